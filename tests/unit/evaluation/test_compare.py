"""Runs beside each other, from the command line: the verdict, the rows, the refusals, the page."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from rtrain import config
from rtrain.cli import app as cli
from rtrain.core.errors import ConfigError, UserError
from rtrain.core.ragged import Head
from rtrain.core.run_folder import Run
from rtrain.evaluation import candidates, compare, page, pairing, significance
from rtrain.evaluation.candidates import Candidate
from rtrain.evaluation.significance import Difference
from rtrain.inference import artifact
from tests.support.reports import Page, answers_of, make_answered, make_run, write_predictions
from tests.support.searches import make_search
from tests.support.tiny import make_task_artifact

LABELS = ("login", "parcel", "refund")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended, with no answers yet."""
    return make_run(tmp_path_factory.mktemp("base"))


def twin(base: Path, folder: Path, right: float, rows: int = 400, language: Sequence[str] = ()) -> Path:
    """A copy of the run with answers of its own, to the same rows; a larger share of them right includes a smaller."""
    shutil.copytree(base, folder)
    columns: dict[str, Any] = {"language": language} if language else {}
    write_predictions(folder, *answers_of(LABELS, rows, right), **columns)
    return folder


def with_ids(run: Path, ids: Sequence[int]) -> None:
    change_columns(run, lambda rows: list(ids), "row_id")


def of(*runs: Path) -> compare.RunComparison:
    return compare.compare_runs(runs)


def compared(*runs: Path) -> compare.AnswerComparison:
    measured = of(*runs).answer_comparison
    assert measured is not None
    return measured


def refused(*runs: Path) -> str:
    """The code of the refusal."""
    with pytest.raises(UserError) as error:
        of(*runs)
    return error.value.code


def test_the_better_run_is_named_first_with_its_figures(base: Path, tmp_path: Path) -> None:
    result = of(twin(base, tmp_path / "a", 0.8), twin(base, tmp_path / "wide", 0.9))
    assert result.answer_comparison is not None
    (item,) = result.answer_comparison.results
    headline = item.headline
    assert (item.candidate.name, headline.name, headline.verdict, headline.rows) == ("wide", "accuracy", 1, 400)
    assert item.mcnemar is not None
    assert item.mcnemar.lost == 0
    assert headline.p == pytest.approx(2 / 2001)  # not one of 2,000 resamples; McNemar's is smaller
    assert headline.difference == pytest.approx(item.mcnemar.won / 400)
    assert [kind.rows for kind in item.change_groups] == [0, item.mcnemar.won, 0]
    assert [item.headline.verdict for item in compared(tmp_path / "wide", tmp_path / "a").results] == [-1]
    classes = compare.build_document(result)["answers"]["results"][0]["classes"]
    assert {entry["class"] for entry in classes} == set(LABELS)
    assert all(entry["other"]["recall"] >= entry["first"]["recall"] for entry in item.classes)


def test_runs_that_cannot_be_told_apart(base: Path, tmp_path: Path) -> None:
    a, b = twin(base, tmp_path / "a", 0.8, rows=60), twin(base, tmp_path / "b", 0.8, rows=60)
    assert [item.headline.verdict for item in compared(a, b).results] == [0]
    target, messages = answers_of(LABELS, 60, 0.8)
    messages[0], messages[1] = target[0], next(label for label in LABELS if label != target[1])
    write_predictions(tmp_path / "b", target, messages)
    assert [item.headline.verdict for item in compared(a, b).results] == [0]


def test_several_are_each_set_beside_the_first(base: Path, tmp_path: Path) -> None:
    runs = [twin(base, tmp_path / name, right) for name, right in (("a", 0.7), ("b", 0.9), ("c", 0.7))]
    better, same = compared(*runs).results
    assert (better.headline.verdict, same.headline.verdict) == (1, 0)
    assert better.headline.p == pytest.approx(2 * next(s.p for s in better.scores if s.name == "accuracy"))
    assert same.headline.p == 1.0


def test_only_common_rows_are_compared(base: Path, tmp_path: Path) -> None:
    a, b = twin(base, tmp_path / "a", 0.6, rows=100), twin(base, tmp_path / "b", 0.6, rows=100)
    with_ids(b, range(130, 30, -1))  # rows 31 to 99 of a, in another order, and 31 that it has not
    result = compared(a, b)
    assert (result.rows, result.split_rows) == (69, (100, 100))
    # Each common row is judged by its own answer in either file.
    target, messages = answers_of(LABELS, 100, 0.6)
    right = [t == s for t, s in zip(target, messages, strict=True)]
    assert result.results[0].headline.first == pytest.approx(np.mean(right[31:]))


def test_validation_rows_do_not_stand_in_for_test_rows_that_differ(base: Path, tmp_path: Path) -> None:
    """They have chosen the weights, and a verdict by them would not say so."""
    a, b = twin(base, tmp_path / "a", 0.6, rows=30), twin(base, tmp_path / "b", 0.6, rows=30)
    for run in (a, b):
        shutil.copyfile(Run(run).predictions("test"), Run(run).predictions("valid"))
    with_ids(b, range(1000, 1030))
    assert refused(a, b) == "no_common_rows"


def test_slices_in_which_a_run_is_worse_are_found(base: Path, tmp_path: Path) -> None:
    languages = ["english", "german"] * 200
    a, b = twin(base, tmp_path / "a", 0.8, language=languages), twin(base, tmp_path / "b", 0.8, language=languages)
    target, messages = answers_of(LABELS, 400, 0.8)
    # B has lost every third row in German.
    messages = ["no label" if row % 6 == 1 else item for row, item in enumerate(messages)]
    write_predictions(b, target, messages, language=languages)
    slices = compared(a, b).results[0].slices
    assert {item.value: item.verdict for item in slices if item.column == "language"} == {"german": -1, "english": 0}


def test_flipped_rows_have_both_answers_and_their_place(base: Path, tmp_path: Path) -> None:
    a, b = twin(base, tmp_path / "a", 1.0, rows=30), twin(base, tmp_path / "b", 1.0, rows=30)
    target, messages = answers_of(LABELS, 30, 1.0)
    other = ["nothing like it" if row in (3, 7) else item for row, item in enumerate(messages)]
    texts = [f'"{row}"\nmit Umbruch: größer 🙂' for row in range(30)]
    write_predictions(b, target, other, text=texts, score=[0.25] * 30)
    lost, won, pair = compared(a, b).results[0].change_groups
    assert [kind.rows for kind in (lost, won, pair)] == [2, 0, 0]
    flips = {flip.location: flip for flip in lost.shown}
    assert flips.keys() == {"rows.csv:5", "rows.csv:9"}
    flip = flips["rows.csv:5"]
    assert (flip.target, flip.first, flip.other, flip.other_score) == (target[3], target[3], "nothing like it", 0.25)
    assert flip.text == "text number 3"  # the first side's


def test_answers_that_are_more_or_less_good_are_worse_and_better(tmp_path: Path) -> None:
    result = of(make_answered(tmp_path / "a", "regression"), make_answered(tmp_path / "b", "regression", seed=4))
    assert result.answer_comparison is not None
    worse, better = result.answer_comparison.results[0].change_groups
    assert 0 < worse.rows + better.rows <= result.answer_comparison.rows
    errors = [[abs(float(text) - float(item.target)) for text in (item.first, item.other)] for item in worse.shown]
    gaps = [other - first for first, other in errors]
    assert gaps == pytest.approx(sorted(gaps, reverse=True), abs=0.003)  # the answers are rounded
    assert min(gaps) > -0.002
    assert "neg" not in page.format_comparison(result)


def test_settings_that_change_the_weights_stand_apart(tmp_path: Path) -> None:
    a = make_run(tmp_path / "one", trained=False)
    other: dict[str, Any] = {"optim.lr": 0.005, "train.log_every": 3}
    b = make_run(tmp_path / "two", trained=False, **other)
    result = of(a, b)
    weights = {item.name: item.values for item in result.settings.weight_settings}
    assert weights["optim.lr"] == ("0.0003", "0.005")
    assert "data.path" not in weights
    remaining_items = {item.name: item.values for item in result.settings.other_settings}
    assert set(remaining_items) == {"data.path", "train.log_every"}
    assert remaining_items["train.log_every"] == ("10", "3")
    assert result.settings.versions == ()
    assert "files, train" not in {item.name for item in result.settings.digests}  # the same bytes in another folder
    assert result.answer_comparison is None
    assert "optim.lr" in page.format_comparison(result)


def test_curves_leave_out_the_time_between_two_starts() -> None:
    attempts = (
        *(("created", 0), ("started", 10), ("progress", 15), ("paused", 20)),
        *(("started", 1020), ("progress", 1030), ("crashed", 1031), ("started", 1100), ("progress", 1101)),
    )
    log = [{"kind": kind, "time": float(time)} for kind, time in attempts]
    assert [seconds for _, seconds in candidates.iter_active_seconds(log)] == [0, 0, 5, 10, 10, 20, 21, 21, 22]


def test_curves_are_over_the_rows_that_were_trained_on(base: Path) -> None:
    """The last update of an epoch has what is left of the rows."""
    first = Run(base).first_event("tokenized")
    assert first is not None
    settings = config.load_config(str(Run(base).config))
    rows, per_update = first["rows"]["train"], settings.recipe.global_batch_size
    assert rows % per_update, "else there is no short update"
    result = candidates.read_curves(Candidate("A", "base", Run(base), base / "artifact", settings))
    assert [point.rows for point in result.score] == [rows, 2 * rows]
    assert result.loss[0].rows == per_update
    assert result.loss[-1].rows == 2 * rows


def test_a_run_without_answers_is_compared_by_what_there_is(base: Path, tmp_path: Path) -> None:
    a, b = twin(base, tmp_path / "a", 0.6), tmp_path / "b"
    shutil.copytree(base, b)
    result = of(a, b)
    assert result.answer_comparison is None
    assert all(f"rtrain train --resume --out {run}" in result.missing_reason for run in (a, b))
    assert result.costs[0].rows_seen == result.costs[1].rows_seen > 0
    assert len(result.curves[1].loss) == 20
    assert result.missing_reason in Page(page.render_comparison(result)).text


def test_what_cannot_be_compared_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        of(base)
    assert [(problem.field, problem.code) for problem in error.value.problems] == [("runs", "out_of_range")]
    for other in (tmp_path / "nowhere", make_search(tmp_path / "s", [0.5, 0.6], ended=False).folder):
        with pytest.raises(UserError):
            of(base, other)
    assert refused(base, base / ".." / "run") == "duplicate_name"
    assert refused(base, make_answered(tmp_path, "regression")) == "task_mismatch"
    run = Run(make_answered(tmp_path / "run", "classification"))
    shutil.copytree(run.artifact, tmp_path / "alone")
    assert refused(base, tmp_path / "alone") == "not_a_run"


def test_a_search_stands_for_its_winner(base: Path, tmp_path: Path) -> None:
    search = make_search(tmp_path / "s", [0.5, 0.9, 0.6])
    result = candidates.find_candidates([base, search.folder])
    assert result[1].run.folder == search.trial(1).folder
    assert [side.name for side in result] == ["run", "search/trial-001"]
    created = of(search.trial(0).folder, search.folder)
    assert page.default_path(created) == tmp_path / "s" / "compare-search-trial-000-search-trial-001.html"


def test_names_tell_sides_apart(base: Path, tmp_path: Path) -> None:
    item, two = tmp_path / "x" / "run", tmp_path / "y" / "run"
    for folder in (item, two):
        shutil.copytree(base, folder)
    assert [side.name for side in candidates.find_candidates([item, two])] == ["x/run", "y/run"]


def test_answers_are_had_from_an_artefact_where_no_file_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second artefact in the run's folder, as rtrain quantize leaves one, and a run whose answers were removed."""
    run = Run(make_answered(tmp_path, "classification"))
    remaining = pyarrow.parquet.read_table(run.predictions("test"))
    shutil.copytree(run.artifact, run.int8_artifact)
    run.predictions("test").unlink()
    result = of(run.folder, run.int8_artifact)
    assert [side.name for side in result.candidates] == ["run", "run/artifact-int8"]
    assert result.answer_comparison is not None
    assert capsys.readouterr().err
    assert pyarrow.parquet.read_table(run.predictions("test")).equals(remaining)
    of(run.folder, run.int8_artifact)
    assert capsys.readouterr().err == ""  # kept
    version = artifact.read_artifact(run.int8_artifact).version
    assert run.predictions(f"test-artifact-int8-{version}").is_file()


@pytest.mark.parametrize(
    "task", ["multi_label", "multi_head", "span_qa", "token_tags", "extractive_summary", "masked_lm"]
)
def test_every_task_has_text_json_and_a_page(task: str, tmp_path: Path) -> None:
    result = of(make_answered(tmp_path / "a", task), make_answered(tmp_path / "b", task, seed=4))
    document = json.loads(json.dumps(compare.build_document(result), allow_nan=False))
    assert document["answers"]["common_rows"] > 0
    assert page.format_comparison(result).splitlines()[0] == result.verdict
    samples = Page(page.render_comparison(result))
    assert f"{result.verdict}." in samples.text
    assert "script" not in samples.tags


def test_the_verb_prints_the_outcome_and_writes_a_page(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = twin(base, tmp_path / "a", 0.7), twin(base, tmp_path / "b", 0.9)
    cli.main(["compare", str(a), str(b)])
    lines = capsys.readouterr().out.splitlines()
    assert (tmp_path / "compare-a-b.html").is_file()
    cli.main(["compare", str(a), str(b), "--json", "--out", str(tmp_path / "mine.html")])
    created: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (created["verdict"], created["page"]) == (lines[0], str(tmp_path / "mine.html"))
    assert created["answers"]["results"][0]["headline"]["verdict"] == 1
    assert [candidate["candidate"] for candidate in created["candidates"]] == ["A", "B"]
    samples = Page((tmp_path / "mine.html").read_text(encoding="utf-8"))
    assert not [value for name, value in samples.attributes if name in ("src", "href") and not value.startswith("#")]


def test_a_page_that_cannot_be_written_is_said(base: Path, tmp_path: Path) -> None:
    result = of(twin(base, tmp_path / "a", 0.7, rows=30), twin(base, tmp_path / "b", 0.9, rows=30))
    with pytest.raises(UserError):
        page.write_comparison(result, tmp_path / "no" / "page.html")


def test_hostile_texts_and_labels_stay_text(base: Path, tmp_path: Path) -> None:
    hostile = "</td><script>alert(1)</script>\x1b[31m\u202e"
    a, b = twin(base, tmp_path / "a", 0.7, rows=30), twin(base, tmp_path / "b", 0.9, rows=30)
    target, _ = answers_of(LABELS, 30, 1.0)
    for run, label in ((a, "parcel"), (b, hostile)):
        write_predictions(run, target, [label] * 30, text=[hostile] * 30, language=[hostile, "x"] * 15)
    result = of(a, b)
    samples = page.render_comparison(result)
    assert "<script" not in samples
    assert "\x1b" not in page.format_comparison(result)


def test_common_rows_are_in_the_order_of_the_first() -> None:
    ids = [np.array(side, dtype=np.uint64) for side in ([5, 2**63 + 1, 9, 7], [7, 2**63 + 1, 5])]
    assert [places.tolist() for places in pairing.common_positions(ids)] == [[0, 1, 3], [2, 1, 0]]


def change_columns(run: Path, change: Callable[[list[Any]], list[Any]], *names: str) -> None:
    """Change columns of a run's predictions."""
    path = Run(run).predictions("test")
    table = pyarrow.parquet.read_table(path)
    for name in names:
        column = pa.array(change(table[name].to_pylist()), table.schema.field(name).type)
        table = table.set_column(table.column_names.index(name), name, column)
    pyarrow.parquet.write_table(table, path)


def test_texts_that_were_all_cut_otherwise_are_refused(tmp_path: Path) -> None:
    a, b = (make_answered(tmp_path / name, "token_tags") for name in "ab")
    change_columns(b, lambda rows: [row[:-1] for row in rows], "target", "prediction")
    assert refused(a, b) == "no_common_rows"


def test_answers_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    a, b = (make_answered(tmp_path / name, "regression") for name in "ab")
    change_columns(b, lambda rows: [float("nan")] * len(rows), "prediction")
    assert refused(a, b) == "not_finite"


def test_a_summary_whose_store_is_gone_is_compared_by_its_loss(tmp_path: Path) -> None:
    a, b = (Run(make_answered(tmp_path / name, "extractive_summary")) for name in "ab")
    assert b.token_store is not None
    shutil.rmtree(b.token_store)
    for pair in ((a, b), (b, a)):
        measured = compared(*(run.folder for run in pair))
        assert [item.headline.name for item in measured.results] == ["neg_loss"]


def test_a_run_that_refuses_rows_is_set_beside_one_that_cannot(base: Path, tmp_path: Path) -> None:
    a, b = twin(base, tmp_path / "a", 0.8), twin(base, tmp_path / "b", 0.7)
    make_task_artifact(b / "artifact", "classification", Head(LABELS, {"out_of_scope_label": "none", "threshold": 0.5}))
    for pair in ((a, b), (b, a)):
        assert [item.headline.name for item in compared(*pair).results] == ["accuracy_with_abstentions"]


def test_errors_and_correlations_are_not_told_in_points() -> None:
    def one(name: str) -> str:
        return significance.format_change(Difference(name, 0.5, 0.25, -0.25, -0.5, 0.125, 0.5, 100))

    assert one("accuracy") == "-25.0 points (-50.0 to 12.5)"
    assert one("mae") == one("qwk") == "-0.250 (-0.500 to 0.125)"
    assert one("neg_rmse") == "+0.250 (-0.125 to 0.500)"  # the error has grown
