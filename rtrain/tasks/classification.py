"""One label per text: intents, sentiments, topics, clauses.

With `data.out_of_scope_label`, texts that belong to no class are detected: texts with a confidence below a threshold,
which is chosen on the validation rows (Hendrycks and Gimpel 2017, arXiv:1610.02136).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rtrain.core.errors import UserError
from rtrain.core.ragged import OUT_OF_SCOPE, EncodedRow, Floats, Head, Ints, Outputs, RaggedArray, TokenBatch
from rtrain.metrics.classes import abstain_threshold, class_probabilities, decide_classes
from rtrain.metrics.classification import choose_threshold, softmax
from rtrain.tasks import base
from rtrain.tasks.base import AnswerColumn, Inputs, Losses, Parameters, ProblemType, RowReport, Targets
from rtrain.tasks.defaults import PooledTask, pool_logits
from rtrain.tasks.encode import sort_labels

if TYPE_CHECKING:
    import tokenizers
    import torch


class Classification(PooledTask):
    name = "classification"
    output = "classes"
    problem_type: ProblemType = "single_label_classification"
    supports_out_of_scope = True
    supports_label_smoothing = True
    weighting: base.Weighting = "classes"

    def build_head(self, counts: Mapping[str, int], tokenizer: "tokenizers.Tokenizer | None" = None) -> Head:
        if len(counts) < 2:
            label_list = ", ".join(repr(label) for label in counts) or "none"
            raise UserError(
                f"data.label: the training rows have one class only ({label_list}); a classifier needs at least two. "
                "Add rows of another label, or name another column with --set data.label=COLUMN.",
                code="one_label",
            )
        return Head(tuple(sort_labels(counts)))

    def build_targets(self, labels: Sequence[str], target_positions: RaggedArray | None, head: Head) -> Targets:
        """The index of each label; -1 (wrong for every class) if the head lacks it; or `OUT_OF_SCOPE`."""
        index = {name: position for position, name in enumerate(head.labels)}
        if "out_of_scope_label" in head.facts:
            index[head.facts["out_of_scope_label"]] = OUT_OF_SCOPE
        class_indices = np.fromiter((index.get(label, -1) for label in labels), dtype=np.float32, count=len(labels))
        return Targets(RaggedArray.from_matrix(class_indices), class_indices == -1)

    def loss(self, logits: "torch.Tensor", tokens: TokenBatch, head: Head) -> Losses:
        import torch

        targets = torch.from_numpy(tokens.targets.astype(np.int64)).to(logits.device)
        return {"loss": torch.nn.functional.cross_entropy(pool_logits(logits, tokens, head), targets, reduction="sum")}

    def target_classes(self, tokens: TokenBatch, head: Head) -> dict[str, base.TargetClasses]:
        return {"loss": base.TargetClasses(np.arange(len(tokens)), tokens.targets.astype(np.int64))}

    def target_losses(self, logits: "torch.Tensor", tokens: TokenBatch, head: Head, loss: base.LabelLoss) -> Losses:
        return {"loss": loss.choose_one(pool_logits(logits, tokens, head), tokens.targets)}

    def distillation_loss(self, logits: "torch.Tensor", tokens: TokenBatch, head: Head, temperature: float) -> Losses:
        """T^2 x KL(teacher, student at temperature T); Hinton et al. 2015. T^2 keeps the gradient at the scale of the
        loss on true labels, whatever the temperature."""
        return {"loss": distillation_kl(pool_logits(logits, tokens, head), tokens.teacher_logits, temperature)}

    def calibrate(self, row_results: RaggedArray, targets: RaggedArray, head: Head) -> dict[str, Any]:
        """Choose the confidence threshold that detects out-of-scope rows with the best F1."""
        is_out_of_scope = targets.values == OUT_OF_SCOPE
        if "out_of_scope_label" not in head.facts or is_out_of_scope.all() or not is_out_of_scope.any():
            return {}
        confidence = class_probabilities(row_results, head).max(axis=1)
        return {"threshold": choose_threshold(confidence, is_out_of_scope)}

    def explain_rows(self, row_results: RaggedArray, targets: RaggedArray, head: Head) -> RowReport:
        probabilities, true = class_probabilities(row_results, head), targets.values.astype(np.int64)
        logits, rows = row_results.to_matrix(len(head.labels)), np.arange(len(row_results))
        best = np.maximum(decide_classes(logits, head.labels, head), 0)  # any class for a NaN
        confidence = probabilities[rows, best]
        is_abstained = confidence < abstain_threshold(head)
        target_probability = np.where(true >= 0, probabilities[rows, true], 0.0)
        target_probability = np.where(true == OUT_OF_SCOPE, 1 - confidence, target_probability)
        with np.errstate(divide="ignore"):  # a target outside the classes has probability 0 and an infinite loss
            loss = -np.log(target_probability)
        # At -2 and -1: out of scope and an unknown class.
        names = [*head.labels, head.facts.get("out_of_scope_label"), None]
        return RowReport(
            target=[names[index] for index in true],
            prediction=[names[index] for index in np.where(is_abstained, OUT_OF_SCOPE, best)],
            score=np.where(is_abstained, 1 - confidence, confidence),
            loss=loss,
        )

    def decode(
        self, outputs: Outputs, inputs: Inputs, encoded: Sequence[EncodedRow], head: Head, parameters: Parameters
    ) -> list[Any]:
        """`[{"label", "score"}, ...]` per row, best first; `top_k` limits the list (default: all labels).

        A label that is decided by an operating point comes first, whatever its score. An out-of-scope text has that
        label first, with 1 minus the best class's score.
        """
        probabilities = softmax(np.asarray(outputs))
        first = decide_classes(np.asarray(outputs), head.labels, head)
        answers, threshold = rank_labels(probabilities, head.labels, parameters, first), abstain_threshold(head)
        if not threshold:
            return answers
        for answer, confidence in zip(answers, probabilities.max(axis=1, initial=0.0), strict=True):
            if confidence < threshold:
                answer.insert(0, {"label": head.facts["out_of_scope_label"], "score": float(1 - confidence)})
                if parameters.get("top_k"):
                    answer.pop()
        return answers

    def answer_columns(self, head: Head) -> list[AnswerColumn]:
        """`abstained` if the artifact has a threshold: the best class's score is below it, and the label is the
        out-of-scope label."""
        columns = [
            AnswerColumn("label", str, lambda answer: answer[0]["label"]),
            AnswerColumn("score", float, lambda answer: answer[0]["score"]),
        ]
        if abstain_threshold(head):
            label = head.facts["out_of_scope_label"]
            columns.append(AnswerColumn("abstained", bool, lambda answer: answer[0]["label"] == label))
        return columns


def distillation_kl(student: "torch.Tensor", teacher: Floats, temperature: float) -> "torch.Tensor":
    """T^2 x KL(teacher, student), both softened by T, summed over the first axis."""
    import torch
    import torch.nn.functional as F

    teacher_logits = torch.from_numpy(teacher.copy()).to(student)
    student_log, teacher_log = (F.log_softmax(side / temperature, dim=-1) for side in (student, teacher_logits))
    return temperature**2 * F.kl_div(student_log, teacher_log, reduction="sum", log_target=True)


def rank_labels(
    scores: Any, labels: Sequence[str], parameters: Mapping[str, Any], first: Ints | None = None
) -> list[Any]:
    """The Hugging Face form of scores [rows, labels]. `first`: the label of each row that comes first."""
    top_k, keys = parameters.get("top_k") or len(labels), -scores
    if first is not None:
        keys[np.arange(len(keys)), first] = -np.inf
    # A stable sort: equal scores keep the label order on every machine.
    order = np.argsort(keys, axis=1, kind="stable")[:, :top_k]
    return [
        [{"label": labels[column], "score": row[column]} for column in columns]
        for row, columns in zip(scores.tolist(), order.tolist(), strict=True)
    ]


TASK = Classification()
