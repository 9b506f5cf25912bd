"""Evaluation: every row counted once on any number of workers, with the scores that counting by hand gives."""

from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from rtrain import config
from rtrain.core.ragged import RaggedArray
from rtrain.data.store.store import Store
from rtrain.parallel.ddp import DDPStrategy
from rtrain.tasks import base
from rtrain.trainer import evaluate, step
from tests.conftest import labelled_rows, write_rows
from tests.support.tiny import make_encoder, make_store
from tests.unit.trainer.test_step import make_network, make_still_encoder
from tests.unit.trainer.test_step_workers import WORLDS, on_workers

TASK = base.get_task("classification")


def make_scored_store(folder: Path, encoder: Path) -> Store:
    """A token store of 300 rows under `folder`."""
    folder.mkdir(parents=True)
    path = write_rows(folder / "rows.csv", labelled_rows(300))
    return make_store(config.load_config("intent", {"data.path": str(path)}).recipe, encoder, folder)


def scores_of(exchange: DDPStrategy, folder: Path) -> dict[str, float]:
    """Scores of the store's validation rows, in passes of four."""
    store = Store(next((folder / ".tokens").iterdir()))
    with mock.patch.object(evaluate, "MAX_ROWS_PER_MICRO_BATCH", 4):
        return evaluate.evaluate(exchange, TASK, store, "valid", pad_id=0, precision="fp32")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_still_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, encoder: Path) -> Store:
    return make_scored_store(tmp_path_factory.mktemp("scored") / "store", encoder)


def by_hand(network: torch.nn.Module, store: Store, split: str) -> dict[str, float]:
    """Accuracy and macro precision, recall and F1 from one forward pass per row."""
    network.eval()
    pairs: Counter[tuple[int, int]] = Counter()
    for row in range(store.num_rows(split)):
        tokens = store.read_tokens(split, np.array([row]))
        with torch.inference_mode():
            predicted = int(step.forward(network, tokens, 0, "fp32").argmax())
        pairs[int(tokens.targets[0]), predicted] += 1
    scores = []
    for label in range(len(store.manifest.labels)):
        right = pairs[label, label]
        actual = sum(count for (_, predicted), count in pairs.items() if predicted == label)
        there = sum(count for (target, _), count in pairs.items() if target == label)
        if actual + there:
            scores.append([right / max(1, actual), right / max(1, there), 2 * right / (actual + there)])
    rows = sum(pairs.values())
    accuracy = sum(count for (target, predicted), count in pairs.items() if target == predicted) / rows
    macro = zip(("macro_precision", "macro_recall", "macro_f1"), np.mean(scores, axis=0).tolist(), strict=True)
    return {"accuracy": accuracy, **dict(macro), "rows": rows}


def test_scores_are_those_of_single_rows(store: Store, encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = make_network(encoder)
    assert store.num_rows("valid") > 20
    expected = by_hand(network, store, "valid")
    assert 0 < expected["accuracy"] < 1
    for rows_per_pass in (1, 4, store.num_rows("valid"), 1000):
        monkeypatch.setattr(evaluate, "MAX_ROWS_PER_MICRO_BATCH", rows_per_pass)
        actual = evaluate.evaluate(DDPStrategy(network), TASK, store, "valid", pad_id=0, precision="fp32")
        assert actual == pytest.approx(expected, rel=1e-12)
        assert actual["rows"] == store.num_rows("valid")


@pytest.mark.parametrize("world", WORLDS)
def test_any_number_of_workers_counts_every_row_once(world: int, store: Store, encoder: Path) -> None:
    expected = by_hand(make_network(encoder), store, "valid")
    results, folder = on_workers()
    assert next((folder / "store" / ".tokens").iterdir()).name == store.folder.name  # the same rows
    for rank in range(world):
        assert results[world, rank]["scores"] == pytest.approx(expected, rel=1e-12)
        assert results[world, rank]["scores"]["rows"] == store.num_rows("valid")


def test_dropout_is_off_during_evaluation_and_on_afterwards(store: Store, tmp_path: Path) -> None:
    network = make_network(make_encoder(tmp_path / "encoder"))
    tokens = store.read_tokens("valid", np.arange(4))
    assert not torch.equal(step.forward(network, tokens, 0, "fp32"), step.forward(network, tokens, 0, "fp32"))
    actual = [
        evaluate.evaluate(DDPStrategy(network), TASK, store, "valid", pad_id=0, precision="fp32") for _ in range(2)
    ]
    assert actual[0] == actual[1] == pytest.approx(by_hand(network, store, "valid"))
    network.eval()
    evaluate.evaluate(DDPStrategy(network), TASK, store, "valid", pad_id=0, precision="fp32")
    assert network.training


def test_a_missing_or_repeated_row_is_an_error() -> None:
    outcomes = RaggedArray.from_matrix(np.array([[1.0], [2.0], [3.0]]))
    assert evaluate.restore_order(outcomes, np.array([2, 0, 1]), 3).values.tolist() == [2.0, 3.0, 1.0]
    for positions, rows in (([0, 1, 1], 3), ([0, 1, 2], 4), ([0, 1, 2], 2), ([0, 1, 3], 3)):
        with pytest.raises(RuntimeError, match="evaluated"):
            evaluate.restore_order(outcomes, np.array(positions), rows)


def test_rows_of_many_windows_are_evaluated_in_smaller_groups(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    every = np.argsort(store.column("valid", "length"), kind="stable")
    monkeypatch.setattr(evaluate, "MAX_TOKENS_PER_MICRO_BATCH", 40)
    actual = list(evaluate.split_micro_batches(store, "valid", every))
    assert np.concatenate(actual).tolist() == every.tolist()
    assert 1 < max(int(store.column("valid", "length")[part].sum()) for part in actual) <= 40
