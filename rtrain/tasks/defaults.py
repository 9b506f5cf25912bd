"""The base classes of tasks: `BaseTask`, `PooledTask` for one output per text, `TokenTask` for one output per token."""

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
    weighting: base.Weighting = "nothing"
    has_independent_labels = False

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

    def label_names(self, head: Head) -> dict[str, tuple[str, ...]]:
        return {"loss": head.labels}

    def target_classes(self, tokens: TokenBatch, head: Head) -> dict[str, base.TargetClasses]:
        raise NotImplementedError

    def target_losses(
        self, logits: "torch.Tensor", tokens: TokenBatch, head: Head, loss: base.LabelLoss
    ) -> base.Losses:
        raise NotImplementedError

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


# -------------------------------------------------------------------------------------------------- one output per text


class PooledTask(BaseTask):
    """Common part of tasks with one output per text."""

    auto_model = "AutoModelForSequenceClassification"
    is_token_level = False
    augmentable: base.Variation = "text"

    def count_targets(self, tokens: TokenBatch, head: Head) -> dict[str, int]:
        return {"loss": len(tokens.targets)}

    def row_outputs(self, logits: Floats, tokens: TokenBatch, head: Head) -> Floats:
        """[rows, outputs]."""
        if len(tokens.window_lengths) == len(tokens):
            return logits
        starts = tokens.first_window_indices
        match _pooling_mode(head.facts):
            case "max":
                pooled_logits: Floats = np.maximum.reduceat(logits, starts, axis=0)
            case "first":
                pooled_logits = logits[starts]
            case _:
                means = np.add.reduceat(logits, starts, axis=0) / tokens.windows_per_row[:, None]
                pooled_logits = means.astype(logits.dtype)
        return pooled_logits

    def row_results(self, outputs: Outputs, tokens: TokenBatch, head: Head) -> RaggedArray:
        return RaggedArray.from_matrix(np.asarray(outputs, dtype=np.float64))


def _pooling_mode(facts: Mapping[str, Any]) -> str:
    return str(facts.get("pooling", "mean"))


def pool_logits(logits: "torch.Tensor", tokens: TokenBatch, head: Head) -> "torch.Tensor":
    """`PooledTask.row_outputs`, with a gradient."""
    import torch

    fp32_logits = upcast_logits(logits)
    if len(tokens.window_lengths) == len(tokens):
        return fp32_logits
    windows = torch.from_numpy(tokens.windows_per_row.astype(np.int64)).to(fp32_logits.device)
    row = torch.repeat_interleave(torch.arange(len(tokens), device=fp32_logits.device), windows)
    shape = (len(tokens), fp32_logits.shape[1])
    match _pooling_mode(head.facts):
        case "max":
            # From -inf: with include_self=False the start, a zero, would take part of the gradient of an equal output.
            lowest = fp32_logits.new_full(shape, -torch.inf)
            return lowest.scatter_reduce(0, row[:, None].expand_as(fp32_logits), fp32_logits, "amax")
        case "first":
            return fp32_logits[torch.cumsum(windows, 0) - windows]
        case _:
            return fp32_logits.new_zeros(shape).index_add(0, row, fp32_logits) / windows[:, None]
