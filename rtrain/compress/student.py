"""What a student starts from: evenly spaced layers of its teacher, narrower ones if need be, in a folder of its own."""

import json
import math
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtrain.config import Distill
from rtrain.core import atomic_write, json_files
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.inference import artifact
from rtrain.models import pooling, tokenizer_files
from rtrain.models.auto_classes import auto_class
from rtrain.models.layerwise_lr import chosen_layers
from rtrain.tasks import base

if TYPE_CHECKING:
    import torch


DEPTHS = ("num_hidden_layers", "n_layers")
WIDTHS = ("hidden_size", "dim")
HEADS = ("num_attention_heads", "n_heads")
INNERS = ("intermediate_size", "hidden_dim")
"""Names by which configurations call these: of most models, and of DistilBERT."""
FUSED = ("modernbert",)
"""Architectures whose query, key and value, or gate and input, are one matrix."""
BY_LAYER = ("layer_types",)
"""Names of lists with an entry for each layer: ModernBERT's attention is local in some and global in others."""


def depth_of(model: Path) -> int | None:
    """How many layers a Transformers folder has; None where its config.json does not count them."""
    document = json_files.read(model / "config.json")
    return next((int(document[name]) for name in DEPTHS if name in document), None)


def taken_from(chosen: Distill, document: Mapping[str, Any], depth: int) -> int:
    """How many of the first layers of a teacher, which has the config.json `document` and `depth` layers, its student's
    are taken from."""
    if chosen.teacher_layers not in ("auto", "all"):
        return int(chosen.teacher_layers)
    # Some of ModernBERT's layers read near tokens alone: the last one, which reads all, is kept.
    mixed = any(len(set(document[name])) > 1 for name in BY_LAYER if name in document)
    if chosen.teacher_layers == "all" or mixed:
        return depth
    return max(chosen.layers or depth, math.ceil(2 * depth / 3))


def start(teacher: Path, chosen: Distill, root: Path) -> Path:
    """A Transformers folder with every n-th of the teacher's layers, or of its first ones, and its other weights, as
    narrow as is asked for; addressed by all of these. Raises `ConfigError` where that is not smaller than the
    teacher."""
    from safetensors.torch import load_file, save_file

    document = json_files.read(teacher / "config.json")
    counted = next((name for name in DEPTHS if name in document), None)
    if counted is None:
        raise UserError(
            f"{teacher}: its config.json does not count its layers, so none can be left out", code="unsupported"
        )
    depth = int(document[counted])
    layers = chosen.layers or depth
    # One as large learns from the rows that its teacher was not trained on.
    as_large = layers == depth and chosen.width is None
    if layers > depth or (as_large and chosen.unlabelled is None):
        fix = f"write {depth - 1} or less" if layers >= depth > 1 else "name another one with distill.student"
        if as_large:
            fix += "; as many learn more with distill.unlabelled alone"
        raise ConfigError(
            [Problem("distill.layers", chosen.layers, f"the teacher has {depth} layers", fix, code="out_of_range")]
        )
    of = taken_from(chosen, document, depth)
    if not layers <= of <= depth:
        reason = f"the student has {layers} layers, and the teacher {depth}"
        fix = f"write a number from {layers} to {depth}"
        raise ConfigError([Problem("distill.teacher_layers", of, reason, fix, code="out_of_range")])
    kept = chosen_layers(of, layers)
    after = {**document, counted: layers}
    after |= {name: [document[name][layer] for layer in kept] for name in BY_LAYER if name in document}
    if chosen.width is not None:
        if document.get("model_type") in FUSED:
            fix = "leave it out, and write distill.layers"
            reason = "its layers have several matrices in one, which cannot be made narrower in step"
            raise ConfigError([Problem("distill.width", chosen.width, reason, fix, code="unsupported")])
        after |= narrower(document, chosen.width)
    made = artifact.read(teacher, verify=False)
    parts = [made.version, str(layers)]
    parts += [] if of == depth else [f"of{of}"]
    parts += [] if chosen.width is None else [f"w{chosen.width}"]
    final = root / "-".join(parts)
    if (final / "config.json").is_file():
        return final
    draft = root / f".{final.name}.{uuid.uuid4().hex[:8]}"
    draft.mkdir(parents=True)
    try:
        weights = keep_layers(pooling.as_trained(load_file(teacher / "model.safetensors")), kept)
        if chosen.width is not None:
            block = _named(document, WIDTHS)[1] // _named(document, HEADS)[1]
            weights = narrowed(weights, _shapes(made.task, after), block)
        save_file(weights, draft / "model.safetensors", {"format": "pt"})
        (draft / "config.json").write_text(json.dumps(after, indent=1))
        for name in tokenizer_files.FILES:
            if (teacher / name).is_file():
                shutil.copyfile(teacher / name, draft / name)
        try:
            atomic_write.publish_folder(draft, final)
        except OSError:
            if not (final / "config.json").is_file():
                raise
            # Another distillation has made the same start meanwhile.
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return final


def narrower(document: dict[str, Any], width: int) -> dict[str, Any]:
    """The settings of a model that differ where it is only so wide: as many heads as fit, of the same size, and
    feed-forward layers in proportion. Raises `ConfigError`."""
    (wide, hidden), (many, heads), (middle, inside) = (_named(document, names) for names in (WIDTHS, HEADS, INNERS))
    size = hidden // heads
    if width >= hidden or width % size:
        reason = f"the teacher has a width of {hidden}, {heads} heads of {size}"
        raise ConfigError(
            [Problem("distill.width", width, reason, f"write a multiple of {size} below {hidden}", code="out_of_range")]
        )
    return {wide: width, many: width // size, middle: inside * width // hidden}


def _named(document: dict[str, Any], names: tuple[str, ...]) -> tuple[str, int]:
    """The setting of `document` among `names`, and its value."""
    found = next((name for name in names if name in document), None)
    if found is None:
        reason = f"the teacher's config.json has no {' or '.join(names)}"
        raise ConfigError([Problem("distill.width", None, reason, "leave it out", code="unsupported")])
    return found, int(document[found])


def _shapes(task: str, document: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each weight of the model that config.json `document` describes."""
    import torch
    import transformers

    settings = transformers.AutoConfig.for_model(**document)
    with torch.device("meta"):
        network = auto_class(base.get(task).auto_model).from_config(settings, trust_remote_code=False)
    return {name: tuple(value.shape) for name, value in network.state_dict().items()}


def narrowed(
    weights: "dict[str, torch.Tensor]", shapes: Mapping[str, tuple[int, ...]], block: int
) -> "dict[str, torch.Tensor]":
    """Weights cut to `shapes`: along each axis that gets shorter, evenly spaced blocks are kept, so that whole heads of
    the size `block` are. The same ones everywhere: what one layer writes, the next one reads."""
    import torch

    found = {}
    for name, value in weights.items():
        wanted = shapes.get(name, tuple(value.shape))
        # From the right: a guarded head has axes of its own before (`rtrain.models.pooling`).
        for axis, (old, new) in enumerate(zip(value.shape[::-1], wanted[::-1], strict=False), start=1):
            if old != new:
                value = value.index_select(-axis, torch.tensor(spaced(old, new, block)))
        found[name] = value.contiguous()
    return found


def spaced(old: int, new: int, block: int) -> list[int]:
    """The places, of `old`, of `new` ones in evenly spaced blocks: of 6 in blocks of 2 the last 4 are 2, 3, 4, 5."""
    if old % block or new % block:
        block = 1
    chosen = chosen_layers(old // block, new // block)
    return [place * block + inside for place in chosen for inside in range(block)]


def keep_layers(weights: dict[str, "torch.Tensor"], chosen: list[int]) -> dict[str, "torch.Tensor"]:
    """Weights of the chosen encoder layers, renumbered, with everything that is not a layer's."""
    kept = {}
    for name, value in weights.items():
        match = re.search(r"\.layers?\.(\d+)\.", name)
        if match is None:
            kept[name] = value
        elif int(match[1]) in chosen:
            number = chosen.index(int(match[1]))
            kept[name[: match.start(1)] + str(number) + name[match.end(1) :]] = value
    return kept
