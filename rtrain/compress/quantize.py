"""Float artefact -> int8 artefact with static scales, on OpenVINO.

Static, because scales that are computed per batch make an answer depend on its neighbours (I8): dynamic int8 moved
logits by a tenth of their range. The scales come from training rows, by NNCF's post-training quantization.
"""

import contextlib
import io
import shutil
import sys
import time
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rtrain import artifact, predict, score
from rtrain.batch import Floats, Head, padded
from rtrain.config import Recipe
from rtrain.data.store import Store
from rtrain.errors import UserError
from rtrain.network import model, pooling
from rtrain.network.inputs import accepted
from rtrain.run import Run
from rtrain.runs.worker import TOKENIZER_FILES
from rtrain.tasks import base

GRAPH = "model.int8.xml"
NUMBER_FLIPS = 0.05
ALONE_ROWS = 4000
"""Test rows that are asked singly, to count the answers that depend on their batch."""


def run(recipe: Recipe, store_folder: Path, parent_run: Path, out: Path) -> dict[str, Any]:
    """Quantize the artefact of a run; returns its scores beside its parent's, flips and sizes."""
    parent_folder = parent_run / "artifact"
    parent = artifact.read(parent_folder)
    if parent.engine != "torch":
        raise UserError(f"{parent_folder} is quantized already; name the run of its float parent")
    store = Store(store_folder)
    started = time.perf_counter()
    draft = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}")
    draft.mkdir(parents=True)
    try:
        _write_graph(parent_folder, parent, store, recipe.quantize.calibration_rows, draft)
        for name in (*TOKENIZER_FILES, "config.json"):
            if (parent_folder / name).is_file():
                shutil.copyfile(parent_folder / name, draft / name)
        lineage = {**parent.lineage, "parent": parent.version, "calibration_rows": recipe.quantize.calibration_rows}
        made = replace(parent, engine="openvino", lineage=lineage, golden=(), metrics={})
        report = _measure(parent_folder, draft, parent, made, store)
        made = replace(made, metrics={"test": report["test"]})
        artifact.write(
            draft,
            made,
            predict.golden_logits,
            predict.golden_inputs(base.get(made.task), Head(made.labels, made.facts)),
        )
        artifact.publish(draft, out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return {**report, "seconds": round(time.perf_counter() - started, 2), "artifact": str(out)}


def _write_graph(folder: Path, parent: artifact.Artifact, store: Store, calibration_rows: int, draft: Path) -> None:
    import openvino
    import torch
    import transformers

    auto = getattr(transformers, base.get(parent.task).auto_model)
    network = pooling.load(auto, folder)[0].eval()
    if parent.facts.get(pooling.FACT) == "mean":
        pooling.pool_by_mean(network)
    samples = list(_samples(store, calibration_rows, model.pad_id(folder), accepted(network)))
    example = {name: torch.from_numpy(value) for name, value in samples[0].items()}
    shapes = {name: openvino.PartialShape([-1, -1]) for name in example}
    with torch.inference_mode(), warnings.catch_warnings():
        # Tracing warns of every Python branch in transformers' mask code; the golden answers are what tells.
        warnings.simplefilter("ignore")
        graph = openvino.convert_model(network, example_input=example, input=list(shapes.items()))
    _quantized(graph, samples, draft)


def _quantized(graph: Any, samples: list[dict[str, npt.NDArray[np.int64]]], draft: Path) -> None:
    import nncf
    import openvino

    # NNCF draws its progress on stdout, which belongs to --json.
    with contextlib.redirect_stdout(sys.stderr if sys.stderr.isatty() else io.StringIO()):
        int8 = nncf.quantize(
            graph, nncf.Dataset(samples), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(samples)
        )
    openvino.save_model(int8, draft / GRAPH, compress_to_fp16=False)


def _samples(store: Store, rows: int, pad_id: int, names: frozenset[str]) -> Iterator[dict[str, npt.NDArray[np.int64]]]:
    """Single training rows, evenly spread over the index; one row at a time, so that padding sets no scale."""
    total = store.rows("train")
    positions = np.unique(np.linspace(0, total - 1, min(rows, total)).astype(np.int64))
    for position in positions:
        arrays = padded(store.read("train", np.array([position])), pad_id)
        yield {name: value for name, value in arrays.items() if name in names}


def _measure(
    parent_folder: Path, draft: Path, parent: artifact.Artifact, made: artifact.Artifact, store: Store
) -> dict[str, Any]:
    """Scores of both on the test rows; flips of the int8 labels against the parent's, and alone against in a batch."""
    alone_rows = np.arange(min(store.rows("test"), ALONE_ROWS))
    int8, every = predict.Predictor(draft, made), np.arange(store.rows("test"))
    float_answers = score.on_split(predict.Predictor(parent_folder, parent), store, "test", every)
    batched = score.on_split(int8, store, "test", every)
    alone = score.on_split(int8, store, "test", alone_rows, batch_rows=1)
    together = [batched.outputs[row] for row in alone_rows]
    return {
        "test": score.scores(int8, batched, store),
        "parent": score.scores(int8, float_answers, store),
        "flips_against_parent": _flips(batched.outputs, float_answers.outputs),
        "flips_alone_against_batch": _flips(alone.outputs, together),
        "largest_logit_difference_alone_against_batch": max(
            (float(np.abs(one - other).max()) for one, other in zip(alone.outputs, together, strict=True)), default=0.0
        ),
        "size_mb": round(artifact.size_mb(draft, "openvino"), 2),
        "parent_size_mb": round(artifact.size_mb(parent_folder, "torch"), 2),
    }


def _flips(left: list[Floats], right: list[Floats]) -> float:
    """Share of the answers that are others: another best label; of a single number, one by a twentieth of a standard
    deviation of the targets away."""
    flips = [
        np.abs(one - other).ravel() > NUMBER_FLIPS if one.shape[-1] == 1 else one.argmax(-1) != other.argmax(-1)
        for one, other in zip(left, right, strict=True)
    ]
    return float(np.concatenate([np.atleast_1d(row) for row in flips]).mean()) if flips else 0.0


def store_of(run: Path) -> Path:
    """The token store that a run was trained from."""
    created = Run(run).first("created")
    if created is None:
        raise UserError(f"{run} holds no run; name the folder of a finished one")
    return Path(created["store"])
