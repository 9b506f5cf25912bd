"""Artefact and texts to explanations: which words, and which sentences, an answer rests on."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rtrain.core.errors import UserError
from rtrain.core.ragged import Encoded, Floats, pack
from rtrain.inference.explain import gradients, token_to_word
from rtrain.inference.explain.integrated_gradients import FIRST_STEPS, MOST_STEPS, TOLERANCE, Doubles, integrate
from rtrain.inference.explain.targets import Target, check, check_label, choose, values
from rtrain.inference.explain.token_to_word import Part
from rtrain.inference.predictor import Predictor
from rtrain.tasks.base import Input, Task

APART = 1e-3
"""Largest difference between the answers from tokens and from their embeddings, absolute or relative."""


@dataclass(frozen=True)
class Reading:
    """One of a row's texts as the model read it."""

    field: str
    text: str
    words: tuple[Part, ...]
    sentences: tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class Explained:
    """One value, and what each part of the texts adds to it compared with a text of padding."""

    label: str
    span: tuple[int, int] | None
    """Characters of the entity that is explained."""
    value: float
    """A logit; of a regression the number itself."""
    baseline: float
    """The value where every word is padding. Value = baseline + sum of the attributions, up to the error."""
    steps: int
    completeness_error: float | None
    """|sum of attributions - (value - baseline)| / |value - baseline|; None where the words change nothing."""
    tokens: Doubles
    """The attribution of each token, special ones included (always 0)."""
    texts: tuple[Reading, ...]

    def to_document(self) -> dict[str, Any]:
        """As JSON, see `serve.schemas.predict.ExplainedAnswer`."""
        entity = {} if self.span is None else {"start": self.span[0], "end": self.span[1]}
        return {
            "label": self.label,
            **entity,
            "value": self.value,
            "baseline": self.baseline,
            "steps": self.steps,
            "completeness_error": self.completeness_error,
            "words": [_entry(text, "word", part) for text in self.texts for part in text.words],
            "sentences": [_entry(text, "sentence", part) for text in self.texts for part in text.sentences],
        }


@dataclass(frozen=True)
class Explanation:
    truncated: bool
    """True where the text goes on behind the last word that was read."""
    answers: tuple[Explained, ...]

    def to_document(self) -> dict[str, Any]:
        return {"truncated": self.truncated, "answers": [answer.to_document() for answer in self.answers]}


class Explainer:
    """Explains a float artefact's answers; refuses one that has no gradients. May be called from any thread."""

    def __init__(self, predictor: Predictor):
        check(predictor.task)
        self._predictor = predictor
        self._network, self._accepted = predictor.network
        added = predictor.tokenizer.get_added_tokens_decoder()
        self._special = frozenset(number for number, token in added.items() if token.special)

    def __call__(
        self, inputs: Sequence[Input], label: str | None = None, steps: int | None = None
    ) -> list[Explanation]:
        """One explanation per input, of its answer or of `label` instead."""
        self.check(label)
        encoded = self._predictor.encode(inputs)
        outputs = self._predictor.outputs(encoded)
        return [
            self.explain(asked, row, output, label, steps)
            for asked, row, output in zip(inputs, encoded, outputs, strict=True)
        ]

    def check(self, label: str | None) -> None:
        """Raise a LabelError for a label that the model does not have."""
        if label is not None:
            check_label(self._predictor.task, self._predictor.head, label)

    def explain(
        self,
        asked: Input,
        encoded: Encoded,
        output: Floats,
        label: str | None = None,
        steps: int | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Explanation:
        """Explain the model's output for one row. `steps` are doubled until the error is small, unless they are given.

        Raises LabelError, and `gradients.Stopped` as soon as `stop()` is true.
        """
        predictor = self._predictor
        if steps is not None:
            _check_steps(steps)
        targets = choose(predictor.task, predictor.head, asked, encoded, output, label)
        if not targets:
            return Explanation(encoded.truncated, ())
        special = gradients.special(encoded.ids, encoded.spans, self._special)
        score = partial(values, task=predictor.task, head=predictor.head, targets=targets)
        path = gradients.Path(self._network, self._accepted, pack([encoded]), special, predictor.pad_id, score, stop)
        found = integrate(path, steps)
        self._check_alike(targets, output, found.values)
        texts = _texts(asked, predictor.task)
        sides = token_to_word.sides(encoded, special.tolist(), paired=len(texts) > 1)
        return Explanation(
            encoded.truncated,
            tuple(
                Explained(
                    target.label,
                    target.span,
                    *(value, baseline, found.steps, error, attributions),
                    _readings(texts, encoded, sides, attributions),
                )
                for target, value, baseline, error, attributions in zip(
                    targets,
                    found.values.tolist(),
                    found.baselines.tolist(),
                    found.errors,
                    found.attributions,
                    strict=True,
                )
            ),
        )

    def _check_alike(self, targets: Sequence[Target], output: Floats, found: Doubles) -> None:
        """Refuse a network that answers otherwise from embeddings: the explanation would be of another value."""
        for target, value in zip(targets, found.tolist(), strict=True):
            answered = target.value(output)
            if not math.isclose(value, answered, rel_tol=APART, abs_tol=APART):
                kind = type(self._network).__name__
                raise UserError(
                    f"{kind} gives {answered:.6g} from tokens and {value:.6g} from their embeddings; "
                    "its answers cannot be explained by integrated gradients",
                    code="not_explainable",
                )


def _check_steps(steps: int) -> None:
    if steps < 2 or steps % 2 or steps > 4 * MOST_STEPS:
        raise UserError(
            f"steps={steps}: not an even number from 2 to {4 * MOST_STEPS}; leave it out to start at {FIRST_STEPS} "
            f"and double until the completeness error is below {TOLERANCE:g}",
            code="out_of_range",
        )


def _texts(asked: Input, task: Task) -> list[tuple[str, str]]:
    """(field, text) of the one or two texts."""
    if isinstance(asked, str):
        return [(task.fields[0], asked)]
    return [(field, asked[field]) for field in task.fields if asked.get(field) is not None]


def _readings(
    texts: Sequence[tuple[str, str]], encoded: Encoded, sides: Sequence[int], attributions: Doubles
) -> tuple[Reading, ...]:
    found = []
    for number, (field, text) in enumerate(texts):
        places = np.flatnonzero(np.array(sides) == number).tolist()
        parts = token_to_word.add_up(text, [encoded.spans[place] for place in places], attributions[places].tolist())
        found.append(Reading(field, text, tuple(parts), tuple(token_to_word.by_sentence(text, parts))))
    return tuple(found)


def _entry(reading: Reading, name: str, part: Part) -> dict[str, Any]:
    return {"field": reading.field, name: reading.text[part.start : part.end], **part._asdict()}
