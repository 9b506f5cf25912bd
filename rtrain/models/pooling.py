"""How the vectors of a text's tokens become the one that is classified, where that is not the model's own way.

Transformers alone knows nothing of it, and would answer wrongly without a word. So weights are saved here in a shape
that it refuses, and read here.
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
"""Name of the fact of an artefact whose model pools by `mean`: transformers alone would answer otherwise."""
GUARD = (1, 1, 1)
"""Dimensions before the two of each of a head's matrices, where it reads the mean or attention is local (`local`):
`AutoModelFor...` ends with an error of mismatched sizes, whereas `AutoModel` and sentence-transformers load the
encoder, and leave the head out."""

STANDARDIZED = ".standardized"
"""End of the names of a regression head's weights as trained. Under their own names stand weights that answer in the
unit of the training scores, which is what other programs read."""

MAKING = threading.Lock()
"""Held while transformers makes a network. It replaces its own functions and torch's meanwhile, for the whole process;
of two threads each would put back what the other has left, and no weights would be tied, or drawn, from then on."""


def pool_by_mean(network: "transformers.PreTrainedModel") -> None:
    """Give the head the mean of the text's tokens in place of its first token's vector.

    That is what sentence encoders are trained with (Reimers and Gurevych 2019, arXiv:1908.10084): their mean tells
    texts apart before any fine-tuning, their first token does not. A pooler, of BERT and its kin, is dropped; a head
    that takes a mean of its own, ModernBERT's, reads the first place instead. Raises `UserError` for a network that
    does not tell its encoder from its head.
    """
    encoder: Any = network.base_model
    if encoder is network:
        kind = type(network).__name__
        raise UserError(
            f"model.pooling=mean: {kind} does not tell its encoder from its head; write model.pooling=own",
            code="unsupported",
        )
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None
    if means(network):
        network.config.classifier_pooling = "cls"
    encoder.register_forward_hook(_mean, with_kwargs=True)


def means(network: "transformers.PreTrainedModel") -> bool:
    """Whether the network's own head reads the mean of the tokens."""
    return getattr(network.config, "classifier_pooling", None) == "mean"


def _mean(module: "torch.nn.Module", inputs: Any, named: Mapping[str, Any], output: Any) -> Any:
    """Put the mean where heads read: the pooled output (BERT) and the first place of the last layer (RoBERTa,
    DistilBERT)."""
    import torch

    if LAYOUT in named:  # the windows of a pack are pooled already
        return output
    hidden = output.last_hidden_state
    mask = named["attention_mask"].to(torch.promote_types(hidden.dtype, torch.float32))[..., None]
    mean = ((hidden * mask).sum(1) / mask.sum(1).clamp(min=1.0)).to(hidden.dtype)
    output.last_hidden_state = torch.cat([mean[:, None], hidden[:, 1:]], dim=1)
    if "pooler_output" in type(output).__dataclass_fields__:
        output.pooler_output = mean
    return output


def save(
    network: "transformers.PreTrainedModel",
    folder: Path,
    *,
    guarded: bool,
    weights: "Mapping[str, torch.Tensor] | None" = None,
    scale: tuple[float, float] | None = None,
) -> None:
    """Write config.json and model.safetensors; `guarded`: others would answer otherwise, so the head's matrices have a
    shape that they refuse.

    `weights`: whole ones by name, where the network's own are shares of them or more than is to be saved.
    `scale`: mean and standard deviation of the training scores, of a network that answers in standard deviations. Its
    last layer is written to answer in their unit, and as trained beside (`STANDARDIZED`).
    """
    encoder = f"{network.base_model_prefix}."
    weights = dict(network.state_dict() if weights is None else weights)
    if scale is not None and not guarded:
        last = next(name for name, weight in weights.items() if not name.startswith(encoder) and _is_output(weight))
        weights |= _in_unit(weights, last.removesuffix(".weight"), *scale)
    if guarded:
        head = {name: weight for name, weight in weights.items() if weight.ndim == 2 and not name.startswith(encoder)}
        weights |= {name: weight.reshape(*GUARD, *weight.shape) for name, weight in head.items()}
    network.save_pretrained(folder, state_dict=weights)


def _is_output(weight: "torch.Tensor") -> bool:
    """Whether it is the matrix of a layer that answers with one number."""
    return weight.ndim == 2 and len(weight) == 1


def _in_unit(weights: "Mapping[str, torch.Tensor]", layer: str, mean: float, std: float) -> "dict[str, torch.Tensor]":
    weight, bias = weights[f"{layer}.weight"], weights[f"{layer}.bias"]
    return {
        f"{layer}.weight": (weight.double() * std).to(weight.dtype),
        f"{layer}.bias": (bias.double() * std + mean).to(bias.dtype),
        f"{layer}.weight{STANDARDIZED}": weight,
        f"{layer}.bias{STANDARDIZED}": bias,
    }


def as_trained(weights: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """The weights of a folder without what `save` has changed for other programs in a regression head."""
    kept = {name: weight for name, weight in weights.items() if not name.endswith(STANDARDIZED)}
    return kept | {
        name.removesuffix(STANDARDIZED): weight for name, weight in weights.items() if name.endswith(STANDARDIZED)
    }


def load(
    auto: Any, folder: Path, *, new_head: bool = False, **settings: Any
) -> "tuple[transformers.PreTrainedModel, dict[str, Any]]":
    """What `auto.from_pretrained` makes of a folder in fp32, guarded or not, and its report of what was read.

    `new_head`: weights of another shape than the model's are drawn, as those that are missing are; else they are an
    error. Pooling is up to the caller.
    """
    import torch
    import transformers
    from safetensors import safe_open

    transformers.utils.logging.disable_progress_bar()
    network: transformers.PreTrainedModel
    with MAKING:
        network, read = auto.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **settings,
        )
    for name in read["unexpected_keys"]:
        if name.endswith(STANDARDIZED):
            with safe_open(folder / "model.safetensors", framework="pt") as file, torch.no_grad():
                network.get_parameter(name.removesuffix(STANDARDIZED)).copy_(file.get_tensor(name))
    others = []
    for name, stored, wanted in sorted(read["mismatched_keys"]):
        if tuple(stored) == (*GUARD, *wanted):
            with safe_open(folder / "model.safetensors", framework="pt") as file, torch.no_grad():
                network.get_parameter(name).copy_(file.get_tensor(name).reshape(*wanted))
        else:
            others.append(f"{name} is {list(stored)} in place of {list(wanted)}")
    if others and not new_head:
        told = f"{folder}: model.safetensors does not fit config.json: {', '.join(others)}; copy it whole"
        raise UserError(told, code="damaged")
    local_attention.attend(network)
    return network, read
