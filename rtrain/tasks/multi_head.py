"""Several answers to one text at once, each of its own labels: its intent and its sentiment.

`data.label` is a list of columns, one head each, named after the column. A row may lack some of its labels: it then
counts for the others. Each head's loss is divided by that head's own number of targets, and the heads are added.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rtrain.core.errors import UserError, quoted
from rtrain.core.ragged import IGNORED, Encoded, Head, Outputs, Ragged, Tokens
from rtrain.metrics.calibration import softmax
from rtrain.tasks.base import Column, Described, Input, Targets
from rtrain.tasks.classification import divergence, ranked
from rtrain.tasks.labels import BadLabel, flaw_of, ordered, parsed, text_of
from rtrain.tasks.pooled import PooledTask, pooled

if TYPE_CHECKING:
    import tokenizers
    import torch


class MultiHead(PooledTask):
    name = "multi_head"
    output = "heads"
    has_standard_head = False  # one softmax over the labels of all heads is none of their answers
    smooths = True

    def flaw(self, text: str, pair: str | None, label: str) -> str | None:
        if not label.startswith("{"):
            return "one column of labels; name several, e.g. --set data.label=[intent,sentiment]"
        return flaw_of(_labels, label)

    def head(self, counts: Mapping[str, int], tokenizer: "tokenizers.Tokenizer | None" = None) -> Head:
        """Labels are `head=label`; which outputs are whose is in the facts: [[head, number of labels], ...]."""
        found: dict[str, set[str]] = {}
        for row in counts:
            for name, label in _labels(row).items():
                found.setdefault(name, set()).update([label] if label else [])
        for name, labels in found.items():
            if len(labels) < 2:
                only = ", ".join(repr(label) for label in labels) or "none"
                raise UserError(
                    f"data.label: the training rows have one class only ({only}) in column {name!r}; a classifier "
                    "needs at least two. Add rows of another label, or leave the column out.",
                    code="one_label",
                )
        names = tuple(f"{name}={label}" for name, labels in found.items() for label in ordered(labels))
        return Head(names, {"heads": [[name, len(labels)] for name, labels in found.items()]})

    def targets(self, labels: Sequence[str], marks: Ragged | None, head: Head) -> Targets:
        """For each head the place among its own labels; ignored where the row has none."""
        index = {name: {label: place for place, label in enumerate(own)} for name, own, _ in heads(head)}
        found = np.full((len(labels), len(index)), IGNORED, dtype=np.float32)
        for row, label in enumerate(labels):
            given = _labels(label)
            for column, (name, places) in enumerate(index.items()):
                if given.get(name):
                    found[row, column] = places.get(given[name], -1)
        return Targets(Ragged.even(found), (found == -1).any(axis=1))

    def stand_in(self, text: str, head: Head) -> str:
        return json.dumps({name: own[0] for name, own, _ in heads(head)})

    def parts(self, head: Head) -> tuple[str, ...]:
        return tuple(name for name, _, _ in heads(head))

    def counts(self, tokens: Tokens, head: Head) -> dict[str, int]:
        names = self.parts(head)
        present = tokens.targets.reshape(len(tokens), len(names)) != IGNORED
        return dict(zip(names, present.sum(axis=0).tolist(), strict=True))

    def loss(self, logits: "torch.Tensor", tokens: Tokens, head: Head) -> dict[str, "torch.Tensor"]:
        import torch

        found, names = pooled(logits, tokens, head), self.parts(head)
        wanted = torch.from_numpy(tokens.targets.reshape(len(tokens), len(names)).astype(np.int64)).to(found.device)
        return {
            name: torch.nn.functional.cross_entropy(
                found[:, columns], wanted[:, place], reduction="sum", ignore_index=IGNORED
            )
            for place, (name, _, columns) in enumerate(heads(head))
        }

    def imitation(
        self, logits: "torch.Tensor", tokens: Tokens, head: Head, temperature: float
    ) -> dict[str, "torch.Tensor"]:
        """As in classification, head by head, over the rows that have the head's label."""
        found, targets = pooled(logits, tokens, head), tokens.targets.reshape(len(tokens), -1)
        sums = {}
        for place, (name, _, columns) in enumerate(heads(head)):
            rows = np.flatnonzero(targets[:, place] != IGNORED)
            sums[name] = divergence(found[rows.tolist()][:, columns], tokens.teacher[rows][:, columns], temperature)
        return sums

    def describe(self, outcomes: Ragged, targets: Ragged, head: Head) -> Described:
        logits, true = outcomes.matrix(len(head.labels)), targets.matrix(len(head.facts["heads"])).astype(np.int64)
        best, score = np.zeros(true.shape, dtype=np.int64), np.ones(len(true))
        loss, present = np.zeros(true.shape), true != IGNORED
        labels = []
        for place, (_, own, columns) in enumerate(heads(head)):
            chances = softmax(logits[:, columns])
            best[:, place] = chances.argmax(axis=1)
            score = np.minimum(score, chances.max(axis=1))
            with np.errstate(divide="ignore"):
                right = chances[np.arange(len(true)), np.maximum(0, true[:, place])]
                own_loss = -np.log(np.where(true[:, place] >= 0, right, 0.0))
            loss[:, place] = np.where(present[:, place], own_loss, 0.0)
            labels.append([*own, ""])  # -1 and IGNORED: the head has no such label
        return Described(
            target=[[names[max(-1, place)] for names, place in zip(labels, row, strict=True)] for row in true],
            prediction=[[names[place] for names, place in zip(labels, row, strict=True)] for row in best],
            score=score,
            loss=loss.sum(axis=1) / np.maximum(1, present.sum(axis=1)),
        )

    def decode(
        self,
        outputs: Outputs,
        asked: Sequence[Input],
        encoded: Sequence[Encoded],
        head: Head,
        parameters: Mapping[str, Any],
    ) -> list[Any]:
        """For each input an object with the ranked labels of each head."""
        logits = np.asarray(outputs)
        answers = {name: ranked(softmax(logits[:, columns]), own, parameters) for name, own, columns in heads(head)}
        return [{name: rows[row] for name, rows in answers.items()} for row in range(len(logits))]

    def columns(self, head: Head) -> list[Column]:
        """For each head its best label, in a column of the head's name, and that label's score."""
        found = []
        for name, _, _ in heads(head):
            found.append(Column(name, str, partial(_best, name, "label")))
            found.append(Column(f"{name} score", float, partial(_best, name, "score")))
        return found


def _best(head: str, entry: str, answer: Any) -> Any:
    return answer[head][0][entry]


def _labels(label: str) -> dict[str, str]:
    """Label by the name of its head; an empty one, or null, where the row has none. Raises `BadLabel`."""
    example = '{"intent": "buy", "mood": "good"}'
    found = {
        text_of(name, label, example): "" if value is None else text_of(value, label, example).strip()
        for name, value in parsed(label, example).items()
    }
    if not any(found.values()):
        raise BadLabel(f"the label {quoted(label)} is empty; write {example}")
    return found


def heads(head: Head) -> Iterator[tuple[str, list[str], slice]]:
    """(name, own labels, columns among the outputs) of each head."""
    start = 0
    for name, size in head.facts["heads"]:
        own = [label.removeprefix(f"{name}=") for label in head.labels[start : start + size]]
        yield name, own, slice(start, start + size)
        start += size


TASK = MultiHead()
