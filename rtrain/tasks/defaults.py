"""The base class of tasks: what most of them have in common. One text or two, one loss, nothing to calibrate."""

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rtrain.core.ragged import Encoded, Floats, Head, Ints, Outputs, Ragged, Tokens
from rtrain.tasks import base
from rtrain.tasks.encode import encode

if TYPE_CHECKING:
    import tokenizers
    import torch

EXAMPLES = (
    "Where is my parcel? It was due on Monday, and nobody came to the door.",
    "Thank you for the quick answer, everything works again now.",
    "The card was declined twice although there is money on the account.",
    "The first half drags, but the last scene is worth the whole evening.",
)


class Defaults:
    """A task overrides what differs, and adds `name`, `output`, `auto_model`, `by_token`, `head`, `targets`, `counts`,
    `loss`, `imitation`, `outputs`, `outcomes`, `describe` and `decode`."""

    fields = ("text", "text_pair")
    needs_pair = False
    reads_pair = True
    """Where False, a second text is left out."""
    never_cuts = False
    rule_of_marks = 1
    reads_special = False
    prepares = False
    packs = False
    varies: base.Variation = "nothing"
    problem_type: base.ProblemType = None
    has_standard_head = True
    finds_outside = False
    smooths = False

    def is_blank(self, text: str, pair: str | None) -> bool:
        reads_pair = self.reads_pair and not self.needs_pair
        return not text.strip() and not (reads_pair and (pair or "").strip())

    def flaw(self, text: str, pair: str | None, label: str) -> str | None:
        return None

    def encode(
        self,
        tokenizer: "tokenizers.Tokenizer",
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        max_windows: int = 1,
    ) -> list[Encoded]:
        return encode(tokenizer, texts, pairs if self.reads_pair else None, max_windows)

    def marks(self, text: str, pair: str | None, label: str, encoded: Encoded) -> list[int]:
        return []

    def stand_in(self, text: str, head: Head) -> str:
        return head.labels[0]

    def prepare(self, tokens: Tokens, head: Head, seed: int, epoch: int) -> Tokens:
        return tokens

    def wanted(self, tokens: Tokens, head: Head) -> Ints | None:
        return None

    def parts(self, head: Head) -> tuple[str, ...]:
        return ("loss",)

    def calibrate(self, outcomes: Ragged, targets: Ragged, head: Head) -> dict[str, Any]:
        return {}

    def alone(self, answer: Any) -> Any:
        return [answer]

    def columns(self, head: Head) -> list[base.Column]:
        return [base.Column("answer", object, lambda answer: answer)]

    def thresholds(self, head: Head) -> Mapping[str, float] | None:
        return None

    def asks(self, texts: Sequence[str], head: Head) -> list[base.Input]:
        if not self.needs_pair:
            return list(texts)
        return [dict(zip(self.fields, pair, strict=True)) for pair in itertools.pairwise(texts)]

    def examples(self, head: Head) -> list[base.Input]:
        return list(EXAMPLES)

    def judge(self, answers: Sequence[Any], labels: Sequence[str]) -> dict[str, float]:
        return {}


class TokenTask(Defaults):
    """What tasks share whose model answers each token of long texts."""

    auto_model = "AutoModelForTokenClassification"
    by_token = True
    never_cuts = True

    def targets(self, labels: Sequence[str], marks: Ragged, head: Head) -> base.Targets:
        return base.Targets(
            Ragged(marks.values.astype(np.float32), marks.counts), np.zeros(len(labels), dtype=np.bool_)
        )

    def outputs(self, logits: Floats, tokens: Tokens, head: Head) -> Outputs:
        """[tokens, outputs] of each row."""
        return np.split(logits, np.cumsum(tokens.lengths_of_rows)[:-1])


def widened(logits: "torch.Tensor") -> "torch.Tensor":
    """In fp32 or better: bf16 loses the small differences that matter late in training. float64 stays: proofs."""
    import torch

    return logits.to(torch.promote_types(logits.dtype, torch.float32))
