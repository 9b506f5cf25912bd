"""A network in parts, one for each pipeline stage: a worker keeps the weights of its own parts and computes them.

The first part begins with the embeddings, the last one ends with the head. Weights of other workers are on the meta
device: their names, shapes and order stay as in the full network, because optimizers, checkpoints and artifacts
need them.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rtrain.models import layerwise_lr
from rtrain.parallel import dtensor_utils

if TYPE_CHECKING:
    import torch

EMBEDDING_NAMES = ("embeddings", "embeddings_project")
"""Names of an encoder's modules before its layers; ELECTRA has both."""


def layer_ranges(num_layers: int, num_parts: int) -> list[range]:
    """The layers of each part. The first parts have fewer layers if the split is uneven: they also keep the embeddings
    and the most micro-batches at a time."""
    return [range(*ends) for ends in pairwise(num_layers * part // num_parts for part in range(num_parts + 1))]


class PipelineStages:
    """A worker's parts of a network, whose layers `layerwise_lr.find_layers` finds. The network is changed in place."""

    def __init__(self, network: Any, num_parts: int, local_parts: Collection[int]):
        """`local_parts`: the parts that this worker keeps, of `num_parts`."""
        self.network, self.num_parts, self.local_parts = network, num_parts, sorted(local_parts)
        self.width: int = network.config.hidden_size
        self._current_part: int | None = None
        self._received: torch.Tensor | None = None
        self._network_forward = network.forward
        """The network's original `forward`."""
        parts_by_module = _parts_by_module(network, num_parts)
        parts_by_parameter = _parts_by_parameter(network, parts_by_module, last_part=num_parts - 1)
        local_parameters = {
            parameter: found for parameter, found in parts_by_parameter.items() if found & set(local_parts)
        }
        _move_others_to_meta(network, local_parameters)
        dtensor_utils.copy_from_file(network)
        shared = {parameter for parameter, found in local_parameters.items() if len(found) > 1}
        self._shared_names = [name for name, parameter in network.named_parameters() if parameter in shared]
        self.has_shared_weights = any(len(found) > 1 for found in parts_by_parameter.values())
        """Whether there are such weights, on this worker or others."""
        encoder = network.base_model
        encoder.embeddings.forward = partial(self._embed_or_receive, encoder.embeddings.forward)
        for module in {*encoder.children(), *_encoder_layers(network)} - {encoder.embeddings}:
            # Modules without weights are needed by every part, e.g. ModernBERT's rotary positions.
            if (part := parts_by_module.get(module)) is not None and any(True for _ in module.parameters()):
                module.forward = partial(self._skip_other_parts, module.forward, part)

    @property
    def shared_parameters(self) -> "list[torch.nn.Parameter]":
        """Weights of this worker that the first and the last part share: word embeddings of a tied head."""
        return [self.network.get_parameter(name) for name in self._shared_names]

    @property
    def device(self) -> "torch.device":
        return dtensor_utils.module_device(self.network)

    @property
    def dtype(self) -> "torch.dtype":
        """The dtype that parts send to each other."""
        dtype: torch.dtype = next(
            parameter.dtype for parameter in self.network.parameters() if dtensor_utils.is_materialized(parameter)
        )
        return dtype

    @contextlib.contextmanager
    def select_part(self, part: int, received: "torch.Tensor | None") -> Iterator[None]:
        """Make `compute` compute this part inside the block. `received`: the previous part's output, [tokens or more,
        width]."""
        self._current_part, self._received = part, received
        try:
            yield
        finally:
            # Recomputed layers of the backward pass belong to this part, whichever part is current then.
            self._current_part = self._received = None

    def compute(self, **inputs: Any) -> Any:
        """Compute the current part: the network's output for the last part, otherwise hidden states as logits [tokens,
        width], including padding."""
        from transformers.modeling_outputs import TokenClassifierOutput

        if self._current_part == self.num_parts - 1:
            return self._network_forward(**inputs)
        # Not by a call: hooks would convert the last layer's outputs to the head's inputs.
        hidden = self.network.base_model.forward(**inputs).last_hidden_state
        # A form in which `fully_shard` finds the tensor; it gathers weights before the tensor's gradient.
        return TokenClassifierOutput(logits=hidden.flatten(0, 1).to(self.dtype))

    @property
    def is_active(self) -> bool:
        return self._current_part is not None

    def _embed_or_receive(self, embed: Any, *args: Any, **kwargs: Any) -> Any:
        if self._received is None:
            return embed(*args, **kwargs)
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        return self._received[: ids.numel()].view(*ids.shape, -1)

    def _skip_other_parts(self, forward: Any, part: int, values: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(values, *args, **kwargs) if self._current_part in (None, part) else values


def _encoder_layers(network: Any) -> "torch.nn.ModuleList":
    layers = layerwise_lr.find_layers(network.base_model)
    assert layers is not None  # `pipeline_schedules` has checked the architectures
    return layers


def _parts_by_module(network: Any, num_parts: int) -> "dict[torch.nn.Module, int]":
    """The part of each module whose weights all belong to one part; weights of other modules belong to the last
    part."""
    encoder, layers = network.base_model, _encoder_layers(network)
    parts_by_module: dict[torch.nn.Module, int] = {}
    for part, numbers in enumerate(layer_ranges(len(layers), num_parts)):
        for number in numbers:
            parts_by_module |= dict.fromkeys(layers[number].modules(), part)
    for name, module in encoder.named_children():
        if not any(submodule is layers for submodule in module.modules()):
            parts_by_module |= dict.fromkeys(module.modules(), 0 if name in EMBEDDING_NAMES else num_parts - 1)
    return parts_by_module


def _parts_by_parameter(
    network: "torch.nn.Module", parts_by_module: "Mapping[torch.nn.Module, int]", last_part: int
) -> "dict[torch.nn.Parameter, set[int]]":
    """The parts of each weight; a tied weight has two."""
    parts_by_parameter: dict[torch.nn.Parameter, set[int]] = {}
    for module in network.modules():
        for parameter in module.parameters(recurse=False):
            parts_by_parameter.setdefault(parameter, set()).add(parts_by_module.get(module, last_part))
    return parts_by_parameter


def _move_others_to_meta(network: "torch.nn.Module", local_parameters: "Collection[torch.nn.Parameter]") -> None:
    """Move all other weights to the meta device; tied weights stay tied."""
    import torch

    absent: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in local_parameters:
                if parameter not in absent:
                    absent[parameter] = torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                module.register_parameter(name, absent[parameter])
