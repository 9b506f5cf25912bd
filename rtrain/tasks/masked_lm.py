"""Masked words of plain text: adapts an encoder to the language of a domain, without any label.

BERT's masking (Devlin et al. 2019): of the tokens 15 % are to be guessed; of these 80 % are replaced by the mask, 10 %
by another token, 10 % stay. Which ones is a pure function of (seed, epoch, row, place): fresh in every epoch, the same
for any number of workers and after any resume, and never stored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rtrain.core.errors import UserError
from rtrain.core.ragged import IGNORED, Encoded, Floats, Head, Ints, Outputs, Ragged, Tokens
from rtrain.metrics.calibration import softmax
from rtrain.tasks.base import Column, Described, Input, Targets
from rtrain.tasks.defaults import Defaults, widened

if TYPE_CHECKING:
    import tokenizers
    import torch

SHARE, MASKED, REPLACED = 0.15, 0.8, 0.1
MASKS = ("[MASK]", "<mask>")
DEFAULT_TOP = 5
EXAMPLES = ("Where is my {mask}? It was due on Monday.", "The {mask} was signed by both {mask}.")

Words = npt.NDArray[np.uint64]


class MaskedLM(Defaults):
    name = "masked_lm"
    output = "tokens"
    auto_model = "AutoModelForMaskedLM"
    by_token = True
    reads_pair = False
    prepares = True
    packs = True
    reads_special = True

    def head(self, counts: Mapping[str, int], tokenizer: "tokenizers.Tokenizer") -> Head:
        mask = next((token for token in MASKS if tokenizer.token_to_id(token) is not None), None)
        if mask is None:
            raise UserError(
                f"model.name: its tokenizer has no mask token ({' or '.join(MASKS)}); name another model",
                code="no_mask_token",
            )
        special = sorted(number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        facts = {"mask": mask, "mask_id": tokenizer.token_to_id(mask), "special": special}
        return Head((), {**facts, "vocabulary": tokenizer.get_vocab_size()})

    def targets(self, labels: Sequence[str], marks: Ragged, head: Head) -> Targets:
        """No targets are stored: `prepare` draws them anew in each epoch."""
        nothing = Ragged(np.empty(0, dtype=np.float32), np.zeros(len(labels), dtype=np.int32))
        return Targets(nothing, np.zeros(len(labels), dtype=np.bool_))

    def prepare(self, tokens: Tokens, head: Head, seed: int, epoch: int) -> Tokens:
        """Masked ids, and for each token what is to be guessed there, or IGNORED."""
        lengths = tokens.lengths_of_rows
        row = np.repeat(tokens.row_ids, lengths)
        place = np.arange(len(tokens.ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        # Seed and epoch are mixed apart from each other: else (seed, epoch + 1) could draw what (seed + 1, epoch) does.
        key = _mix(np.array([seed], dtype=np.uint64)) + np.uint64(epoch)
        word = _mix(_mix(row ^ _mix(key)) + place.astype(np.uint64))
        guessed = (_unit(word) < SHARE) & ~np.isin(tokens.ids, head.facts["special"])
        kind = _unit(_mix(word ^ np.uint64(1)))
        drawn = (_unit(_mix(word ^ np.uint64(2))) * head.facts["vocabulary"]).astype(np.int32)
        ids = np.where(guessed & (kind < MASKED), np.int32(head.facts["mask_id"]), tokens.ids)
        ids = np.where(guessed & (kind >= MASKED) & (kind < MASKED + REPLACED), drawn, ids)
        targets = np.where(guessed, tokens.ids, IGNORED).astype(np.float32)
        return replace(tokens, ids=ids.astype(np.int32), targets=targets, counts=lengths)

    def wanted(self, tokens: Tokens, head: Head) -> Ints:
        """The tokens with a target; of a request's text, which has none, its masks."""
        if len(tokens.targets):
            return np.flatnonzero(tokens.targets != IGNORED)
        return np.flatnonzero(tokens.ids == head.facts["mask_id"])

    def counts(self, tokens: Tokens, head: Head) -> dict[str, int]:
        return {"loss": int((tokens.targets != IGNORED).sum())}

    def loss(self, logits: "torch.Tensor", tokens: Tokens, head: Head) -> dict[str, "torch.Tensor"]:
        import torch

        words = torch.from_numpy(tokens.targets[self.wanted(tokens, head)].astype(np.int64)).to(logits.device)
        return {"loss": torch.nn.functional.cross_entropy(widened(logits), words, reduction="sum")}

    def imitation(
        self, logits: "torch.Tensor", tokens: Tokens, head: Head, temperature: float
    ) -> dict[str, "torch.Tensor"]:
        raise UserError(
            "task=masked_lm: a masked language model is not distilled; distil the model tuned from it",
            code="unsupported",
        )

    def outputs(self, logits: Floats, tokens: Tokens, head: Head) -> Outputs:
        """[tokens to guess, vocabulary] of each row."""
        rows = np.repeat(np.arange(len(tokens)), tokens.lengths_of_rows)[self.wanted(tokens, head)]
        return np.split(logits, np.cumsum(np.bincount(rows, minlength=len(tokens)))[:-1])

    def outcomes(self, outputs: Outputs, tokens: Tokens, head: Head) -> Ragged:
        """For each row: tokens guessed, how many of them rightly, the sum of their losses."""
        found = []
        for output, targets in zip(outputs, tokens.labelled, strict=True):
            wanted = targets[targets != IGNORED].astype(np.int64)
            wide = output.astype(np.float64)
            highest = wide.max(axis=1, initial=-np.inf)
            total = highest + np.log(np.exp(wide - highest[:, None]).sum(axis=1))
            losses = total - wide[np.arange(len(wanted)), wanted]
            found.append((len(wanted), (output.argmax(axis=1) == wanted).sum() if len(wanted) else 0, losses.sum()))
        return Ragged.of(found, np.float64)

    def describe(self, outcomes: Ragged, targets: Ragged, head: Head) -> Described:
        guessed, right, losses = outcomes.matrix(3).T
        mean = losses / np.maximum(1, guessed)
        share = [f"{int(good)} of {int(count)} masked tokens" for good, count in zip(right, guessed, strict=True)]
        return Described([""] * len(share), share, right / np.maximum(1, guessed), mean)

    def alone(self, answer: Any) -> Any:
        """The tokens of its mask; where there are several masks, those of each."""
        return answer[0] if len(answer) == 1 else answer

    def columns(self, head: Head) -> list[Column]:
        raise UserError(
            "task=masked_lm: a masked language model guesses masked words, and a row of a file has no one answer; "
            "train a task on it, with --model and the folder of this artefact, and answer rows with that",
            code="unsupported",
        )

    def asks(self, texts: Sequence[str], head: Head) -> list[Input]:
        """A mask before each text: at the end of a long one it would be cut off."""
        return [f"{head.facts['mask']} {text}" for text in texts]

    def examples(self, head: Head) -> list[Input]:
        return [example.format(mask=head.facts["mask"]) for example in EXAMPLES]

    def decode(
        self,
        outputs: Outputs,
        asked: Sequence[Input],
        encoded: Sequence[Encoded],
        head: Head,
        parameters: Mapping[str, Any],
    ) -> list[Any]:
        """For each mask of each text, in order, its likeliest tokens: `[{"score", "token"}, ...]`, best first."""
        top = parameters.get("top_k") or DEFAULT_TOP
        return [[_ranked(chances, top) for chances in softmax(output)] if len(output) else [] for output in outputs]


def _ranked(chances: Any, top: int) -> list[dict[str, Any]]:
    best = np.argsort(-chances, kind="stable")[:top]
    return [{"score": float(chances[token]), "token": int(token)} for token in best]


def _mix(value: Words) -> Words:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014); uint64 products wrap by design."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _unit(word: Words) -> npt.NDArray[np.float64]:
    """A number in [0, 1) from each word."""
    return (word >> np.uint64(11)).astype(np.float64) / 2**53


TASK = MaskedLM()
