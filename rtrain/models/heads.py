"""Reuse of the head of a model folder: the mapping from its outputs to the labels of the run.

`AutoModelFor...` loads any head with as many outputs as the run has labels, whatever their names. A spam classifier
would start as a sentiment classifier, and a head with reordered labels would start with wrong answers.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import transformers

LABELED_HEADS = ("ForSequenceClassification", "ForTokenClassification")
"""Suffixes of classes whose outputs are named by `id2label`. Outputs of span and masked-token heads mean the same in
every model."""
_UNNAMED_LABEL = re.compile(r"LABEL_\d+")
"""Transformers' default name of an output."""


def label_order(document: Mapping[str, Any], auto_model: str, labels: Sequence[str]) -> list[int] | None:
    """For each of `labels` the index of the output that answers it; None if the head answers other labels.

    The order stays unchanged if the outputs have default names, if there are not as many as labels, or if there is a
    single one (regression).

    Args:
        document: The folder's config.json.
        auto_model: The class that loads the folder.
    """
    id2label = document.get("id2label") or {}
    names = [str(id2label[number]) for number in sorted(id2label, key=int)]
    if not auto_model.endswith(LABELED_HEADS) or len(names) != len(labels) or len(labels) < 2:
        return list(range(len(labels)))
    if set(names) == set(labels):
        return [names.index(label) for label in labels]
    return list(range(len(labels))) if all(map(_UNNAMED_LABEL.fullmatch, names)) else None


def event_fields(document: Mapping[str, Any], auto_model: str, labels: Sequence[str]) -> dict[str, Any] | None:
    """Describe a head with the right number of outputs but other labels, for the log; None if there is no such head."""
    has_head = any(name.endswith(LABELED_HEADS) for name in document.get("architectures") or ())
    if not has_head or label_order(document, auto_model, labels) is not None:
        return None
    return {"answers": sorted(map(str, document["id2label"].values()))}


def align_head_to_labels(
    network: "transformers.PreTrainedModel", order: Sequence[int] | None, new_weights: Collection[str]
) -> None:
    """Reorder the outputs of the head to the labels' order, or initialize them anew if `order` is None.

    The outputs belong to the last linear layer outside the encoder. A layer in `new_weights` was not loaded and stays
    as it is.
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
    if f"{name}.weight" in new_weights:
        return
    with torch.no_grad():
        for parameter in last.parameters():
            if order is not None:
                parameter.copy_(parameter[order])
            elif parameter.ndim == 1:
                parameter.zero_()
            else:
                parameter.normal_(0.0, getattr(network.config, "initializer_range", 0.02))
