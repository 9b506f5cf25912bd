"""Masked words of plain text: adapts an encoder to the language of a domain, without any label.

BERT's masking (Devlin et al. 2019): 15 % of the tokens are predicted; 80 % of these are replaced by the mask,
10 % by another token, 10 % stay. The choice is a pure function of (seed, epoch, row, position): new in every epoch, the
same for any number of workers and after any resume, and never stored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rtrain.core.errors import UserError
from rtrain.core.ragged import IGNORE_INDEX, EncodedRow, Floats, Head, Ints, Outputs, RaggedArray, TokenBatch
from rtrain.metrics.classification import softmax
from rtrain.metrics.registry import TokenResults
from rtrain.tasks.base import AnswerColumn, Input, Inputs, Losses, Parameters, RowReport, Targets
from rtrain.tasks.defaults import BaseTask, upcast_logits

if TYPE_CHECKING:
    import tokenizers
    import torch

MASKED_SHARE, MASK_TOKEN_SHARE, RANDOM_TOKEN_SHARE = 0.15, 0.8, 0.1
MASK_TOKENS = ("[MASK]", "<mask>")
DEFAULT_TOP_K = 5
EXAMPLE_TEXTS = ("Where is my {mask}? It was due on Monday.", "The {mask} was signed by both {mask}.")

Uint64s = npt.NDArray[np.uint64]


class MaskedLM(BaseTask):
    name = "masked_lm"
    output = "tokens"
    auto_model = "AutoModelForMaskedLM"
    is_token_level = True
    reads_pair = False
    prepares_targets = True
    packs_text = True
    parses_special_tokens = True

    def build_head(self, counts: Mapping[str, int], tokenizer: "tokenizers.Tokenizer") -> Head:
        mask = next((token for token in MASK_TOKENS if tokenizer.token_to_id(token) is not None), None)
        if mask is None:
            raise UserError(
                f"model.name: its tokenizer has no mask token ({' or '.join(MASK_TOKENS)}); name another model",
                code="no_mask_token",
            )
        special = sorted(number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        facts = {"mask": mask, "mask_id": tokenizer.token_to_id(mask), "special": special}
        return Head((), {**facts, "vocabulary": tokenizer.get_vocab_size()})

    def build_targets(self, labels: Sequence[str], target_positions: RaggedArray, head: Head) -> Targets:
        """No targets are stored: `prepare` draws them anew in each epoch."""
        nothing = RaggedArray(np.empty(0, dtype=np.float32), np.zeros(len(labels), dtype=np.int32))
        return Targets(nothing, np.zeros(len(labels), dtype=np.bool_))

    def prepare(self, tokens: TokenBatch, head: Head, seed: int, epoch: int) -> TokenBatch:
        """Masked ids, and for each token the id to predict, or `IGNORE_INDEX`."""
        lengths = tokens.row_lengths
        row = np.repeat(tokens.row_ids, lengths)
        token_position = np.arange(len(tokens.ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        # Seed and epoch are mixed separately: else (seed, epoch + 1) could equal (seed + 1, epoch).
        key = _mix(np.array([seed], dtype=np.uint64)) + np.uint64(epoch)
        word = _mix(_mix(row ^ _mix(key)) + token_position.astype(np.uint64))
        is_target = (_to_unit_interval(word) < MASKED_SHARE) & ~np.isin(tokens.ids, head.facts["special"])
        kind = _to_unit_interval(_mix(word ^ np.uint64(1)))
        random_ids = (_to_unit_interval(_mix(word ^ np.uint64(2))) * head.facts["vocabulary"]).astype(np.int32)
        ids = np.where(is_target & (kind < MASK_TOKEN_SHARE), np.int32(head.facts["mask_id"]), tokens.ids)
        is_random = (kind >= MASK_TOKEN_SHARE) & (kind < MASK_TOKEN_SHARE + RANDOM_TOKEN_SHARE)
        ids = np.where(is_target & is_random, random_ids, ids)
        targets = np.where(is_target, tokens.ids, IGNORE_INDEX).astype(np.float32)
        return replace(tokens, ids=ids.astype(np.int32), targets=targets, targets_per_row=lengths)

    def logit_positions(self, tokens: TokenBatch, head: Head) -> Ints:
        """The tokens with a target; of a request's text, which has none, its masks."""
        if len(tokens.targets):
            return np.flatnonzero(tokens.targets != IGNORE_INDEX)
        return np.flatnonzero(tokens.ids == head.facts["mask_id"])

    def count_targets(self, tokens: TokenBatch, head: Head) -> dict[str, int]:
        return {"loss": int((tokens.targets != IGNORE_INDEX).sum())}

    def loss(self, logits: "torch.Tensor", tokens: TokenBatch, head: Head) -> Losses:
        import torch

        words = torch.from_numpy(tokens.targets[self.logit_positions(tokens, head)].astype(np.int64)).to(logits.device)
        return {"loss": torch.nn.functional.cross_entropy(upcast_logits(logits), words, reduction="sum")}

    def distillation_loss(self, logits: "torch.Tensor", tokens: TokenBatch, head: Head, temperature: float) -> Losses:
        raise UserError(
            "task=masked_lm: a masked language model is not distilled; distil the model tuned from it",
            code="unsupported",
        )

    def row_outputs(self, logits: Floats, tokens: TokenBatch, head: Head) -> Outputs:
        """[tokens to guess, vocabulary] of each row."""
        rows = np.repeat(np.arange(len(tokens)), tokens.row_lengths)[self.logit_positions(tokens, head)]
        return np.split(logits, np.cumsum(np.bincount(rows, minlength=len(tokens)))[:-1])

    def row_results(self, outputs: Outputs, tokens: TokenBatch, head: Head) -> RaggedArray:
        """`TokenResults` of each row."""
        results = []
        for output, targets in zip(outputs, tokens.row_targets, strict=True):
            target_ids = targets[targets != IGNORE_INDEX].astype(np.int64)
            logits = output.astype(np.float64)
            highest = logits.max(axis=1, initial=-np.inf)
            total = highest + np.log(np.exp(logits - highest[:, None]).sum(axis=1))
            losses = total - logits[np.arange(len(target_ids)), target_ids]
            num_correct = (output.argmax(axis=1) == target_ids).sum() if len(target_ids) else 0
            results.append(TokenResults(len(target_ids), num_correct, losses.sum()))
        return RaggedArray.from_rows(results, np.float64)

    def explain_rows(self, row_results: RaggedArray, targets: RaggedArray, head: Head) -> RowReport:
        rows = TokenResults(*row_results.to_matrix(len(TokenResults._fields)).T)
        counts = zip(rows.num_correct, rows.num_targets, strict=True)
        predictions = [f"{int(good)} of {int(count)} masked tokens" for good, count in counts]
        divisors = np.maximum(1, rows.num_targets)
        return RowReport([""] * len(predictions), predictions, rows.num_correct / divisors, rows.loss / divisors)

    def unwrap_single(self, answer: Any) -> Any:
        """The tokens of its mask; where there are several masks, those of each."""
        return answer[0] if len(answer) == 1 else answer

    def answer_columns(self, head: Head) -> list[AnswerColumn]:
        raise UserError(
            "task=masked_lm: a masked language model guesses masked words, and a row of a file has no one answer; "
            "fine-tune it for a task with --model and the folder of this artifact, and predict with that model",
            code="unsupported",
        )

    def golden_inputs(self, texts: Sequence[str], head: Head) -> list[Input]:
        """A mask before each text: at the end of a long one it would be cut off."""
        return [f"{head.facts['mask']} {text}" for text in texts]

    def example_inputs(self, head: Head) -> list[Input]:
        return [example.format(mask=head.facts["mask"]) for example in EXAMPLE_TEXTS]

    def decode(
        self, outputs: Outputs, inputs: Inputs, encoded: Sequence[EncodedRow], head: Head, parameters: Parameters
    ) -> list[Any]:
        """For each mask of each text, in order, its likeliest tokens: `[{"score", "token"}, ...]`, best first."""
        top_k = parameters.get("top_k") or DEFAULT_TOP_K
        return [
            [_rank_tokens(chances, top_k) for chances in softmax(output)] if len(output) else [] for output in outputs
        ]


def _rank_tokens(probabilities: Any, top_k: int) -> list[dict[str, Any]]:
    best = np.argsort(-probabilities, kind="stable")[:top_k]
    return [{"score": float(probabilities[token]), "token": int(token)} for token in best]


def _mix(value: Uint64s) -> Uint64s:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014); uint64 products wrap by design."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _to_unit_interval(word: Uint64s) -> npt.NDArray[np.float64]:
    """A number in [0, 1) from each word."""
    return (word >> np.uint64(11)).astype(np.float64) / 2**53


TASK = MaskedLM()
