"""Explain predictions of an artifact: attributions of words and sentences.

The explained target is a label's logit, a number, or the mean logit of an entity's tags.
"""

import bisect
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import regex

from rtrain.core.errors import UserError
from rtrain.core.ragged import EncodedRow, Floats, Head, TokenBatch, collate
from rtrain.core.text_segmentation import LETTER_PATTERN, SYMBOL_PATTERN, Span, find_sentence_spans
from rtrain.inference import integrated_gradients
from rtrain.inference.integrated_gradients import ERROR_TOLERANCE, INITIAL_STEPS, MAX_STEPS, Doubles, integrate
from rtrain.inference.predictor import Predictor
from rtrain.metrics.classes import decide_classes, iter_heads, label_thresholds, sigmoid
from rtrain.tasks.base import Input, Task
from rtrain.tasks.defaults import pool_logits
from rtrain.tasks.token_tags import locate_entities

if TYPE_CHECKING:
    import torch


MAX_OUTPUT_DIFFERENCE = 1e-3
"""Maximum difference, absolute or relative, between the outputs from tokens and from their embeddings."""
MAX_TARGETS = 8
"""Maximum targets of a prediction: each costs a backward pass. The most certain labels or entities, or the first heads,
are kept."""
# Ideographs have no spaces between words.
_LETTER = rf"(?:(?![\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]){LETTER_PATTERN})"
_WORD = regex.compile(rf"{_LETTER}(?:{_LETTER}|['\u2019-](?={_LETTER})|(?<=\d)[.,:](?=\d))*|{SYMBOL_PATTERN}")


class LabelError(UserError):
    """The model does not have the label, or did not predict it."""


class AttributedSpan(NamedTuple):
    """A word or a sentence: characters [start, end) of its text, and its attribution."""

    start: int
    end: int
    attribution: float


class ExplainedTarget(NamedTuple):
    label: str
    columns: tuple[int, ...]
    """The value is the mean of these outputs."""
    tokens: tuple[int, ...] | None = None
    """The token of each column, for token-level tasks."""
    scale: float = 1.0
    shift: float = 0.0
    """Value = scale x output + shift, in the unit of the training scores."""
    span: tuple[int, int] | None = None
    """Characters of the labeled part; None for the whole text."""

    def compute_value(self, output: Floats) -> float:
        """Return the target's value from a row's output, [outputs] or [tokens, outputs]."""
        columns = list(self.columns)
        values = output[columns] if self.tokens is None else output[list(self.tokens), columns]
        return float(np.mean(values, dtype=np.float64)) * self.scale + self.shift


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
        self._network, _ = predictor.network
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
        special = integrated_gradients.find_special_tokens(encoded.ids, encoded.spans, self._special_ids)
        score = partial(target_values, task=predictor.task, head=predictor.head, targets=targets)
        path = integrated_gradients.IntegrationPath(
            predictor.network, collate([encoded]), special, predictor.pad_id, score, should_stop
        )
        integral = integrate(path, steps)
        self._check_same_values(targets, output, integral.values)
        texts = _list_texts(row_input, predictor.task)
        text_numbers = text_indices(encoded, special.tolist(), paired=len(texts) > 1)
        return RowExplanation(
            encoded.is_truncated,
            tuple(
                TargetExplanation(
                    target.label,
                    target.span,
                    *(value, baseline, integral.steps, error, attributions),
                    _attribute_texts(texts, encoded, text_numbers, attributions),
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
    texts: Sequence[tuple[str, str]], encoded: EncodedRow, text_numbers: Sequence[int], attributions: Doubles
) -> tuple[AttributedText, ...]:
    attributed = []
    for number, (field, text) in enumerate(texts):
        token_indices = np.flatnonzero(np.array(text_numbers) == number).tolist()
        attributed_words = attribute_words(
            text, [encoded.spans[place] for place in token_indices], attributions[token_indices].tolist()
        )
        attributed.append(
            AttributedText(field, text, tuple(attributed_words), tuple(attribute_sentences(text, attributed_words)))
        )
    return tuple(attributed)


def _span_document(attributed_text: AttributedText, name: str, attributed_span: AttributedSpan) -> dict[str, Any]:
    return {
        "field": attributed_text.field,
        name: attributed_text.text[attributed_span.start : attributed_span.end],
        **attributed_span._asdict(),
    }


def check_explainable(task: Task) -> None:
    if task.output not in CHOOSER_BY_OUTPUT:
        kinds = ", ".join(CHOOSER_BY_OUTPUT)
        raise UserError(
            f"answers of kind {task.output!r} (task {task.name}) cannot be explained, only {kinds}",
            code="not_explainable",
        )


def check_label(task: Task, head: Head, label: str) -> None:
    """Raise a LabelError with similar names if the model lacks the label."""
    _label_index(label, _entity_types(head) if task.output == "tags" else head.labels)


def choose_targets(
    task: Task, head: Head, row_input: Input, encoded: EncodedRow, output: Floats, label: str | None = None
) -> list[ExplainedTarget]:
    """Return the targets of the prediction of a row, or of `label`; empty without tagged words.

    Targets are the logit of the class, of each predicted label (or the likeliest one) or of each head's class, the mean
    logit of the tags of each entity, or a number in the unit of the training scores.

    """
    return CHOOSER_BY_OUTPUT[task.output](head, row_input, encoded, output, label)[:MAX_TARGETS]


def target_values(
    logits: "torch.Tensor", rows: TokenBatch, task: Task, head: Head, targets: Sequence[ExplainedTarget]
) -> "torch.Tensor":
    """Return differentiable values [rows, targets] from logits of rows of equal length."""
    import torch

    if task.is_token_level:
        logits = logits.unflatten(0, (len(rows), -1))
        target_logits = [logits[:, list(target.tokens or ()), list(target.columns)] for target in targets]
    else:
        row_logits = pool_logits(logits, rows, head)
        target_logits = [row_logits[:, list(target.columns)] for target in targets]
    means = [
        column.mean(dim=1) * target.scale + target.shift for column, target in zip(target_logits, targets, strict=True)
    ]
    return torch.stack(means, dim=1)


# ------------------------------------------------------------------------------------------------- by kind of output


def _class_targets(
    head: Head, row_input: Input, encoded: EncodedRow, output: Floats, label: str | None
) -> list[ExplainedTarget]:
    index = (
        int(decide_classes(output[None], head.labels, head)[0]) if label is None else _label_index(label, head.labels)
    )
    return [ExplainedTarget(head.labels[index], (index,))]


def _label_targets(
    head: Head, row_input: Input, encoded: EncodedRow, output: Floats, label: str | None
) -> list[ExplainedTarget]:
    if label is not None:
        return _class_targets(head, row_input, encoded, output, label)
    order = np.argsort(-output, kind="stable")
    probabilities, thresholds = sigmoid(output), label_thresholds(head)
    predicted = [int(place) for place in order if probabilities[place] >= thresholds[place]]
    return [ExplainedTarget(head.labels[place], (place,)) for place in predicted or [int(order[0])]]


def _head_targets(
    head: Head, row_input: Input, encoded: EncodedRow, output: Floats, label: str | None
) -> list[ExplainedTarget]:
    if label is not None:
        return _class_targets(head, row_input, encoded, output, label)
    best_columns = [
        columns.start + int(decide_classes(output[None, columns], labels, head, name)[0])
        for name, labels, columns in iter_heads(head)
    ]
    return [ExplainedTarget(head.labels[place], (place,)) for place in best_columns]


def _number_targets(
    head: Head, row_input: Input, encoded: EncodedRow, output: Floats, label: str | None
) -> list[ExplainedTarget]:
    if label is not None:
        _label_index(label, head.labels)
    return [ExplainedTarget(head.labels[0], (0,), scale=float(head.facts["std"]), shift=float(head.facts["mean"]))]


def _tag_targets(
    head: Head, row_input: Input, encoded: EncodedRow, output: Floats, label: str | None
) -> list[ExplainedTarget]:
    entities = locate_entities(row_input, output, encoded, head)
    if label is not None:
        _label_index(label, _entity_types(head))
        types = sorted({group["entity_group"] for group, _, _ in entities})
        entities = [entity for entity in entities if entity[0]["entity_group"] == label]
        if not entities:
            raise LabelError(
                f"no entity of type {label!r} was predicted; predicted: {', '.join(types) or 'none'}",
                code="label_not_given",
            )
    most_certain = sorted(range(len(entities)), key=lambda place: -entities[place][0]["score"])[:MAX_TARGETS]
    return [
        ExplainedTarget(group["entity_group"], tuple(columns), tuple(tokens), span=(group["start"], group["end"]))
        for group, tokens, columns in (entities[place] for place in sorted(most_certain))  # in the order of the text
    ]


def _entity_types(head: Head) -> list[str]:
    return sorted({name.partition("-")[2] for name in head.labels} - {""})


def _label_index(label: str, labels: Sequence[str]) -> int:
    if label in labels:
        return list(labels).index(label)
    similar_labels = difflib.get_close_matches(label, labels, n=3, cutoff=0.5)
    similar_labels += [name for name in labels if label.lower() in name.lower() and name not in similar_labels][:3]
    first_labels = ", ".join(labels[:10]) + (f" and {len(labels) - 10} more" if len(labels) > 10 else "")
    fix = f"did you mean {' or '.join(similar_labels)}?" if similar_labels else f"known: {first_labels}"
    raise LabelError(f"the model has no label {label!r}; {fix}", code="unknown_label")


CHOOSER_BY_OUTPUT: Mapping[str, Callable[[Head, Input, EncodedRow, Floats, str | None], list[ExplainedTarget]]] = {
    "classes": _class_targets,
    "labels": _label_targets,
    "heads": _head_targets,
    "number": _number_targets,
    "tags": _tag_targets,
}


def word_spans(text: str) -> list[Span]:
    """Return words, numbers, punctuation marks, ideographs and emoji; each non-space character is in exactly one.

    Words keep inner apostrophes and hyphens, numbers inner points; every other character is a word.

    """
    return [match.span() for match in _WORD.finditer(text)]


def text_indices(encoded: EncodedRow, special: Sequence[bool], paired: bool) -> list[int]:
    """Return the text of each token: first (0), second (1), or none (-1) for special tokens."""
    indices: list[int] = []
    for window in encoded.windows:
        begin = len(indices)
        # Without token types, the second text begins after the first special token that follows a token.
        has_token_types, has_seen_token, is_second_text = window.pair_start < window.num_tokens, False, False
        for token_index in range(window.num_tokens):
            if special[begin + token_index]:
                is_second_text = is_second_text or has_seen_token
                indices.append(-1)
                continue
            has_seen_token = True
            indices.append(int(paired and (token_index >= window.pair_start if has_token_types else is_second_text)))
    return indices


def attribute_words(text: str, token_spans: Sequence[Span], attributions: Sequence[float]) -> list[AttributedSpan]:
    """Return the words in order with their attributions. A token that covers several words joins them into one.

    The sum over the words is the sum over the tokens.

    """
    text_end = max((end for _, end in token_spans), default=0)
    spans = [span for span in word_spans(text) if span[0] < text_end] or ([(0, text_end)] if token_spans else [])
    starts, ends = [start for start, _ in spans], [end for _, end in spans]
    joins_previous = [False] * len(spans)  # to the word before
    word_of_token = []
    for start, end in token_spans:
        # A token of spaces only belongs to the next word, or to the last word of the text.
        first = min(bisect.bisect_right(ends, start), len(spans) - 1)
        last = max(first, bisect.bisect_left(starts, end) - 1)
        joins_previous[first + 1 : last + 1] = [True] * (last - first)
        word_of_token.append(first)
    totals = [0.0] * len(spans)
    for word_index, attribution in zip(word_of_token, attributions, strict=True):
        totals[word_index] += attribution
    attributed_words: list[AttributedSpan] = []
    for (start, end), total, join in zip(spans, totals, joins_previous, strict=True):
        previous = attributed_words.pop() if join else AttributedSpan(start, end, 0.0)
        attributed_words.append(AttributedSpan(previous.start, end, previous.attribution + total))
    return attributed_words


def attribute_sentences(text: str, words: Sequence[AttributedSpan]) -> list[AttributedSpan]:
    """Return the sentences in order, each with the sum of its words."""
    spans = find_sentence_spans(text)
    starts = [start for start, _ in spans]
    totals: dict[int, float] = {}
    for word in words:
        sentence_index = max(0, bisect.bisect_right(starts, word.start) - 1)
        totals[sentence_index] = totals.get(sentence_index, 0.0) + word.attribution
    return [AttributedSpan(*spans[place], total) for place, total in totals.items()] if spans else []
