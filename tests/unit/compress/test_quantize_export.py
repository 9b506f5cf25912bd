"""Exported graphs answer like PyTorch's model on rows of every length; files of the artifact; instructions."""

import copy
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rtrain.compress import calibrate
from rtrain.compress.exporters import onnx, openvino as exporters_openvino
from rtrain.compress.exporters.base import Sample
from rtrain.core import engines, manifest
from rtrain.core.errors import ConfigError, UserError
from rtrain.evaluation.inspect_artifact import read_openvino_graph
from rtrain.inference import artifact, predictor
from rtrain.models import precision
from rtrain.models.precision import Int8Support
from tests.support import quantizing
from tests.support.quantizing import Made
from tests.support.root import ROOT


@dataclass(frozen=True)
class Quantized:
    folder: Path
    report: dict[str, Any]


@pytest.fixture(scope="module")
def static(small_job: Made, tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    folder = tmp_path_factory.mktemp("static") / "int8"
    return Quantized(folder, quantizing.quantize(small_job, folder, calibration_rows=8))


def test_the_float_graph_is_compared_on_every_length(small_job: Made, static: Quantized) -> None:
    checked = static.report["export"]
    lengths = small_job.store.column("train", "length")
    assert checked["buckets"] == len(np.unique(np.searchsorted([16, 32, 64], lengths))) == 3
    assert checked["rows"] == 3 * calibrate.ROWS_PER_BUCKET
    assert 0 < checked["max_difference"] <= calibrate.TOLERANCE
    assert checked["bucket"] in ("up to 16 tokens", "up to 32 tokens", "up to 64 tokens")


def test_the_graph_has_no_positions_that_no_text_reaches(small_job: Made, static: Quantized) -> None:
    limit = artifact.read_artifact(small_job.folder).max_tokens
    full = transformers.AutoConfig.from_pretrained(small_job.folder)
    assert limit < full.max_position_embeddings
    layers = read_openvino_graph(static.folder / "model.int8.xml").layers.values()
    numbers = [layer.element_count for layer in layers if layer.element_type == "i8"]
    assert limit * full.hidden_size in numbers
    assert full.max_position_embeddings * full.hidden_size not in numbers


def test_rows_of_every_length_hold_the_shortest_and_the_longest_of_each() -> None:
    lengths = np.array([5, 40, 16, 17, 32, 600, 9, 8192, 513], dtype=np.int32)
    result = {name: lengths[rows].tolist() for name, rows in calibrate.group_by_length(lengths, max_rows=2)}
    assert result == {
        "up to 16 tokens": [5, 16],
        "up to 32 tokens": [17, 32],
        "up to 64 tokens": [40],
        "up to 1024 tokens": [513, 600],
        "more than 4096 tokens": [8192],
    }


def broken_weight(network: Any, sample: Sample) -> exporters_openvino.OpenVinoExportedGraph:
    """An export in which one number of one weight is another."""
    changed = copy.deepcopy(network)
    with torch.no_grad():
        changed.bert.encoder.layer[1].output.dense.weight[0, 0] += 0.5
    return exporters_openvino.export(changed, sample)


@pytest.mark.parametrize("module", [exporters_openvino, onnx])
def test_a_model_without_token_types_is_exported_and_answers(module: Any) -> None:
    config = transformers.DistilBertConfig(
        vocab_size=100, max_position_embeddings=64, dim=32, n_layers=1, n_heads=2, hidden_dim=64
    )
    network = transformers.DistilBertForSequenceClassification(config).eval()
    ids = np.arange(5, 15)[None]
    graph = module.export(network, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
    inputs = {"input_ids": np.repeat(ids[:, :7], 2, axis=0), "attention_mask": np.ones((2, 7), dtype=np.int64)}
    with torch.inference_mode():
        logits = network(**{name: torch.from_numpy(value) for name, value in inputs.items()}).logits.numpy()
    result = graph.load_engine(1).logits({**inputs, "token_type_ids": np.zeros((2, 7), dtype=np.int64)})
    assert np.abs(result - logits).max() <= calibrate.TOLERANCE


class OfOneLength:
    """It ignores tokens after the 20th, like a graph whose trace kept the length of its sample."""

    def __init__(self, engine: predictor.Engine):
        self.engine = engine

    def logits(self, inputs: Any) -> Any:
        return self.engine.logits({name: value[:, :20] for name, value in inputs.items()})


def cut_short(network: Any, sample: Sample) -> Any:
    exported = exporters_openvino.export(network, sample)
    full = exported.load_engine
    exported.load_engine = lambda threads: OfOneLength(full(threads))  # type: ignore
    return exported


@pytest.mark.parametrize("export", [broken_weight, cut_short])
def test_a_graph_that_answers_otherwise_is_refused(
    small_job: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, export: Any
) -> None:
    openvino = engines.ENGINES["openvino"]._replace(quantizer=f"{__name__}:{export.__name__}")
    monkeypatch.setattr(engines, "ENGINES", {**engines.ENGINES, "openvino": openvino})
    with pytest.raises(UserError) as error:
        quantizing.quantize(small_job, tmp_path / "int8", calibration_rows=8)
    assert error.value.code == "export_mismatch"
    assert list((tmp_path / "int8").iterdir()) == []


def test_weights_alone_are_as_small_and_nothing_is_calibrated(
    small_job: Made, static: Quantized, tmp_path: Path
) -> None:
    from rtrain.evaluation.inspect_artifact import read_openvino_graph

    report = quantizing.quantize(small_job, tmp_path / "weights", kind="weights", calibration_rows=8)
    assert max(item["export"]["max_difference"] for item in (static.report, report)) <= calibrate.TOLERANCE
    full, weights = (artifact.model_size_mb(folder, "openvino") for folder in (static.folder, tmp_path / "weights"))
    assert weights <= 1.02 * full
    operators = read_openvino_graph(tmp_path / "weights" / "model.int8.xml").count_operators()
    assert operators["MatMul"] == {"i8 weights": 14}
    assert "FakeQuantize" not in operators


def test_weights_alone_take_no_fall_back() -> None:
    from rtrain import config

    with pytest.raises(ConfigError) as error:
        config.load_config("intent", {"quantize.kind": "weights", "quantize.max_changed_predictions": 0.01})
    assert [problem.field for problem in error.value.problems] == ["quantize.max_changed_predictions"]


@pytest.mark.parametrize(
    ("flags", "instructions"),
    [("fpu avx512_vnni amx_int8 amx_tile", ("AMX", "VNNI")), ("fpu avx2 avx_vnni", ("VNNI",)), ("fpu avx2", ())],
)
def test_the_processor_says_what_int8_is_computed_by(tmp_path: Path, flags: str, instructions: tuple[str, ...]) -> None:
    (tmp_path / "cpuinfo").write_text(f"model name\t: a processor\nflags\t\t: {flags}\n")
    result = precision.detect_int8(tmp_path / "cpuinfo")
    assert (result.instructions, result.is_known) == (instructions, True)
    assert not precision.detect_int8(tmp_path / "none").is_known


@pytest.mark.parametrize(
    ("measured", "is_served", "slower"),
    [
        (("AMX", "VNNI"), (), True),
        (("VNNI",), ("VNNI",), False),
        (("AMX", "VNNI"), ("VNNI",), False),
        (("VNNI",), ("dot products",), False),
        ((), (), False),  # it was slow where it was measured, and the gate has seen that
    ],
)
def test_a_latency_of_other_instructions_does_not_hold_where_there_are_none(
    measured: tuple[str, ...] | None, is_served: tuple[str, ...], slower: bool
) -> None:
    assert (precision.slower_latency_warning(measured, Int8Support(is_served)) is not None) == slower
    assert precision.slower_latency_warning(measured, Int8Support((), is_known=False)) is None


def test_the_log_of_nncf_stays_off_stdout_and_nobody_is_told_of_the_model(small_job: Made, tmp_path: Path) -> None:
    """stdout is reserved for --json, and the model is private. In a process, since NNCF's import takes stdout."""
    script = (
        "from pathlib import Path; from tests.support import quantizing; from rtrain.data.store.store import Store\n"
        f"made = quantizing.Made(Path({str(small_job.folder)!r}), Store(Path({str(small_job.store.folder)!r})))\n"
        f"quantizing.quantize(made, Path({str(tmp_path / 'int8')!r}), calibration_rows=8)\n"
        "import sys; assert sys.modules['openvino_telemetry'] is None\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == ""


def test_a_network_that_cannot_be_traced_is_refused_by_name(small_job: Made, tmp_path: Path) -> None:
    folder = shutil.copytree(small_job.folder, tmp_path / "decoder")
    sizes: dict[str, Any] = {"vocab_size": 400, "n_positions": 64, "n_embd": 8, "n_layer": 1, "n_head": 1}
    sizes |= {"pad_token_id": 0, "num_labels": len(quantizing.LABELS)}
    settings = transformers.AutoConfig.for_model("gpt2", **sizes)
    transformers.AutoModelForSequenceClassification.from_config(settings).save_pretrained(folder)
    manifest.write_manifest(folder)
    with pytest.raises(UserError) as error:
        quantizing.quantize(small_job, tmp_path / "int8", parent=folder, calibration_rows=8)
    assert error.value.code == "unsupported"
