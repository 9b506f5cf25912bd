"""An honest int8 artefact of the session's run, and copies of it with one fault each."""

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rtrain.compress import quantize
from rtrain.core import manifest
from rtrain.core.ragged import Head
from rtrain.core.run_folder import Run
from rtrain.inference import artifact, predictor
from rtrain.inference.artifact import Artifact
from rtrain.tasks import base
from tests.support.trained import Trained, settings

QUICK = {"gate.latency_seconds": 0.5, "gate.min_speedup": 0.0}
"""The tiny model answers in less than half a millisecond, and as fast by either engine: a machine that is busy with
other work cannot tell which is faster, nor whether one is ten times slower."""
Change = Callable[[Path, Artifact], Artifact]


@dataclass(frozen=True)
class Gated:
    run: Run
    report: dict[str, Any]
    """What `quantize.run_quantization` returned."""

    @property
    def float_one(self) -> Path:
        return self.run.artifact

    @property
    def int8(self) -> Path:
        return self.run.int8_artifact


def quantized(trained: Trained, name: str) -> Gated:
    """A copy of the session's run beside it, with its int8 artefact, which has been gated."""
    run = Run(trained.run.parent / name)
    shutil.copytree(trained.run, run.folder)
    recipe = settings(trained.run.parent, **QUICK).recipe
    return Gated(
        run, quantize.run_quantization(recipe, quantize.find_token_store(run.folder), run.folder, run.int8_artifact)
    )


def copy(
    original: Path, target: Path, change: Callable[[Path, Artifact], Artifact] = lambda folder, created: created
) -> Path:
    """A copy with a fault by its maker's hand: version, golden answers and manifest are made anew, so that it passes
    every check that looks at the artefact alone. It has not been gated."""
    shutil.copytree(original, target)
    (target / manifest.FILE_NAME).unlink()
    created = change(target, replace(artifact.read_artifact(original), gate=None, golden=()))
    inputs = predictor.make_golden_inputs(base.get_task(created.task), Head(created.labels, created.facts))
    artifact.write_artifact(target, created, predictor.compute_golden_logits, inputs)
    predictor.Predictor.load(target)
    return target


def by_files(change: Callable[[Path], None]) -> Change:
    """A change of files alone."""

    def both(folder: Path, made: Artifact) -> Artifact:
        change(folder)
        return made

    return both


def damaged(original: Path, target: Path, change: Callable[[Path], None]) -> Path:
    """A copy with files changed behind its maker's back, and a manifest that says nothing of it."""
    shutil.copytree(original, target)
    change(target)
    manifest.write_manifest(target)
    return target


def scale_a_layer(folder: Path, factor: float = -300.0) -> None:
    """Multiply the scales of a weight of the first layer, where the int8 graph's file has them."""
    root = ElementTree.parse(folder / "model.int8.xml").getroot()
    layers = {layer.attrib["id"]: layer for layer in root.iterfind("layers/layer")}
    (scaled,) = (
        number
        for number, layer in layers.items()
        if re.search(r"layer\.0\.intermediate.*fq_weights_1$", layer.attrib["name"])
        and layer.attrib["type"] == "Multiply"
    )
    (scales,) = (
        edge.attrib["from-layer"]
        for edge in root.iterfind("edges/edge")
        if (edge.attrib["to-layer"], edge.attrib["to-port"]) == (scaled, "1")
    )
    sizes = layers[scales].find("data")
    assert sizes is not None
    assert sizes.attrib["element_type"] == "f32"
    offset, count = int(sizes.attrib["offset"]), int(sizes.attrib["size"]) // 4
    weights = np.memmap(folder / "model.int8.bin", np.float32, "r+", offset, (count,))
    weights *= factor
    weights.flush()


def swap_labels(folder: Path, made: Artifact) -> Artifact:
    """The first two labels' names stand on each other's place."""
    item, two, *remainder = made.labels
    return replace(made, labels=(two, item, *remainder))


def turn_tokenizer(folder: Path, made: Artifact) -> Artifact:
    """Another tokenizer's vocabulary: as many pieces, most with other numbers."""
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = document["model"]["vocab"]
    special = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
    pieces = [piece for piece in vocabulary if piece not in special]
    numbers = [vocabulary[piece] for piece in pieces]
    document["model"]["vocab"] = vocabulary | dict(zip(pieces, [*numbers[7:], *numbers[:7]], strict=True))
    path.write_text(json.dumps(document), encoding="utf-8")
    return made


def mistake_a_word(folder: Path, word: str, other: str) -> None:
    """In a float artefact, a word gets the vector of another."""
    import safetensors.numpy

    path = folder / "model.safetensors"
    tensors = dict(safetensors.numpy.load_file(path))
    vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    (name,) = (name for name in tensors if name.endswith("word_embeddings.weight"))
    table = np.array(tensors[name])
    table[vocabulary[word]] = table[vocabulary[other]]
    safetensors.numpy.save_file(tensors | {name: table}, path, metadata={"format": "pt"})
