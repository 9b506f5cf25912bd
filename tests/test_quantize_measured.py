"""What an int8 artefact is measured by beside its parent, where all outputs fit into memory and where not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain.compress import quantize
from rtrain.core.ragged import Head
from rtrain.data.store.store import Store
from rtrain.inference import artifact, score
from tests.reports import settings_of
from tests.tiny import make_store, make_task_artifact

Made = tuple[tuple[Path, Path], Store]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Two masked language models with weights of their own, and rows for both."""
    folder = tmp_path_factory.mktemp("measured")
    recipe = settings_of("masked_lm", folder).recipe
    store = make_store(recipe, folder / "encoder", folder)
    facts: dict[str, Any] = {**store.manifest.head.facts, "mask": "[MASK]"}
    one, other = (make_task_artifact(folder / str(seed), "masked_lm", Head((), facts), seed, 48) for seed in (1, 2))
    return (one, other), store


def test_no_more_outputs_are_held_than_fit_and_all_rows_are_scored(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has one for each mask and piece of the vocabulary: of 10,000 rows of 512 tokens they would be 90 GB."""
    (parent, small), store = made
    sides = artifact.read(parent), artifact.read(small)
    whole, answers = quantize.measure(parent, small, *sides, store)
    rows = store.rows("test")
    assert [len(one.outputs) for one in answers] == [rows, rows]
    each = np.mean([one.nbytes for one in answers[0].outputs])
    held: list[int] = []

    def noted(*given: Any, **named: Any) -> score.Answered:
        held.append(len((found := on_split(*given, **named)).outputs))
        return found

    on_split = score.on_split
    monkeypatch.setattr(score, "on_split", noted)
    monkeypatch.setattr(quantize, "OUTPUT_BYTES", int(each * 5))
    monkeypatch.setattr(quantize, "PROBED", 2)
    cut, fewer = quantize.measure(parent, small, *sides, store)
    assert 2 <= max(held) < rows > 10
    assert [one.outputs for one in fewer] == [[], []]
    for name in ("test", "parent"):
        assert cut[name] == pytest.approx(whole[name])
    some = max(held)
    assert "flips_rows" not in whole
    assert cut["flips_rows"] == some
    assert cut["flips_against_parent"] == np.mean(
        np.concatenate([one.argmax(-1) for one in answers[0].outputs[:some]])
        != np.concatenate([one.argmax(-1) for one in answers[1].outputs[:some]])
    )
