"""Encoders without padding: the windows of a micro-batch form one sequence, and only attention separates them.

All modules of an encoder except attention compute each token by itself. So a micro-batch is one sequence [1, tokens] of
all its windows (Zeng et al. 2022, arXiv:2208.08124, "Boosting Distributed Training Performance of the Unpadded BERT
Model"). Attention pads and multiplies windows of similar length together.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rtrain.core.ragged import Int32s, Ints, TokenBatch
from rtrain.models import attention, dropout as masks, long_texts
from rtrain.models.device import effective_type, to_device
from rtrain.models.network_parts import LAYOUT
from rtrain.models.pack_layout import PackLayout, make_layout

if TYPE_CHECKING:
    import torch
    import transformers

ATTENTION_NAME = "rtrain_packed"
"""Name of the attention implementation in Transformers."""
TORCH_DROPOUT_NAME = "rtrain_packed_torch_dropout"
"""Name of the implementation with torch's dropout masks."""
ENABLED_ATTRIBUTE = "rtrain_packed_attention"
"""Attribute of a packed network: the name of its attention. Copies of the network keep it."""
HEADS_ATTRIBUTE = "rtrain_heads"
"""Attribute of a network with a shard of the attention heads: their number."""
SHARED_INPUT_NAMES = {"query", "q_lin"}
"""Names of a linear layer that shares its input with two others; they identify an attention layer."""
FIRST_POSITION: Mapping[str, Callable[[Any], int]] = {
    "bert": lambda config: 0,
    "distilbert": lambda config: 0,
    "electra": lambda config: 0,
    "roberta": lambda config: config.pad_token_id + 1,
    "xlm-roberta": lambda config: config.pad_token_id + 1,
    "camembert": lambda config: config.pad_token_id + 1,
    "modernbert": lambda config: 0,
}
"""Architectures whose packed outputs are verified, with the position of a text's first token."""


def supports_packing(network: Any) -> bool:
    """Whether the network's encoder can be packed and is separate from its head."""
    return network.config.model_type in FIRST_POSITION and network.base_model is not network


def enable_packing(network: "transformers.PreTrainedModel", head: str, *, fast_dropout: bool = True) -> None:
    """Enable calls of `network` with `make_inputs`.

    Args:
        head: The input of the head for each window: the `first` token, the `mean` of all, or each of the `tokens`.
        fast_dropout: Draw masks by `rtrain.models.dropout`.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    name, draw = (ATTENTION_NAME, masks.draw_mask) if fast_dropout else (TORCH_DROPOUT_NAME, masks.draw_torch_mask)
    AttentionInterface.register(name, partial(attention.packed_attention, draw=draw))
    AttentionMaskInterface.register(name, make_mask)
    network.set_attn_implementation(name)
    setattr(network, ENABLED_ATTRIBUTE, name)
    for module in network.modules():
        if SHARED_INPUT_NAMES & {name for name, _ in module.named_children()}:
            module.register_forward_pre_hook(_cast_input)
    if fast_dropout:
        masks.use_fast_dropout(network)
    if head != "tokens":
        encoder: Any = network.base_model
        encoder.register_forward_hook(partial(_select_head_input, head), with_kwargs=True)


def is_packed(network: Any) -> bool:
    """Whether the network can be called with `make_inputs`."""
    return bool(getattr(network, ENABLED_ATTRIBUTE, False))


def count_computed_tokens(network: Any, lengths: Int32s) -> int:
    """Number of tokens that the network computes for windows of these lengths, with or without padding."""
    return int(lengths.sum()) if is_packed(network) else len(lengths) * int(lengths.max())


def make_inputs(network: Any, tokens: TokenBatch, device: "torch.device") -> tuple[dict[str, Any], Ints]:
    """Make the inputs of a packed network: tensors [1, tokens] and the layout; and the index in the pack of each token
    of the micro-batch."""
    config = network.config
    layout = make_layout(
        tokens,
        getattr(network, HEADS_ATTRIBUTE, config.num_attention_heads),
        device,
        long_texts.attention_window(config),
    )
    offsets = np.arange(len(tokens.ids)) - np.repeat(
        np.cumsum(tokens.window_lengths) - tokens.window_lengths, tokens.window_lengths
    )
    positions = offsets + (first := FIRST_POSITION[config.model_type](config))
    if first and (padding := tokens.ids == config.pad_token_id).any():
        # These models do not count padding tokens in positions, and a masked text may contain padding tokens.
        text_tokens = np.cumsum(~padding)
        text_tokens_before = np.repeat(
            (text_tokens - ~padding)[np.cumsum(tokens.window_lengths) - tokens.window_lengths], tokens.window_lengths
        )
        positions = config.pad_token_id + np.where(padding, 0, text_tokens - text_tokens_before)
    columns = {
        "input_ids": tokens.ids.astype(np.int64),
        "position_ids": positions,
        "token_type_ids": (offsets >= np.repeat(tokens.pair_start, tokens.window_lengths)).astype(np.int64),
    }
    inputs = {name: to_device(values[layout.order], device)[None] for name, values in columns.items()}
    pack_positions = np.empty_like(layout.order)
    pack_positions[layout.order] = np.arange(len(pack_positions))
    return {**inputs, LAYOUT: layout}, pack_positions


def make_mask(**kwargs: Any) -> Any:
    """The mask of padded inputs in the format of Transformers; None for a pack.

    The mask is boolean: with an additive mask, padding that reads no token would give NaN.
    """
    return None if kwargs["attention_mask"] is None else long_texts.make_mask(**kwargs)


def _cast_input(attention: Any, inputs: tuple[Any, ...]) -> Any:
    """Cast the input of an attention layer to the autocast dtype on a GPU. Autocast itself would cast it for each of
    the three products and add their gradients in fp32, which takes a GPU as long as the products."""
    import torch

    if not inputs:  # called by keyword, whose name depends on the architecture
        return None
    device = inputs[0].device
    if effective_type(device) != "cuda" or not torch.is_autocast_enabled(device.type):
        return None
    return inputs[0].to(torch.get_autocast_dtype(device.type)), *inputs[1:]


def _select_head_input(head: str, encoder: Any, inputs: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
    """Replace the encoder's output for a pack by the vectors that the head reads, as windows of one token [windows, 1,
    hidden]."""
    import torch

    layout: PackLayout | None = kwargs.get(LAYOUT)
    if layout is None:
        return output
    hidden = output.last_hidden_state.squeeze(0)
    if head == "first":
        pooled = hidden.index_select(0, layout.starts)
    else:
        fp32_hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        means = torch.segment_reduce(fp32_hidden, "mean", lengths=layout.lengths, axis=0)
        pooled = means.index_select(0, layout.pack_index).to(hidden.dtype)
    output.last_hidden_state = pooled[:, None]
    if "pooler_output" in type(output).__dataclass_fields__:
        pooler = getattr(encoder, "pooler", None)
        # The encoder's pooler read only the pack's first token, so it is called again.
        output.pooler_output = pooled if pooler is None else pooler(output.last_hidden_state)
    return output
