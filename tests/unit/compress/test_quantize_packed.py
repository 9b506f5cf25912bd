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
from tests.support import quantizing
from tests.support.tiny import CORPUS

ENGINES = ("openvino", "onnxruntime")


@pytest.fixture(scope="module", params=ENGINES)
def artifacts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An int8 artefact as it is, and compressed."""
    folder = tmp_path_factory.mktemp(request.param)
    created = quantizing.make(folder, rows=40)
    plain = quantizing.complete(created, folder / "plain", calibration_rows=8, engine=request.param)
    packed = shutil.copytree(plain, folder / "packed")
    quantize.compress_graph(packed)
    return plain, packed


def answers(folder: Path) -> Any:
    return np.stack(Predictor.load(folder).logits(CORPUS))


def test_it_is_smaller_and_answers_bit_for_bit(artifacts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpacked into memory, where nothing may be kept."""
    monkeypatch.setenv(env.CACHE_ENV, "")
    plain, packed = artifacts
    assert np.array_equal(answers(plain), answers(packed))
    item, other = (artifact.read_artifact(folder) for folder in artifacts)
    assert artifact.model_size_mb(packed, other.engine) < 0.95 * artifact.model_size_mb(plain, item.engine)
    assert {path.name for path in engines.get_engine(other.engine).find_files(packed)} == {
        f"{name}.gz" for name in engines.get_engine(item.engine).files
    }
    assert item.version != other.version
    assert other.lineage["compressed"]


def test_what_is_in_it_is_said_all_the_same(artifacts: tuple[Path, Path]) -> None:
    plain, packed = (inspect_artifact.inspect_artifact(folder) for folder in artifacts)
    assert plain["parts"] == packed["parts"]
    assert plain["operators"] == packed["operators"]
    assert packed["bytes"]["compression"] < 0
    assert "compression" not in plain["bytes"]
    for result, folder in zip((plain, packed), artifacts, strict=True):
        assert sum(result["bytes"].values()) == sum(path.stat().st_size for path in folder.iterdir())
    assert "compression" in inspect_artifact.format_inspection(packed)


def test_it_is_unpacked_once_for_all_processes(
    artifacts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.CACHE_ENV, str(tmp_path))
    _, packed = artifacts
    created = artifact.read_artifact(packed)
    expected = answers(packed)
    if created.engine == "onnxruntime":  # it reads a graph from memory, and keeps none
        assert list(tmp_path.iterdir()) == []
        return
    (remaining,) = (tmp_path / "openvino").iterdir()
    assert {path.name for path in remaining.iterdir()} >= set(engines.get_engine(created.engine).files)
    monkeypatch.setattr(compile_cache, "read_compressed", None)  # nothing is unpacked any more
    assert np.array_equal(answers(packed), expected)


def test_its_files_are_carried(artifacts: tuple[Path, Path]) -> None:
    created = artifact.read_artifact(artifacts[1])
    assert {path.name for path in engines.get_engine(created.engine).find_files(artifacts[1])} <= bundle.ENGINE_FILES


def test_the_same_graph_has_the_same_bytes(artifacts: tuple[Path, Path], tmp_path: Path) -> None:
    repeated = shutil.copytree(artifacts[0], tmp_path / "again")
    quantize.compress_graph(repeated)
    assert artifact.read_artifact(repeated).version == artifact.read_artifact(artifacts[1]).version
