"""What the tests of strategies train on workers, and how they look at it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing.spawn import ProcessExitedException

from rtrain.checkpoint import format as checkpoint_format
from rtrain.config import Distill, Recipe, load
from rtrain.core.ragged import Head, Tokens
from rtrain.parallel import dtensor_utils
from rtrain.parallel.base import Exchange
from rtrain.trainer import losses, optimizers, step
from tests import test_training_loop
from tests.test_training_step import TASK, distance, make_network, make_rows, norm, pick
from tests.workers import run

UPDATES = (13, 2, 1, 12)
"""Rows of the updates, in passes of three; the third leaves one replica idle."""


def held(network: torch.nn.Module) -> dict[str, int]:
    """Bytes of weights and gradients that this worker has now."""
    every = [one for one in network.parameters() if dtensor_utils.here(one)]
    grown = [one.grad for one in every if one.grad is not None]
    return {
        name: sum(dtensor_utils.local(one).nbytes for one in of)
        for name, of in (("weights", every), ("gradients", grown))
    }


class Looking(losses.RunLoss):
    """A loss that looks at what a worker has between a forward pass and its backward pass."""

    def __init__(self, network: torch.nn.Module):
        super().__init__(TASK, Distill(), Head())
        self._network, self.held = network, dict[str, int]()

    def __call__(self, logits: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        self.held = held(self._network)
        return super().__call__(logits, tokens)


class Kept(step.Observer):
    """The gradients of an update, whole, and what this worker has of them."""

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}
        self.held: dict[str, int] = {}

    def gradient(self, exchange: Exchange) -> None:
        self.held = held(exchange.module)
        own = {name: one.grad for name, one in exchange.module.named_parameters() if one.grad is not None}
        self.found = {name: value.clone() for name, value in exchange.whole(own)}


def recipe(**train: Any) -> Recipe:
    return load("intent", {f"train.{name}": value for name, value in train.items()} | {"optim.lr": 1e-3}).recipe


def share_of(number: int, world: int, rank: int) -> list[Tokens]:
    """Passes of three rows, two of three of them the first replica's."""
    rows = make_rows(UPDATES[number], seed=number)
    every = [pick(rows, range(first, min(first + 3, len(rows)))) for first in range(0, len(rows), 3)]
    return every if world == 1 else [one for place, one in enumerate(every) if (place % 3 == 2) == (rank == 1)]


def trained(exchange: Exchange, kept: Path, **train: Any) -> list[dict[str, Any]]:
    """Four updates by AdamW; rank 0 keeps gradients and weights."""
    optimizer, found, gradients = optimizers.of_run(exchange, recipe(**train)), [], []
    for number, count in enumerate(UPDATES):
        share, rows = share_of(number, exchange.world, exchange.rank), step.row_sum(make_rows(count, number).row_ids)
        seen, loss = Kept(), Looking(exchange.module)
        done = step.run_update(
            exchange, optimizer, loss, share, pad_id=0, clip_norm=1.0, rows=rows, observer=seen, measures=True
        )
        each: dict[str, Any] = {"loss": done.loss, "norm": done.gradient_norm, "rows": done.rows, "passes": done.passes}
        noise = {"noise": done.noise is not None, "tells_noise": exchange.tells_noise}
        found.append(each | noise | {"inside": loss.held, "after": seen.held})
        gradients.append(seen.found)
    weights = dict(exchange.whole({name: one.detach() for name, one in exchange.module.named_parameters()}))
    moments = dict(exchange.whole(checkpoint_format.moments_of(exchange.module, optimizer)))
    if weights:
        kept.mkdir()
        for name, value in (("gradients", gradients), ("weights", weights), ("moments", moments)):
            torch.save(value, kept / f"{name}.pt")
    return found


class Overflowing(losses.RunLoss):
    """A loss too large for its number format."""

    def __call__(self, logits: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        return super().__call__(logits, tokens) * float("inf")


class Spoiling(step.Observer):
    """It makes infinite what this worker alone has of some cut tensor's gradient, if it has any."""

    def gradient(self, exchange: Exchange) -> None:
        every = [one.grad for one in exchange.module.parameters() if one.grad is not None]
        for one in [one for one in every if 0 < dtensor_utils.local(one).numel() < one.numel()][:1]:
            dtensor_utils.local(one).fill_(float("inf"))


def scaled(exchange: Exchange, **train: Any) -> dict[str, Any]:
    """Updates whose loss is scaled, as it is in fp16. In the second one the last worker's loss overflows, in the third
    one only what it has of a tensor that is cut, in layouts that cut any."""
    optimizer, network, last = (
        optimizers.of_run(exchange, recipe(**train)),
        exchange.module,
        distributed.get_world_size() - 1,
    )
    usual, found = losses.RunLoss(TASK, Distill(), Head()), dict[str, Any]()
    cuts = any(dtensor_utils.local(one).numel() < one.numel() for one in network.parameters())
    for name, number in (("first", 0), ("loss", 3), *((("share", 3),) if cuts else ()), ("after", 1)):
        is_last = distributed.get_rank() == last
        loss = Overflowing(TASK, Distill(), Head()) if name == "loss" and is_last else usual
        observer = Spoiling() if name == "share" and is_last else step.Observer()
        before = [dtensor_utils.local(one).detach().clone() for one in network.parameters()]
        share = share_of(number, exchange.world, exchange.rank)
        done = step.run_update(
            exchange, optimizer, loss, share, pad_id=0, clip_norm=1.0, scale=1024.0, observer=observer
        )
        same = all(
            torch.equal(dtensor_utils.local(one), old) for one, old in zip(network.parameters(), before, strict=True)
        )
        found[name] = {"norm": done.gradient_norm, "skipped": done.skipped, "unchanged": same}
    return found


class Failing:
    """A task that cannot tell what its second pass has come to."""

    def __init__(self) -> None:
        self.passes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(TASK, name)

    def outcomes(self, *given: Any) -> Any:
        self.passes += 1
        if self.passes == 2:
            raise ValueError("no outcome")
        return TASK.outcomes(*given)


class Dying(losses.RunLoss):
    """The loss of a worker that dies between a forward pass and its backward pass."""

    def __call__(self, logits: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        os._exit(0)


DYING = "dying"


def told_alone(work: Callable[[int, Path], None], folder: Path) -> str:
    """What the first of two workers has written into the file `told` of the folder `DYING`, where the other one has
    died. Its own processes: the thread of torch's Gloo that reads from the peer may crash as that goes, which is an end
    too, and was one of all tests of the group."""
    (folder / DYING).mkdir()
    try:
        run(work, (folder,), 2)
    except ProcessExitedException as error:
        if (error.error_index, error.signal_name) != (0, "SIGSEGV"):
            raise
        return "it crashed"
    return (folder / DYING / "told").read_text()


def told(ran: test_training_loop.Ran) -> dict[str, Any]:
    """What a run has come to, as the tests compare it."""
    assert ran.outcome is not None
    return {
        "from": ran.recorder.of("started")[0]["update"],
        "scores": ran.outcome.scores,
        "ledger": ran.outcome.ledger,
        "losses": [fields["loss"] for fields in ran.recorder.of("evaluated") if "loss" in fields],
    }


def check_the_same(folder: Path, name: str, like: str, encoder: str = "encoder") -> None:
    """The gradients of all updates, the weights and the moments of a layout are those that one worker alone has."""
    for one, alone in zip(kept(folder, name, "gradients"), kept(folder, like, "gradients"), strict=True):
        assert one.keys() == alone.keys()
        assert distance(one, alone) < 1e-10
    start = {one: value.detach() for one, value in make_network(folder / encoder).named_parameters()}
    weights, alone = (kept(folder, one, "weights") for one in (name, like))
    assert weights.keys() == alone.keys()
    moved = norm({one: value - start[one] for one, value in alone.items()})
    assert norm({one: value - alone[one] for one, value in weights.items()}) < 1e-8 * moved
    moments, others = (kept(folder, one, "moments") for one in (name, like))
    assert {one: value.shape for one, value in moments.items()} == {one: value.shape for one, value in others.items()}
    assert distance(moments, others) < 1e-8


def kept(folder: Path, name: str, what: str) -> Any:
    return torch.load(folder / name / f"{what}.pt", weights_only=True)


def weights_of(folder: Path, name: str, update: int) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(checkpoint_format.path_of(folder / name / "checkpoints", update) / "model.safetensors")
