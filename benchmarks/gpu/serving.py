"""The speed of an artefact's answers by batch size: on the GPU, and on the CPU beside it, there also in int8 if
possible.

One caller is timed from text to logits, tokenizer included: this is the time of an endpoint's engine without HTTP.
"""

import importlib.util
import json
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gpu.bench import Bench, synchronize

if TYPE_CHECKING:
    from rtrain.predict import Predictor

BATCHES = (1, 8, 32)
NEAR = 1e-3
"""Largest difference of logits between devices; it is the tolerance of golden answers."""
Answer = Callable[[Sequence[str]], "np.ndarray[Any, Any]"]


def run(bench: Bench) -> None:
    from rtrain import predict

    texts: list[str] = json.loads((bench.data / "texts.json").read_text(encoding="utf-8"))
    root = bench.scratch / "serving"
    shutil.rmtree(root, ignore_errors=True)
    folder = artifact(bench, root / "artifact")
    predictor = predict.Predictor.load(folder)
    engines: dict[str, Answer] = {"processor.fp32": lambda batch: np.stack(predictor.logits(batch, len(batch)))}
    for precision in dict.fromkeys(("fp32", bench.precision)) if bench.gpu else ("fp32",):
        engines[f"{bench.device.type}.packed.{precision}"] = on_device(bench, predictor, precision)
    with bench.report.attempt("int8"):
        if all(importlib.util.find_spec(name) for name in ("openvino", "nncf")):
            small = predict.Predictor.load(quantized(bench, root))
            engines["processor.int8"] = lambda batch: np.stack(small.logits(batch, len(batch)))
        else:
            bench.report.line("int8", None, note="openvino or nncf is not here")
    packed = engines[f"{bench.device.type}.packed.fp32"]
    apart = float(np.abs(packed(texts[:32]) - engines["processor.fp32"](texts[:32])).max())
    bench.report.line("same_answers", apart, "of logits", most=NEAR, texts=min(32, len(texts)))
    found: dict[tuple[str, int], float] = {}
    for size in BATCHES:
        for name, answer in engines.items():
            with bench.report.attempt(f"{name}.batch_{size}"):
                times = measure(bench, answer, texts, size)
                found[name, size] = rate = size / statistics.fmean(times)
                p50, p99 = (1e3 * float(np.quantile(times, at)) for at in (0.5, 0.99))
                bench.report.line(f"{name}.batch_{size}.p50", p50, "ms", p99=p99, texts_per_s=rate, calls=len(times))
    _gains(bench, found)


def _gains(bench: Bench, found: dict[tuple[str, int], float]) -> None:
    """The texts per second of the GPU over those of the CPU; below 1 the GPU does not pay."""
    if not bench.gpu:
        return
    for size in BATCHES:
        here = {name: rate for (name, batch), rate in found.items() if batch == size}
        fast, slow = (
            {name: rate for name, rate in here.items() if name.startswith("processor") == way} for way in (False, True)
        )
        if fast and slow:
            best, other = max(fast, key=fast.__getitem__), max(slow, key=slow.__getitem__)
            bench.report.line(f"gain.batch_{size}", fast[best] / slow[other], "x the texts", of=best, over=other)


def measure(bench: Bench, answer: Answer, texts: Sequence[str], size: int) -> list[float]:
    """Seconds of each call with `size` texts."""
    draw, times = np.random.default_rng(0), list[float]()
    begun = None
    while begun is None or len(times) < 5 or time.perf_counter() - begun < bench.size.seconds:
        batch = [texts[place] for place in draw.integers(0, len(texts), size)]
        start = time.perf_counter()
        answer(batch)
        times.append(time.perf_counter() - start)
        if begun is None and len(times) == 5:  # the first five calls are a warm-up
            begun, times = time.perf_counter(), []
    return times


def on_device(bench: Bench, predictor: "Predictor", precision: str) -> Answer:
    """The speed of rtrain's own forward pass of an evaluation, without padding."""
    import torch

    from rtrain.batch import pack
    from rtrain.network import model
    from rtrain.training import step

    made: Any = model.build(bench.scratch / "serving" / "artifact", predictor.task, predictor.artifact.labels, 0)
    model.place(made, bench.device)
    made.eval()

    def answer(batch: Sequence[str]) -> "np.ndarray[Any, Any]":
        with torch.inference_mode():
            logits = step.forward(made, pack(predictor.encode(batch)), predictor.pad_id, precision)
            found: np.ndarray[Any, Any] = logits.float().cpu().numpy()
        synchronize(bench)
        return found

    return answer


def artifact(bench: Bench, folder: Path) -> Path:
    """Make a complete float artefact of the carried model with a new head."""
    from rtrain import artifact as artifacts, predict
    from rtrain.network import model
    from rtrain.tasks import base

    labels, task = bench.store("banking77").manifest.labels, base.get("classification")
    folder.mkdir(parents=True)
    model.build(bench.model, task, labels, 0, pack=False).save_pretrained(folder)
    shutil.copyfile(bench.model / "tokenizer.json", folder / "tokenizer.json")
    made = artifacts.Artifact(name="gpu", task=task.name, labels=labels, max_tokens=64, engine="torch")
    artifacts.write(folder, made, predict.golden_logits)
    return folder


def quantized(bench: Bench, root: Path) -> Path:
    from rtrain import config
    from rtrain.compress import quantize

    recipe = config.load("intent", {"data.path": "carried", "quantize.calibration_rows": 64}).recipe
    quantize.run(recipe, bench.store("banking77").folder, root, root / "int8")
    return root / "int8"
