"""Histograms of validation rows: the same numbers from a store as from requests of the same texts, for every task."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain.config.recipe import TASKS
from rtrain.core.ragged import OUT_OF_SCOPE, Head, RaggedArray
from rtrain.core.run_folder import Run
from rtrain.data.store.store import Store
from rtrain.inference import drift_baseline, score
from rtrain.inference.drift_baseline import BIN_EDGES, DriftFeatures
from rtrain.inference.predictor import Predictor
from rtrain.tasks import base
from tests.support import reports

TASK = base.get_task("classification")
HEAD = Head(("a", "b"))


def histogram(values: np.ndarray[Any, Any], name: str) -> list[int]:
    found: list[int] = np.bincount(
        drift_baseline.assign_bins(values, BIN_EDGES[name]), minlength=len(BIN_EDGES[name]) + 1
    ).tolist()
    return found


@pytest.mark.parametrize("task", sorted(TASKS))
def test_requests_give_what_the_validation_rows_gave(task: str, tmp_path: Path) -> None:
    run = Run(reports.make_answered(tmp_path, task))
    created = run.first_event("created")
    assert created is not None
    store, predictor = Store(Path(created["store"])), Predictor.load(run.artifact, threads=1)
    rows, unknown_id = np.arange(store.num_rows("valid")), drift_baseline.find_unknown_id(predictor.tokenizer)
    outcomes = score.predict_split(predictor, store, "valid", rows).row_results
    made = drift_baseline.build_split_baseline(predictor.task, predictor.head, store, outcomes, unknown_id)
    if predictor.task.packs_text:
        assert made == {}
        return
    assert (made["version"], made["rows"]) == (drift_baseline.BASELINE_VERSION, len(rows))
    assert sum(made["tokens"]["counts"]) == len(rows)
    assert ("score" in made, "labels" in made) == (
        predictor.task.output in drift_baseline.SCORED_OUTPUTS,
        predictor.task.output in drift_baseline.LABELED_OUTPUTS,
    )
    asked: list[Any] = []
    for kept in store.kept_texts("valid", rows):
        assert kept is not None
        text, pair = kept
        asked.append(text if pair is None else dict(zip(predictor.task.fields, (text, pair), strict=True)))
    encoded = predictor.encode(asked)
    found = drift_baseline.compute_request_features(
        predictor.task, predictor.head, predictor.outputs(encoded), encoded, unknown_id
    )
    for name, values in found.numeric_features().items():
        apart = np.abs(np.array(histogram(values[~np.isnan(values)], name)) - made[name]["counts"]).sum()
        assert apart <= (2 if name == "score" else 0), name  # a score may fall on either side of an edge
    if found.labels is not None:
        assert sorted(set(made["labels"])) == sorted({label for row in found.labels for label in row})


def test_unknown_pieces_are_counted_row_by_row() -> None:
    from rtrain.core.ragged import EncodedRow, TokenWindow

    rows = [[5, 1, 1, 6], [7], [1, 1]]
    encoded = [EncodedRow(ids, [TokenWindow(len(ids), len(ids))], False, []) for ids in rows]
    outputs = [np.array([0.0, 2.0], dtype=np.float32)] * 3
    found = drift_baseline.compute_request_features(TASK, HEAD, outputs, encoded, 1)
    assert isinstance(found, DriftFeatures)
    assert found.unknown_share is not None
    assert found.unknown_share.tolist() == [0.5, 0.0, 1.0]
    assert found.tokens.tolist() == [4, 1, 2]
    assert found.labels == [["b"]] * 3
    assert found.score == pytest.approx(np.full(3, 1 / (1 + np.exp(-2))))
    assert drift_baseline.compute_request_features(TASK, HEAD, outputs, encoded, None).unknown_share is None


def test_a_text_that_no_class_is_sure_of_has_a_low_score_where_it_is_refused_too() -> None:
    from rtrain.core.ragged import EncodedRow, TokenWindow

    sure = [0.35, 0.49, 0.9]
    encoded = [EncodedRow([5], [TokenWindow(1, 1)], False, [])] * 3
    outputs = [np.log([one, *[(1 - one) / 3] * 3]).astype(np.float32) for one in sure]
    head = Head(("a", "b", "c", "d"), {"out_of_scope_label": "other", "threshold": 0.5})
    found = drift_baseline.compute_request_features(TASK, head, outputs, encoded, None)
    assert found.score == pytest.approx(sure)
    assert found.labels == [["other"], ["other"], ["a"]]


def test_rows_outside_of_all_classes_are_no_reference(tmp_path: Path) -> None:
    run = Run(reports.make_answered(tmp_path, "classification"))
    created = run.first_event("created")
    assert created is not None
    store = Store(Path(created["store"]))

    class Outside(Store):
        def targets(self, split: str, positions: Any = None) -> RaggedArray:
            """Every second row is outside."""
            known = super().targets(split, positions)
            return RaggedArray.from_matrix(np.where(np.arange(len(known)) % 2, OUT_OF_SCOPE, known.values))

    rows = store.num_rows("valid")
    outcomes = RaggedArray.from_matrix(np.zeros((rows, len(store.manifest.labels))))
    made = drift_baseline.build_split_baseline(TASK, store.manifest.head, Outside(store.folder), outcomes, None)
    assert made["rows"] == sum(made["tokens"]["counts"]) == -(-rows // 2)


def test_an_answer_is_abstained_from_where_few_right_ones_would_be_lost() -> None:
    """Five of 100 right answers with scores 0.505, 0.51, ... 1.0 have less than the sixth; wrong ones do not count."""
    sure = np.concatenate([np.linspace(0.505, 1.0, 100), np.full(50, 0.51)])
    outcomes = RaggedArray.from_matrix(np.log(np.stack([sure, 1 - sure + 1e-12], axis=1)))
    targets = RaggedArray.from_matrix(np.array([0] * 100 + [1] * 50))
    found = drift_baseline.choose_abstain_threshold(TASK, HEAD, outcomes, targets)
    assert found == {"abstain": pytest.approx(0.525, abs=0.006)}
    assert (sure[:100] >= found["abstain"]).mean() >= drift_baseline.MIN_ANSWERED_SHARE
    chosen = Head(("a", "b"), {"out_of_scope_label": "other", "threshold": 0.6})
    assert drift_baseline.choose_abstain_threshold(TASK, chosen, outcomes, targets) == {}
    assert drift_baseline.choose_abstain_threshold(base.get_task("multi_label"), HEAD, outcomes, targets) == {}
    assert (
        drift_baseline.choose_abstain_threshold(TASK, HEAD, outcomes, RaggedArray.from_matrix(np.full(150, -1))) == {}
    )


def test_a_model_that_is_sure_of_every_row_abstains_from_few() -> None:
    logits = np.random.default_rng(0).uniform(9.9, 10.5, 1000)
    outcomes, targets = (
        RaggedArray.from_matrix(np.stack([logits, np.zeros(1000)], axis=1)),
        RaggedArray.from_matrix(np.zeros(1000)),
    )
    score = TASK.explain_rows(outcomes, targets, HEAD).score
    assert score.min() > 0.9999
    found = drift_baseline.choose_abstain_threshold(TASK, HEAD, outcomes, targets)[drift_baseline.ABSTAIN_FACT]
    assert (score >= found).mean() >= drift_baseline.MIN_ANSWERED_SHARE


def test_the_unknown_piece_is_found_by_its_usual_names() -> None:
    import tokenizers
    from tokenizers.models import BPE, Unigram, WordPiece

    assert drift_baseline.find_unknown_id(tokenizers.Tokenizer(WordPiece({"a": 0, "[?]": 1}, unk_token="[?]"))) == 1
    assert drift_baseline.find_unknown_id(tokenizers.Tokenizer(Unigram([("a", -1.0), ("<unk>", 0.0)], 1, False))) == 1
    assert drift_baseline.find_unknown_id(tokenizers.Tokenizer(BPE({"a": 0}, []))) is None
