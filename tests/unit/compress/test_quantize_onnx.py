"""ONNX Runtime as the engine of int8 models: the same checks, answers and fall-back as OpenVINO's."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from rtrain import config
from rtrain.compress import calibrate, quantize
from rtrain.config import Recipe
from rtrain.core.errors import UserError
from rtrain.evaluation import inspect_artifact
from rtrain.inference import artifact
from rtrain.inference.predictor import Predictor
from tests.support import quantizing
from tests.support.outliers import plant
from tests.support.quantizing import Made
from tests.support.root import ROOT
from tests.support.tiny import CORPUS

ENGINE: dict[str, Any] = {"engine": "onnxruntime"}


def recipe(**overrides: Any) -> Recipe:
    settings = {f"quantize.{name}": value for name, value in {**ENGINE, "calibration_rows": 64}.items()}
    return config.load_config("intent", {**settings, "gate.latency_seconds": 0.1, **overrides}).recipe


@pytest.fixture(scope="module")
def report(job: Made) -> dict[str, Any]:
    return quantize.run_quantization(recipe(), job.store.folder, job.folder.parent, job.folder.parent / "artifact-int8")


def test_the_artefact_is_checked_gated_and_answers_as_its_parent(job: Made, report: dict[str, Any]) -> None:
    folder = job.folder.parent / "artifact-int8"
    assert 0 < report["export"]["max_difference"] <= calibrate.TOLERANCE
    assert (report["engine"], report["gate"]["version"]) == ("onnxruntime", artifact.read_artifact(folder).version)
    assert report["batch_changed_share"] == 0.0
    assert report["batch_max_logit_difference"] <= 0.05
    assert report["changed_share"] <= 0.1
    int8, parent = Predictor.load(folder), Predictor.load(job.folder)
    separate = [np.abs(item - two).max() for item, two in zip(int8.logits(CORPUS), parent.logits(CORPUS), strict=True)]
    assert 0 < max(separate) < 0.5
    assert (folder / "model.int8.onnx").stat().st_size == pytest.approx(1e6 * report["size_mb"], abs=1e4)


def test_weights_are_whole_numbers_in_the_file(job: Made, report: dict[str, Any]) -> None:
    graph = onnx.load(str(job.folder.parent / "artifact-int8" / "model.int8.onnx")).graph
    counted = dict.fromkeys(("float", "whole"), 0)
    for weight in graph.initializer:
        if len(weight.dims) == 2 and min(weight.dims) > 1:
            kind = "whole" if weight.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8) else "float"
            counted[kind] += int(np.prod(weight.dims))
    # Three tables; the positions end with the longest text; two layers of four matrices of attention
    # and two of the rest, pooler and classifier.
    assert counted == {"float": 0, "whole": 32 * (300 + 64 + 2) + 2 * (4 * 32 * 32 + 2 * 32 * 64) + 32 * 32 + 32 * 3}


def test_its_bytes_are_told(job: Made, report: dict[str, Any]) -> None:
    result = inspect_artifact.inspect_artifact(job.folder.parent / "artifact-int8")
    assert sum(result["bytes"].values()) == sum(result["files"].values())
    assert (result["element_count"], result["operators"]) == (None, None)


def test_a_planted_outlier_is_named_and_alone_goes_back(job: Made, tmp_path: Path) -> None:
    honest = quantizing.quantize(job, tmp_path / "honest", max_changed_predictions=1.0, calibration_rows=64, **ENGINE)[
        "fallback"
    ]
    harmed = plant(job.folder, tmp_path / "harmed", layer=1, factor=128.0, channels=(0, 16))
    limit = honest["changed_share"] + 0.02
    result = quantizing.quantize(
        job, tmp_path / "int8", harmed, max_changed_predictions=limit, calibration_rows=64, **ENGINE
    )["fallback"]
    assert result["changed_share_before"] > limit
    assert result["reverted"] == ["bert.encoder.layer.1.attention.self (MatMul)"]
    assert result["changed_share"] <= limit


def test_it_answers_without_openvino_and_what_trains(job: Made, report: dict[str, Any]) -> None:
    script = (
        "import sys; from rtrain.cli.app import main\n"
        f"main(['predict', {str(job.folder.parent / 'artifact-int8')!r}, 'where is my parcel'])\n"
        "print(sorted({'openvino', 'onnx', 'torch', 'transformers', 'ray', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]"


def test_where_it_is_not_installed_the_extra_is_named(
    job: Made, report: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("onnx") else result(name))
    with pytest.raises(UserError):
        quantize.run_quantization(recipe(), job.store.folder, job.folder.parent, tmp_path / "out")
    with pytest.raises(UserError):
        Predictor.load(job.folder.parent / "artifact-int8")
    assert list(tmp_path.iterdir()) == []
