"""Common bugs, planted on purpose: `rtrain verify --inject-bugs` shows that each of them is detected.

Each function replaces `step.run_step` and trains with one mistake.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rtrain.core.ragged import Ints, TokenBatch
from rtrain.parallel.base import MicroBatchRunnerProtocol, Strategy
from rtrain.parallel.ddp import DDPStrategy
from rtrain.parallel.pipeline import PipelineStrategy
from rtrain.trainer import step

if TYPE_CHECKING:
    import torch


def average_micro_batch_means(
    strategy: Strategy, optimizer: Any, loss: step.Loss, micro_batches: Sequence[TokenBatch], **settings: Any
) -> step.StepResult:
    """Average the means of the micro-batches: rows of a short micro-batch weigh more."""
    return step.run_step(strategy, optimizer, _MeanLoss(strategy, loss, micro_batches), micro_batches, **settings)


def drop_tail_row(
    strategy: Strategy, optimizer: Any, loss: step.Loss, micro_batches: Sequence[TokenBatch], **settings: Any
) -> step.StepResult:
    """Drop the last row of each worker, like a loader that drops incomplete batches."""
    shortened = [
        *micro_batches[:-1],
        *([] if not micro_batches or len(micro_batches[-1]) == 1 else [_drop_last_row(micro_batches[-1])]),
    ]
    # Without the row check, which would stop the run at once: the figures must show the bug.
    if _count_rows(strategy, shortened) == 0:
        shortened = list(micro_batches)
    return step.run_step(strategy, optimizer, loss, shortened, **{**settings, "expected_row_sum": None})


def all_reduce_twice(
    strategy: DDPStrategy, optimizer: Any, loss: step.Loss, micro_batches: Sequence[TokenBatch], **settings: Any
) -> step.StepResult:
    """Sum the gradient over the workers once more after its all-reduce."""

    def sum_again() -> None:
        for parameter in strategy.module.parameters():
            if parameter.grad is not None:
                strategy.sum_over_replicas(parameter.grad)

    return step.run_step(
        _FaultAfterMicroBatch(strategy, after_last=sum_again), optimizer, loss, micro_batches, **settings
    )


def ignore_accumulation(
    strategy: DDPStrategy, optimizer: Any, loss: step.Loss, micro_batches: Sequence[TokenBatch], **settings: Any
) -> step.StepResult:
    """Forget all micro-batches but the last, as if each one cleared the gradient."""

    return step.run_step(
        _FaultAfterMicroBatch(strategy, after_others=strategy.begin_step), optimizer, loss, micro_batches, **settings
    )


def keep_stale_embedding_row(
    strategy: DDPStrategy, optimizer: Any, loss: step.Loss, micro_batches: Sequence[TokenBatch], **settings: Any
) -> step.StepResult:
    """Keep the row of the first token (`[CLS]`) unchanged, as if it were missing from the synchronized rows."""
    table = strategy.module.get_input_embeddings().weight  # type: ignore[operator]
    row = int(micro_batches[0].ids[0]) if micro_batches else None

    def drop_gradient() -> None:
        if row is not None:
            table.grad[row] = 0.0

    return step.run_step(
        _FaultAfterMicroBatch(strategy, after_last=drop_gradient), optimizer, loss, micro_batches, **settings
    )


class _MeanLoss:
    """A loss that `step.run_step`, which divides by the step's targets, turns into a mean of the micro-batches'
    means."""

    def __init__(self, strategy: Strategy, loss: step.Loss, micro_batches: Sequence[TokenBatch]):
        import torch

        self._loss, self._num_micro_batches, self.num_parts = (
            loss,
            strategy.num_replicas * len(micro_batches),
            loss.num_parts,
        )
        counts = [sum(part) for part in zip([0] * loss.num_parts, *map(loss.count_targets, micro_batches), strict=True)]
        self._totals = strategy.sum_over_replicas(torch.tensor(counts)).tolist()

    def count_targets(self, tokens: TokenBatch) -> Sequence[int]:
        return self._loss.count_targets(tokens)

    def logit_positions(self, tokens: TokenBatch) -> Ints | None:
        return self._loss.logit_positions(tokens)

    def __call__(self, logits: "torch.Tensor", tokens: TokenBatch) -> "torch.Tensor":
        factors = [
            total / (self._num_micro_batches * max(1, count))
            for total, count in zip(self._totals, self.count_targets(tokens), strict=True)
        ]
        sums = self._loss(logits, tokens)
        return sums * sums.new_tensor(factors)


def count_gradient_twice(strategy: Strategy, *rest: Any, **settings: Any) -> step.StepResult:
    """Count every gradient twice, as with two hooks on the same weights."""
    return step.run_step(_FaultAfterRun(strategy, lambda: strategy.scale_gradients(2.0)), *rest, **settings)


def leave_out_replica(
    strategy: Strategy, optimizer: Any, loss: step.Loss, micro_batches: Sequence[TokenBatch], **settings: Any
) -> step.StepResult:
    """Lose the gradient of a replica, as with a wrong process group."""
    return step.run_step(
        strategy, optimizer, _ZeroLoss(loss) if strategy.replica_rank else loss, micro_batches, **settings
    )


class _FaultAfterRun:
    """A strategy with a mistake after the micro-batches of a step."""

    def __init__(self, strategy: Strategy, after: Callable[[], None]):
        self._strategy, self._after = strategy, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    def run_micro_batches(self, *arguments: Any) -> None:
        self._strategy.run_micro_batches(*arguments)
        self._after()


class _ZeroLoss:
    def __init__(self, loss: step.Loss):
        self._loss, self.num_parts = loss, loss.num_parts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)

    def __call__(self, logits: "torch.Tensor", tokens: TokenBatch) -> "torch.Tensor":
        return self._loss(logits, tokens) * 0.0


def drop_edge_gradient(strategy: PipelineStrategy, *rest: Any, **settings: Any) -> step.StepResult:
    """Treat the received input of a stage as a constant: earlier stages get a gradient of zero."""
    return step.run_step(_DetachedPipeline(strategy), *rest, **settings)


def divide_by_micro_batches(strategy: PipelineStrategy, *rest: Any, **settings: Any) -> step.StepResult:
    """Divide the gradient, a sum over micro-batches, by their number: torch's schedules do so with `scale_grads`."""
    return step.run_step(_ScaledPipeline(strategy), *rest, **settings)


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


LAYOUT_BUGS: dict[str, dict[str, step.RunStep]] = {
    "zero 3": {"gradient twice": count_gradient_twice, "replica left out": leave_out_replica},
    "pipeline": {"edge gradient lost": drop_edge_gradient, "scale_grads left on": divide_by_micro_batches},
}
"""Bugs of workers with a part of the weights, by layout."""
STALE_ROW_BUG = "stale embedding row"
BUGS: dict[str, step.RunStep] = {
    "mean of means": average_micro_batch_means,
    "dropped tail row": drop_tail_row,
    "double exchange": all_reduce_twice,
    "k ignored": ignore_accumulation,
    STALE_ROW_BUG: keep_stale_embedding_row,
    **{name: bug for bugs in LAYOUT_BUGS.values() for name, bug in bugs.items()},
}


def possible_bugs(freeze: str) -> list[str]:
    """Bugs of full models that a recipe can have: with `model.freeze` the embedding has no gradient to be stale."""
    excluded = {name for bugs in LAYOUT_BUGS.values() for name in bugs} | (
        {STALE_ROW_BUG} if freeze != "none" else set()
    )
    return [name for name in BUGS if name not in excluded]


class _FaultAfterMicroBatch(DDPStrategy):
    """A strategy with a mistake after a micro-batch; it shares the model and the buckets of the correct one."""

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


def _count_rows(strategy: Strategy, micro_batches: Sequence[TokenBatch]) -> int:
    import torch

    return int(strategy.sum_over_replicas(torch.tensor([sum(len(tokens) for tokens in micro_batches)])).item())


def _drop_last_row(tokens: TokenBatch) -> TokenBatch:
    return tokens.take(range(len(tokens) - 1))
