"""Where an encoder layer can be cut across workers, by architecture (Shoeybi et al. 2019, arXiv:1909.08053).

Two products after each other need one sum: the first is cut by its outputs, the second by its inputs, and what lies
between, attention heads or the feed-forward layer's inner vector, is a worker's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from rtrain.models import attention, dropout, unpadded

if TYPE_CHECKING:
    import torch
    import transformers


@dataclass(frozen=True)
class Cut:
    """Names of parts within an encoder layer."""

    by_outputs: tuple[str, ...]
    """Linear layers."""
    by_inputs: tuple[str, ...]
    """Linear layers."""
    whole: tuple[str, ...]
    """What reads all tokens, where the tokens are cut too between these products (Korthikanti et al. 2022,
    arXiv:2205.05198)."""
    norms: tuple[str, ...]
    """Normalisations, which then read a worker's own tokens."""
    several: Mapping[str, int] = field(default_factory=dict)
    """The layers of `by_outputs` whose outputs are several vectors after each other: how many. A worker has its share
    of each."""
    inside: tuple[str, ...] = ()
    """Dropout between two products: of a worker's own numbers, with masks of its own."""


_BERT = Cut(
    (*(f"attention.self.{name}" for name in ("query", "key", "value")), "intermediate.dense"),
    ("attention.output.dense", "output.dense"),
    ("attention.self", "intermediate"),
    ("attention.output.LayerNorm", "output.LayerNorm"),
)
CUTS: Mapping[str, Cut] = {
    **dict.fromkeys(("bert", "electra", "roberta", "xlm-roberta", "camembert"), _BERT),
    "distilbert": Cut(
        ("attention.q_lin", "attention.k_lin", "attention.v_lin", "ffn.lin1"),
        ("attention.out_lin", "ffn.lin2"),
        ("attention", "ffn"),
        ("sa_layer_norm", "output_layer_norm"),
    ),
    "modernbert": Cut(
        ("attn.Wqkv", "mlp.Wi"),
        ("attn.Wo", "mlp.Wo"),
        ("attn", "mlp"),
        ("attn_norm", "mlp_norm"),
        several={"attn.Wqkv": 3, "mlp.Wi": 2},
        inside=("mlp.drop",),
    ),
}
"""By model type."""


DRAWS: Mapping[str | None, Any] = {unpadded.NAME: dropout.mask, unpadded.STOCK_DROPOUT: dropout.stock_salted}
"""What draws masks of dropout for workers that have some of the numbers each, by the name of a network's attention."""


def drop_apart(layers: "torch.nn.Module", place: int) -> None:
    """Let dropout between layers' products take a worker's own tokens, with masks of its own."""
    import torch

    for layer in layers.modules():
        if type(layer) is torch.nn.Dropout:
            layer.forward = partial(_drop_own, layer, place)  # type: ignore[method-assign]


def drop_inside(network: Any, layers: "torch.nn.Module", place: int) -> None:
    """Let dropout between two products, which is of a worker's own numbers, have masks of its own."""
    import torch

    draw = DRAWS.get(getattr(network, unpadded.MARK, None), dropout.stock_salted)
    for layer in layers.children():
        for name in CUTS[network.config.model_type].inside:
            part = layer.get_submodule(name)
            if type(part) is torch.nn.Dropout:
                part.forward = partial(dropout.drop, part, salt=place, draw=draw)  # type: ignore[method-assign]


def _drop_own(layer: "torch.nn.Dropout", place: int, values: "torch.Tensor") -> "torch.Tensor":
    from torch.distributed.tensor import DTensor

    if not isinstance(values, DTensor):
        return dropout.drop(layer, values)
    own = dropout.drop(layer, values.to_local(), place)
    found: torch.Tensor = DTensor.from_local(
        own, values.device_mesh, values.placements, run_check=False, shape=values.shape, stride=values.stride()
    )
    return found


def keep_share(network: "transformers.PreTrainedModel", layers: "torch.nn.Module", table: Any, parts: int) -> None:
    """Leave of a network what the first of `parts` workers has of it, without the others and their sums: layers, and
    the `table` of words if there is one. For what is asked of shapes alone."""
    import torch

    cut = CUTS[network.config.model_type]

    def shorten(part: Any, name: str, axis: int) -> None:
        weight = getattr(part, name)
        size = -(-weight.shape[axis] // parts)
        share = weight.detach().narrow(axis, 0, size).clone()
        setattr(part, name, torch.nn.Parameter(share, requires_grad=weight.requires_grad))

    for layer in layers.children():
        for path in cut.by_outputs:
            for name, _ in list(layer.get_submodule(path).named_parameters()):
                shorten(layer.get_submodule(path), name, 0)
        for path in cut.by_inputs:
            shorten(layer.get_submodule(path), "weight", 1)
    if table is not None:
        shorten(table, "weight", 0)
    _count_heads(network, parts)


def keep_tokens(network: "transformers.PreTrainedModel", parts: int, place: int, attend: Any) -> None:
    """Tell a network that its tokens are cut into `parts`, of which it has number `place`. `attend`: attention that is
    called with that of a pack, and then as this is; it gives the other a share of the heads.

    Dropout has masks of its own in the encoder, whose tokens others have not, and the same on all workers in the head.
    """
    import torch

    draw = DRAWS[getattr(network, unpadded.MARK)]
    for part in network.base_model.modules():
        if type(part) is torch.nn.Dropout:
            part.forward = partial(dropout.drop, part, salt=place, draw=draw)  # type: ignore[method-assign]
    _register(network, f"tokens_{place}_of_{parts}", partial(attend, _apart(network, place)))
    _count_heads(network, parts)


def keep_heads(network: "transformers.PreTrainedModel", parts: int, place: int) -> None:
    """Tell a network that its attention heads are cut into `parts`, of which it has number `place`.

    A worker's heads must not drop what the same heads of the others drop: its masks of attention's dropout are its own,
    while all other masks stay the same on all workers of a replica.
    """
    if not unpadded.enabled(network):
        return
    _register(network, f"{place}_of_{parts}", _apart(network, place))
    _count_heads(network, parts)


def _apart(network: Any, place: int) -> Any:
    """Attention of a pack, with masks of dropout of a worker's own."""
    return partial(attention.packed, draw=partial(DRAWS[getattr(network, unpadded.MARK)], salt=place))


def _register(network: Any, suffix: str, attend: Any) -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    name = f"{getattr(network, unpadded.MARK)}_{suffix}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, unpadded.mask)
    network.set_attn_implementation(name)


def _count_heads(network: Any, parts: int) -> None:
    setattr(network, unpadded.HEADS, network.config.num_attention_heads // parts)
