"""Initial weights of a student: evenly spaced layers of its teacher, optionally narrower, in a model folder."""

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtrain.config import DistillConfig
from rtrain.core import json_files
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.inference import artifact
from rtrain.models import model_files
from rtrain.models.model_files import auto_class
from rtrain.models.network_parts import spaced_layers
from rtrain.tasks import base

if TYPE_CHECKING:
    import torch


LAYER_COUNT_KEYS = ("num_hidden_layers", "n_layers")
HIDDEN_SIZE_KEYS = ("hidden_size", "dim")
HEAD_COUNT_KEYS = ("num_attention_heads", "n_heads")
INTERMEDIATE_SIZE_KEYS = ("intermediate_size", "hidden_dim")
"""Keys of config.json: those of most models, then those of DistilBERT."""
FUSED_ARCHITECTURES = ("modernbert",)
"""Architectures that fuse query, key and value, or gate and input, into one matrix."""
PER_LAYER_KEYS = ("layer_types",)
"""Keys with a list of one entry per layer, e.g. local or global attention in ModernBERT."""


def count_layers(model: Path) -> int | None:
    """Read the number of layers of a Transformers folder; None if its config.json lacks it."""
    document = json_files.load_json_object(model / "config.json")
    return next((int(document[name]) for name in LAYER_COUNT_KEYS if name in document), None)


def count_source_layers(settings: DistillConfig, document: Mapping[str, Any], depth: int) -> int:
    """Number of the teacher's first layers from which the student's layers are taken.

    Args:
        document: config.json of the teacher.
        depth: layers of the teacher.
    """
    if settings.teacher_layers not in ("auto", "all"):
        return int(settings.teacher_layers)
    # ModernBERT mixes local and global layers; its last layer is global and is kept.
    mixed = any(len(set(document[name])) > 1 for name in PER_LAYER_KEYS if name in document)
    if settings.teacher_layers == "all" or mixed:
        return depth
    return max(settings.layers or depth, math.ceil(2 * depth / 3))


def create_student(teacher: Path, settings: DistillConfig, root: Path) -> Path:
    """Create a Transformers folder with evenly spaced layers of the teacher, optionally narrower.

    The name of the folder identifies teacher, layers and width; an existing folder is reused. Raises `ConfigError` if
    the student is not smaller than the teacher.
    """
    from safetensors.torch import load_file, save_file

    document = json_files.load_json_object(teacher / "config.json")
    layer_count_key = next((name for name in LAYER_COUNT_KEYS if name in document), None)
    if layer_count_key is None:
        raise UserError(
            f"{teacher}: its config.json lacks the number of layers, so none can be removed", code="unsupported"
        )
    depth = int(document[layer_count_key])
    layers = settings.layers or depth
    # A student of the same size can learn from rows without labels.
    as_large = layers == depth and settings.width is None
    if layers > depth or (as_large and settings.unlabeled_rows_path is None):
        fix = f"write {depth - 1} or less" if layers >= depth > 1 else "name another model with distill.student"
        if as_large:
            fix += "; as many layers need distill.unlabeled_rows_path"
        reason = f"the teacher has {depth} layers"
        raise ConfigError([Problem("distill.layers", settings.layers, reason, fix, code="out_of_range")])
    source_layers = count_source_layers(settings, document, depth)
    if not layers <= source_layers <= depth:
        reason = f"the student has {layers} layers, and the teacher {depth}"
        fix = f"write a number from {layers} to {depth}"
        raise ConfigError([Problem("distill.teacher_layers", source_layers, reason, fix, code="out_of_range")])
    kept_layers = spaced_layers(source_layers, layers)
    student_config = {**document, layer_count_key: layers}
    student_config |= {
        name: [document[name][layer] for layer in kept_layers] for name in PER_LAYER_KEYS if name in document
    }
    if settings.width is not None:
        if document.get("model_type") in FUSED_ARCHITECTURES:
            fix = "leave it out, and write distill.layers"
            reason = "its layers fuse several matrices, which cannot be narrowed"
            raise ConfigError([Problem("distill.width", settings.width, reason, fix, code="unsupported")])
        student_config |= narrow_config(document, settings.width)
    metadata = artifact.read_artifact(teacher, verify=False)
    parts = [metadata.version, str(layers)]
    parts += [] if source_layers == depth else [f"of{source_layers}"]
    parts += [] if settings.width is None else [f"w{settings.width}"]
    final = root / "-".join(parts)
    if (final / "config.json").is_file():
        return final
    with model_files.draft_model_folder(final) as draft:
        weights = keep_layers(model_files.restore_standardized(load_file(teacher / "model.safetensors")), kept_layers)
        if settings.width is not None:
            block = _find_setting(document, HIDDEN_SIZE_KEYS)[1] // _find_setting(document, HEAD_COUNT_KEYS)[1]
            weights = narrow_weights(weights, _weight_shapes(metadata.task, student_config), block)
        save_file(weights, draft / "model.safetensors", {"format": "pt"})
        (draft / "config.json").write_text(json.dumps(student_config, indent=1))
        for name in model_files.FILES:
            if (teacher / name).is_file():
                shutil.copyfile(teacher / name, draft / name)
    return final


def narrow_config(document: dict[str, Any], width: int) -> dict[str, Any]:
    """Keys of config.json for a smaller width: fewer heads of the same size, feed-forward layers in proportion.

    Raises `ConfigError` if the width does not fit.
    """
    (width_key, old_width), (heads_key, heads), (intermediate_key, intermediate_size) = (
        _find_setting(document, names) for names in (HIDDEN_SIZE_KEYS, HEAD_COUNT_KEYS, INTERMEDIATE_SIZE_KEYS)
    )
    head_size = old_width // heads
    if width >= old_width or width % head_size:
        reason = f"the teacher has width {old_width} with {heads} heads of size {head_size}"
        fix = f"write a multiple of {head_size} below {old_width}"
        raise ConfigError([Problem("distill.width", width, reason, fix, code="out_of_range")])
    return {width_key: width, heads_key: width // head_size, intermediate_key: intermediate_size * width // old_width}


def _find_setting(document: dict[str, Any], names: tuple[str, ...]) -> tuple[str, int]:
    key = next((name for name in names if name in document), None)
    if key is None:
        reason = f"the teacher's config.json has no {' or '.join(names)}"
        raise ConfigError([Problem("distill.width", None, reason, "leave it out", code="unsupported")])
    return key, int(document[key])


def _weight_shapes(task: str, document: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    import torch
    import transformers

    settings = transformers.AutoConfig.for_model(**document)
    with torch.device("meta"):
        network = auto_class(base.get_task(task).auto_model).from_config(settings, trust_remote_code=False)
    return {name: tuple(value.shape) for name, value in network.state_dict().items()}


def narrow_weights(
    weights: "dict[str, torch.Tensor]", shapes: Mapping[str, tuple[int, ...]], block_size: int
) -> "dict[str, torch.Tensor]":
    """Narrow weights to `shapes`.

    Along each shorter axis, evenly spaced blocks of `block_size` (whole heads) are kept. All layers keep the same
    blocks, so that their inputs match.
    """
    import torch

    student_weights = {}
    for name, value in weights.items():
        shape = shapes.get(name, tuple(value.shape))
        # From the right: a standardized head has extra leading axes (`rtrain.models.pooling`).
        for axis, (old, new) in enumerate(zip(value.shape[::-1], shape[::-1], strict=False), start=1):
            if old != new:
                value = value.index_select(-axis, torch.tensor(space_evenly(old, new, block_size)))
        student_weights[name] = value.contiguous()
    return student_weights


def space_evenly(old_size: int, new_size: int, block_size: int) -> list[int]:
    """Select `new_size` of `old_size` positions in evenly spaced blocks: 4 of 6 in blocks of 2 are 2, 3, 4, 5."""
    if old_size % block_size or new_size % block_size:
        block_size = 1
    blocks = spaced_layers(old_size // block_size, new_size // block_size)
    return [place * block_size + inside for place in blocks for inside in range(block_size)]


def keep_layers(weights: dict[str, "torch.Tensor"], layers: list[int]) -> dict[str, "torch.Tensor"]:
    """Keep the given encoder layers, renumbered, and all weights outside of layers."""
    student_weights = {}
    for name, value in weights.items():
        match = re.search(r"\.layers?\.(\d+)\.", name)
        if match is None:
            student_weights[name] = value
        elif int(match[1]) in layers:
            number = layers.index(int(match[1]))
            student_weights[name[: match.start(1)] + str(number) + name[match.end(1) :]] = value
    return student_weights
