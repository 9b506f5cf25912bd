"""Transformers' auto classes by name, without their unneeded imports."""

import sys
from collections.abc import Mapping
from typing import Any

ENCODERS = frozenset(
    {
        *("albert", "bert", "camembert", "deberta-v2", "distilbert", "electra", "ernie", "longformer", "modernbert"),
        *("mpnet", "nomic_bert", "roberta", "xlm-roberta"),
    }
)
"""Common encoders. Other architectures need transformers' import tables, which takes seconds."""
BIDIRECTIONAL = frozenset({"xlnet"})
"""Architectures that predict the next token although each token reads the tokens after it."""


def describe_generator(config: Mapping[str, Any]) -> str | None:
    """Describe a model that generates text by its config.json: `a decoder` or `an encoder-decoder`; None for an
    encoder."""
    model_type = config.get("model_type")
    if config.get("is_encoder_decoder"):
        return "an encoder-decoder"
    if config.get("is_decoder"):
        return "a decoder"
    if model_type in ENCODERS or model_type in BIDIRECTIONAL:
        return None
    auto_class("AutoConfig")  # a lazy import of transformers
    from transformers.models.auto import modeling_auto as tables

    if model_type in tables.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return "an encoder-decoder"
    is_causal = model_type in tables.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return "a decoder" if is_causal and model_type not in tables.MODEL_FOR_MASKED_LM_MAPPING_NAMES else None


def auto_class(name: str) -> Any:
    """One of transformers' auto classes, such as `AutoModelForSequenceClassification`.

    Each of them imports the losses of object detection, which import scipy's optimizers if scipy is installed: 0.25 s
    of a core and 30 MB at the start of every worker. So scipy is hidden during the import.
    """
    import transformers

    if "transformers.loss.loss_utils" not in sys.modules:
        utils: Any = transformers.utils
        is_scipy_available, utils.is_scipy_available = utils.is_scipy_available, lambda: False
        try:
            import transformers.loss.loss_utils
        finally:
            utils.is_scipy_available = is_scipy_available
    return getattr(transformers, name)
