"""The word table in 4 bits: its numbers, its graph, its vocabulary cut afterwards, its way back to float."""

from pathlib import Path

import numpy as np
import pytest

from rtrain import config
from rtrain.compress import calibrate, quantize
from rtrain.compress.exporters import openvino
from rtrain.config.recipe import QuantizeConfig
from rtrain.core.errors import ConfigError, UserError
from rtrain.core.ragged import Head
from rtrain.evaluation import inspect_artifact
from rtrain.inference import artifact, predictor
from rtrain.models import vocab_trimming
from tests.support import quantizing
from tests.support.quantizing import Made
from tests.support.tiny import CORPUS, make_task_artifact


@pytest.fixture(scope="module")
def half(small_job: Made) -> Path:
    return quantizing.complete(small_job, small_job.folder.parent / "half", calibration_rows=8, embedding_dtype="int4")


@pytest.mark.parametrize("width", [384, 32, 24, 7])
@pytest.mark.parametrize("size", [1e-9, 1e-3, 1.0, 1e4])
def test_a_number_is_off_by_half_a_step_at_most(width: int, size: float) -> None:
    values = (np.random.default_rng(0).normal(size=(9, width)) * size).astype(np.float32)
    values[3], values[4], values[5] = 0, size, np.abs(values[5])
    table = openvino.quantize_table(values)
    assert table.codes.max() <= openvino.MAX_VALUE
    assert table.codes.shape[2] == (width if width < 16 or width == 24 else min(width, 64))
    steps = np.broadcast_to(table.scale, table.codes.shape).reshape(values.shape).astype(np.float32)
    assert (np.abs(table.values - values) <= 0.51 * steps + 1e-30).all()
    assert (table.values[3] == 0).all()
    assert (table.values[:, :1][values[:, :1] == 0] == 0).all()


def test_a_graph_s_word_table_has_half_the_bytes_and_its_answers_are_near(
    small_job: Made, half: Path, tmp_path: Path
) -> None:
    full = quantizing.complete(small_job, tmp_path / "whole", calibration_rows=8)
    parts = [inspect_artifact.inspect_artifact(item)["parts"] for item in (full, half)]
    numbers = parts[0]["word table"]["precisions"]["i8"]
    assert parts[1]["word table"]["precisions"]["u4"] >= numbers  # and a zero point for each group
    assert parts[1]["layers"] == parts[0]["layers"]
    assert parts[1]["word table"]["bytes"] < 0.7 * parts[0]["word table"]["bytes"]
    tables = [inspect_artifact.inspect_artifact(item)["operators"]["Gather"] for item in (full, half)]
    assert tables[1]["u4 weights"] == 1
    assert tables[0]["i8 weights"] == tables[1].get("i8 weights", 0) + 1  # the others are as before
    item, other = (np.stack(predictor.Predictor.load(folder).logits(CORPUS)) for folder in (full, half))
    assert 0 < np.abs(item - other).max() < 0.2 * np.abs(item).max()


def test_the_table_goes_back_to_float_as_others_do(small_job: Made, tmp_path: Path) -> None:
    job = calibrate.QuantizationJob(
        small_job.folder,
        artifact.read_artifact(small_job.folder),
        small_job.store,
        QuantizeConfig(calibration_rows=8),
        tmp_path,
        1,
    )
    engine = predictor.TorchEngine(small_job.folder, job.metadata, None)
    network = job.make_predictor(engine)
    samples = list(job.iter_samples(engine.forward_args, network.pad_id))
    graph = openvino.export(engine.network, samples[0]).calibrate(samples)
    graph.quantize_embedding_int4(vocab_trimming.embedding_rows(small_job.folder))
    (table,) = (name for name in graph.operations if "word_embeddings" in name)

    def reference() -> float:
        answers = job.make_predictor(graph.load_engine(1)).logits(CORPUS)
        pairs = zip(answers, network.logits(CORPUS), strict=True)
        return max(float(np.abs(item - other).max()) for item, other in pairs)

    graph.revert(graph.operations)
    assert reference() < 1e-4
    graph.revert(set(graph.operations) - {table})
    single = reference()
    assert single > 1e-3
    graph.revert(())
    assert reference() > 0
    with pytest.raises(UserError) as error:
        graph.quantize_embedding_int4(7)
    assert error.value.code == "unsupported"


def test_a_model_that_answers_by_its_word_table_keeps_that_in_int8(small_job: Made, tmp_path: Path) -> None:
    """A graph with both tables was larger than one without the 4-bit table."""
    facts = {"mask": "[MASK]", "mask_id": 4, "vocabulary": 300, "special": [0, 1, 2, 3, 4]}
    folder = make_task_artifact(tmp_path / "run" / "artifact", "masked_lm", Head((), facts))
    recipe = config.load_config("intent", {"quantize.embedding_dtype": "int4"}).recipe
    with pytest.raises(ConfigError) as error:
        quantize.run_quantization(recipe, small_job.store.folder, folder.parent, tmp_path / "int8")
    assert [(problem.field, problem.code) for problem in error.value.problems] == [
        ("quantize.embedding_dtype", "unsupported")
    ]
    assert not (tmp_path / "int8").exists()


def test_an_engine_without_such_a_table_refuses_it() -> None:
    with pytest.raises(ConfigError) as error:
        quantize.check_engine_support(QuantizeConfig(engine="onnxruntime", embedding_dtype="int4"))
    assert [(problem.field, problem.code) for problem in error.value.problems] == [
        ("quantize.embedding_dtype", "unsupported")
    ]
