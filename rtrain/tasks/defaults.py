"""The base class of tasks: what most of them have in common. One text or two, one loss, nothing to calibrate."""

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rtrain.core.ragged import EncodedRow, Floats, Head, Ints, Outputs, RaggedArray, TokenBatch
from rtrain.tasks import base
from rtrain.tasks.encode import encode

if TYPE_CHECKING:
    import tokenizers
    import torch

EXAMPLE_TEXTS = (
    "Where is my parcel? It was due on Monday, and nobody rang the bell.",
    "Thank you for the quick answer, everything works again now.",
    "The card was declined twice although there is money on the account.",
    "The first half drags, but the last scene is worth the whole evening.",
)


class BaseTask:
    """Defaults of a task. Subclasses add `name`, `output`, `auto_model`, `is_token_level`, `build_head`,
    `build_targets`, `count_targets`, `loss`, `distillation_loss`, `row_outputs`, `row_results`, `explain_rows` and
    `decode`."""

    fields = ("text", "text_pair")
    needs_pair = False
    reads_pair = True
    """If False, a second text is ignored."""
    uses_windows = False
    target_rule_version = 1
    parses_special_tokens = False
    prepares_targets = False
    packs_text = False
    augmentable: base.Variation = "nothing"
    problem_type: base.ProblemType = None
    has_standard_head = True
    supports_out_of_scope = False
    supports_label_smoothing = False

    def is_blank(self, text: str, pair: str | None) -> bool:
        reads_pair = self.reads_pair and not self.needs_pair
        return not text.strip() and not (reads_pair and (pair or "").strip())

    def validate_row(self, text: str, pair: str | None, label: str) -> str | None:
        return None

    def encode(
        self,
        tokenizer: "tokenizers.Tokenizer",
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        max_windows: int = 1,
    ) -> list[EncodedRow]:
        return encode(tokenizer, texts, pairs if self.reads_pair else None, max_windows)

    def target_positions(self, text: str, pair: str | None, label: str, encoded: EncodedRow) -> list[int]:
        return []

    def placeholder_label(self, text: str, head: Head) -> str:
        return head.labels[0]

    def prepare(self, tokens: TokenBatch, head: Head, seed: int, epoch: int) -> TokenBatch:
        return tokens

    def logit_positions(self, tokens: TokenBatch, head: Head) -> Ints | None:
        return None

    def loss_parts(self, head: Head) -> tuple[str, ...]:
        return ("loss",)

    def calibrate(self, row_results: RaggedArray, targets: RaggedArray, head: Head) -> dict[str, Any]:
        return {}

    def unwrap_single(self, answer: Any) -> Any:
        return [answer]

    def answer_columns(self, head: Head) -> list[base.AnswerColumn]:
        return [base.AnswerColumn("answer", object, lambda answer: answer)]

    def label_thresholds(self, head: Head) -> Mapping[str, float] | None:
        return None

    def golden_inputs(self, texts: Sequence[str], head: Head) -> list[base.Input]:
        if not self.needs_pair:
            return list(texts)
        return [dict(zip(self.fields, pair, strict=True)) for pair in itertools.pairwise(texts)]

    def example_inputs(self, head: Head) -> list[base.Input]:
        return list(EXAMPLE_TEXTS)

    def reference_scores(self, answers: Sequence[Any], labels: Sequence[str]) -> dict[str, float]:
        return {}


class TokenTask(BaseTask):
    """The common part of tasks with an output for each token of long texts."""

    auto_model = "AutoModelForTokenClassification"
    is_token_level = True
    uses_windows = True

    def build_targets(self, labels: Sequence[str], target_positions: RaggedArray, head: Head) -> base.Targets:
        return base.Targets(
            RaggedArray(target_positions.values.astype(np.float32), target_positions.counts),
            np.zeros(len(labels), dtype=np.bool_),
        )

    def row_outputs(self, logits: Floats, tokens: TokenBatch, head: Head) -> Outputs:
        """[tokens, outputs] of each row."""
        return np.split(logits, np.cumsum(tokens.row_lengths)[:-1])


def upcast_logits(logits: "torch.Tensor") -> "torch.Tensor":
    """The logits in fp32 at least: bf16 loses small differences that matter late in training. float64 stays, for
    tests."""
    import torch

    return logits.to(torch.promote_types(logits.dtype, torch.float32))
