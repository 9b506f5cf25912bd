"""Parts of a network: its inputs and logits, its layers, its head, and weights that only training needs."""

import inspect
import math
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rtrain.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    import torch
    import transformers

LAYOUT = "layout"
"""Name of the argument that holds the pack layout of a network that computes no padding."""
LABELED_HEADS = ("ForSequenceClassification", "ForTokenClassification")
"""Suffixes of classes whose outputs are named by `id2label`. Outputs of span and masked-token heads mean the same in
every model."""
_UNNAMED_LABEL = re.compile(r"LABEL_\d+")
"""Transformers' default name of an output."""
MODULE_NAME = "rtrain_auxiliary"
NEW_OUTPUT = "rtrain_new_output"
"""Attribute of a network: its output layer was not loaded."""


def accepted_inputs(network: Any) -> frozenset[str]:
    """Arguments that the network's forward accepts. DistilBERT has no token types. XLM-RoBERTa and relatives have a
    single type and raise an index error for the second text of a pair."""
    network_class: Any = type(network)
    names = _forward_parameters(network_class)
    return names - {"token_type_ids"} if getattr(getattr(network, "config", None), "type_vocab_size", 2) < 2 else names


@lru_cache(maxsize=8)
def _forward_parameters(network_class: Any) -> frozenset[str]:
    return frozenset(inspect.signature(network_class.forward).parameters)


def logits_of(output: Any) -> "torch.Tensor":
    """The single output tensor of a Transformers model; a span's two ends are its last axis."""
    import torch

    if hasattr(output, "start_logits"):
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    logits: torch.Tensor = output.logits
    return logits


def label_order(document: Mapping[str, Any], auto_model: str, labels: Sequence[str]) -> list[int] | None:
    """For each of `labels` the index of the output that answers it; None if the head answers other labels.

    `AutoModelFor...` loads any head with as many outputs as the run has labels, whatever their names: a spam classifier
    would start as a sentiment classifier, and a head with reordered labels would start with wrong answers.

    The order stays unchanged if the outputs have default names, if there are not as many as labels, or if there is a
    single one (regression).

    Args:
        document: The folder's config.json.
        auto_model: The class that loads the folder.
    """
    id2label = document.get("id2label") or {}
    names = [str(id2label[number]) for number in sorted(id2label, key=int)]
    if not auto_model.endswith(LABELED_HEADS) or len(names) != len(labels) or len(labels) < 2:
        return list(range(len(labels)))
    if set(names) == set(labels):
        return [names.index(label) for label in labels]
    return list(range(len(labels))) if all(map(_UNNAMED_LABEL.fullmatch, names)) else None


def head_event_fields(document: Mapping[str, Any], auto_model: str, labels: Sequence[str]) -> dict[str, Any] | None:
    """Describe a head with the right number of outputs but other labels, for the log; None if there is no such head."""
    has_head = any(name.endswith(LABELED_HEADS) for name in document.get("architectures") or ())
    if not has_head or label_order(document, auto_model, labels) is not None:
        return None
    return {"answers": sorted(map(str, document["id2label"].values()))}


def align_head_to_labels(
    network: "transformers.PreTrainedModel", order: Sequence[int] | None, new_weights: Collection[str]
) -> None:
    """Reorder the outputs of the head to the labels' order, or initialize them anew if `order` is None.

    The outputs belong to the last linear layer outside the encoder. A layer in `new_weights` was not loaded and stays
    as it is.
    """
    if order is not None and list(order) == sorted(order):
        return
    import torch

    name, last = _find_output_layer(network)
    if f"{name}.weight" in new_weights:
        return
    with torch.no_grad():
        for parameter in last.parameters():
            if order is not None:
                parameter.copy_(parameter[order])
            elif parameter.ndim == 1:
                parameter.zero_()
            else:
                parameter.normal_(0.0, getattr(network.config, "initializer_range", 0.02))


def _find_output_layer(network: Any) -> "tuple[str, torch.nn.Linear]":
    """The last linear layer outside the encoder, and its name."""
    import torch

    encoder = f"{network.base_model_prefix}."
    return [
        (name, layer)
        for name, layer in network.named_modules()
        if isinstance(layer, torch.nn.Linear) and not name.startswith(encoder)
    ][-1]


def has_new_output(network: Any) -> bool:
    """Whether the output layer is new: not loaded from a model with a head."""
    return bool(getattr(network, NEW_OUTPUT, False))


def set_output_bias(network: Any, bias: Any) -> None:
    """Set the bias of the output layer, [labels]; a layer without a bias stays as it is."""
    import torch

    _, layer = _find_output_layer(network)
    if layer.bias is not None:
        with torch.no_grad():
            layer.bias.copy_(torch.from_numpy(bias))


def lr_factors(network: "torch.nn.Module", decay: float) -> "dict[torch.nn.Parameter, float]":
    """The learning-rate factor of each parameter: layers near the input are more general, and learn slower.

    Like the fine-tuning of BEiT (Bao et al. 2022, arXiv:2106.08254): the head has factor 1, the i-th layer from the top
    (from 1) decay^i, and the embeddings below L layers decay^(L + 1). ELECTRA (Clark et al. 2020, arXiv:2003.10555)
    uses one power more from the last layer downwards.

    Modules of the encoder before its layers count as embeddings, modules after them (a pooler, a final normalization)
    as head. Weights shared by the head and the embeddings count as embeddings. Raises `ConfigError` for an encoder
    without a list of layers.
    """
    if decay == 1.0:
        return dict.fromkeys(network.parameters(), 1.0)
    encoder: Any = getattr(network, "base_model", network)
    encoder_layers = find_layers(encoder)
    if encoder_layers is None:
        reason = f"{type(network).__name__} has no list of layers, so the learning rate cannot decay by layer"
        raise ConfigError([Problem("optim.layerwise_lr_decay", decay, reason, "write 1.0", code="unsupported")])
    depths = {parameter: place for place, layer in enumerate(encoder_layers, 1) for parameter in layer.parameters()}
    head_depth, has_passed_layers = len(encoder_layers) + 1, False
    for parameter in encoder.parameters():  # in the order of the forward pass, as every encoder registers them
        has_passed_layers = has_passed_layers or parameter in depths
        depths.setdefault(parameter, head_depth if has_passed_layers else 0)
    return {parameter: decay ** (head_depth - depths.get(parameter, head_depth)) for parameter in network.parameters()}


def find_layers(encoder: "torch.nn.Module") -> "torch.nn.ModuleList | None":
    """The module list that holds most of the encoder's weights; the outermost of nested lists."""
    import torch

    lists = [part for part in encoder.modules() if isinstance(part, torch.nn.ModuleList) and len(part)]
    return max(lists, key=lambda part: sum(parameter.numel() for parameter in part.parameters()), default=None)


def spaced_layers(depth: int, count: int) -> list[int]:
    """Evenly spaced layers, counted from 0, including the last one: 3 of 6 are 1, 3, 5."""
    return [math.ceil(depth * (place + 1) / count) - 1 for place in range(count)]


def attach_auxiliary(network: "torch.nn.Module", module: "torch.nn.Module") -> None:
    """Attach weights that only training needs, e.g. the map between the hidden states of two models.

    Their gradients are all-reduced, the optimizer updates them and checkpoints hold them; an artifact leaves them out.
    Call before the strategy and the optimizer are built.
    """
    network.add_module(MODULE_NAME, module)


def drop_auxiliary(weights: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    return {name: value for name, value in weights.items() if not name.startswith(f"{MODULE_NAME}.")}


def auxiliary_parameters(network: "torch.nn.Module") -> "list[torch.nn.Parameter]":
    """The auxiliary weights. The network's forward pass does not use them."""
    module = getattr(network, MODULE_NAME, None)
    return [] if module is None else list(module.parameters())
