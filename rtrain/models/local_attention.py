"""Local attention for models that were made to read all tokens: each token reads those near it and the text's first
one, which reads all and is read by all (Beltagy et al. 2020, arXiv:2004.05150: sliding windows and global attention,
which have the same weights here).

How far is a fact of the model's config.json. Transformers alone knows nothing of it and would read all tokens, so an
artefact's head is guarded (`rtrain.models.pooling`).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rtrain.core.errors import Problem
from rtrain.models import position_embeddings

if TYPE_CHECKING:
    import torch

KEY = "rtrain_local_attention"
"""Name in config.json of the tokens that a token reads on either side."""
FACT = "local_attention"
"""Name of the same fact of an artefact."""
NAME = "rtrain_local"
"""The name by which Transformers knows the attention of padded texts."""


def reach(config: Any) -> int | None:
    """Tokens that a token of a model with this configuration reads on either side; None where it reads all, or where
    the architecture has a way of its own."""
    found: int | None = getattr(config, KEY, None)
    return found


def problems(settings: Mapping[str, Any], asked: int | None) -> list[Problem]:
    """What is wrong with `asked` for a model with these settings (config.json)."""
    kind = settings.get("model_type")
    if asked is None or kind in position_embeddings.TABLES:
        return []
    reason = f"{kind} is none of those whose attention can be made local ({', '.join(position_embeddings.TABLES)})"
    return [Problem("model.local_attention", asked, reason, "write null", code="unsupported")]


def limit(network: Any, asked: int) -> None:
    """Let each token read so many on either side, and the first."""
    setattr(network.config, KEY, asked)
    attend(network)


def attend(network: Any) -> None:
    """Give a network whose configuration asks for it local attention of padded texts."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface

    if reach(network.config) is not None:
        AttentionInterface.register(NAME, sdpa_attention_forward)
        AttentionMaskInterface.register(NAME, mask)
        network.set_attn_implementation(NAME)


def mask(**named: Any) -> Any:
    """The mask of padded texts [windows, 1, tokens, tokens], in the form that Transformers asks for; of a model that
    reads all, of what is no padding."""
    from transformers.masking_utils import and_masks, sdpa_mask

    most = reach(named["config"])
    if most is not None:

        def close(batch: "torch.Tensor", head: "torch.Tensor", reads: "torch.Tensor", read: "torch.Tensor") -> Any:
            return near(reads, read, most)

        named |= {"mask_function": and_masks(named["mask_function"], close), "allow_is_bidirectional_skip": False}
    return sdpa_mask(**named)


def near(reads: "torch.Tensor", read: "torch.Tensor", most: int) -> "torch.Tensor":
    """Whether a token at one place of a text reads the one at another."""
    found: torch.Tensor = (reads == 0) | (read == 0) | ((reads - read).abs() <= most)
    return found
