"""transformers' classes of networks, by name, without what they import in vain."""

import sys
from collections.abc import Mapping
from typing import Any

ENCODERS = frozenset(
    {
        *("albert", "bert", "camembert", "deberta-v2", "distilbert", "electra", "ernie", "longformer", "modernbert"),
        *("mpnet", "nomic_bert", "roberta", "xlm-roberta"),
    }
)
"""Common encoders. For another architecture transformers' tables are imported, which takes seconds."""
READS_BOTH_WAYS = frozenset({"xlnet"})
"""Architectures that predict the next token and still let each token read those after it."""


def generator(config: Mapping[str, Any]) -> str | None:
    """What a model that writes text is, by its config.json: `a decoder`, `an encoder-decoder`; None for an encoder."""
    kind = config.get("model_type")
    if config.get("is_encoder_decoder"):
        return "an encoder-decoder"
    if config.get("is_decoder"):
        return "a decoder"
    if kind in ENCODERS or kind in READS_BOTH_WAYS:
        return None
    auto_class("AutoConfig")  # its own way of importing
    from transformers.models.auto import modeling_auto as tables

    if kind in tables.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return "an encoder-decoder"
    is_causal = kind in tables.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return "a decoder" if is_causal and kind not in tables.MODEL_FOR_MASKED_LM_MAPPING_NAMES else None


def auto_class(name: str) -> Any:
    """One of transformers' auto classes, such as `AutoModelForSequenceClassification`.

    With any of them come the losses of object detection, and with these scipy's optimizers, if scipy is there: of the
    start of every worker 0.25 s of a core, and 30 MB. They are told that it is not.
    """
    import transformers

    if "transformers.loss.loss_utils" not in sys.modules:
        named: Any = transformers.utils
        known, named.is_scipy_available = named.is_scipy_available, lambda: False
        try:
            import transformers.loss.loss_utils
        finally:
            named.is_scipy_available = known
    return getattr(transformers, name)
