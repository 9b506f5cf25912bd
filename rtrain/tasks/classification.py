"""One label per text: intents, sentiments, topics, clauses."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rtrain.errors import UserError
from rtrain.tasks.base import Encoded, Floats, Ints

if TYPE_CHECKING:
    import tokenizers
    import torch


class Classification:
    name = "classification"
    output = "classes"
    auto_model = "AutoModelForSequenceClassification"

    def labels(self, counts: Mapping[str, int]) -> tuple[str, ...]:
        if len(counts) < 2:
            found = ", ".join(repr(label) for label in counts) or "none"
            raise UserError(
                f"data.label: the training rows have one class only ({found}); a classifier needs at least two. "
                "Add rows of another label, or name another column with --set data.label=COLUMN."
            )
        return tuple(sorted(counts))

    def targets(self, labels: Sequence[str], names: tuple[str, ...]) -> Ints:
        index = {name: position for position, name in enumerate(names)}
        return np.fromiter((index.get(label, -1) for label in labels), dtype=np.int64, count=len(labels))

    def encode(
        self, tokenizer: "tokenizers.Tokenizer", texts: Sequence[str], pairs: Sequence[str] | None = None
    ) -> list[Encoded]:
        rows = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
        encoded = []
        for row in tokenizer.encode_batch(rows):
            types = row.type_ids
            second = types.index(1) if 1 in types else len(types)
            encoded.append(Encoded(row.ids, second, bool(row.overflowing)))
        return encoded

    def loss(self, logits: "torch.Tensor", targets: "torch.Tensor") -> dict[str, tuple["torch.Tensor", int]]:
        import torch

        # Cross-entropy of bf16 logits loses the small differences that matter late in training. float64 stays: proofs.
        wide = torch.promote_types(logits.dtype, torch.float32)
        total = torch.nn.functional.cross_entropy(logits.to(wide), targets, reduction="sum")
        return {"loss": (total, targets.numel())}

    def decode(self, logits: Floats, names: tuple[str, ...], parameters: Mapping[str, Any]) -> list[Any]:
        """`[{"label", "score"}, ...]` per row, best first; `top_k` limits the list (default: all labels)."""
        top = parameters.get("top_k") or len(names)
        shifted = np.exp(logits - logits.max(axis=1, keepdims=True), dtype=np.float64)
        scores = shifted / shifted.sum(axis=1, keepdims=True)
        # A stable sort: equal scores keep the label order on every machine.
        order = np.argsort(-scores, axis=1, kind="stable")[:, :top]
        return [
            [{"label": names[column], "score": float(row[column])} for column in columns]
            for row, columns in zip(scores, order, strict=True)
        ]


TASK = Classification()
