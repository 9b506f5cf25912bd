"""The Task protocol: all that the other rooms know of a task. `get` finds a task by its name.

The name of a task is that of its module in this package; `rtrain.config.recipe.TASKS` lists the names that a recipe may
give. Scores, charts and explanations are chosen by the kind of its answers, `Task.output`. docs/adding.md lists the
steps to another task. No torch or transformers at module level: serving needs neither.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rtrain.core.ragged import Encoded, Floats, Head, Ints, Outputs, Ragged, Tokens

if TYPE_CHECKING:
    import tokenizers
    import torch

Input = str | Mapping[str, str]
"""What a request asks of: a text, or texts by name."""


class Targets(NamedTuple):
    values: Ragged
    """float32."""
    unknown: npt.NDArray[np.bool_]
    """Whether a row has a label that the head lacks, one entry per row."""


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


class Column(NamedTuple):
    """A column of the answers, where rows are answered into a table."""

    name: str
    kind: Any
    """Type of its values: `str`, `float`, `int` or `bool`; a list of one of these, as `[str]`; a list of objects, as
    `[{"word": str, "start": int}]`; `object` for anything, which a table holds as JSON."""
    value: Callable[[Any], Any]
    """From an answer of `Task.decode` to the column's value; None where it has none."""


Variation = Literal["text", "words", "nothing"]
"""`text`: anything. `words`: each word, but neither their number nor their order, where a label is about places.
`nothing`: not a character."""


ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"] | None
"""What Transformers calls them."""


class Task(Protocol):
    """What the loop, the compressors and the endpoint need to know of a task, and all that they know.

    A model gives its outputs per window, [windows, outputs], or per token, [tokens, outputs], in the order of
    `Tokens.ids`: the task's `by_token` says which. Only those tokens that `wanted` names have outputs.
    """

    name: str
    output: str
    """Kind of the answers: chooses scores (`rtrain.metrics.registry`), charts, explanations and reply tensors."""
    auto_model: str
    """Name of the transformers class that loads the float artefact."""
    problem_type: "ProblemType"
    """How other programs read the outputs of a head that answers once per text: `problem_type` of config.json."""
    has_standard_head: bool
    """Other programs that load the model turn its outputs into the task's answers."""
    by_token: bool
    """The model answers each token, not each window."""
    fields: tuple[str, str]
    """Names of the two texts in a request."""
    needs_pair: bool
    never_cuts: bool
    """Long texts are read in windows whatever the settings: an answer may lie anywhere in them."""
    rule_of_marks: int
    """The number of the rule by which answers become `marks`: stores by another rule are not taken for these."""
    varies: Variation
    """What augmentation may change in a training text without making its label false."""
    finds_outside: bool
    """Supports `data.outside`: rows that belong to none of the labels, and are never trained on, are told apart."""
    smooths: bool
    """Supports `train.label_smoothing`: each target is one label out of several."""
    reads_special: bool
    """The names of special tokens in a text, e.g. of masks, are those tokens. Elsewhere they are text."""
    prepares: bool
    """`prepare` makes the targets: counts of these do not follow from the stored ones."""
    packs: bool
    """Rows are blocks of text that fill the model's window (`rtrain.data.packing`), not the file's rows."""

    # ---------------------------------------------------------------------------------------------- rows to targets

    def is_blank(self, text: str, pair: str | None) -> bool:
        """Whether there is no text to read. One of two texts may be empty where neither is about the other."""
        ...

    def flaw(self, text: str, pair: str | None, label: str) -> str | None:
        """Why a row that is not blank cannot be used, or None. A label that is a list arrives as JSON."""
        ...

    def head(self, counts: Mapping[str, int], tokenizer: "tokenizers.Tokenizer") -> Head:
        """What the outputs mean, from the training rows' labels (`counts`: how often each occurs)."""
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
        """Where in a row's tokens its targets lie, which can be told only while the text is at hand. May be empty."""
        ...

    def targets(self, labels: Sequence[str], marks: Ragged, head: Head) -> Targets:
        """Targets of rows from their labels and marks."""
        ...

    def stand_in(self, text: str, head: Head) -> str:
        """A label that a row of this text could have. It stands in the place of the missing one where a teacher alone
        answers a row: its targets say what is answered, and are not learned."""
        ...

    # ----------------------------------------------------------------------------------------------------- training

    def prepare(self, tokens: Tokens, head: Head, seed: int, epoch: int) -> Tokens:
        """The rows as they are trained on in that epoch, e.g. masked; a pure function of its arguments, row by row."""
        ...

    def wanted(self, tokens: Tokens, head: Head) -> Ints | None:
        """Places in `tokens.ids`, ascending, of the tokens whose logits `loss` and `outputs` need; None for all. The
        logits of other tokens are not computed, which matters for a head as wide as a vocabulary."""
        ...

    def parts(self, head: Head) -> tuple[str, ...]:
        """Names of the parts of the loss. Each part is divided by its own count of targets; the quotients are added."""
        ...

    def counts(self, tokens: Tokens, head: Head) -> dict[str, int]:
        """Number of targets of each part: what the sums of `loss` are divided by. Sums and counts add up exactly over
        passes and workers, means would not. The counts are a method of their own because those of all workers must be
        known before the first backward pass."""
        ...

    def loss(self, logits: "torch.Tensor", tokens: Tokens, head: Head) -> dict[str, "torch.Tensor"]:
        """The loss of each part, summed over its targets (not averaged)."""
        ...

    def imitation(
        self, logits: "torch.Tensor", tokens: Tokens, head: Head, temperature: float
    ) -> dict[str, "torch.Tensor"]:
        """Distance to `tokens.teacher`, summed over the same targets as `loss` and on its scale (a KL times T^2)."""
        ...

    # ------------------------------------------------------------------------------------------------------ answers

    def outputs(self, logits: Floats, tokens: Tokens, head: Head) -> Outputs:
        """The model's output for each row, its windows pooled. Distillation learns it, golden answers record it, and
        `decode` makes the HTTP answer from it."""
        ...

    def outcomes(self, outputs: Outputs, tokens: Tokens, head: Head) -> Ragged:
        """What the metric needs of each row, float64. Compact, since all workers' rows are gathered."""
        ...

    def calibrate(self, outcomes: Ragged, targets: Ragged, head: Head) -> dict[str, Any]:
        """Facts for the head, e.g. a threshold, chosen on the validation rows of the trained model; often none."""
        ...

    def describe(self, outcomes: Ragged, targets: Ragged, head: Head) -> Described:
        """The answers to evaluated rows beside what they should be, for the report."""
        ...

    def decode(
        self,
        outputs: Outputs,
        asked: Sequence[Input],
        encoded: Sequence[Encoded],
        head: Head,
        parameters: Mapping[str, Any],
    ) -> list[Any]:
        """The answer of /predict to each input, JSON; `serve.schemas.predict.PredictReply` describes its forms."""
        ...

    def alone(self, answer: Any) -> Any:
        """The reply to a request of one input that stands in no list. Hugging Face's clients expect a list of one
        answer from some tasks, the answer itself from others."""
        ...

    def columns(self, head: Head) -> list[Column]:
        """The columns of an answer in a table. Raises `UserError` where a row has no one answer."""
        ...

    def thresholds(self, head: Head) -> Mapping[str, float] | None:
        """The score from which each label of an answer is given, by label; None where the first entry is the answer."""
        ...

    def asks(self, texts: Sequence[str], head: Head) -> list[Input]:
        """Requests made of arbitrary `texts`: an artefact's golden answers are the answers to these."""
        ...

    def examples(self, head: Head) -> list[Input]:
        """Requests that show what the task is for, for the page on which people try a model."""
        ...

    def judge(self, answers: Sequence[Any], labels: Sequence[str]) -> dict[str, float]:
        """Scores that compare the answers' texts with the labels, e.g. those of a published script; often none."""
        ...


def flaw_of(task: Task, text: str, pair: str | None, label: str) -> str | None:
    """Why a task cannot use a row, or None."""
    return (
        "the text is empty; write a text or remove the row"
        if task.is_blank(text, pair)
        else task.flaw(text, pair, label)
    )


def get(name: str) -> Task:
    """The task of that name, from `rtrain.tasks.<name>`."""
    found: Task = importlib.import_module(f"rtrain.tasks.{name}").TASK
    return found
