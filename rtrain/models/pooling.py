"""Pooling of a text's token vectors into the classified vector, and weights that other programs must not load.

Transformers knows neither this pooling nor local attention and would compute other outputs without an error. So weights
are saved in a shape that it refuses.
"""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtrain.core.errors import UserError
from rtrain.models import local_attention
from rtrain.models.forward import LAYOUT

if TYPE_CHECKING:
    import torch
    import transformers

FACT = "token_pooling"
"""Artifact fact of a model with `mean` pooling."""
GUARD_SHAPE = (1, 1, 1)
"""Leading dimensions of the head's matrices in a guarded artifact (mean pooling or local attention). `AutoModelFor...`
raises an error of mismatched sizes; `AutoModel` and sentence-transformers load the encoder without the head."""

STANDARDIZED_SUFFIX = ".standardized"
"""Suffix of a regression head's weights as trained. The weights without the suffix answer in the unit of the training
scores, for other programs."""

CREATION_LOCK = threading.Lock()
"""Held while transformers creates a network. It patches its own functions and torch's for the whole process meanwhile;
two threads would restore each other's patches, and no weights would be tied or initialized afterwards."""


def pool_by_mean(network: "transformers.PreTrainedModel") -> None:
    """Feed the head the mean of the text's tokens instead of its first token's vector.

    Sentence encoders are trained this way (Reimers and Gurevych 2019, arXiv:1908.10084): their mean separates texts
    before any fine-tuning, their first token does not. A pooler (BERT and relatives) is removed; a head with its own
    mean (ModernBERT) reads the first position instead. Raises `UserError` for a network without a separate encoder.
    """
    encoder: Any = network.base_model
    if encoder is network:
        class_name = type(network).__name__
        raise UserError(
            f"model.pooling=mean: {class_name} does not tell its encoder from its head; write model.pooling=own",
            code="unsupported",
        )
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None
    if pools_by_mean(network):
        network.config.classifier_pooling = "cls"
    encoder.register_forward_hook(_pool_mean, with_kwargs=True)


def pools_by_mean(network: "transformers.PreTrainedModel") -> bool:
    """Whether the network's own head reads the mean of the tokens."""
    return getattr(network.config, "classifier_pooling", None) == "mean"


def _pool_mean(module: "torch.nn.Module", inputs: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
    """Write the mean where heads read it: into the pooled output (BERT) and the first position of the last layer
    (RoBERTa, DistilBERT)."""
    import torch

    if LAYOUT in kwargs:  # windows of a pack are pooled already
        return output
    hidden = output.last_hidden_state
    mask = kwargs["attention_mask"].to(torch.promote_types(hidden.dtype, torch.float32))[..., None]
    mean = ((hidden * mask).sum(1) / mask.sum(1).clamp(min=1.0)).to(hidden.dtype)
    output.last_hidden_state = torch.cat([mean[:, None], hidden[:, 1:]], dim=1)
    if "pooler_output" in type(output).__dataclass_fields__:
        output.pooler_output = mean
    return output


def save_weights(
    network: "transformers.PreTrainedModel",
    folder: Path,
    *,
    guard_head: bool,
    weights: "Mapping[str, torch.Tensor] | None" = None,
    scale: tuple[float, float] | None = None,
) -> None:
    """Write config.json and model.safetensors.

    Args:
        guard_head: Save the head's matrices in a shape that other programs refuse.
        weights: Full weights by name, if the network's own are shards or include more than the artifact needs.
        scale: Mean and standard deviation of the training scores, for a network that answers in standard deviations.
            Its last layer is written to answer in their unit, and as trained (`STANDARDIZED_SUFFIX`).
    """
    encoder_prefix = f"{network.base_model_prefix}."
    weights = dict(network.state_dict() if weights is None else weights)
    if scale is not None and not guard_head:
        output_name = next(
            name for name, weight in weights.items() if not name.startswith(encoder_prefix) and _is_output(weight)
        )
        weights |= _rescale_output(weights, output_name.removesuffix(".weight"), *scale)
    if guard_head:
        head_weights = {
            name: weight for name, weight in weights.items() if weight.ndim == 2 and not name.startswith(encoder_prefix)
        }
        weights |= {name: weight.reshape(*GUARD_SHAPE, *weight.shape) for name, weight in head_weights.items()}
    network.save_pretrained(folder, state_dict=weights)


def _is_output(weight: "torch.Tensor") -> bool:
    """Whether the weight is the matrix of a layer with a single output."""
    return weight.ndim == 2 and len(weight) == 1


def _rescale_output(
    weights: "Mapping[str, torch.Tensor]", layer: str, mean: float, std: float
) -> "dict[str, torch.Tensor]":
    weight, bias = weights[f"{layer}.weight"], weights[f"{layer}.bias"]
    return {
        f"{layer}.weight": (weight.double() * std).to(weight.dtype),
        f"{layer}.bias": (bias.double() * std + mean).to(bias.dtype),
        f"{layer}.weight{STANDARDIZED_SUFFIX}": weight,
        f"{layer}.bias{STANDARDIZED_SUFFIX}": bias,
    }


def restore_standardized(weights: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Undo the rescaling of a regression head by `save_weights`."""
    other_weights = {name: weight for name, weight in weights.items() if not name.endswith(STANDARDIZED_SUFFIX)}
    return other_weights | {
        name.removesuffix(STANDARDIZED_SUFFIX): weight
        for name, weight in weights.items()
        if name.endswith(STANDARDIZED_SUFFIX)
    }


def load_network(
    auto: Any, folder: Path, *, new_head: bool = False, **settings: Any
) -> "tuple[transformers.PreTrainedModel, dict[str, Any]]":
    """Load a folder in fp32 by `auto.from_pretrained`, guarded or not, with its loading report. The caller sets the
    pooling.

    Args:
        new_head: Initialize weights of mismatched shape like missing ones, instead of raising an error.
    """
    import torch
    import transformers
    from safetensors import safe_open

    transformers.utils.logging.disable_progress_bar()
    network: transformers.PreTrainedModel
    with CREATION_LOCK:
        network, report = auto.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **settings,
        )
    for name in report["unexpected_keys"]:
        if name.endswith(STANDARDIZED_SUFFIX):
            with safe_open(folder / "model.safetensors", framework="pt") as file, torch.no_grad():
                network.get_parameter(name.removesuffix(STANDARDIZED_SUFFIX)).copy_(file.get_tensor(name))
    mismatches = []
    for name, saved_shape, expected_shape in sorted(report["mismatched_keys"]):
        if tuple(saved_shape) == (*GUARD_SHAPE, *expected_shape):
            with safe_open(folder / "model.safetensors", framework="pt") as file, torch.no_grad():
                network.get_parameter(name).copy_(file.get_tensor(name).reshape(*expected_shape))
        else:
            mismatches.append(f"{name} is {list(saved_shape)} in place of {list(expected_shape)}")
    if mismatches and not new_head:
        message = f"{folder}: model.safetensors does not fit config.json: {', '.join(mismatches)}; copy it whole"
        raise UserError(message, code="damaged")
    local_attention.enable_local_attention(network)
    return network, report
