"""The interface between a task and the other packages: four protocols, and `Task`, which has them all.

| protocol | content | a new task writes |
|---|---|---|
| `TaskData` | rows to tokens and targets | `build_head`, `build_targets` |
| `TaskLoss` | tokens and logits to the loss | `count_targets`, `loss`, `distillation_loss` |
| `TaskEvaluation` | logits to the metric and the report | `output`, `row_outputs`, `row_results`, `explain_rows` |
| `TaskServing` | answers to requests, and other programs | `auto_model`, `decode`, `answer_columns` |

The base classes in `rtrain.tasks.defaults` have the other members, and `PooledTask` and `TokenTask` some of these.

A task is named as its module in this package, and is the module's `TASK`; `rtrain.config.recipe.TASKS` lists the names.
`get_task` finds a task by its name. The kind of its answers, `Task.output`, chooses metric, charts and explanations.
docs/adding.md lists the steps to add a task. No torch or transformers at module level: serving needs neither.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rtrain.core import plugins
from rtrain.core.errors import UserError
from rtrain.core.ragged import EncodedRow, Floats, Head, Ints, Outputs, RaggedArray, TokenBatch

if TYPE_CHECKING:
    import tokenizers
    import torch

Input = str | Mapping[str, str]
"""One input of a request: a text, or texts by name."""
Inputs = Sequence[Input]
Parameters = Mapping[str, Any]
"""Parameters of a request, e.g. `top_k`."""
Losses = dict[str, "torch.Tensor"]
"""The sum of each part of the loss."""
Variation = Literal["text", "words", "nothing"]
"""`text`: anything. `words`: each word, but not their number or order, for labels at positions. `nothing`: no
character."""
ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"] | None
"""Names of Transformers."""


Weighting = Literal["classes", "rows", "nothing"]
"""Weights that a task's targets can have in the loss: of their class and of their row, of their row alone, or none."""


class TargetClasses(NamedTuple):
    """The row and the class of each target, in the order of `TaskLoss.target_losses`."""

    rows: Ints
    classes: Ints
    """Index into the labels of the part of the loss. One more than the last label: the target is a "no" to one label of
    several."""


TargetValues = Ints | Floats


class LabelLoss(Protocol):
    """A loss of labels, target by target (`rtrain.tasks.label_losses`)."""

    def choose_one(self, logits: "torch.Tensor", classes: TargetValues) -> "torch.Tensor":
        """The loss of each target, [targets]: logits [targets, labels], index of each target's label."""
        ...

    def decide_each(self, logits: "torch.Tensor", has_label: TargetValues) -> "torch.Tensor":
        """The loss of each yes or no, [rows, labels]: logits and targets of 0 or 1, of this shape both."""
        ...


class Targets(NamedTuple):
    values: RaggedArray
    """float32."""
    has_unknown_label: npt.NDArray[np.bool_]
    """Whether a row has a label that the head lacks, one entry per row."""


class TokenSpan(NamedTuple):
    """A span of tokens in one of a row's windows."""

    window: int
    first: int
    last: int
    """Included."""


class RowReport(NamedTuple):
    """Predictions and targets of evaluated rows, for reports. One entry per row each."""

    target: list[Any]
    """A string, a float or a list of strings; or a `TokenSpan` of the row's tokens."""
    prediction: list[Any]
    """Like the target; or a slice of the row's tokens."""
    score: npt.NDArray[np.float64]
    """The model's confidence, 0 to 1; NaN if the task has none."""
    loss: npt.NDArray[np.float64]
    """The row's mean loss per target."""


class AnswerColumn(NamedTuple):
    """A column of a table of answers."""

    name: str
    kind: Any
    """Type of its values: `str`, `float`, `int` or `bool`; a list of one of these, as `[str]`; a list of objects, as
    `[{"word": str, "start": int}]`; `object` for any value, which a table holds as JSON."""
    value: Callable[[Any], Any]
    """Maps an answer of `Task.decode` to the column's value, or None."""


class TaskData(Protocol):
    """Rows to tokens and targets."""

    name: str
    fields: tuple[str, str]
    """Names of the two texts in a request."""
    needs_pair: bool
    uses_windows: bool
    """Long texts are always read in windows: an answer may be anywhere."""
    packs_text: bool
    """Rows are blocks of text that fill the model's window (`rtrain.data.store.shards.pack_documents`), not the file's
    rows."""
    parses_special_tokens: bool
    """The names of special tokens in a text, e.g. of masks, are those tokens. Elsewhere they are text."""
    augmentable: Variation
    """What augmentation may change in a training text without making its label false."""
    supports_out_of_scope: bool
    """Supports `data.out_of_scope_label`: detects rows that belong to none of the labels and are never trained on."""
    target_rule_version: int
    """Version of the rule for `target_positions`; part of the store's address."""
    prepares_targets: bool
    """`prepare` makes the targets: stored targets do not give their counts."""

    def is_blank(self, text: str, pair: str | None) -> bool:
        """Whether the row has no text. One of two texts may be empty unless the task needs both."""
        ...

    def validate_row(self, text: str, pair: str | None, label: str) -> str | None:
        """Why a row that is not blank cannot be used, or None. A label that is a list arrives as JSON."""
        ...

    def build_head(self, counts: Mapping[str, int], tokenizer: "tokenizers.Tokenizer") -> Head:
        """Build the head from the training rows' labels (`counts`: how often each occurs)."""
        ...

    def encode(
        self,
        tokenizer: "tokenizers.Tokenizer",
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        max_windows: int = 1,
    ) -> list[EncodedRow]:
        """Rows to tokens, the same in training and in serving."""
        ...

    def target_positions(self, text: str, pair: str | None, label: str, encoded: EncodedRow) -> list[int]:
        """Positions of the targets among a row's tokens, computed while the text is available. May be empty."""
        ...

    def build_targets(self, labels: Sequence[str], target_positions: RaggedArray, head: Head) -> Targets:
        """Targets of rows from their labels and target positions."""
        ...

    def placeholder_label(self, text: str, head: Head) -> str:
        """A label that a row of this text could have, for an unlabeled row: its targets name the answered positions,
        and are not learned."""
        ...

    def prepare(self, tokens: TokenBatch, head: Head, seed: int, epoch: int) -> TokenBatch:
        """Prepare the rows for one epoch, e.g. mask tokens; a pure function of its arguments, row by row."""
        ...


class TaskLoss(Protocol):
    """The loss of a micro-batch.

    A model gives its outputs per window, [windows, outputs], or per token, [tokens, outputs], in the order of
    `TokenBatch.ids`: `is_token_level` says which. Only the tokens of `logit_positions` have outputs.
    """

    is_token_level: bool
    """The model answers each token, not each window."""
    supports_label_smoothing: bool
    """Supports `train.label_smoothing`: each target is one label out of several."""
    weighting: Weighting
    """Weights that the targets can have. `classes` also allows other losses of labels (`train.loss`)."""
    has_independent_labels: bool
    """Each label is a yes or no of its own: class weights are weights of a label's positives."""

    def logit_positions(self, tokens: TokenBatch, head: Head) -> Ints | None:
        """Positions in `tokens.ids`, ascending, of the tokens whose logits `loss` and `row_outputs` need; None for all.
        Other logits are not computed, which saves time for a head as wide as the vocabulary."""
        ...

    def loss_parts(self, head: Head) -> tuple[str, ...]:
        """Names of the parts of the loss. Each part is divided by its own count of targets; the quotients are added."""
        ...

    def count_targets(self, tokens: TokenBatch, head: Head) -> dict[str, int]:
        """Number of targets of each part, the divisor of the sums of `loss`. Sums and counts add up exactly over
        micro-batches and workers; means do not. This is a separate method because all workers' counts must be known
        before the first backward computation."""
        ...

    def loss(self, logits: "torch.Tensor", tokens: TokenBatch, head: Head) -> Losses:
        """The loss of each part, summed over its targets (not averaged)."""
        ...

    def label_names(self, head: Head) -> dict[str, tuple[str, ...]]:
        """The labels of each part of the loss that class weights name, in the order of `TargetClasses.classes`."""
        ...

    def target_classes(self, tokens: TokenBatch, head: Head) -> dict[str, TargetClasses]:
        """The targets of each part of the loss, to weigh them. Needs `weighting` other than `nothing`."""
        ...

    def target_losses(self, logits: "torch.Tensor", tokens: TokenBatch, head: Head, loss: LabelLoss) -> Losses:
        """The loss of each target by part, [targets] instead of sums; tasks that choose labels compute it by `loss`."""
        ...

    def distillation_loss(self, logits: "torch.Tensor", tokens: TokenBatch, head: Head, temperature: float) -> Losses:
        """Distance to `tokens.teacher_logits`, summed over the same targets as `loss` and on its scale (a KL times
        T^2)."""
        ...


class TaskEvaluation(Protocol):
    """Logits of evaluated rows to the inputs of the metric and of the report."""

    output: str
    """Kind of the answers: chooses the metric (`rtrain.metrics.registry`), charts, explanations and reply tensors."""

    def row_outputs(self, logits: Floats, tokens: TokenBatch, head: Head) -> Outputs:
        """The model's output for each row, windows pooled: the input of distillation, golden answers and `decode`."""
        ...

    def row_results(self, outputs: Outputs, tokens: TokenBatch, head: Head) -> RaggedArray:
        """Inputs of the metric for each row, float64. Compact, since all workers' rows are gathered. The metric's
        module names the columns."""
        ...

    def calibrate(self, row_results: RaggedArray, targets: RaggedArray, head: Head) -> dict[str, Any]:
        """Facts for the head, e.g. a threshold, chosen on the validation rows of the trained model; may be empty."""
        ...

    def explain_rows(self, row_results: RaggedArray, targets: RaggedArray, head: Head) -> RowReport:
        """Predictions and targets of evaluated rows, for the report."""
        ...

    def reference_scores(self, answers: Sequence[Any], labels: Sequence[str]) -> dict[str, float]:
        """Scores of the answers' texts against the labels, e.g. of a published script; may be empty."""
        ...


class TaskServing(Protocol):
    """Answers to requests, and the model in other programs."""

    auto_model: str
    """Name of the transformers class that loads the float artifact."""
    problem_type: ProblemType
    """`problem_type` of config.json: how other programs read the outputs of a head with one answer per text."""
    has_standard_head: bool
    """Other programs that load the model turn its outputs into the task's answers."""

    def decode(
        self, outputs: Outputs, inputs: Inputs, encoded: Sequence[EncodedRow], head: Head, parameters: Parameters
    ) -> list[Any]:
        """The answer of /predict to each input, JSON; `serve.schemas.predict.PredictReply` describes its forms."""
        ...

    def unwrap_single(self, answer: Any) -> Any:
        """The reply to a request whose single input is not in a list. Hugging Face's clients expect a list of one
        answer from some tasks, the answer itself from others."""
        ...

    def answer_columns(self, head: Head) -> list[AnswerColumn]:
        """The columns of an answer in a table. Raises `UserError` if a row has no single answer."""
        ...

    def label_thresholds(self, head: Head) -> Mapping[str, float] | None:
        """Minimum score of each label of an answer, by label; None if the first entry is the answer."""
        ...

    def golden_inputs(self, texts: Sequence[str], head: Head) -> list[Input]:
        """Inputs made of arbitrary `texts`, for an artifact's golden answers."""
        ...

    def example_inputs(self, head: Head) -> list[Input]:
        """Example inputs for the model's demo page."""
        ...


class Task(TaskData, TaskLoss, TaskEvaluation, TaskServing, Protocol):
    """The interface of a task to the trainer, the compressors and the endpoint."""


def validate_task_row(task: Task, text: str, pair: str | None, label: str) -> str | None:
    """Why a task cannot use a row, or None."""
    if task.is_blank(text, pair):
        return "the text is empty; write a text or remove the row"
    return task.validate_row(text, pair, label)


def get_task(name: str) -> Task:
    """The task of that name, a plug-in's or from `rtrain.tasks.<name>`. Raises `UserError` if a plug-in's class lacks
    members of the protocol."""
    if (task_class := plugins.find_value("task", name)) is not None:
        return _make_registered_task(name, task_class)
    task: Task = importlib.import_module(f"rtrain.tasks.{name}").TASK
    return task


def _make_registered_task(name: str, task_class: Callable[[], Task]) -> Task:
    task, protocols = task_class(), (TaskData, TaskLoss, TaskEvaluation, TaskServing)
    task.name = name
    members = {member for protocol in protocols for member in (*dir(protocol), *protocol.__annotations__)}
    if missing := sorted(member for member in members if not member.startswith("_") and not hasattr(task, member)):
        fix = "derive it from PooledTask or TokenTask of rtrain.tasks.defaults, or write these members"
        raise UserError(f"the task {name} lacks {', '.join(missing)}; {fix}", code="incomplete_task")
    return task
