"""Encoders that compute no padding: a pass's tokens are one line, and only attention sees which window each is of.

Everything in an encoder but attention answers each token by itself, so a pass is one sequence [1, tokens] of all of its
windows, one after another (Zeng et al. 2022, arXiv:2208.08124, "Boosting Distributed Training Performance of the
Unpadded BERT Model"). Inside attention, windows of about equal length are padded and multiplied together.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rtrain.core.ragged import Int32s, Ints, Tokens
from rtrain.models import attention, dropout as masks, local_attention
from rtrain.models.device import kind, moved
from rtrain.models.forward import LAYOUT
from rtrain.models.pack_layout import Layout, layout_of

if TYPE_CHECKING:
    import torch
    import transformers

NAME = "rtrain_packed"
"""The name by which Transformers knows the attention implementation."""
STOCK_DROPOUT = "rtrain_packed_stock_dropout"
"""The name of the implementation whose masks of dropout are drawn by torch."""
MARK = "rtrain_packs"
"""Attribute of a network that computes no padding, the name of its attention; copies of the network have it too."""
HEADS = "rtrain_heads"
"""Attribute of a network that has a share of the attention heads: how many."""
SHARES = {"query", "q_lin"}
"""Names of a product whose input is that of two others, by which an attention layer is known."""
FIRST_POSITION: Mapping[str, Callable[[Any], int]] = {
    "bert": lambda config: 0,
    "distilbert": lambda config: 0,
    "electra": lambda config: 0,
    "roberta": lambda config: config.pad_token_id + 1,
    "xlm-roberta": lambda config: config.pad_token_id + 1,
    "camembert": lambda config: config.pad_token_id + 1,
    "modernbert": lambda config: 0,
}
"""Architectures whose encoders are known to give the same answers packed, and the position of a text's first token."""


def supports(network: Any) -> bool:
    """Whether the network's encoder can be packed, and its head told from it."""
    return network.config.model_type in FIRST_POSITION and network.base_model is not network


def enable(network: "transformers.PreTrainedModel", head: str, *, fast_dropout: bool = True) -> None:
    """Let `network` be called with `inputs_of`. `head`: what its head reads, of each window the `first` token or the
    `mean` of all, or each of the `tokens`. `fast_dropout`: draw masks as `rtrain.models.dropout` does."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    name, draw = (NAME, masks.mask) if fast_dropout else (STOCK_DROPOUT, masks.stock)
    AttentionInterface.register(name, partial(attention.packed, draw=draw))
    AttentionMaskInterface.register(name, mask)
    network.set_attn_implementation(name)
    setattr(network, MARK, name)
    for module in network.modules():
        if SHARES & {name for name, _ in module.named_children()}:
            module.register_forward_pre_hook(_cast)
    if fast_dropout:
        masks.replace(network)
    if head != "tokens":
        encoder: Any = network.base_model
        encoder.register_forward_hook(partial(_by_window, head), with_kwargs=True)


def enabled(network: Any) -> bool:
    """Whether the network may be called with `inputs_of`."""
    return bool(getattr(network, MARK, False))


def computed(network: Any, lengths: Int32s) -> int:
    """Tokens that the network computes for a pass over windows of these `lengths`: with padding, or without."""
    return int(lengths.sum()) if enabled(network) else len(lengths) * int(lengths.max())


def inputs_of(network: Any, tokens: Tokens, device: "torch.device") -> tuple[dict[str, Any], Ints]:
    """What an enabled network is called with: tensors [1, tokens] and the layout; and where in the pack each of the
    pass's tokens is."""
    config = network.config
    layout = layout_of(
        tokens, getattr(network, HEADS, config.num_attention_heads), device, local_attention.reach(config)
    )
    inside = np.arange(len(tokens.ids)) - np.repeat(np.cumsum(tokens.lengths) - tokens.lengths, tokens.lengths)
    positions = inside + (first := FIRST_POSITION[config.model_type](config))
    if first and (padding := tokens.ids == config.pad_token_id).any():
        # These models do not count padding, wherever it stands: a masked text may have such a piece drawn.
        counted = np.cumsum(~padding)
        before = np.repeat((counted - ~padding)[np.cumsum(tokens.lengths) - tokens.lengths], tokens.lengths)
        positions = config.pad_token_id + np.where(padding, 0, counted - before)
    columns = {
        "input_ids": tokens.ids.astype(np.int64),
        "position_ids": positions,
        "token_type_ids": (inside >= np.repeat(tokens.second, tokens.lengths)).astype(np.int64),
    }
    inputs = {name: moved(values[layout.order], device)[None] for name, values in columns.items()}
    places = np.empty_like(layout.order)
    places[layout.order] = np.arange(len(places))
    return {**inputs, LAYOUT: layout}, places


def mask(**named: Any) -> Any:
    """The mask of padded inputs, in the form that Transformers asks for; a pack has none.

    As truth values: of a token of padding that reads none of a text, numbers would make an answer that is no number.
    """
    return None if named["attention_mask"] is None else local_attention.mask(**named)


def _cast(attention: Any, inputs: tuple[Any, ...]) -> Any:
    """On a GPU in half precision, an attention layer's input in that type. Autocast would cast it for each of its three
    products, and add their gradients in fp32: passes over all of a layer's numbers, which take a GPU as long as
    products do."""
    import torch

    if not inputs:  # called by name: what it is called is the architecture's
        return None
    where = inputs[0].device
    if kind(where) != "cuda" or not torch.is_autocast_enabled(where.type):
        return None
    return inputs[0].to(torch.get_autocast_dtype(where.type)), *inputs[1:]


def _by_window(head: str, encoder: Any, inputs: Any, named: Mapping[str, Any], output: Any) -> Any:
    """The encoder's answers for a pack as those of windows of one token [windows, 1, hidden]: what a head reads."""
    import torch

    layout: Layout | None = named.get(LAYOUT)
    if layout is None:
        return output
    hidden = output.last_hidden_state.squeeze(0)
    if head == "first":
        chosen = hidden.index_select(0, layout.starts)
    else:
        exact = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        means = torch.segment_reduce(exact, "mean", lengths=layout.lengths, axis=0)
        chosen = means.index_select(0, layout.window).to(hidden.dtype)
    output.last_hidden_state = chosen[:, None]
    if "pooler_output" in type(output).__dataclass_fields__:
        pooler = getattr(encoder, "pooler", None)
        # The encoder gave its pooler the pack's first token alone, so the pooler is called again.
        output.pooler_output = chosen if pooler is None else pooler(output.last_hidden_state)
    return output
