"""Explain predictions of an artifact: attributions of words and sentences."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rtrain.core.errors import UserError
from rtrain.core.ragged import EncodedRow, Floats, collate
from rtrain.inference.explain import gradients, token_to_word
from rtrain.inference.explain.integrated_gradients import ERROR_TOLERANCE, INITIAL_STEPS, MAX_STEPS, Doubles, integrate
from rtrain.inference.explain.targets import (
    ExplainedTarget,
    check_explainable,
    check_label,
    choose_targets,
    target_values,
)
from rtrain.inference.explain.token_to_word import AttributedSpan
from rtrain.inference.predictor import Predictor
from rtrain.tasks.base import Input, Task

MAX_OUTPUT_DIFFERENCE = 1e-3
"""Maximum difference, absolute or relative, between the outputs from tokens and from their embeddings."""


@dataclass(frozen=True)
class AttributedText:
    """One of a row's texts, up to the last token that the model read."""

    field: str
    text: str
    words: tuple[AttributedSpan, ...]
    sentences: tuple[AttributedSpan, ...]


@dataclass(frozen=True, eq=False)
class TargetExplanation:
    """The explained value, and the attribution of each part of the texts relative to padding."""

    label: str
    span: tuple[int, int] | None
    """Characters of the explained entity."""
    value: float
    """A logit; for a regression the predicted number."""
    baseline: float
    """The value if every word is padding. value = baseline + sum of the attributions, up to the error."""
    steps: int
    completeness_error: float | None
    """|sum of attributions - (value - baseline)| / |value - baseline|; None if value equals baseline."""
    tokens: Doubles
    """The attribution of each token, special ones included (always 0)."""
    texts: tuple[AttributedText, ...]

    def to_document(self) -> dict[str, Any]:
        """Return the JSON of `serve.schemas.predict.ExplainedAnswer`."""
        entity = {} if self.span is None else {"start": self.span[0], "end": self.span[1]}
        return {
            "label": self.label,
            **entity,
            "value": self.value,
            "baseline": self.baseline,
            "steps": self.steps,
            "completeness_error": self.completeness_error,
            "words": [_span_document(text, "word", part) for text in self.texts for part in text.words],
            "sentences": [_span_document(text, "sentence", part) for text in self.texts for part in text.sentences],
        }


@dataclass(frozen=True)
class RowExplanation:
    truncated: bool
    """Whether the text was truncated."""
    answers: tuple[TargetExplanation, ...]

    def to_document(self) -> dict[str, Any]:
        return {"truncated": self.truncated, "answers": [answer.to_document() for answer in self.answers]}


class Explainer:
    """Explains predictions of a float artifact; refuses engines without gradients. Thread-safe."""

    def __init__(self, predictor: Predictor):
        check_explainable(predictor.task)
        self._predictor = predictor
        self._network, self._accepted_arguments = predictor.network
        added_tokens = predictor.tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(number for number, token in added_tokens.items() if token.special)

    def __call__(
        self, inputs: Sequence[Input], label: str | None = None, steps: int | None = None
    ) -> list[RowExplanation]:
        """Return one explanation per input, of its prediction or of `label`."""
        self.check(label)
        encoded = self._predictor.encode(inputs)
        outputs = self._predictor.outputs(encoded)
        return [
            self.explain(input_, row, output, label, steps)
            for input_, row, output in zip(inputs, encoded, outputs, strict=True)
        ]

    def check(self, label: str | None) -> None:
        """Raise a LabelError for a label that the model does not have."""
        if label is not None:
            check_label(self._predictor.task, self._predictor.head, label)

    def explain(
        self,
        row_input: Input,
        encoded: EncodedRow,
        output: Floats,
        label: str | None = None,
        steps: int | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> RowExplanation:
        """Explain the model's output for one row. Without `steps`, they are doubled until the error is small.

        Raises:
            LabelError: see `choose_targets`.
            ExplanationCancelled: `should_stop()` is true.

        """
        predictor = self._predictor
        if steps is not None:
            _check_steps(steps)
        targets = choose_targets(predictor.task, predictor.head, row_input, encoded, output, label)
        if not targets:
            return RowExplanation(encoded.is_truncated, ())
        special = gradients.find_special_tokens(encoded.ids, encoded.spans, self._special_ids)
        score = partial(target_values, task=predictor.task, head=predictor.head, targets=targets)
        path = gradients.IntegrationPath(
            self._network, self._accepted_arguments, collate([encoded]), special, predictor.pad_id, score, should_stop
        )
        integral = integrate(path, steps)
        self._check_same_values(targets, output, integral.values)
        texts = _list_texts(row_input, predictor.task)
        text_indices = token_to_word.text_indices(encoded, special.tolist(), paired=len(texts) > 1)
        return RowExplanation(
            encoded.is_truncated,
            tuple(
                TargetExplanation(
                    target.label,
                    target.span,
                    *(value, baseline, integral.steps, error, attributions),
                    _attribute_texts(texts, encoded, text_indices, attributions),
                )
                for target, value, baseline, error, attributions in zip(
                    targets,
                    integral.values.tolist(),
                    integral.baselines.tolist(),
                    integral.errors,
                    integral.attributions,
                    strict=True,
                )
            ),
        )

    def _check_same_values(self, targets: Sequence[ExplainedTarget], output: Floats, embedding_values: Doubles) -> None:
        """Refuse a network whose output from embeddings differs: the explanation would be of another value."""
        for target, value in zip(targets, embedding_values.tolist(), strict=True):
            token_value = target.compute_value(output)
            if not math.isclose(value, token_value, rel_tol=MAX_OUTPUT_DIFFERENCE, abs_tol=MAX_OUTPUT_DIFFERENCE):
                kind = type(self._network).__name__
                raise UserError(
                    f"{kind} gives {token_value:.6g} from tokens and {value:.6g} from their embeddings; "
                    "its predictions cannot be explained by integrated gradients",
                    code="not_explainable",
                )


def _check_steps(steps: int) -> None:
    if steps < 2 or steps % 2 or steps > 4 * MAX_STEPS:
        raise UserError(
            f"steps={steps}: not an even number from 2 to {4 * MAX_STEPS}; leave it out to start at {INITIAL_STEPS} "
            f"and double until the completeness error is below {ERROR_TOLERANCE:g}",
            code="out_of_range",
        )


def _list_texts(row_input: Input, task: Task) -> list[tuple[str, str]]:
    """Return (field, text) of the one or two texts."""
    if isinstance(row_input, str):
        return [(task.fields[0], row_input)]
    return [(field, row_input[field]) for field in task.fields if row_input.get(field) is not None]


def _attribute_texts(
    texts: Sequence[tuple[str, str]], encoded: EncodedRow, text_indices: Sequence[int], attributions: Doubles
) -> tuple[AttributedText, ...]:
    attributed = []
    for number, (field, text) in enumerate(texts):
        token_indices = np.flatnonzero(np.array(text_indices) == number).tolist()
        attributed_words = token_to_word.attribute_words(
            text, [encoded.spans[place] for place in token_indices], attributions[token_indices].tolist()
        )
        attributed.append(
            AttributedText(
                field, text, tuple(attributed_words), tuple(token_to_word.attribute_sentences(text, attributed_words))
            )
        )
    return tuple(attributed)


def _span_document(attributed_text: AttributedText, name: str, attributed_span: AttributedSpan) -> dict[str, Any]:
    return {
        "field": attributed_text.field,
        name: attributed_text.text[attributed_span.start : attributed_span.end],
        **attributed_span._asdict(),
    }
