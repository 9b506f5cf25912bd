"""Operations that int8 harms are reverted to float, as few as needed: by tables, and on a graph with an outlier."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from rtrain.compress import calibrate, quantize
from rtrain.compress.calibrate import AnswerDifference, GraphAnswers
from rtrain.compress.exporters import openvino
from rtrain.core.ragged import Floats, Head, RaggedArray
from rtrain.evaluation.inspect_artifact import read_openvino_graph
from rtrain.inference.score import PredictedRows
from rtrain.tasks import base
from tests.support import quantizing
from tests.support.outliers import plant
from tests.support.quantizing import Made
from tests.support.tiny import make_artifact

ROWS: dict[str, Any] = {"calibration_rows": 64}


class Table:
    """A graph whose operations each change a share of the answers."""

    def __init__(self, harm: Mapping[str, float]):
        self.harm = harm
        self.calls: list[frozenset[str]] = []

    def __call__(self, floats: frozenset[str]) -> AnswerDifference:
        self.calls.append(floats)
        left = sum(harm for name, harm in self.harm.items() if name not in floats)
        return AnswerDifference(changed_share=left, distance=10 * left)


EVEN = {f"op{number}": 0.001 for number in range(40)}


@pytest.mark.parametrize(
    ("harm", "max_share", "expected"),
    [
        (EVEN, 0.05, ()),
        ({**EVEN, "op7": 0.2}, 0.05, ("op7",)),
        ({**EVEN, "op7": 0.2, "op3": 0.1, "op9": 0.3}, 0.05, ("op9", "op7", "op3")),
        ({"a": 0.1, "b": 0.2}, 0.0, ("b", "a")),
        ({}, 0.0, ()),
    ],
    ids=["none", "one", "three", "all", "no operations"],
)
def test_the_smallest_set_is_found(harm: dict[str, float], max_share: float, expected: tuple[str, ...]) -> None:
    result = calibrate.search_operations(list(harm), Table(harm), max_share)
    assert result.reverted == expected
    assert result.original_difference.changed_share == pytest.approx(sum(harm.values()))
    assert result.final_difference.changed_share == pytest.approx(
        sum(share for name, share in harm.items() if name not in expected)
    )


def test_each_operation_is_tried_once_and_the_set_in_a_few_steps_more() -> None:
    table = Table({**EVEN, "op7": 0.2, "op3": 0.1, "op9": 0.3})
    result = calibrate.search_operations(list(table.harm), table, 0.05)
    assert len(table.calls) == len(set(table.calls))
    assert {floats for floats in table.calls if len(floats) == 1} == {frozenset({name}) for name in table.harm}
    assert len(table.calls) <= 1 + 40 + 6
    assert list(result.sensitivity)[:3] == ["op9", "op7", "op3"]
    even = Table(EVEN)
    assert calibrate.search_operations(list(EVEN), even, 0.05).sensitivity == {}
    assert even.calls == [frozenset()]


def test_what_a_ranking_puts_too_high_is_left_out_again() -> None:
    """`near` alone moves the logits most, but no answer changes."""

    def measure(floats: frozenset[str]) -> AnswerDifference:
        return AnswerDifference(0.3 if "far" not in floats else 0.0, 5.0 - 2 * ("near" in floats) - ("far" in floats))

    result = calibrate.search_operations(["other", "far", "near"], measure, 0.01)
    assert list(result.sensitivity) == ["near", "far", "other"]
    assert result.reverted == ("far",)


def test_where_nothing_suffices_all_goes_back() -> None:
    result = calibrate.search_operations(["a", "b", "c"], lambda floats: AnswerDifference(0.5, 3.0 - len(floats)), 0.1)
    assert (set(result.reverted), result.final_difference.changed_share) == ({"a", "b", "c"}, 0.5)


SEVERAL = Head(("m=a", "m=b", "n=c", "n=d"), {"heads": [["m", 2], ["n", 2]]})


@pytest.mark.parametrize(
    ("task", "head", "left", "right", "share"),
    [
        ("classification", Head(("a", "b")), [[1, 2], [3, 1], [0, 1]], [[2, 1], [1, 0], [0, 3]], 1 / 3),
        # The best label stays, and the second one is given by one side alone.
        ("multi_label", Head(("a", "b", "c")), [[5, 2, -3], [5, -2, 3]], [[5, -2, -3], [5, -2, 3]], 1 / 2),
        ("multi_label", Head(("a", "b")), [[-5, -2], [-3, -4]], [[-2, -5], [-4, -3]], 0),  # none is given
        ("multi_head", SEVERAL, [[9, -9, 1, -1], [9, -9, 1, -1]], [[9, -9, -1, 1], [8, -8, 2, -2]], 1 / 2),
        ("regression", Head(("score",), {"mean": 3.0, "std": 2.0}), [[1.0], [2.0]], [[1.04], [2.06]], 1 / 2),
        ("regression", Head(("score",), {"mean": 3.0, "std": 2.0}), [[1.0], [2.0]], [[float("nan")], [2.0]], 1 / 2),
    ],
)
def test_an_answer_is_another_where_the_task_decides_otherwise(
    task: str, head: Head, left: list[list[float]], right: list[list[float]], share: float
) -> None:
    assert calibrate.changed_share(*(of_rows(task, head, side).answers for side in (left, right))) == share


def of_rows(name: str, head: Head, logits: list[list[float]]) -> GraphAnswers:
    """Decisions of a task that answers a row once."""
    task, outputs = base.get_task(name), np.array(logits, dtype=np.float64)
    context = [task.placeholder_label("", head)] * len(outputs)
    targets = task.build_targets(context, RaggedArray.from_rows([], np.int32), head).values
    return calibrate.collect_graph_answers(
        task, head, PredictedRows(list(outputs), RaggedArray.from_matrix(outputs)), targets
    )


def test_an_answer_in_words_is_another_where_its_place_is() -> None:
    """Most tokens are surer of a begin than of an end, or the reverse: which of the two is no answer."""
    task, head = base.get_task("span_qa"), Head(("start", "end"))

    def answers_of(*best: tuple[int, int]) -> GraphAnswers:
        rows = [[0.5, 0, 3.0, 1, 0.4, first, last] for first, last in best]
        outputs: list[Floats] = [np.zeros((8, 2), dtype=np.float32)] * len(best)
        targets = RaggedArray.from_rows([[0, 0]] * len(best), np.float32)
        return calibrate.collect_graph_answers(
            task, head, PredictedRows(outputs, RaggedArray.from_rows(rows, np.float64)), targets
        )

    assert calibrate.changed_share(answers_of((3, 4), (5, 6)).answers, answers_of((3, 4), (5, 7)).answers) == 1 / 2


def test_tags_are_answers_of_their_words() -> None:
    task, head = base.get_task("token_tags"), Head(("O", "B-x"))

    def answers_of(*tags: list[int]) -> GraphAnswers:
        rows = [np.array([(tag, 0.9, 0.1) for tag in row]).ravel() for row in tags]
        targets = RaggedArray.from_rows([[0] * len(row) for row in tags], np.float32)
        return calibrate.collect_graph_answers(
            task, head, PredictedRows([], RaggedArray.from_rows(rows, np.float64)), targets
        )

    assert calibrate.changed_share(answers_of([0, 1, 0], [0]).answers, answers_of([0, 0, 0], [0]).answers) == 1 / 4


def test_no_rows_are_not_apart() -> None:
    assert calibrate.measure_difference(GraphAnswers([], []), GraphAnswers([], [])) == AnswerDifference(0.0, 0.0)


def test_a_planted_outlier_is_named_and_alone_goes_back(job: Made, tmp_path: Path) -> None:
    honest = quantizing.quantize(job, tmp_path / "honest", max_changed_predictions=1.0, **ROWS)["fallback"]
    assert honest["reverted"] == []
    harmed = plant(job.folder, tmp_path / "harmed", layer=1, factor=128.0, channels=(0, 16))
    result = quantizing.quantize(
        job, tmp_path / "int8", harmed, max_changed_predictions=honest["changed_share"] + 0.005, **ROWS
    )["fallback"]
    assert result["changed_share_before"] > honest["changed_share"] + 0.05
    assert result["reverted"] == ["bert.encoder.layer.1.attention.self (ScaledDotProductAttention)"]
    assert result["changed_share"] <= honest["changed_share"] + 0.005
    assert result["operations"] == len(result["sensitivity"]) == 19
    # A reverted operation has no weights: it costs a few constants at most.
    assert abs(result["megabytes_added"]) < 0.01
    assert [item["bucket"] for item in result["latency"]] == ["up to 16 tokens", "up to 32 tokens", "up to 64 tokens"]


def test_a_reverted_operation_has_its_float_weights_in_the_file(tmp_path: Path) -> None:
    """A quantized operation that was reverted before is written unchanged."""
    network = transformers.AutoModelForSequenceClassification.from_pretrained(make_artifact(tmp_path / "float")).eval()
    ids = np.arange(5, 17)[None]
    sample = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    graph = openvino.export(network, sample).calibrate([sample])
    assert {name.rpartition("(")[2] for name in graph.operations} == {
        *("Gather)", "MatMul)", "Add)", "ScaledDotProductAttention)")
    }
    for name, reverted in (
        ("int8", ()),
        ("mixed", ("bert.pooler.dense (MatMul)", "bert.encoder.layer.0.output.dense (MatMul)")),
        ("again", ()),
    ):
        graph.revert(reverted)
        graph.write(tmp_path / f"{name}.xml")
    result = {
        name: read_openvino_graph(tmp_path / f"{name}.xml").count_operators()["MatMul"] for name in ("int8", "mixed")
    }
    assert result == {"int8": {"i8 x i8": 14}, "mixed": {"i8 x i8": 12, "float": 2}}
    sizes = {name: (tmp_path / f"{name}.bin").stat().st_size for name in ("int8", "mixed", "again")}
    # 32 x 32 and 64 x 32 weights of four bytes in place of one; scales and bounds of a quantizer are a few bytes.
    assert sizes["mixed"] - sizes["int8"] == pytest.approx(3 * (32 * 32 + 64 * 32), rel=0.1)
    assert (tmp_path / "again.bin").read_bytes() == (tmp_path / "int8.bin").read_bytes()


def test_rows_without_a_masked_token_are_no_farther_apart_than_others() -> None:
    """A short row of masked text may have no masked token."""
    none, two = np.zeros((0, 5), dtype=np.float32), np.zeros((2, 5), dtype=np.float32)
    assert quantize.max_logit_difference([none, two], [none, two + 0.5]) == 0.5
    assert quantize.max_logit_difference([none], [none]) == quantize.max_logit_difference([], []) == 0.0
