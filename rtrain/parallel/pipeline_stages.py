"""A network in parts, one for each stage of a pipeline: a worker keeps the weights of its own parts and computes these.

The first part begins with the embeddings, the last one ends with the head. Weights that a worker does not keep are on
torch's meta device: their names, shapes and order stay those of the whole network, which optimizers, checkpoints and
artefacts are made by.
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

ENTRANCE = ("embeddings", "embeddings_project")
"""Names of what an encoder has before its layers; ELECTRA has both."""


def ranges(layers: int, parts: int) -> list[range]:
    """The layers of each part. Where they are not even, the first parts have the fewer: these also keep the embeddings,
    and the most passes at a time."""
    return [range(*ends) for ends in pairwise(layers * part // parts for part in range(parts + 1))]


class Staged:
    """What a worker has of a network, whose layers `layerwise.layers` finds. The network is changed in place."""

    def __init__(self, network: Any, parts: int, own: Collection[int]):
        """`own`: numbers of the parts, of so many, that this worker keeps."""
        self.network, self.parts, self.own = network, parts, sorted(own)
        self.width: int = network.config.hidden_size
        self._at: int | None = None
        self._received: torch.Tensor | None = None
        self._whole = network.forward
        """The network's own way to compute."""
        places = _places(network, parts)
        owners = _owners(network, places, last=parts - 1)
        kept = {one: found for one, found in owners.items() if found & set(own)}
        _leave(network, kept)
        dtensor_utils.leave_file(network)
        common = {one for one, found in kept.items() if len(found) > 1}
        self._shared = [name for name, one in network.named_parameters() if one in common]
        self.shares = any(len(found) > 1 for found in owners.values())
        """Whether there are such weights, on this worker or others."""
        encoder = network.base_model
        encoder.embeddings.forward = partial(self._enter, encoder.embeddings.forward)
        for module in {*encoder.children(), *_layers(network)} - {encoder.embeddings}:
            # What has no weights is no part of the way: ModernBERT's positions, of which each layer reads some.
            if (part := places.get(module)) is not None and any(True for _ in module.parameters()):
                module.forward = partial(self._pass_by, module.forward, part)

    @property
    def shared(self) -> "list[torch.nn.Parameter]":
        """Weights of this worker that the first and the last part have in common: words, of a tied head."""
        return [self.network.get_parameter(name) for name in self._shared]

    @property
    def device(self) -> "torch.device":
        return dtensor_utils.device(self.network)

    @property
    def dtype(self) -> "torch.dtype":
        """In which parts send to each other."""
        found: torch.dtype = next(one.dtype for one in self.network.parameters() if dtensor_utils.here(one))
        return found

    @contextlib.contextmanager
    def at(self, part: int, received: "torch.Tensor | None") -> Iterator[None]:
        """Inside, `compute` computes this part. `received`: what the part before it gave, [tokens or more, width]."""
        self._at, self._received = part, received
        try:
            yield
        finally:
            # Layers that are computed again in the backward pass are so whatever part is the next one.
            self._at = self._received = None

    def compute(self, **inputs: Any) -> Any:
        """The part at work: what the network answers of the last one, else hidden vectors as logits [tokens, width], of
        padding too."""
        from transformers.modeling_outputs import TokenClassifierOutput

        if self._at == self.parts - 1:
            return self._whole(**inputs)
        # Not by a call: hooks make of the last layer's answers what the head reads.
        hidden = self.network.base_model.forward(**inputs).last_hidden_state
        # In a form in which `fully_shard` finds the tensor, before whose gradient it gathers weights.
        return TokenClassifierOutput(logits=hidden.flatten(0, 1).to(self.dtype))

    @property
    def working(self) -> bool:
        return self._at is not None

    def _enter(self, embed: Any, *positional: Any, **named: Any) -> Any:
        if self._received is None:
            return embed(*positional, **named)
        ids = named["input_ids"] if "input_ids" in named else positional[0]
        return self._received[: ids.numel()].view(*ids.shape, -1)

    def _pass_by(self, forward: Any, part: int, values: Any, *positional: Any, **named: Any) -> Any:
        return forward(values, *positional, **named) if self._at in (None, part) else values


def _layers(network: Any) -> "torch.nn.ModuleList":
    found = layerwise_lr.layers(network.base_model)
    assert found is not None  # `schedules` knows the architectures
    return found


def _places(network: Any, parts: int) -> "dict[torch.nn.Module, int]":
    """The part of each module in which all weights are of one part; the others' own weights are of the last part."""
    encoder, layers = network.base_model, _layers(network)
    found: dict[torch.nn.Module, int] = {}
    for part, numbers in enumerate(ranges(len(layers), parts)):
        for number in numbers:
            found |= dict.fromkeys(layers[number].modules(), part)
    for name, module in encoder.named_children():
        if not any(one is layers for one in module.modules()):
            found |= dict.fromkeys(module.modules(), 0 if name in ENTRANCE else parts - 1)
    return found


def _owners(
    network: "torch.nn.Module", places: "Mapping[torch.nn.Module, int]", last: int
) -> "dict[torch.nn.Parameter, set[int]]":
    """The parts that have each weight; a tied one has two places."""
    found: dict[torch.nn.Parameter, set[int]] = {}
    for module in network.modules():
        for parameter in module.parameters(recurse=False):
            found.setdefault(parameter, set()).add(places.get(module, last))
    return found


def _leave(network: "torch.nn.Module", kept: "Collection[torch.nn.Parameter]") -> None:
    """Put all other weights on the meta device; what is tied stays so."""
    import torch

    absent: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in network.modules():
        for name, one in list(module.named_parameters(recurse=False)):
            if one not in kept:
                if one not in absent:
                    absent[one] = torch.nn.Parameter(one.detach().to("meta"), one.requires_grad)
                module.register_parameter(name, absent[one])
