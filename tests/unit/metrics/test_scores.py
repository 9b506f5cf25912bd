"""Scores in full: tables by hand, slices worst first and bounded, intervals, and any artefact on any file."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rtrain.cli import app as cli
from rtrain.core.errors import UserError
from rtrain.core.ragged import IGNORE_INDEX, EncodedRow, Head, RaggedArray, TokenWindow, collate
from rtrain.inference import artifact, score
from rtrain.inference.predictor import Predictor
from rtrain.metrics import classification, registry, scores, summaries
from rtrain.tasks import base
from tests.support.causes import caused_by
from tests.support.tiny import make_artifact, make_task_artifact

INTENTS = base.get_task("classification")
ABC = Head(("a", "b", "c"))


def of_intents(predicted: list[int], true: list[int], head: Head = ABC, **columns: list[str]) -> dict[str, Any]:
    """A chance of one half for the predicted class, the rest in equal shares."""
    logits = np.where(np.eye(len(head.labels))[predicted] > 0, math.log(len(head.labels) - 1), 0.0)
    lengths = np.arange(len(true))
    return scores.measure_split(
        INTENTS,
        head,
        "test",
        RaggedArray.from_matrix(logits),
        RaggedArray.from_matrix(np.array(true)),
        lengths,
        columns,
    )


def test_tables_of_classes_by_hand() -> None:
    result = of_intents([0, 0, 1, 1, 0, 2], [0, 1, 1, 1, 1, -1])
    tables = result["tables"]
    assert tables["confusion"] == {
        "labels": ["a", "b", "c"],
        "counts": [[1, 0, 0], [2, 2, 0], [0, 0, 0]],
        "without_class": [0, 0, 1],
    }
    assert tables["confused"] == [{"true": "b", "predicted": "a", "rows": 2}]
    assert [(entry["class"], entry["support"], entry["predicted"]) for entry in tables["per_class"]] == [
        ("c", 0, 1),
        ("a", 1, 3),
        ("b", 4, 2),
    ]
    assert [entry["f1"] for entry in tables["per_class"]] == pytest.approx([0, 2 / 4, 4 / 6])
    # Class a: its one row is above 3 of the 5 others, level with 2. Class b: 2 of 4 above, 2 level, with the 2 others.
    assert [entry["auc"] for entry in tables["per_class"]] == [None, pytest.approx(4 / 5), pytest.approx(6 / 8)]
    # Every row is half sure, and 3 of 6 are right.
    assert result["scores"]["ece"] == tables["calibration"]["ece"] == pytest.approx(0)
    assert result["scores"]["auc"] == pytest.approx((4 / 5 + 6 / 8) / 2)
    assert sum(entry["rows"] for entry in tables["calibration"]["bins"]) == result["rows"] == 6


def test_slices_are_the_worst_first_and_small_ones_together() -> None:
    languages = ["en"] * 40 + ["de"] * 20 + ["fr"] * 5 + ["it"] * 4
    predicted = [0] * 40 + [0] * 10 + [1] * 10 + [1] * 9
    result = of_intents(predicted, [0] * 69, language=languages)["slices"]
    assert [(entry["value"], entry["rows"], entry["scores"]["accuracy"]) for entry in result["language"]] == [
        ("(2 values with fewer than 20 rows)", 9, 0.0),
        ("de", 20, 0.5),
        ("en", 40, 1.0),
    ]
    assert (result["language"][0]["merged"], result["language"][0]["examples"]) == (2, ["fr", "it"])
    # Rows are in the order of their lengths, so the last quarter has the mistakes.
    assert (result["length"][0]["value"], result["length"][0]["rows"]) == ("52 to 68", 17)
    assert sum(entry["rows"] for entry in result["length"]) == 69


def test_the_document_is_bounded_whatever_the_columns_and_classes() -> None:
    random = np.random.default_rng(0)
    names = tuple(f"class {number}" for number in range(700))
    true, rows = random.integers(0, 700, 3000).tolist(), [f"value {number // 25}" for number in range(3000)]
    result = of_intents(random.integers(0, 700, 3000).tolist(), true, Head(names), of=rows)
    assert len(result["slices"]["of"]) <= scores.MAX_SLICES + 1
    assert sum(entry["rows"] for entry in result["slices"]["of"]) == 3000
    assert (result["tables"]["classes"], len(result["tables"]["per_class"])) == (700, 500)
    assert "confusion" not in result["tables"]
    assert len(json.dumps(result)) < 300_000


def test_an_empty_split_has_its_scores_and_nothing_more(tmp_path: Path) -> None:
    result = of_intents([], [])
    assert (result["rows"], result["scores"]["accuracy"], result["slices"], result["tables"]) == (0, 0, {}, {})
    path = tmp_path / "scores-test.json"
    scores.write_scores(path, result)
    assert scores.read_scores(path) == result


HEADS = {
    "labels": (base.get_task("multi_label"), Head(("x", "y"), {"thresholds": dict.fromkeys(("x", "y"), 0.5)})),
    "heads": (base.get_task("multi_head"), Head(("m=a", "m=b", "n=c", "n=d"), {"heads": [["m", 2], ["n", 2]]})),
    "number": (
        base.get_task("regression"),
        Head(("score",), {"mean": 2.0, "std": 1.0, "lowest": 1.0, "highest": 3.0, "step": 1.0}),
    ),
    "tags": (base.get_task("token_tags"), Head(("O", "B-x", "I-x"))),
    "summary": (base.get_task("extractive_summary"), Head(("left out", "taken"), {"max_words": 5})),
    "spans": (base.get_task("span_qa"), Head(("start", "end"), {"no_answer": True, "threshold": 0.5})),
    "tokens": (base.get_task("masked_lm"), Head((), {"mask": "[MASK]"})),
}
ROW_RESULTS: dict[str, tuple[list[Any], list[Any]]] = {
    "labels": ([[2, -2], [1, 1]], [[1, 0], [0, 1]]),
    "heads": ([[2, 0, 0, 1], [0, 1, 5, 0]], [[0, IGNORE_INDEX], [0, 0]]),
    "number": ([[1.2], [2.9]], [[1], [2]]),
    "tags": ([[0, 0.9, 0.1, 1, 0.8, 0.2], [1, 0.5, 0.7]], [[0, 1], [0]]),
    "summary": (
        [[*[0.5] * summaries.NUM_FIGURES, 0.75, 1, 0.25, 0], [*[0.0] * summaries.NUM_FIGURES, 0.5, 1]],
        [
            summaries.encode_summary_row(["a b", "c"], [(1, 3), (3, 4)], [0], "b"),
            summaries.encode_summary_row(["d"], [(1, 2)], [], "e"),
        ],
    ),
    # F1, exact match, margin, whether there is an answer, loss, first and last token; targets are places in windows.
    "spans": ([[0.8, 0, 3.0, 1, 0.4, 5, 9], [0, 0, -1.0, 0, 0.1, 4, 4]], [[0, 0, 6, 9], [0, 0]]),
    "tokens": ([[10, 5, 20.0], [6, 3, 12.0]], [[], []]),
}


@pytest.mark.parametrize("output", HEADS)
def test_every_kind_of_output_has_intervals_of_its_headline_and_tables(output: str, tmp_path: Path) -> None:
    task, head = HEADS[output]
    result, true = ROW_RESULTS[output]
    row_results, targets = RaggedArray.from_rows(result, np.float64), RaggedArray.from_rows(true, np.float32)
    document = scores.measure_split(task, head, "valid", row_results, targets, np.array([3, 9]), {"of": ["one", "two"]})
    assert document["headline"] in document["intervals"]["scores"]
    assert bool(document["tables"]) == (output != "tokens")
    for entry in document["slices"]["length"]:  # of a single row each, whose resamples are all the same
        assert entry["interval"] == [entry["scores"][document["headline"]]] * 2
    assert sorted(entry["value"] for entry in document["slices"]["length"]) == ["3", "9"]
    scores.write_scores(tmp_path / "scores-valid.json", document)
    assert scores.read_scores(tmp_path / "scores-valid.json") == document
    assert document["headline"] in scores.format_scores(document)


def test_tables_of_the_other_kinds_by_hand() -> None:
    tables = {}
    for output, (task, head) in HEADS.items():
        result, true = (
            RaggedArray.from_rows(rows, kind)
            for rows, kind in zip(ROW_RESULTS[output], (float, np.float32), strict=True)
        )
        tables[output] = scores.measure_split(task, head, "valid", result, true, np.array([3, 9]), {})["tables"]
    # Labels: x is given twice and true once; y once and rightly.
    assert {entry["class"]: entry["f1"] for entry in tables["labels"]["per_class"]} == pytest.approx(
        {"x": 2 / 3, "y": 1}
    )
    assert {name: subset["rows"] for name, subset in tables["heads"]["heads"].items()} == {"m": 2, "n": 1}
    # 2.9 is nearest to 3, and its grade was 2.
    assert tables["number"]["scale"]["confusion"]["counts"] == [[1, 0, 0], [0, 0, 1], [0, 0, 0]]
    assert sum(tables["number"]["residuals"]["rows"]) == 2
    assert tables["summary"]["positions"] == {"tenths": 10, "oracle": [1, *[0] * 9], "picked": [2, *[0] * 9]}
    [entity] = tables["tags"]["per_class"]
    assert (entity["class"], entity["precision"], entity["recall"]) == ("x", 0.5, 1.0)


def test_a_head_of_which_no_row_has_a_label_counts_for_nothing() -> None:
    task, head = HEADS["heads"]
    (first, second), _ = ROW_RESULTS["heads"]
    # Both rows are right by m, and none says what n is.
    result, true = (
        RaggedArray.from_rows([first, second], np.float64),
        RaggedArray.from_rows([[0, IGNORE_INDEX], [1, IGNORE_INDEX]], np.float32),
    )
    right = registry.get_metric("heads").main_scores(result, true, head)["m_accuracy"]
    document = scores.measure_split(task, head, "file", result, true, np.array([3, 9]), {})
    assert document["scores"]["mean_accuracy"] == right
    assert document["scores"]["n_accuracy"] == 0
    low, high = document["intervals"]["scores"]["mean_accuracy"]
    assert low <= right <= high
    assert document["tables"]["heads"]["n"]["rows"] == 0
    assert right > 0


def of_questions(rows: list[list[float]], lengths: list[int], threshold: float, no_answer: bool = True) -> Any:
    """Rows of F1, exact match, margin; an answer of that many tokens begins at token 5 of the second window."""
    head = Head(("start", "end"), {"no_answer": no_answer, "threshold": threshold} if no_answer else {})
    row_results = [[*row, float(length > 0), 0.1, 0, 0] for row, length in zip(rows, lengths, strict=True)]
    targets = [[0, 0, 5, 4 + length] if length else [0, 0, 0, 0] for length in lengths]
    result, true = RaggedArray.from_rows(row_results, np.float64), RaggedArray.from_rows(targets, np.float32)
    return scores.measure_split(base.get_task("span_qa"), head, "valid", result, true, np.arange(len(rows)), {})


def test_questions_by_the_length_of_their_answer() -> None:
    """One of five answers of 1, 1, 2, 12 and 14 tokens is left unanswered, one of length 1."""
    rows = [[1.0, 1, 9], [1.0, 1, -9], [0.5, 0, 9], [0.25, 0, 9], [0.75, 0, 9], [0.0, 0, -9]]
    result = of_questions(rows, [1, 1, 2, 12, 14, 0], threshold=0.0)
    assert result["tables"]["by_length"] == [
        {"low": 1, "high": 1, "rows": 2, "f1": 0.5, "exact_match": 0.5},
        {"low": 2, "high": 2, "rows": 1, "f1": 0.5, "exact_match": 0.0},
        {"low": 12, "high": 14, "rows": 2, "f1": 0.5, "exact_match": 0.0},
    ]
    assert "no_answer" not in of_questions(rows[:5], [1, 1, 2, 12, 14], 0.0, no_answer=False)["tables"]


def test_f1_at_each_threshold_is_that_of_answers_above_it() -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(0, 3, 400).tolist()
    margins = random.normal(size=400).round(1)  # many are equal
    rows = [
        [random.uniform() * bool(n), float(random.integers(2) * bool(n)), m]
        for n, m in zip(lengths, margins, strict=True)
    ]
    tables = of_questions(rows, lengths, threshold=0.3)["tables"]["no_answer"]
    curve = tables["curve"]
    assert 2 < len(curve) <= 101
    assert (curve[0]["answered"], curve[-1]["answered"]) == (0, 1)
    for point in curve:
        scored = of_questions(rows, lengths, point["threshold"])["scores"]
        assert (scored["f1"], scored["exact_match"]) == pytest.approx((point["f1"], point["exact_match"]))
        assert scored["answered"] == pytest.approx(point["answered"])
    assert (tables["rows"], tables["threshold"]) == (lengths.count(0), 0.3)
    none = margins[np.array(lengths) == 0]
    assert tables["unanswered_share"] == pytest.approx((none <= 0.3).mean())


# ------------------------------------------------------------------------------------------------------- any artefact


def test_a_file_is_read_as_the_artefact_s_own_rows_were(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = Head(("score",), {"mean": 2.0, "std": 1.0})
    folder = make_task_artifact(
        tmp_path / "artifact", "regression", head, data={"text": "essay", "label": "grade", "slices": ["school"]}
    )
    essays = [f"where is my parcel number {number}" for number in range(50)]
    lines = [f"{essay},{number % 4},{'north' if number < 22 else 'south'}" for number, essay in enumerate(essays)]
    path = tmp_path / "essays.csv"
    path.write_text("\n".join(["essay,grade,school", *lines, "late,none,south"]) + "\n")
    result = Predictor.load(folder)(essays)
    errors = [answer - number % 4 for number, answer in enumerate(result)]
    cli.main(["evaluate", str(folder), "--data", str(path), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["scores"]["rmse"] == pytest.approx(math.sqrt(np.mean(np.square(errors))), rel=1e-5)
    assert (report["rows"], report["bad_rows"]) == (50, 1)
    assert {entry["value"]: entry["rows"] for entry in report["slices"]["school"]} == {"north": 22, "south": 28}
    cli.main(["evaluate", str(folder), "--data", str(path), "--set", "data.slices=[]"])
    shown = capsys.readouterr().out
    assert "neg_rmse" in shown
    assert "school" not in shown


@pytest.mark.parametrize("facts", [{}, {"out_of_scope_label": "other", "threshold": 0.1}])
def test_an_answer_that_is_no_number_is_wrong(facts: dict[str, Any]) -> None:
    nothing = float("nan")
    row_results = RaggedArray.from_matrix(np.array([[nothing, nothing], [nothing, 1.0], [2.0, 1.0]]))
    targets, head = RaggedArray.from_matrix(np.zeros((3, 1))), Head(("a", "b"), facts)
    metric = registry.get_metric("classes")
    assert metric.main_scores(row_results, targets, head)["accuracy"] == pytest.approx(1 / 3)
    assert metric.mark_correct is not None
    assert metric.mark_correct(row_results, targets, head).tolist() == [False, False, True]
    several = Head(("m=a", "m=b"), {"heads": [["m", 2]]})
    assert registry.get_metric("heads").main_scores(row_results, targets, several)["mean_accuracy"] == pytest.approx(
        1 / 3
    )


def test_labels_of_an_answer_that_is_no_number_are_wrong() -> None:
    """Whatever is true of them: no label of the first row, the label of the second one."""
    nothing = float("nan")
    row_results = RaggedArray.from_matrix(np.array([[nothing, nothing], [nothing, -9.0], [9.0, -9.0]]))
    targets, head = RaggedArray.from_matrix(np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 0.0]])), Head(("a", "b"))
    metric = registry.get_metric("labels")
    assert metric.main_scores(row_results, targets, head)["subset_accuracy"] == pytest.approx(1 / 3)
    assert metric.main_scores(row_results, targets, head)["micro_f1"] == pytest.approx(
        2 / 5
    )  # 1 right, 2 too many, 1 missed
    assert metric.mark_correct is not None
    assert metric.mark_correct(row_results, targets, head).tolist() == [False, False, True]
    assert "mean_average_precision" not in metric.all_scores(row_results, targets, head)
    calibrate = base.get_task("multi_label").calibrate
    assert set(calibrate(row_results, targets, head)["thresholds"]) == {"a", "b"}
    # Ten true rows without a number, one true and one false with one: the threshold stays between these two.
    many = RaggedArray.from_matrix(np.array([[nothing]] * 10 + [[2.2], [-2.2]]))
    true = RaggedArray.from_matrix(np.array([[1.0]] * 11 + [[0.0]]))
    assert calibrate(many, true, Head(("a",))) == {"thresholds": {"a": pytest.approx(0.5)}}
    assert (
        calibrate(
            RaggedArray.from_matrix(np.array([[nothing]])), RaggedArray.from_matrix(np.array([[1.0]])), Head(("a",))
        )
        == {}
    )


NAN = float("nan")
NO_NUMBERS: dict[str, tuple[Head, list[Any], list[Any]]] = {
    "classification": (Head(("a", "b")), [[NAN, 1.0], [2.0, 1.0]], [[0], [0]]),
    "multi_label": (Head(("a", "b")), [[NAN, 1.0], [2.0, -1.0]], [[1, 0], [1, 0]]),
    "multi_head": (Head(("m=a", "m=b"), {"heads": [["m", 2]]}), [[NAN, 1.0], [2.0, 1.0]], [[0], [0]]),
    "token_tags": (Head(("O", "B-x")), [[classification.NO_CLASS, NAN, NAN], [1, 0.9, 0.1]], [[1], [1]]),
}


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_tables_hold_numbers_where_an_answer_is_none(name: str, tmp_path: Path) -> None:
    """JSON has no other. The row is a missed one of its class, and says nothing of how sure the model is."""
    head, result, true = NO_NUMBERS[name]
    row_results, targets = RaggedArray.from_rows(result, np.float64), RaggedArray.from_rows(true, np.float32)
    document = scores.measure_split(base.get_task(name), head, "test", row_results, targets, np.array([3, 9]), {})
    scores.write_scores(tmp_path / "scores-test.json", document)
    tables = document["tables"]["heads"]["m"] if name == "multi_head" else document["tables"]
    recall = {entry["class"]: (entry["recall"], entry["support"]) for entry in tables["per_class"]}
    assert recall["x" if name == "token_tags" else "a"] == (0.5, 2)
    assert sum(entry["rows"] for entry in tables["calibration"]["bins"]) == (3 if name == "multi_label" else 1)
    if "confusion" in tables:
        assert tables["confusion"]["counts"] == [[1, 0], [0, 0]]


def test_numbers_of_a_model_gone_astray_are_told_as_that() -> None:
    head, task = Head(("score",), {"mean": 2.0, "std": 1.0}), base.get_task("regression")
    row_results, true = (RaggedArray.from_matrix(np.array(side)) for side in ([[NAN], [1.0]], [[1.0], [2.0]]))
    with pytest.raises(UserError, check=caused_by("diverged")):
        scores.measure_split(task, head, "test", row_results, true, np.array([3, 9]), {})


def test_tags_of_an_answer_that_is_no_number_are_wrong() -> None:
    """A word without an entity is one of them, which the first of all tags would answer rightly."""
    task, head = base.get_task("token_tags"), Head(("O", "B-PER"))
    outputs = [np.array([[np.nan, np.nan], [1.0, np.nan], [-9.0, 9.0]], dtype=np.float32)]
    targets = RaggedArray.from_rows([[0, 0, 1]], np.float32)
    words = collate([EncodedRow([5, 6, 7], [TokenWindow(3, 3)], False, [(0, 1), (2, 3), (4, 5)])])
    tokens = replace(words, targets=targets.values, targets_per_row=targets.counts)
    row_results, metric = task.row_results(outputs, tokens, head), registry.get_metric("tags")
    assert metric.main_scores(row_results, targets, head)["word_accuracy"] == pytest.approx(1 / 3)
    assert metric.mark_correct is not None
    assert metric.mark_correct(row_results, targets, head).tolist() == [False]


def test_labels_that_the_artefact_lacks_are_wrong_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The artifact predicts no label; every row has a label that it does not know."""
    head = Head(("a", "b"), {"thresholds": dict.fromkeys(("a", "b"), 0.999999)})
    folder = make_task_artifact(tmp_path / "artifact", "multi_label", head, data={"text": "text", "label": "labels"})
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"parcel {row}", "labels": ["zzz"]}) + "\n" for row in range(30)))
    result = score.score_file(
        folder, score.resolve_data_settings(artifact.read_artifact(folder), {"data.path": str(path)})
    )
    assert result["unknown_labels"] == {"rows": 30, "examples": ["'zzz'"]}
    assert (result["scores"]["subset_accuracy"], result["scores"]["micro_f1"]) == (0, 0)
    assert {entry["class"]: entry["support"] for entry in result["tables"]["per_class"]} == {"a": 0, "b": 0, "zzz": 30}
    cli.main(["evaluate", str(folder), "--data", str(path)])
    assert "labels that the artifact lacks, in 30 rows, such as 'zzz'; it has " in capsys.readouterr().out


def test_entities_of_a_type_that_the_artefact_lacks_are_missed(tmp_path: Path) -> None:
    head = Head(("O", "B-PER", "I-PER"))
    folder = make_task_artifact(tmp_path / "artifact", "token_tags", head, data={"text": "words", "label": "tags"})
    path = tmp_path / "rows.jsonl"
    rows = [{"words": ["where", "is", "my", "parcel"], "tags": ["B-LOC", "I-LOC", "O", "O"]}] * 3
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = score.score_file(
        folder, score.resolve_data_settings(artifact.read_artifact(folder), {"data.path": str(path)})
    )
    assert report["unknown_labels"] == {"rows": 3, "examples": ["'B-LOC'", "'I-LOC'"]}
    assert {entry["class"]: entry["support"] for entry in report["tables"]["per_class"]}["LOC"] == 3
    assert report["scores"]["recall"] == 0


def test_a_file_is_read_in_the_format_of_the_training_rows_unless_its_name_says_another(tmp_path: Path) -> None:
    store = replace(artifact.read_artifact(make_artifact(tmp_path / "artifact")), data={"format": "squad"})
    for path, format in (("dev.json", "squad"), ("dev.json.gz", "squad"), ("dev", "squad"), ("rows.jsonl", None)):
        assert score.resolve_data_settings(store, {"data.path": path}).format == format
    assert score.resolve_data_settings(store, {"data.path": "dev.json", "data.format": "jsonl"}).format == "jsonl"


@settings(deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "c", "d", None]), max_size=80), st.integers(0, 10))
def test_every_row_is_in_one_group(values: list[str | None], min_rows: int) -> None:
    result = scores.group_rows(values, min_rows)
    assert sorted(row for group in result for row in group.rows) == list(range(len(values)))
    assert sum(len(group.rows) < min_rows for group in result) <= 1  # only that of small ones, or a single small value
    assert all(len(group.merged_values) != 1 for group in result)  # a single small value keeps its name


def test_all_but_the_most_frequent_values_are_one() -> None:
    values = [*"aaaa", *"bbb", *"cc", *"dd", *"e"]
    result = scores.group_rows(values, min_rows=1, max_groups=2)
    assert [(entry.value, entry.rows.tolist(), entry.merged_values) for entry in result] == [
        ("a", [0, 1, 2, 3], ()),
        ("b", [4, 5, 6], ()),
        ("(the 3 rarest values)", [7, 8, 9, 10, 11], ("c", "d", "e")),
    ]
    # Ties are sorted by name: values with equally many rows are not all merged.
    assert [entry.value for entry in scores.group_rows([*"abcd"] * 5, min_rows=1, max_groups=2)] == [
        "a",
        "b",
        "(the 2 rarest values)",
    ]


@settings(deadline=None)
@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=50), st.integers(1, 6))
def test_quantile_ranges_do_not_overlap_and_hold_their_numbers(numbers: list[int], parts: int) -> None:
    labels = scores.bin_by_quantile(numbers, parts)
    order = [label for _, label in sorted(zip(numbers, labels, strict=True), key=lambda pair: pair[0])]
    changes = sum(a != b for a, b in pairwise(order))
    assert changes == len(set(labels)) - 1 < parts
    for number in set(numbers):
        assert len({label for value, label in zip(numbers, labels, strict=True) if value == number}) == 1
    assert np.unique(labels).size <= parts
    assert scores.bin_by_quantile([]) == []
