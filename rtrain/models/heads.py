"""A head that a model's folder brings along: which of its outputs answers which label of the run.

`AutoModelFor...` takes over a head that has as many outputs as the run has labels, whatever its outputs are called: a
model that told ham from spam would start by telling negative from positive, and one whose labels stand in another order
would start with its answers mixed up.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import transformers

NAMED = ("ForSequenceClassification", "ForTokenClassification")
"""Ends of the names of the classes whose outputs are named by `id2label`. The outputs of others, of spans and of masked
tokens, mean the same in every model."""
_NUMBERED = re.compile(r"LABEL_\d+")
"""What transformers calls an output that nobody has named."""


def places(document: Mapping[str, Any], auto_model: str, labels: Sequence[str]) -> list[int] | None:
    """For each of `labels` the output of the folder's head that answers it; None where the head answers others.

    `document`: the folder's config.json; `auto_model`: the class that is to load it. As they stand, where the outputs
    have no names, where they are not as many as the labels, and where there is one alone, which is a number.
    """
    found = document.get("id2label") or {}
    names = [str(found[number]) for number in sorted(found, key=int)]
    if not auto_model.endswith(NAMED) or len(names) != len(labels) or len(labels) < 2:
        return list(range(len(labels)))
    if set(names) == set(labels):
        return [names.index(label) for label in labels]
    return list(range(len(labels))) if all(map(_NUMBERED.fullmatch, names)) else None


def told(document: Mapping[str, Any], auto_model: str, labels: Sequence[str]) -> dict[str, Any] | None:
    """What a run's log is to say of a head with as many outputs that is not taken over, since it answers other labels;
    None where nothing."""
    has_head = any(name.endswith(NAMED) for name in document.get("architectures") or ())
    if not has_head or places(document, auto_model, labels) is not None:
        return None
    return {"answers": sorted(map(str, document["id2label"].values()))}


def fit(network: "transformers.PreTrainedModel", order: Sequence[int] | None, drawn: Collection[str]) -> None:
    """Put the outputs of the head into the labels' order, or draw them anew where `order` is None.

    They are what the last linear layer outside of the encoder gives. One that was `drawn`, not read, stays as it is.
    """
    if order is not None and list(order) == sorted(order):
        return
    import torch

    encoder = f"{network.base_model_prefix}."
    layers: list[tuple[str, torch.nn.Linear]] = [
        (name, layer)
        for name, layer in network.named_modules()
        if isinstance(layer, torch.nn.Linear) and not name.startswith(encoder)
    ]
    name, last = layers[-1]
    if f"{name}.weight" in drawn:
        return
    with torch.no_grad():
        for parameter in last.parameters():
            if order is not None:
                parameter.copy_(parameter[order])
            elif parameter.ndim == 1:
                parameter.zero_()
            else:
                parameter.normal_(0.0, getattr(network.config, "initializer_range", 0.02))
