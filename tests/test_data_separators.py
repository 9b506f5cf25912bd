"""The separator of several labels in one text: found where the labels show it, refused where they do not."""

import itertools
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from rtrain import config
from rtrain.config import Recipe
from rtrain.data import records, separators
from rtrain.data.separators import Found
from rtrain.errors import ConfigError, UserError
from rtrain.report.live import said
from rtrain.runs import preparing
from tests.conftest import write_rows
from tests.tiny import make_encoder, make_store

SEVERAL = ["Delivery; Other", "Delivery", "Account; Other", "Account; Delivery", "Other"]
PLACES = ["Paris, France", "Lyon, France", "Berlin, Germany", "Munich, Germany", "Rome, Italy"]
NAME = st.text(
    st.characters(exclude_characters=";|,[]{}", exclude_categories=("Cs", "Cc", "Zs", "Zl", "Zp")), min_size=1
)


def seen(labels: list[str]) -> Found:
    return separators.found(Counter(labels))


def sign(labels: list[str]) -> str | None:
    one = seen(labels).separator
    return None if one is None else one.sign


def test_parts_that_recur_in_other_company_show_the_separator() -> None:
    assert sign(SEVERAL) == ";"
    assert sign([label.replace("; ", "|") for label in SEVERAL]) == "|"
    assert sign([label.replace(";", " ,") for label in SEVERAL]) == ","


def test_a_sign_within_names_is_no_separator() -> None:
    assert sign(PLACES) is None
    assert sign(["Food, Drink", "Books, Music", "Travel"] * 100) is None  # however often they stand there
    assert sign(["Food, Drink; Travel", "Travel; Work", "Work", "Food, Drink"]) == ";"


def test_signs_that_are_both_likely_are_left_to_the_user() -> None:
    both = seen([f"{a};{b},{c}" for a, b, c in itertools.product("xyz", repeat=3)])
    assert [one.sign for one in both.candidates] == [";", ","]
    assert both.separator is None


def test_counts_are_of_rows_and_the_most_frequent_label_is_the_example() -> None:
    found = seen([*SEVERAL, "Delivery; Other", "", '["a", "b"]'])
    assert (found.rows, found.lists) == (6, 1)
    [one] = found.candidates
    assert one == (";", 4, "Delivery; Other", True)


@given(st.lists(NAME, min_size=2, max_size=6, unique_by=str.strip), st.sampled_from(separators.SIGNS), st.data())
def test_all_pairs_of_names_show_the_sign_between_them(names: list[str], between: str, data: st.DataObject) -> None:
    rows = [f"{a}{data.draw(st.sampled_from(['', ' ']))}{between} {b}" for a, b in itertools.combinations(names, 2)]
    assert sign(data.draw(st.permutations([*rows, *names]))) == between


@given(st.lists(NAME, min_size=2, max_size=12, unique_by=str.strip), st.sampled_from(separators.SIGNS))
def test_names_that_never_recur_show_nothing(names: list[str], within: str) -> None:
    rows = [f"{a}{within}{b}" for a, b in zip(names[::2], names[1::2], strict=False)]
    assert sign(rows) is None
    assert len(seen(rows).candidates) == 1


@given(st.lists(st.text(st.sampled_from("ab;|, []\"'")), max_size=12), st.integers(1, 50))
@settings(max_examples=300)
def test_any_labels_give_an_answer_that_rests_on_them_and_on_no_count(labels: list[str], times: int) -> None:
    found = seen(labels)
    assert found.rows + found.lists == sum(bool(label) for label in labels)
    for one in found.candidates:
        assert one.sign in one.example
        assert one.rows == sum(one.sign in label for label in labels if not separators.is_list(label))
    assert sign(labels * times) == sign(labels) == sign(labels[::-1])


# ----------------------------------------------------------------------------------------------------- in a run


def recipe_of(folder: Path, labels: list[str], task: str = "multi_label", **data: str) -> Recipe:
    write_rows(folder / "rows.csv", [(f"text number {place}", label) for place, label in enumerate(labels)])
    named = {f"data.{name}": value for name, value in data.items()}
    return config.load("intent", {"task": task, "data.path": str(folder / "rows.csv"), **named}).recipe


def looked_at(recipe: Recipe) -> Found:
    return separators.shown(recipe, records.inspect(recipe.data))


def test_the_separator_that_is_found_is_the_run_s_and_is_said(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, SEVERAL * 2)
    found = config.Config(recipe, config.load("intent").deploy)
    chosen, told = preparing.separated(found, records.inspect(recipe.data))
    assert chosen.recipe.data.separator == ";"
    assert chosen.recipe.identity() != recipe.identity()  # another run than one that learns joined labels
    assert told is not None
    line = "data.separator: ';' stands between the labels of 6 of the 10 labels looked at, e.g. 'Delivery; Other'"
    assert said.label_column(told) == line


def test_what_is_not_clear_is_refused_with_the_signs_and_their_counts(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, [*PLACES, "North; South"])
    [problem] = separators.problems(recipe, looked_at(recipe))
    assert str(problem) == (
        "data.separator: 5 of the first 6 labels hold a sign that may stand between several, e.g. 'Paris, France', and "
        "each would be learned as one label; "
        "write --set \"data.separator=';'\" (1 of them) or --set \"data.separator=','\" (5 of them); "
        "where they are whole labels, a sign that is in none: --set \"data.separator='@@'\""
    )
    found, source = config.Config(recipe, config.load("intent").deploy), records.inspect(recipe.data)
    with pytest.raises(ConfigError, match="hold a sign that may stand between several"):
        preparing.separated(found, source)
    assert preparing.separated(found, source, begun=True) == (found, None)
    for option in ("';'", "','", "'@@'"):  # as a shell hands them over
        assert config.loading.parse_assignment(f"data.separator={option}") == ("data.separator", option.strip("'"))


@pytest.mark.parametrize(
    ("task", "labels", "data"),
    [
        ("multi_label", ['["a, b"]', '["c"]', "d, e"], {}),  # a column of lists
        ("multi_label", PLACES, {"separator": "@@"}),  # the user has said it
        ("multi_label", ["a", "b", "c"], {}),
        ("classification", SEVERAL, {}),
        ("regression", ["1,5", "2,5"], {}),
    ],
)
def test_what_is_not_refused(task: str, labels: list[str], data: dict[str, str], tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, labels, task, **data)
    assert separators.problems(recipe, looked_at(recipe)) == []


def test_labels_that_do_not_fit_the_task_get_a_line(tmp_path: Path) -> None:
    def line(task: str, labels: list[str]) -> str | None:
        recipe = recipe_of(tmp_path, labels, task)
        told = separators.told(recipe, looked_at(recipe))
        return None if told is None else said.label_column(told)

    assert line("multi_label", ["a", "b", "c"] * 5) == (
        "no label holds several: each of the 15 labels looked at is one. For one label per text, whose chances add up "
        "to 1, write --set task=classification"
    )
    assert line("classification", SEVERAL) == (
        "3 of the 5 labels looked at look like lists, e.g. 'Delivery; Other', and each is learned as one label; for "
        "several labels per text: --set task=multi_label --set \"data.separator=';'\""
    )
    assert line("classification", ['["a"]', '["a", "b"]', "c"]) == (
        "2 of the 3 labels looked at look like lists, and each is learned as one label; for several labels per text: "
        "--set task=multi_label"
    )
    assert line("classification", PLACES) is None
    assert line("classification", [*SEVERAL, *["Delivery"] * 60]) is None  # too few of them


def test_a_file_whose_first_rows_show_no_separator_is_refused_when_all_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(separators, "MOST_ROWS", 40)
    recipe = recipe_of(tmp_path, [*["Delivery", "Other"] * 20, *SEVERAL * 12])
    assert looked_at(recipe).candidates == ()
    with pytest.raises(UserError, match=r"^data.separator: \d+ of \d+ training labels hold ';' between several"):
        make_store(recipe, make_encoder(tmp_path / "encoder"), tmp_path)


def test_a_student_reads_its_teacher_s_rows_as_the_teacher_did(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, SEVERAL * 2)
    student = recipe.model_copy(update={"distill": recipe.distill.model_copy(update={"teacher": "abc"})})
    assert looked_at(student) == Found(0, 0, ())


@pytest.mark.parametrize("lists", [["[]"] * 3, ['["Delivery", "Other"]'], []])
def test_a_few_lists_do_not_hide_the_separator_of_the_others(lists: list[str], tmp_path: Path) -> None:
    """Rows without a label are often empty lists."""
    labels = [*SEVERAL * 4, *lists]
    recipe = config.load("intent", {"task": "multi_label", "data.path": str(write_rows(tmp_path / "a.csv", []))}).recipe
    found = seen(labels)
    assert not found.by_lists
    assert separators.told(recipe, found) is not None
    assert separators.late_problem(recipe, Counter(labels)) is not None
    most = seen([*labels, *['["Delivery", "Other"]'] * 40])
    assert most.by_lists
    assert separators.told(recipe, most) is None
