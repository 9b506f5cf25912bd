"""Common bugs, planted on purpose: `rtrain verify --inject-bugs` shows that each of them is detected.

Each class is a `StepRunner` that makes one mistake, and a base class of a trainer that does.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rtrain.core.ragged import TokenBatch
from rtrain.models import used_vocabulary
from rtrain.parallel.base import MicroBatchRunnerProtocol, Strategy
from rtrain.parallel.ddp import DDPStrategy
from rtrain.parallel.pipeline import PipelineStrategy
from rtrain.trainer.step import StepResult, StepRunner

if TYPE_CHECKING:
    import torch


class _RescaledMicroBatches(StepRunner):
    """Gives each micro-batch a factor of its own."""

    def run_step(self, micro_batches: Sequence[TokenBatch], **plan: Any) -> StepResult:
        self._num_micro_batches = self.strategy.num_replicas * len(micro_batches)
        self._num_rows = _sum_over_replicas(self.strategy, [sum(len(tokens) for tokens in micro_batches)])[0]
        self._totals_by_part = _sum_over_replicas(self.strategy, self._count_targets(micro_batches))
        return super().run_step(micro_batches, **plan)

    def compute_loss(self, logits: "torch.Tensor", tokens: TokenBatch) -> "torch.Tensor":
        if tokens is self.idle_tokens:
            return super().compute_loss(logits, tokens)
        counts, correct_factors = self.loss.count_targets(tokens), self._factors
        shares = [total / count if count else 0.0 for total, count in zip(self._totals_by_part, counts, strict=True)]
        self._factors = correct_factors * correct_factors.new_tensor(shares) * self._weigh_micro_batch(tokens)
        loss = super().compute_loss(logits, tokens)
        self._factors = correct_factors
        return loss

    def _weigh_micro_batch(self, tokens: TokenBatch) -> float:
        raise NotImplementedError


class MeanOfMeans(_RescaledMicroBatches):
    """Averages the means of the micro-batches: rows of a short micro-batch weigh more."""

    def _weigh_micro_batch(self, tokens: TokenBatch) -> float:
        return 1.0 / self._num_micro_batches


class WeightsPerMicroBatch(_RescaledMicroBatches):
    """Divides by the weight of a micro-batch in place of the step's: a row's weight depends on the rows beside it."""

    def _weigh_micro_batch(self, tokens: TokenBatch) -> float:
        return len(tokens) / self._num_rows


class DroppedTailRow(StepRunner):
    """Drops the last row of each worker, like a loader that drops incomplete batches."""

    def run_step(self, micro_batches: Sequence[TokenBatch], **plan: Any) -> StepResult:
        tail = [tokens.take(range(len(tokens) - 1)) for tokens in micro_batches[-1:] if len(tokens) > 1]
        shortened = [*micro_batches[:-1], *tail]
        if _sum_over_replicas(self.strategy, [sum(len(tokens) for tokens in shortened)]) == [0]:
            shortened = list(micro_batches)
        # Without the row check, which would stop the run at once: the figures must show the bug.
        return super().run_step(shortened, **{**plan, "expected_row_sum": None})


class ReplicaLeftOut(StepRunner):
    """Loses the gradient of a replica, as with a wrong process group."""

    def compute_loss(self, logits: "torch.Tensor", tokens: TokenBatch) -> "torch.Tensor":
        loss = super().compute_loss(logits, tokens)
        return loss * 0.0 if self.strategy.replica_rank else loss


# ------------------------------------------------------------------------------------------------- faults of a strategy


class _FaultyStrategy(StepRunner):
    """Runs the micro-batches of a step by a strategy with a mistake, which shares the state of the correct one."""

    def run_step(self, micro_batches: Sequence[TokenBatch], **plan: Any) -> StepResult:
        correct = self.strategy
        self.strategy = self._make_faulty(correct, micro_batches)
        try:
            return super().run_step(micro_batches, **plan)
        finally:
            self.strategy = correct

    def _make_faulty(self, strategy: Any, micro_batches: Sequence[TokenBatch]) -> Any:
        raise NotImplementedError


class GradientTwice(_FaultyStrategy):
    """Counts every gradient twice, as with two hooks on the same weights."""

    def _make_faulty(self, strategy: Strategy, micro_batches: Sequence[TokenBatch]) -> Any:
        return _FaultAfterRun(strategy, lambda: strategy.scale_gradients(2.0))


class DoubleAllReduce(_FaultyStrategy):
    """Sums the gradient over the workers once more after its all-reduce."""

    def _make_faulty(self, strategy: DDPStrategy, micro_batches: Sequence[TokenBatch]) -> Any:
        def sum_again() -> None:
            for parameter in strategy.module.parameters():
                if parameter.grad is not None:
                    strategy.sum_over_replicas(parameter.grad)

        return _FaultAfterMicroBatch(strategy, after_last=sum_again)


class IgnoredAccumulation(_FaultyStrategy):
    """Forgets all micro-batches but the last, as if each one cleared the gradient."""

    def _make_faulty(self, strategy: DDPStrategy, micro_batches: Sequence[TokenBatch]) -> Any:
        return _FaultAfterMicroBatch(strategy, after_others=strategy.begin_step)


class StaleEmbeddingRow(_FaultyStrategy):
    """Keeps the row of the first token (`[CLS]`) unchanged, as if it were missing from the synchronized rows."""

    def _make_faulty(self, strategy: DDPStrategy, micro_batches: Sequence[TokenBatch]) -> Any:
        embedding: Any = strategy.module.get_input_embeddings()  # type: ignore[operator]
        table, rows_of_tokens = embedding.weight, getattr(embedding, used_vocabulary.ROW_BUFFER, None)

        def drop_gradient() -> None:
            for tokens in micro_batches[:1]:
                first = int(tokens.ids[0])
                table.grad[first if rows_of_tokens is None else rows_of_tokens[first]] = 0.0

        return _FaultAfterMicroBatch(strategy, after_last=drop_gradient)


class EdgeGradientLost(_FaultyStrategy):
    """Treats the received input of a stage as a constant: earlier stages get a gradient of zero."""

    def _make_faulty(self, strategy: PipelineStrategy, micro_batches: Sequence[TokenBatch]) -> Any:
        return _DetachedPipeline(strategy)


class GradientDivided(_FaultyStrategy):
    """Divides the gradient, a sum over micro-batches, by their number: torch's schedules do so with `scale_grads`."""

    def _make_faulty(self, strategy: PipelineStrategy, micro_batches: Sequence[TokenBatch]) -> Any:
        return _ScaledPipeline(strategy)


class _FaultAfterRun:
    """A mistake after the micro-batches of a step."""

    def __init__(self, strategy: Strategy, after: Callable[[], None]):
        self._strategy, self._after = strategy, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    def run_micro_batches(self, *arguments: Any) -> None:
        self._strategy.run_micro_batches(*arguments)
        self._after()


class _FaultAfterMicroBatch(DDPStrategy):
    """A mistake after a micro-batch."""

    def __init__(
        self,
        strategy: DDPStrategy,
        after_others: Callable[[], None] = lambda: None,
        after_last: Callable[[], None] = lambda: None,
    ):
        self.__dict__ |= vars(strategy)
        self._after = {False: after_others, True: after_last}

    @contextlib.contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        with super().micro_batch(is_last):
            yield
        self._after[is_last]()


class _DetachedPipeline(PipelineStrategy):
    def __init__(self, strategy: PipelineStrategy):
        self.__dict__ |= vars(strategy)

    def prepare_input(self, received: "torch.Tensor") -> "torch.Tensor":
        return received.detach()


class _ScaledPipeline(PipelineStrategy):
    def __init__(self, strategy: PipelineStrategy):
        self.__dict__ |= vars(strategy)

    def make_schedule(self, micro_batches: Sequence[TokenBatch], runner: MicroBatchRunnerProtocol) -> Any:
        schedule = super().make_schedule(micro_batches, runner)
        schedule.scale_grads = True
        return schedule


def _sum_over_replicas(strategy: Strategy, values: Sequence[float]) -> list[float]:
    import torch

    totals: list[float] = strategy.sum_over_replicas(torch.tensor(values, dtype=torch.float64)).tolist()
    return totals


LAYOUT_BUGS: dict[str, dict[str, type[StepRunner]]] = {
    "zero 3": {"gradient twice": GradientTwice, "replica left out": ReplicaLeftOut},
    "pipeline": {"edge gradient lost": EdgeGradientLost, "scale_grads left on": GradientDivided},
}
"""Bugs of workers with a part of the weights, by layout."""
STALE_ROW_BUG, WEIGHTS_BUG = "stale embedding row", "weights per micro-batch"
BUGS: dict[str, type[StepRunner]] = {
    "mean of means": MeanOfMeans,
    "dropped tail row": DroppedTailRow,
    "double exchange": DoubleAllReduce,
    "k ignored": IgnoredAccumulation,
    STALE_ROW_BUG: StaleEmbeddingRow,
    **{name: bug for bugs in LAYOUT_BUGS.values() for name, bug in bugs.items()},
    WEIGHTS_BUG: WeightsPerMicroBatch,
}


def possible_bugs(freeze: str) -> list[str]:
    """Bugs of full models that a recipe can have: with `model.freeze` the embedding has no gradient to be stale."""
    excluded = {WEIGHTS_BUG, *(name for bugs in LAYOUT_BUGS.values() for name in bugs)} | (
        {STALE_ROW_BUG} if freeze != "none" else set()
    )
    return [name for name in BUGS if name not in excluded]
