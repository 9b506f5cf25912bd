"""Bugs of the field, planted on purpose: a check that cannot fail proves nothing.

Each stands in for `step.run_update` and trains with one mistake. `rtrain verify --planted` shows that all are seen.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rtrain.core.ragged import Ints, Tokens
from rtrain.parallel.base import Exchange, Work
from rtrain.parallel.ddp import Replicated
from rtrain.parallel.pipeline import Pipeline
from rtrain.trainer import step

if TYPE_CHECKING:
    import torch


def mean_of_means(
    exchange: Exchange, optimizer: Any, loss: step.Loss, passes: Sequence[Tokens], **settings: Any
) -> step.Done:
    """The mean over passes of each pass's mean: rows of a short pass count for more than others."""
    return step.run_update(exchange, optimizer, _Means(exchange, loss, passes), passes, **settings)


def dropped_tail_row(
    exchange: Exchange, optimizer: Any, loss: step.Loss, passes: Sequence[Tokens], **settings: Any
) -> step.Done:
    """The last row of each worker is not trained on, as by a loader that cuts to whole batches."""
    kept = [*passes[:-1], *([] if not passes or len(passes[-1]) == 1 else [_without_last(passes[-1])])]
    # The row check, which would stop this at once, is left out: the figures have to show it by themselves.
    if _count(exchange, kept) == 0:
        kept = list(passes)
    return step.run_update(exchange, optimizer, loss, kept, **{**settings, "rows": None})


def double_exchange(
    exchange: Replicated, optimizer: Any, loss: step.Loss, passes: Sequence[Tokens], **settings: Any
) -> step.Done:
    """The gradient is summed over the workers once more after it was exchanged."""

    def again() -> None:
        for parameter in exchange.module.parameters():
            if parameter.grad is not None:
                exchange.sum(parameter.grad)

    return step.run_update(_Altered(exchange, after_last=again), optimizer, loss, passes, **settings)


def k_ignored(
    exchange: Replicated, optimizer: Any, loss: step.Loss, passes: Sequence[Tokens], **settings: Any
) -> step.Done:
    """Passes before the last are forgotten, as where each pass clears the gradient."""

    return step.run_update(_Altered(exchange, after_others=exchange.begin), optimizer, loss, passes, **settings)


def stale_embedding_row(
    exchange: Replicated, optimizer: Any, loss: step.Loss, passes: Sequence[Tokens], **settings: Any
) -> step.Done:
    """The row of the first token (`[CLS]`) stays as it was, as where it is left out of the rows that are exchanged."""
    table = exchange.module.get_input_embeddings().weight  # type: ignore[operator]
    row = int(passes[0].ids[0]) if passes else None

    def lose() -> None:
        if row is not None:
            table.grad[row] = 0.0

    return step.run_update(_Altered(exchange, after_last=lose), optimizer, loss, passes, **settings)


class _Means:
    """A loss that `step.run_update`, which divides by the update's targets, makes a mean of each pass's means."""

    def __init__(self, exchange: Exchange, loss: step.Loss, passes: Sequence[Tokens]):
        import torch

        self._loss, self._passes, self.parts = loss, exchange.world * len(passes), loss.parts
        own = [sum(part) for part in zip([0] * loss.parts, *map(loss.counts, passes), strict=True)]
        self._totals = exchange.sum(torch.tensor(own)).tolist()

    def counts(self, tokens: Tokens) -> Sequence[int]:
        return self._loss.counts(tokens)

    def wanted(self, tokens: Tokens) -> Ints | None:
        return self._loss.wanted(tokens)

    def __call__(self, logits: "torch.Tensor", tokens: Tokens) -> "torch.Tensor":
        factors = [
            total / (self._passes * max(1, count))
            for total, count in zip(self._totals, self.counts(tokens), strict=True)
        ]
        sums = self._loss(logits, tokens)
        return sums * sums.new_tensor(factors)


def counted_twice(exchange: Exchange, *rest: Any, **settings: Any) -> step.Done:
    """Every gradient is counted twice, as by two hooks on the same weights."""
    return step.run_update(_Mistaken(exchange, lambda: exchange.multiply(2.0)), *rest, **settings)


def replica_left_out(
    exchange: Exchange, optimizer: Any, loss: step.Loss, passes: Sequence[Tokens], **settings: Any
) -> step.Done:
    """What a replica's rows give is lost, as where a group of workers is made of others than its replicas."""
    return step.run_update(exchange, optimizer, _Lost(loss) if exchange.rank else loss, passes, **settings)


class _Mistaken:
    """An exchange of whatever strategy, with something wrong after the passes of an update."""

    def __init__(self, sound: Exchange, after: Callable[[], None]):
        self._sound, self._after = sound, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sound, name)

    def run(self, *arguments: Any) -> None:
        self._sound.run(*arguments)
        self._after()


class _Lost:
    def __init__(self, loss: step.Loss):
        self._loss, self.parts = loss, loss.parts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)

    def __call__(self, logits: "torch.Tensor", tokens: Tokens) -> "torch.Tensor":
        return self._loss(logits, tokens) * 0.0


def edge_gradient_lost(exchange: Pipeline, *rest: Any, **settings: Any) -> step.Done:
    """A stage takes what it received for a constant: the stages before it get a gradient of zero."""
    return step.run_update(_Constant(exchange), *rest, **settings)


def divided_by_passes(exchange: Pipeline, *rest: Any, **settings: Any) -> step.Done:
    """The gradient, a sum over passes, is divided by their number: torch's schedules do so if `scale_grads` is on."""
    return step.run_update(_Scaled(exchange), *rest, **settings)


class _Constant(Pipeline):
    def __init__(self, sound: Pipeline):
        self.__dict__ |= vars(sound)

    def entered(self, received: "torch.Tensor") -> "torch.Tensor":
        return received.detach()


class _Scaled(Pipeline):
    def __init__(self, sound: Pipeline):
        self.__dict__ |= vars(sound)

    def schedule(self, passes: Sequence[Tokens], work: Work) -> Any:
        made = super().schedule(passes, work)
        made.scale_grads = True
        return made


LAID_OUT: dict[str, dict[str, step.RunUpdate]] = {
    "shard 3": {"gradient twice": counted_twice, "replica left out": replica_left_out},
    "pipeline": {"edge gradient lost": edge_gradient_lost, "scale_grads left on": divided_by_passes},
}
"""Bugs of workers that have a part of the weights, by the layout in which they are planted."""
STALE = "stale embedding row"
BUGS: dict[str, step.RunUpdate] = {
    "mean of means": mean_of_means,
    "dropped tail row": dropped_tail_row,
    "double exchange": double_exchange,
    "k ignored": k_ignored,
    STALE: stale_embedding_row,
    **{name: bug for bugs in LAID_OUT.values() for name, bug in bugs.items()},
}


def possible(freeze: str) -> list[str]:
    """Bugs of whole models that a recipe can have, given its `model.freeze`: a frozen embedding has no gradient to be
    stale."""
    others = {name for bugs in LAID_OUT.values() for name in bugs} | ({STALE} if freeze != "none" else set())
    return [name for name in BUGS if name not in others]


class _Altered(Replicated):
    """An exchange with something wrong after a pass; it shares the model and the buckets of the sound one."""

    def __init__(
        self,
        sound: Replicated,
        after_others: Callable[[], None] = lambda: None,
        after_last: Callable[[], None] = lambda: None,
    ):
        self.__dict__ |= vars(sound)
        self._after = {False: after_others, True: after_last}

    @contextlib.contextmanager
    def during(self, last: bool) -> Iterator[None]:
        with super().during(last):
            yield
        self._after[last]()


def _count(exchange: Exchange, passes: Sequence[Tokens]) -> int:
    import torch

    return int(exchange.sum(torch.tensor([sum(len(tokens) for tokens in passes)])).item())


def _without_last(tokens: Tokens) -> Tokens:
    return tokens.pick(range(len(tokens) - 1))
