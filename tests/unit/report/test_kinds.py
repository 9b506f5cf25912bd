"""The page of each kind of task, from real runs of tiny models: each section says something, and says it right."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from rtrain.core.run_folder import Run
from rtrain.data.store.store import Store
from rtrain.metrics.scores import read_scores as read_scores
from rtrain.report import html
from rtrain.report.page import Figure, Section, Table
from rtrain.report.sections import answers, data, outcome, outputs, run_details
from rtrain.report.summary import summarize
from rtrain.runs import export
from rtrain.tasks import base
from tests.support.reports import Page, make_answered, read
from tests.unit.report.test_page import table

TASKS = ("regression", "multi_label", "multi_head", "token_tags", "span_qa", "masked_lm", "extractive_summary")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result = {}
    for task in TASKS:
        folder = make_answered(tmp_path_factory.mktemp("kinds") / task, task)
        html.make_report(Run(folder))
        result[task] = read(folder)
    return result


def titles(section: Section | None) -> list[str]:
    assert section is not None
    return [block.title for block in section.blocks if isinstance(block, Figure | Table)]


def words(section: Section | None) -> str:
    assert section is not None
    return " ".join(str(block) for block in section.blocks)


@pytest.mark.parametrize("task", TASKS)
def test_every_kind_has_a_page_whose_sections_say_something(task: str, runs: dict[str, Any]) -> None:
    run = runs[task]
    page = Page((run.folder / "report.html").read_text(encoding="utf-8"))
    for heading in ("Outcome", "How it was run", "Data", "Training", "Answers", "Time"):
        assert heading in page.words
    assert len(answers.build_answers_section(run).blocks) >= 2
    assert not any("neg " in title for title in titles(run_details.build_training_section(run)))
    assert "neg" not in outcome.build_tiles(run)[0].name
    # Nothing that is not a number, and no name of a Python thing, has got into the text.
    for wrong in ("nan", "None", "inf", "array(", "{}"):
        assert wrong not in page.words, wrong


def test_numbers_have_scatter_errors_and_lengths(runs: dict[str, Any]) -> None:
    run = runs["regression"]
    assert run.answers.kind == "numbers"
    result = titles(answers.build_answers_section(run))
    assert any(title.startswith("Predicted against true: correlation") for title in result)
    assert any(title.startswith("Half of the predictions are off by") for title in result)
    assert any(title.startswith("On the scale of the scores") for title in result)
    rows = {row[0]: row for row in table(answers.build_answers_section(run), "Scores").rows}
    assert str(rows["QWK"][2]).count(" to ") == 1  # it has an interval
    assert "neg rmse" not in rows
    in_data = titles(data.build_section(run))
    assert any(title.startswith("The true scores of the training rows") for title in in_data)
    by_column = titles(answers.build_slices_section(run))
    assert any(title.startswith("Worst slice: ") and "RMSE" in title for title in by_column)


def test_an_error_s_worst_slice_is_the_one_with_the_largest(runs: dict[str, Any]) -> None:
    scores = runs["regression"].scores
    assert scores is not None
    result, full = answers.list_slices(scores), answers.measure_headline(scores)
    assert (full.name, full.larger_is_better) == ("RMSE", False)
    assert full.overall_value == scores["scores"]["rmse"]
    values = [item.value for item in result]
    assert values == sorted(values, reverse=True)
    for item in result:
        assert item.interval is not None
        assert item.interval[0] <= item.value <= item.interval[1]
        [verdict] = answers.judge_slices([item], full)
        if item.interval[0] > full.overall_value:
            assert verdict == "worse"


def test_slices_of_a_sound_model_are_rarely_called_worse() -> None:
    """Fifteen slices of 40 rows of a model that is as good on all: at most one report in twenty calls one worse; of a
    slice that is much worse it is told."""
    random, alarms = np.random.default_rng(0), 0
    for planted in [*[False] * 400, True]:
        right = random.binomial(40, 0.8, 15)
        if planted:
            right[0] = 12
        every = [{"value": f"v{n}", "rows": 40, "scores": {"accuracy": hits / 40}} for n, hits in enumerate(right)]
        document = {"headline": "accuracy", "scores": {"accuracy": right.sum() / 600}, "slices": {"part": every}}
        result = answers.list_slices(document)
        worse = [
            item.name
            for item, verdict in zip(
                result, answers.judge_slices(result, answers.measure_headline(document)), strict=True
            )
            if verdict == "worse"
        ]
        if planted:
            assert worse == ["part: v0"]
        else:
            alarms += bool(worse)
    assert alarms <= 0.05 * 400


def test_several_labels_have_scores_of_each(runs: dict[str, Any]) -> None:
    run = runs["multi_label"]
    result = answers.build_answers_section(run)
    entry = {row[0]: row[1] for row in table(result, "The labels with the lowest F1").rows}
    true = run.store.targets("test").to_matrix(4).sum(axis=0)
    keywords = dict(zip(run.store.manifest.labels, true.tolist(), strict=True))
    assert entry == keywords
    assert "Thresholds of the labels" in words(result)
    assert any("labels per training row" in title for title in titles(data.build_section(run)))


def test_each_head_has_its_confusion(runs: dict[str, Any]) -> None:
    run = runs["multi_head"]
    for head in ("intent: ", "mood: "):
        assert any(
            title.startswith(head) and "predictions are wrong" in title
            for title in titles(answers.build_answers_section(run))
        )
        assert any(title.startswith(head) and "labels: " in title for title in titles(data.build_section(run)))


def test_a_run_tells_what_its_answers_to_running_text_are_worth(tmp_path: Path) -> None:
    folder = Run(make_answered(tmp_path, "token_tags"))
    assert folder.token_store is not None
    store = Store(folder.token_store)
    export.measure_running_text(folder, base.get_task("token_tags"), store)
    document = read_scores(folder.scores("test"))
    assert document is not None
    # These words are parted by blanks alone, so that the text is cut into the same ones again.
    assert document["running_text"]["rows"] == document["rows"]
    assert document["running_text"]["scores"]["f1"] == pytest.approx(document["scores"]["f1"])
    assert summarize(folder)["running_text"] == document["running_text"]["scores"]
    assert f"F1 is {document['scores']['f1']:.3f}" in words(answers.build_answers_section(read(folder)))


def test_rows_are_named_by_the_column_that_people_know_them_by(tmp_path: Path) -> None:
    overrides: dict[str, Any] = {"data.id": "kind"}
    run = Run(make_answered(tmp_path, "regression", **overrides))
    html.make_report(run)
    collected = read(run)
    keywords = pyarrow.parquet.read_table(run.predictions("test"), columns=["id", "kind"])
    assert keywords["id"].to_pylist() == keywords["kind"].to_pylist()
    assert set(collected.answers.slices) == {"kind"}
    row = int(collected.answers.hardest_rows(1)[0])
    place = f"essays.csv:{collected.answers.line[row]} ({keywords['id'][row].as_py()})"
    assert place in words(outcome.build_section(collected))


def test_mistakes_of_entities_by_kind() -> None:
    true = ["B-a", "I-a", "O", "B-b", "O", "B-a", "O", "B-b", "I-b", "O"]
    messages = ["B-a", "O", "O", "B-a", "O", "B-a", "O", "O", "B-a", "I-a"]
    result = outputs.find_mistakes(true, messages)
    kinds = [
        (kind, true and (true.type, true.start, true.end), messages and messages.start)
        for kind, true, messages in result
    ]
    assert kinds == [
        (outputs.EDGES, ("a", 0, 2), 0),
        (outputs.TYPE, ("b", 3, 4), 3),
        (outputs.TYPE_AND_EDGES, ("b", 7, 9), 8),
    ]
    assert [kind for kind, _, _ in outputs.find_mistakes(["O", "B-a"], ["B-a", "O"])] == [
        outputs.MISSED,
        outputs.INVENTED,
    ]
    assert outputs.find_mistakes(true, true) == []


def test_questions_by_length_and_threshold(runs: dict[str, Any]) -> None:
    run = runs["span_qa"]
    result = answers.build_answers_section(run)
    (figure,) = (block for block in result.blocks if isinstance(block, Figure) and "threshold" in block.title)
    assert f"F1 {run.scores['scores']['f1']:.3f} at the chosen threshold" in figure.title
    assert "chosen</text>" in figure.chart
    rows = table(result, "Scores by the length of the answer").rows
    assert sum(int(row[1]) for row in rows) == sum(score["rows"] for score in run.scores["tables"]["by_length"])
    assert any("answers have" in title for title in titles(data.build_section(run)))


def test_true_answers_of_questions_are_words(runs: dict[str, Any]) -> None:
    run = runs["span_qa"]
    assert set(Counter(run.answers.target.tolist())) <= {"monday", ""}
    assert "monday" in run.answers.target.tolist()


# ----------------------------------------------------------------------------------------------------------- summaries


def test_summaries_stand_beside_the_first_sentences_and_the_oracle(runs: dict[str, Any]) -> None:
    run = runs["extractive_summary"]
    result, scores, ends = answers.build_answers_section(run), run.scores["scores"], run.scores["intervals"]["scores"]
    neighbor = table(result, "ROUGE ")
    rows = {(row[0], row[1]): (str(row[2]), str(row[3])) for row in neighbor.rows}
    assert {name for name, _ in rows} == {"ROUGE-1", "ROUGE-2", "ROUGE-L", "ROUGE", "BLEU"}
    assert [neighbor.is_figure(column) for column in range(4)] == [False, False, True, True]  # not broken on a phone
    low, high = ends["over_lead_rouge1"]
    assert float(rows["ROUGE-1", "difference"][0]) == pytest.approx(scores["rouge1"] - scores["lead_rouge1"], abs=1e-4)
    assert low <= scores["over_lead_rouge1"] <= high
    assert ("BLEU", "oracle") not in rows  # it has none
    assert all(interval.count(" to ") == 1 for _, interval in rows.values())
    plain = {str(row[0]) for row in table(result, "Scores with intervals").rows}
    assert not any("lead" in name or "oracle" in name for name in plain)


def test_lengths_and_places_of_the_sentences_that_were_picked(runs: dict[str, Any]) -> None:
    run = runs["extractive_summary"]
    rows = {row[0]: row[1:] for row in table(answers.build_answers_section(run), "A summary has").rows}
    picked = np.mean([len(numbers) for numbers in run.answers.prediction])
    assert rows["summary"][0] == f"{picked:.1f}"
    assert float(str(rows["summary"][1])) < float(str(rows["whole document"][1]))
    positions = run.scores["tables"]["positions"]
    share = 100 * positions["picked"][0] / sum(positions["picked"])
    assert any(
        title.startswith(f"{share:.0f} % of the summaries' sentences")
        for title in titles(answers.build_answers_section(run))
    )


def test_a_slice_without_entities_is_no_worst_slice(runs: dict[str, Any]) -> None:
    run = runs["token_tags"]
    result = run.answers
    column = ["empty" if row % 2 else "full" for row in range(len(result))]
    messages, true = (np.empty(len(result), dtype=object) for _ in range(2))
    messages[:] = [["O", "B-x"] if name == "full" else ["O", "O"] for name in column]
    true[:] = [["O", "O"]] * len(result)
    changed = replace(run, answers=replace(result, target=true, prediction=messages, slices={"part": column}))
    every = [answers.ScoreSlice(f"part: {name}", 20, 0.0, (0.0, 0.0)) for name in ("empty", "full")]
    assert [item.name for item in answers.drop_empty_slices(changed, every)] == ["part: full"]
    assert answers.drop_empty_slices(runs["regression"], every) == every


@pytest.mark.parametrize(
    ("task", "nothing", "something"),
    [("multi_label", ([], []), ([], ["login"])), ("multi_head", (["", ""], ["a", "b"]), (["", "b"], ["a", "c"]))],
)
def test_nor_is_a_slice_of_which_no_row_counts(
    runs: dict[str, Any], task: str, nothing: tuple[Any, Any], something: tuple[Any, Any]
) -> None:
    """Its F1, or accuracy, is 0 of 0: rows that have no label, and get none."""
    result = runs[task].answers
    sides = [np.empty(len(result), dtype=object) for _ in range(2)]
    for row in range(len(result)):
        for side, value in zip(sides, nothing if row % 2 else something, strict=True):
            side[row] = value
    column = ["empty" if row % 2 else "full" for row in range(len(result))]
    changed = replace(
        runs[task], answers=replace(result, target=sides[0], prediction=sides[1], slices={"part": column})
    )
    every = [answers.ScoreSlice(f"part: {name}", 20, 0.0, (0.0, 0.0)) for name in ("empty", "full")]
    assert [item.name for item in answers.drop_empty_slices(changed, every)] == ["part: full"]


def test_masked_text_has_perplexities_and_no_confusion(runs: dict[str, Any]) -> None:
    run = runs["masked_lm"]
    result = titles(answers.build_answers_section(run))
    assert any("have a perplexity of" in title for title in result)
    assert not any("Confused" in title or "labels" in title for title in result)
    rows: dict[Any, Any] = {row[0]: row for row in table(answers.build_answers_section(run), "Scores").rows}
    assert set(rows) == {"perplexity", "masked accuracy"}
    low, high = (float(end) for end in str(rows["perplexity"][2]).split(" to "))
    assert low <= float(rows["perplexity"][1]) <= high


def test_answers_are_those_of_the_artefact(runs: dict[str, Any]) -> None:
    """The helper's runs are real: what the page is about is what the files say."""
    for run in runs.values():
        remaining = pyarrow.parquet.read_table(run.folder / "predictions-test.parquet")
        assert remaining.num_rows == run.scores["rows"] == len(run.answers)
        assert np.isfinite(run.answers.loss).all()
