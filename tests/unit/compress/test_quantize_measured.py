"""Figures of an int8 artifact beside its parent's, with and without memory for all outputs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain.compress import quantize
from rtrain.core.ragged import Head
from rtrain.data.store.store import Store
from rtrain.inference import artifact, score
from tests.support.reports import settings_of
from tests.support.tiny import make_store, make_task_artifact

Setup = tuple[tuple[Path, Path], Store]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """Two masked language models with weights of their own, and rows for both."""
    folder = tmp_path_factory.mktemp("measured")
    recipe = settings_of("masked_lm", folder).recipe
    store = make_store(recipe, folder / "encoder", folder)
    facts: dict[str, Any] = {**store.manifest.head.facts, "mask": "[MASK]"}
    item, other = (make_task_artifact(folder / str(seed), "masked_lm", Head((), facts), seed, 48) for seed in (1, 2))
    return (item, other), store


def test_no_more_outputs_are_held_than_fit_and_all_rows_are_scored(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row has one for each mask and piece of the vocabulary: of 10,000 rows of 512 tokens they would be 90 GB."""
    (parent, small), store = setup
    sides = artifact.read_artifact(parent), artifact.read_artifact(small)
    full, answers = quantize.measure_quantization(parent, small, *sides, store)
    rows = store.num_rows("test")
    assert [len(answer.outputs) for answer in answers] == [rows, rows]
    entry = np.mean([answer.nbytes for answer in answers[0].outputs])
    sizes: list[int] = []

    def noted(*given: Any, **named: Any) -> score.PredictedRows:
        sizes.append(len((result := on_split(*given, **named)).outputs))
        return result

    on_split = score.predict_split
    monkeypatch.setattr(score, "predict_split", noted)
    monkeypatch.setattr(quantize, "MAX_OUTPUT_BYTES", int(entry * 5))
    monkeypatch.setattr(quantize, "PROBE_ROWS", 2)
    cut, fewer = quantize.measure_quantization(parent, small, *sides, store)
    assert 2 <= max(sizes) < rows > 10
    assert [item.outputs for item in fewer] == [[], []]
    for name in ("test", "parent"):
        assert cut[name] == pytest.approx(full[name])
    some = max(sizes)
    assert "changed_share_rows" not in full
    assert cut["changed_share_rows"] == some
    assert cut["changed_share"] == np.mean(
        np.concatenate([answer.argmax(-1) for answer in answers[0].outputs[:some]])
        != np.concatenate([answer.argmax(-1) for answer in answers[1].outputs[:some]])
    )
