"""The Task protocol and its registry. No torch or transformers at module level: serving needs neither."""

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rtrain.batch import Encoded, Floats, Head, Ints, Outputs, Ragged, Tokens

if TYPE_CHECKING:
    import tokenizers
    import torch

Input = str | Mapping[str, str]
"""What a request asks of: a text, or texts by name."""


class Targets(NamedTuple):
    values: Ragged
    """float32."""
    unknown: npt.NDArray[np.bool_]
    """Rows with a label that the head has not."""


class Place(NamedTuple):
    """A stretch of tokens of one of a row's windows."""

    window: int
    first: int
    last: int
    """Included."""


class Described(NamedTuple):
    """Rows' answers beside what they should be, for people. One entry per row each."""

    target: list[Any]
    """A string, a float or a list of strings; or a `Place` of the row's tokens."""
    prediction: list[Any]
    """As the target is; or a slice of the row's tokens."""
    score: npt.NDArray[np.float64]
    """How sure the model is, 0 to 1; NaN where the task has no such thing."""
    loss: npt.NDArray[np.float64]
    """The row's own mean loss per target."""


Variation = Literal["text", "words", "nothing"]
"""Anything; the words, but neither their number nor their order (a label is about their places); nothing."""


class Task(Protocol):
    """What the loop, the compressors and the endpoint need to know of a task, and all that they know.

    A model gives outputs for each window [windows, outputs], or for each token [tokens, outputs], tokens one after
    another as in `Tokens.ids`; which of them is the task's own business. Of the tokens it gives those `wanted`.
    """

    name: str
    output: str
    """Kind of output: chooses the metric (`rtrain.metrics.by_output`) and what can be done with the answers."""
    auto_model: str
    """Name of the transformers class that loads the float artefact."""
    by_token: bool
    """Its model answers each token, not each window."""
    fields: tuple[str, str]
    """Names of the two texts in a request."""
    needs_pair: bool
    never_cuts: bool
    """Reads a text in windows whatever the settings: an answer may lie anywhere in it."""
    varies: Variation
    """What augmentation may change of a training text, its label staying true."""
    finds_outside: bool
    """Tells rows that belong to none of its labels: those of the head's fact `outside`, which are never trained on."""

    packs: bool
    """Its rows are blocks of text that fill the model's window (`rtrain.data.packing`), not the file's rows."""

    # ---------------------------------------------------------------------------------------------- rows to targets

    def flaw(self, text: str, pair: str | None, label: str) -> str | None:
        """Why a row cannot be used, or None. A label that is a list arrives as JSON."""
        ...

    def head(self, counts: Mapping[str, int], tokenizer: "tokenizers.Tokenizer") -> Head:
        """From the training rows' labels and how often each occurs."""
        ...

    def encode(
        self,
        tokenizer: "tokenizers.Tokenizer",
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        max_windows: int = 1,
    ) -> list[Encoded]:
        """Rows to tokens, the same in training and in serving."""
        ...

    def marks(self, text: str, pair: str | None, label: str, encoded: Encoded) -> list[int]:
        """What of a row's targets can be known only beside its text: where in its tokens they lie. May be empty."""
        ...

    def targets(self, labels: Sequence[str], marks: Ragged, head: Head) -> Targets:
        """Targets of rows from their labels and marks."""
        ...

    # ----------------------------------------------------------------------------------------------------- training

    def prepare(self, tokens: Tokens, head: Head, seed: int, epoch: int) -> Tokens:
        """The rows as they are trained on in that epoch; a pure function of its arguments, row by row."""
        ...

    def wanted(self, tokens: Tokens, head: Head) -> Ints | None:
        """Places in `tokens.ids`, ascending, of the tokens whose logits `loss` and `outputs` get; None for all. A head
        as wide as a vocabulary is computed for these alone."""
        ...

    def parts(self, head: Head) -> tuple[str, ...]:
        """Names of the parts of the loss; each is divided by its own count, and they are added."""
        ...

    def counts(self, tokens: Tokens, head: Head) -> dict[str, int]:
        """Number of targets of each part. With `loss` the (sum, count) pairs: never a mean, so that passes and workers
        add up exactly. Apart from it, because all workers' counts must be known before the first backward pass."""
        ...

    def loss(self, logits: "torch.Tensor", tokens: Tokens, head: Head) -> dict[str, "torch.Tensor"]:
        """Sum over the targets of each part."""
        ...

    def imitation(
        self, logits: "torch.Tensor", tokens: Tokens, head: Head, temperature: float
    ) -> dict[str, "torch.Tensor"]:
        """Distance to `tokens.teacher`, summed over the same targets; at the scale of `loss` (a KL times T^2)."""
        ...

    # ------------------------------------------------------------------------------------------------------ answers

    def outputs(self, logits: Floats, tokens: Tokens, head: Head) -> Outputs:
        """The model's output for each row: what a teacher teaches, an artefact's golden answers hold, and `decode`
        turns into the HTTP answer. Windows are pooled here."""
        ...

    def outcomes(self, outputs: Outputs, tokens: Tokens, head: Head) -> Ragged:
        """What the metric needs to know of each row, compact: it is gathered from all workers. float64."""
        ...

    def calibrate(self, outcomes: Ragged, targets: Ragged, head: Head) -> dict[str, Any]:
        """Facts that are chosen on the validation rows once the model is trained, e.g. a threshold; often none."""
        ...

    def describe(self, outcomes: Ragged, targets: Ragged, head: Head) -> Described:
        """Evaluated rows, for people."""
        ...

    def decode(
        self,
        outputs: Outputs,
        asked: Sequence[Input],
        encoded: Sequence[Encoded],
        head: Head,
        parameters: Mapping[str, Any],
    ) -> list[Any]:
        """The HTTP answer to each input."""
        ...

    def judge(self, answers: Sequence[Any], labels: Sequence[str]) -> dict[str, float]:
        """Scores that need the answers' texts beside the labels, e.g. those of a published script; often none."""
        ...


def get(name: str) -> Task:
    """The task of that name, from `rtrain.tasks.<name>`."""
    found: Task = importlib.import_module(f"rtrain.tasks.{name}").TASK
    return found
