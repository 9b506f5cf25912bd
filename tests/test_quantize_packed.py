"""A graph that is kept compressed: smaller, answered as before, inspected, carried, unpacked once."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain.compress import quantize
from rtrain.core import engines, env
from rtrain.evaluation import inspect_artifact
from rtrain.inference import artifact
from rtrain.inference.predictor import Predictor
from rtrain.models import compile_cache
from rtrain.runs.store import bundle
from tests import quantizing
from tests.tiny import CORPUS

ENGINES = ("openvino", "onnxruntime")


@pytest.fixture(scope="module", params=ENGINES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An int8 artefact as it is, and compressed."""
    folder = tmp_path_factory.mktemp(request.param)
    made = quantizing.make(folder, rows=40)
    plain = quantizing.complete(made, folder / "plain", calibration_rows=8, engine=request.param)
    packed = shutil.copytree(plain, folder / "packed")
    quantize.pack_graph(packed)
    return plain, packed


def answers(folder: Path) -> Any:
    return np.stack(Predictor.load(folder).logits(CORPUS))


def test_it_is_smaller_and_answers_bit_for_bit(both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpacked into memory, where nothing may be kept."""
    monkeypatch.setenv(env.CACHE, "")
    plain, packed = both
    assert np.array_equal(answers(plain), answers(packed))
    one, other = (artifact.read(folder) for folder in both)
    assert artifact.size_mb(packed, other.engine) < 0.95 * artifact.size_mb(plain, one.engine)
    assert {path.name for path in engines.get(other.engine).present(packed)} == {
        f"{name}.gz" for name in engines.get(one.engine).files
    }
    assert one.version != other.version
    assert other.lineage["compressed"]


def test_what_is_in_it_is_said_all_the_same(both: tuple[Path, Path]) -> None:
    plain, packed = (inspect_artifact.inspect(folder) for folder in both)
    assert plain["parts"] == packed["parts"]
    assert plain["operators"] == packed["operators"]
    assert packed["bytes"]["compression"] < 0
    assert "compression" not in plain["bytes"]
    for found, folder in zip((plain, packed), both, strict=True):
        assert sum(found["bytes"].values()) == sum(path.stat().st_size for path in folder.iterdir())
    assert "compression" in inspect_artifact.text(packed)


def test_it_is_unpacked_once_for_all_processes(
    both: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.CACHE, str(tmp_path))
    _, packed = both
    made = artifact.read(packed)
    expected = answers(packed)
    if made.engine == "onnxruntime":  # it reads a graph from memory, and keeps none
        assert list(tmp_path.iterdir()) == []
        return
    (kept,) = (tmp_path / "openvino").iterdir()
    assert {path.name for path in kept.iterdir()} >= set(engines.get(made.engine).files)
    monkeypatch.setattr(compile_cache, "contents", None)  # nothing is unpacked any more
    assert np.array_equal(answers(packed), expected)


def test_its_files_are_carried(both: tuple[Path, Path]) -> None:
    made = artifact.read(both[1])
    assert {path.name for path in engines.get(made.engine).present(both[1])} <= bundle.NAMES


def test_the_same_graph_has_the_same_bytes(both: tuple[Path, Path], tmp_path: Path) -> None:
    again = shutil.copytree(both[0], tmp_path / "again")
    quantize.pack_graph(again)
    assert artifact.read(again).version == artifact.read(both[1]).version
