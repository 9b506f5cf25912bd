"""Local attention for models that were trained with full attention: each token reads its neighbors and the text's first
token, which reads all tokens and is read by all (Beltagy et al. 2020, arXiv:2004.05150: sliding windows and global
attention, here with the same weights).

config.json holds the window. Transformers ignores it and would read all tokens, so the head of such an artifact is
guarded (`rtrain.models.pooling`).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rtrain.core.errors import Problem
from rtrain.models import position_embeddings

if TYPE_CHECKING:
    import torch

CONFIG_KEY = "rtrain_attention_window"
"""Key of config.json: tokens that a token reads on either side."""
FACT = "attention_window"
"""Key of the same fact in an artifact."""
ATTENTION_NAME = "rtrain_local"
"""Name of the attention implementation for padded texts in Transformers."""


def attention_window(config: Any) -> int | None:
    """Tokens that a token of this model reads on either side; None for full attention and for architectures with their
    own local attention."""
    window: int | None = getattr(config, CONFIG_KEY, None)
    return window


def check_attention_window(settings: Mapping[str, Any], requested_window: int | None) -> list[Problem]:
    """Problems of `requested_window` for a model with these settings (config.json)."""
    model_type = settings.get("model_type")
    if requested_window is None or model_type in position_embeddings.TABLE_ARCHITECTURES:
        return []
    reason = (
        f"attention of {model_type} cannot be made local, only of {', '.join(position_embeddings.TABLE_ARCHITECTURES)}"
    )
    return [Problem("model.attention_window", requested_window, reason, "write null", code="unsupported")]


def set_attention_window(network: Any, window: int) -> None:
    """Restrict attention to `window` tokens on either side and the first token."""
    setattr(network.config, CONFIG_KEY, window)
    enable_local_attention(network)


def enable_local_attention(network: Any) -> None:
    """Enable local attention of padded texts if the network's configuration asks for it."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface

    if attention_window(network.config) is not None:
        AttentionInterface.register(ATTENTION_NAME, sdpa_attention_forward)
        AttentionMaskInterface.register(ATTENTION_NAME, make_mask)
        network.set_attn_implementation(ATTENTION_NAME)


def make_mask(**kwargs: Any) -> Any:
    """The mask of padded texts [windows, 1, tokens, tokens] in the format of Transformers. Without a window only
    padding is masked."""
    from transformers.masking_utils import and_masks, sdpa_mask

    window = attention_window(kwargs["config"])
    if window is not None:

        def is_in_window(
            batch: "torch.Tensor", head: "torch.Tensor", q_idx: "torch.Tensor", kv_idx: "torch.Tensor"
        ) -> Any:
            return window_mask(q_idx, kv_idx, window)

        kwargs |= {
            "mask_function": and_masks(kwargs["mask_function"], is_in_window),
            "allow_is_bidirectional_skip": False,
        }
    return sdpa_mask(**kwargs)


def window_mask(queries: "torch.Tensor", keys: "torch.Tensor", window: int) -> "torch.Tensor":
    """Whether the token at a position of a text reads the token at another position."""
    visible: torch.Tensor = (queries == 0) | (keys == 0) | ((queries - keys).abs() <= window)
    return visible
