"""One label per text: intents, sentiments, topics, clauses.

With `data.outside` texts that belong to none of the classes are told too: those of which the model is less sure than a
threshold, which is chosen on the validation rows (Hendrycks and Gimpel 2017, arXiv:1610.02136).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rtrain.core.errors import UserError
from rtrain.core.ragged import OUTSIDE, Encoded, Floats, Head, Outputs, Ragged, Tokens
from rtrain.metrics.calibration import softmax
from rtrain.metrics.classification import choose_threshold
from rtrain.tasks.base import Column, Described, Input, ProblemType, Targets
from rtrain.tasks.labels import ordered
from rtrain.tasks.pooled import PooledTask, pooled

if TYPE_CHECKING:
    import tokenizers
    import torch


class Classification(PooledTask):
    name = "classification"
    output = "classes"
    problem_type: ProblemType = "single_label_classification"
    finds_outside = True
    smooths = True

    def head(self, counts: Mapping[str, int], tokenizer: "tokenizers.Tokenizer | None" = None) -> Head:
        if len(counts) < 2:
            found = ", ".join(repr(label) for label in counts) or "none"
            raise UserError(
                f"data.label: the training rows have one class only ({found}); a classifier needs at least two. "
                "Add rows of another label, or name another column with --set data.label=COLUMN.",
                code="one_label",
            )
        return Head(tuple(ordered(counts)))

    def targets(self, labels: Sequence[str], marks: Ragged | None, head: Head) -> Targets:
        """The place of each label; -1, wrong for every class, where the head has not got it; `OUTSIDE`."""
        index = {name: position for position, name in enumerate(head.labels)}
        if "outside" in head.facts:
            index[head.facts["outside"]] = OUTSIDE
        found = np.fromiter((index.get(label, -1) for label in labels), dtype=np.float32, count=len(labels))
        return Targets(Ragged.even(found), found == -1)

    def loss(self, logits: "torch.Tensor", tokens: Tokens, head: Head) -> dict[str, "torch.Tensor"]:
        import torch

        targets = torch.from_numpy(tokens.targets.astype(np.int64)).to(logits.device)
        return {"loss": torch.nn.functional.cross_entropy(pooled(logits, tokens, head), targets, reduction="sum")}

    def imitation(
        self, logits: "torch.Tensor", tokens: Tokens, head: Head, temperature: float
    ) -> dict[str, "torch.Tensor"]:
        """T^2 x KL(teacher, student at temperature T); Hinton et al. 2015. T^2 keeps the gradient at the scale of the
        loss on true labels, whatever the temperature."""
        return {"loss": divergence(pooled(logits, tokens, head), tokens.teacher, temperature)}

    def calibrate(self, outcomes: Ragged, targets: Ragged, head: Head) -> dict[str, Any]:
        """The chance below which a text is outside of the classes: the one that finds such rows with the best F1."""
        outside = targets.values == OUTSIDE
        if "outside" not in head.facts or outside.all() or not outside.any():
            return {}
        sure = softmax(outcomes.matrix(len(head.labels))).max(axis=1)
        return {"threshold": choose_threshold(sure, outside)}

    def describe(self, outcomes: Ragged, targets: Ragged, head: Head) -> Described:
        chances, places = softmax(outcomes.matrix(len(head.labels))), targets.values.astype(np.int64)
        best, rows = chances.argmax(axis=1), np.arange(len(outcomes))
        sure = chances[rows, best]
        names = [*head.labels, head.facts.get("outside"), None]  # at -2 and -1: OUTSIDE and an unknown class
        refused = sure < refusal(head)
        right = np.where(places == OUTSIDE, 1 - sure, np.where(places >= 0, chances[rows, places], 0.0))
        with np.errstate(divide="ignore"):  # a target that is no class has probability 0 and an endless loss
            loss = -np.log(right)
        return Described(
            target=[names[place] for place in places],
            prediction=[names[place] for place in np.where(refused, OUTSIDE, best)],
            score=np.where(refused, 1 - sure, sure),
            loss=loss,
        )

    def decode(
        self,
        outputs: Outputs,
        asked: Sequence[Input],
        encoded: Sequence[Encoded],
        head: Head,
        parameters: Mapping[str, Any],
    ) -> list[Any]:
        """`[{"label", "score"}, ...]` per row, best first; `top_k` limits the list (default: all labels).

        A text outside of the classes has that label first, with what is left of the best class's score.
        """
        chances = softmax(np.asarray(outputs))
        answers, least = ranked(chances, head.labels, parameters), refusal(head)
        if not least:
            return answers
        for answer, sure in zip(answers, chances.max(axis=1, initial=0.0), strict=True):
            if sure < least:
                length = len(answer) if parameters.get("top_k") else len(answer) + 1
                answer[:] = [{"label": head.facts["outside"], "score": float(1 - sure)}, *answer][:length]
        return answers

    def columns(self, head: Head) -> list[Column]:
        """`abstained`, where the artefact has a threshold: the best class's chance is below it, and the label is that
        of rows outside of all classes."""
        outside = head.facts.get("outside")
        abstained = [Column("abstained", bool, lambda answer: answer[0]["label"] == outside)] if refusal(head) else []
        return [
            Column("label", str, lambda answer: answer[0]["label"]),
            Column("score", float, lambda answer: answer[0]["score"]),
            *abstained,
        ]


def refusal(head: Head) -> float:
    """The threshold below which the best class's chance makes a text one outside of all classes. 0, which refuses no
    text, where the head has no `outside`."""
    return float(head.facts.get("threshold", 0.0)) if "outside" in head.facts else 0.0


def divergence(student: "torch.Tensor", teacher: Floats, temperature: float) -> "torch.Tensor":
    """T^2 x KL(teacher, student), both softened by T, summed over the first axis."""
    import torch
    import torch.nn.functional as F

    known = torch.from_numpy(teacher.copy()).to(student)
    student_log, teacher_log = F.log_softmax(student / temperature, dim=-1), F.log_softmax(known / temperature, dim=-1)
    return temperature**2 * F.kl_div(student_log, teacher_log, reduction="sum", log_target=True)


def ranked(scores: Any, labels: Sequence[str], parameters: Mapping[str, Any]) -> list[Any]:
    """The Hugging Face form of scores [rows, labels]."""
    top = parameters.get("top_k") or len(labels)
    # A stable sort: equal scores keep the label order on every machine.
    order = np.argsort(-scores, axis=1, kind="stable")[:, :top]
    return [
        [{"label": labels[column], "score": row[column]} for column in columns]
        for row, columns in zip(scores.tolist(), order.tolist(), strict=True)
    ]


TASK = Classification()
