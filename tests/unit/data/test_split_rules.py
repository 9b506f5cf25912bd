"""Splits that depend on all rows: by strata, by time; and a fold's store as a view of another fold's."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain import config
from rtrain.config import Recipe
from rtrain.core.errors import UserError
from rtrain.data import row_reader
from rtrain.data.splits import RowSurvey, Splits
from rtrain.data.store import builder, fold_view
from rtrain.data.store.store import Store
from tests.support.causes import caused_by
from tests.support.tiny import make_store

SPLITS = ("train", "valid", "test")


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def recipe_of(path: Path, **settings: Any) -> Recipe:
    return config.load_config(
        "intent", {"data.path": str(path), **{f"data.{k}": v for k, v in settings.items()}}
    ).recipe


def assign(path: Path, **settings: Any) -> list[tuple[row_reader.SourceRow, str]]:
    """The rows of a file, each with its split."""
    data = recipe_of(path, **settings).data
    source = row_reader.inspect_source(data)
    splits = Splits.from_config(data, source)
    rows = [(row, file.role) for file in source.files for row in row_reader.read_rows(file, data)]
    return [(row, splits.assign_split(row, role)) for row, role in rows if row.reason is None]


RARE_LABELS = {"often": 600, "seldom": 40, "rare": 10, "single": 1}
LABELLED = [
    {"text": f"{label} {number}", "label": label, "team": f"t{number % 3}"}
    for label, count in RARE_LABELS.items()
    for number in range(count)
]


def test_each_label_has_its_share_of_each_split(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", LABELLED)
    counts = Counter((row.label, split) for row, split in assign(path, stratify="label"))
    for label, count in RARE_LABELS.items():
        assert abs(counts[label, "test"] - 0.1 * count) <= 1
        assert abs(counts[label, "valid"] - 0.1 * count) <= 1
        assert counts[label, "train"] >= 1
    assert assign(path, stratify="label") == assign(path, stratify="label")
    shuffled = write(tmp_path / "b.jsonl", LABELLED[::-1])  # the order of the rows decides nothing
    assert {(row.text, split) for row, split in assign(shuffled, stratify="label")} == {
        (row.text, split) for row, split in assign(path, stratify="label")
    }
    teams = Counter((row.stratum, split) for row, split in assign(path, stratify="team"))
    assert all(abs(teams[f"t{team}", "test"] - 21.7) <= 1.2 for team in range(3))


def test_small_strata_together_have_the_shares(tmp_path: Path) -> None:
    rows = [{"text": f"{label} {number}", "label": str(label)} for label in range(300) for number in range(3)]
    counts = Counter(split for _, split in assign(write(tmp_path / "a.jsonl", rows), stratify="label"))
    assert 60 < counts["test"] < 120
    assert 60 < counts["valid"] < 120


def test_equal_texts_and_groups_stay_in_one_split_whatever_their_labels(tmp_path: Path) -> None:
    rows = [{"text": f"t{number}", "label": label} for number in range(200) for label in ("a", "b", "b")]
    by_text: dict[str, set[str]] = {}
    for row, split in assign(write(tmp_path / "a.jsonl", rows), stratify="label"):
        by_text.setdefault(row.text, set()).add(split)
    assert {len(splits) for splits in by_text.values()} == {1}
    grouped = [{"text": f"{n}", "label": "ab"[n % 2], "essay": n // 5} for n in range(1000)]
    by_group: dict[str | None, set[str]] = {}
    for row, split in assign(write(tmp_path / "b.jsonl", grouped), stratify="label", group_column="essay"):
        by_group.setdefault(row.group, set()).add(split)
    assert {len(splits) for splits in by_group.values()} == {1}


def test_stratified_folds_test_each_row_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", LABELLED)
    tested = Counter[str]()
    for fold in range(5):
        rows = assign(path, stratify="label", folds=5, fold=fold)
        tested.update(row.text for row, split in rows if split == "test")
        assert {row.label for row, split in rows if split == "train"} == set(RARE_LABELS)
        assert sum(row.label == "seldom" and split == "test" for row, split in rows) == 8
    # A label with one text is trained on in each fold.
    assert tested == Counter({row["text"]: 1 for row in LABELLED if row["label"] != "single"})


def times(rows: list[tuple[row_reader.SourceRow, str]]) -> dict[str, list[float]]:
    return {split: sorted(row.time or 0.0 for row, name in rows if name == split) for split in SPLITS}


def test_the_newest_rows_are_the_test(tmp_path: Path) -> None:
    dates = [f"2024-{1 + number % 12:02d}-{1 + number % 28:02d}T0{number % 10}:00:00+02:00" for number in range(200)]
    rows = [{"text": f"t{number}", "label": "ab"[number % 2], "at": date} for number, date in enumerate(dates)]
    path = write(tmp_path / "a.jsonl", rows)
    by_share = times(assign(path, split_time={"column": "at", "valid": 0.2, "test": 0.1}))
    assert max(by_share["train"]) < min(by_share["valid"]) <= max(by_share["valid"]) < min(by_share["test"])
    assert 20 <= len(by_share["test"]) <= 25  # rows of one time stay together
    by_date = assign(path, split_time={"column": "at", "valid": "2024-06-01", "test": "2024-11-01T12:00:00Z"})
    assert {split for row, split in by_date if (row.time or 0) >= 1730462400} == {"test"}
    assert {split for row, split in by_date if 1717200000 <= (row.time or 0) < 1730462400} == {"valid"}
    assert {split for row, split in by_date if (row.time or 0) < 1717200000} == {"train"}


def test_times_of_each_kind_are_read_and_others_are_bad_rows(tmp_path: Path) -> None:
    values = [
        "2024-06-01",
        "2024-06-01 02:00:00+02:00",
        1717200000,
        1717200000000,
        "1717200000.0",
        "01.06.24",
        "",
        None,
    ]
    rows = [{"text": f"t{n}", "label": "a", "at": value} for n, value in enumerate(values)]
    data = recipe_of(write(tmp_path / "a.jsonl", rows), split_time={"column": "at"}).data
    (file,) = row_reader.inspect_source(data).files
    read = list(row_reader.read_rows(file, data))
    assert [row.time for row in read[:5]] == [1717200000.0] * 5
    assert [row.reason is None for row in read] == [True] * 5 + [False] * 3


def test_rows_of_one_time_leave_no_training_rows(tmp_path: Path, encoder: Path) -> None:
    rows = [{"text": f"t{number}", "label": "ab"[number % 2], "at": "2024-01-01"} for number in range(50)]
    recipe = recipe_of(write(tmp_path / "a.jsonl", rows), split_time={"column": "at"})
    with pytest.raises(UserError, check=caused_by("no_rows")):
        make_store(recipe, encoder, tmp_path)


def test_a_survey_of_parts_is_the_survey_of_the_complete() -> None:
    values = [(label, number * 2**40, float(number)) for number, label in enumerate("abcabcaab")]
    parts = [RowSurvey.from_values(values[start : start + 3]) for start in (0, 3, 6)]
    splits, complete = Splits(False, 0.1), RowSurvey.from_values(values)
    assert RowSurvey.merge(parts).stratify(splits) == complete.stratify(splits)
    assert RowSurvey.merge([]).stratify(splits).find_split(5, "a") is None


# ---------------------------------------------------------------------------------------------------------- fold views


def describe(store: Store) -> dict[str, Any]:
    """The rows of a store, with their tokens, targets and texts."""
    result: dict[str, Any] = {"rows": store.manifest.rows, "labels": store.manifest.labels}
    for split in SPLITS:
        every = np.arange(store.num_rows(split))
        tokens = store.read_tokens(split, every)
        result[split] = (tokens.ids.tolist(), tokens.targets.tolist(), tokens.row_ids.tolist())
        result[f"{split} texts"] = store.kept_texts(split, every)
        result[f"{split} origins"] = store.origins(split).to_pylist()
    return result


@pytest.mark.parametrize("stratify", [None, "label"])
def test_a_fold_is_a_view_of_another_folds_store(tmp_path: Path, encoder: Path, stratify: str | None) -> None:
    rows = [row for row in LABELLED[500:] if row["label"] != "single"] + [{"text": "", "label": "often"}] * 2
    path = write(tmp_path / "a.jsonl", [{**row, "team": "t"} for row in rows])
    recipes = [recipe_of(path, folds=4, fold=fold, stratify=stratify, where="team is not null") for fold in range(4)]
    source = row_reader.inspect_source(recipes[0].data)
    first = make_store(recipes[0], encoder, tmp_path)

    def address_of(recipe: Recipe) -> str:
        return builder.compute_digest(recipe, source, encoder)

    tested: list[int] = []
    for fold, recipe in enumerate(recipes):
        (tmp_path / f"other-{fold}").mkdir()
        complete = make_store(recipe, encoder, tmp_path / f"other-{fold}")
        final = first.folder.with_name(address_of(recipe))
        view = first if fold == 0 else fold_view.build_view(recipe, source, encoder, final, address_of)
        assert view is not None
        assert view.folder == final
        assert describe(view) == describe(complete)
        assert view.manifest.selection == complete.manifest.selection
        for name in view.manifest.shards:
            assert (view.folder / name).samefile(first.folder / name)
        tested += view.column("test", "row_id").tolist()
    assert sorted(tested) == sorted({*tested})
    assert len(tested) == len(rows) - 2


def test_copies_of_rows_are_made_for_each_fold(tmp_path: Path, encoder: Path) -> None:
    path = write(tmp_path / "a.jsonl", LABELLED[450:])
    overrides = {"data.path": str(path), "data.folds": 4, "augment.copies": 1, "augment.swap": 0.5}
    recipe = config.load_config("intent", {**overrides, "data.stratify": "team"}).recipe
    source = row_reader.inspect_source(recipe.data)
    store = make_store(recipe, encoder, tmp_path)
    other = recipe.model_copy(update={"data": recipe.data.model_copy(update={"fold": 1})})

    def address_of(recipe: Recipe) -> str:
        return builder.compute_digest(recipe, source, encoder)

    assert store.folder.name == address_of(recipe)
    final = store.folder.with_name(address_of(other))
    assert fold_view.build_view(other, source, encoder, final, address_of) is None
