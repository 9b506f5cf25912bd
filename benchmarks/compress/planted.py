"""banking77's student with an outlier in it that int8 cannot hold: what falling back to float, and training it to be
rounded, bring back."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.compress import limit, making
from benchmarks.compress.making import BANKING, Set, Work
from benchmarks.results import Keep
from benchmarks.search import commands
from rtrain import artifact, manifest, predict
from rtrain.batch import Head
from rtrain.compress import quantize
from rtrain.data.stores.store import Store
from rtrain.run import Run
from rtrain.runs import opening
from rtrain.tasks import base

LAYER, FACTOR = 1, 256.0
FLIPS = 0.005
"""Share of answers that may be others than the float model's, where operations go back to float."""
AWARE = {"distill.layers": None, "distill.quantization_aware": True, "distill.epochs": 3, "distill.alpha": 1.0}
"""Settings of a student as large that is trained to be rounded: by its teacher's answers alone, which are to stay."""


def part(work: Work, sets: Sequence[Set], keep: Keep) -> dict[str, Any]:
    return measured(making.student(work, BANKING), making.students(work, BANKING) / "planted", keep)


def measured(run: Run, folder: Path, keep: Keep) -> dict[str, Any]:
    """For a finished run of a BERT, scores and flips as it is and with the outlier, by each way to int8."""
    harmed = planted(run, folder / "run")
    whole = quantized(run, folder / "whole")
    plain, back = (quantized(harmed, folder / name, given) for name, given in WAYS.items())
    flips = {"as it was": whole, "outlier": plain, "fall-back": back}
    given = back["fallback"]
    store, threads = Store(quantize.store_of(run.folder)), opening.stored(run.folder).deploy.serve.threads
    least = limit.fallback_s(folder / "plain", store, given["rows"], given["operations"], threads)
    found = {
        "limits": {"fallback_points": 0.0, "fallback_s": least},
        "fallback_points": 100 * max(0.0, back["flips_against_parent"] - whole["flips_against_parent"]),
        "fallback_s": given["seconds"],
        "reverted": given["reverted"],
        "flips": {name: one["flips_against_parent"] for name, one in flips.items()},
        "scores": {"float": _score(plain, "parent"), **{name: _score(one) for name, one in flips.items()}},
    }
    keep(found)
    learned = quantized(making.distilled(folder / "aware", harmed, AWARE), folder / "learned")
    calm = quantized(making.distilled(folder / "aware-whole", run, AWARE), folder / "learned-whole")
    found["scores"] |= {"outlier, aware": _score(learned), "as it was, aware": _score(calm)}
    return {**found, "settings": AWARE}


WAYS: Mapping[str, Mapping[str, Any]] = {"plain": {}, "fall-back": {"quantize.flips": FLIPS}}


def planted(run: Run, folder: Path) -> Run:
    """A copy of a run without its checkpoints, in whose artefact one channel of each head's queries in a layer is
    `FACTOR` times as large and the keys' as many times smaller. Their products stay, and so do all answers in float."""
    made = Run(folder)
    if made.artifact.is_dir():
        return made
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run.folder, folder, ignore=shutil.ignore_patterns("checkpoints", "artifact*"))
    draft = shutil.copytree(run.artifact, folder / ".artifact", ignore=shutil.ignore_patterns(manifest.NAME))
    _scale(draft)
    before = artifact.read(run.artifact)
    inputs = predict.golden_inputs(base.get(before.task), Head(before.labels, before.facts))
    artifact.write(draft, replace(before, gate=None, golden=()), predict.golden_logits, inputs)
    artifact.publish(draft, made.artifact)
    return made


def _scale(folder: Path) -> None:
    from safetensors.numpy import load_file, save_file

    document = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    channels = slice(None, None, document["hidden_size"] // document["num_attention_heads"])
    tensors = {name: np.array(value) for name, value in load_file(folder / "model.safetensors").items()}
    for name, by in (("query", FACTOR), ("key", 1 / FACTOR)):
        for kind in ("weight", "bias"):
            [found] = [one for one in tensors if one.endswith(f"layer.{LAYER}.attention.self.{name}.{kind}")]
            tensors[found][channels] *= by
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def quantized(run: Run, out: Path, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What `rtrain quantize --json` says of the int8 artefact `out`, which is made where it is not there."""
    told = out.with_name(f"{out.name}.log")
    if not (out / artifact.NAME).is_file():
        told.unlink(missing_ok=True)
        given = ["quantize", str(run.folder), *commands.settings(values or {}), "--out", str(out), "--json"]
        commands.run(given, told)
    lines = told.read_text(encoding="utf-8").splitlines()
    found: dict[str, Any] = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    return found


def _score(report: Mapping[str, Any], side: str = "test") -> float:
    return float(report[side][BANKING.score])
