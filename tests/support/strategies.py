"""What the tests of strategies train on workers, and how they look at it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing.spawn import ProcessExitedException

from rtrain.checkpoint import format as checkpoint_format
from rtrain.config import DistillConfig, Recipe, load_config
from rtrain.core.ragged import Head, TokenBatch
from rtrain.models import builder
from rtrain.parallel import dtensor_utils
from rtrain.parallel.base import Strategy
from rtrain.parallel.layout import build_strategy
from rtrain.trainer import losses, optimizers, step
from tests.support.workers import joined, run
from tests.unit.tasks import test_masked_lm
from tests.unit.trainer import test_trainer
from tests.unit.trainer.test_step import LOSS, TASK, distance, make_network, make_rows, norm, pick

UPDATES = (13, 2, 1, 12)
"""Rows of the updates, in passes of three; the third leaves one replica idle."""


def held(network: torch.nn.Module) -> dict[str, int]:
    """Bytes of weights and gradients that this worker has now."""
    every = [item for item in network.parameters() if dtensor_utils.is_materialized(item)]
    grown = [item.grad for item in every if item.grad is not None]
    return {
        name: sum(dtensor_utils.local_tensor(item).nbytes for item in source)
        for name, source in (("weights", every), ("gradients", grown))
    }


class Looking(losses.RunLoss):
    """A loss that looks at what a worker has between a forward pass and its backward pass."""

    def __init__(self, network: torch.nn.Module):
        super().__init__(TASK, DistillConfig(), Head())
        self._network, self.held = network, dict[str, int]()

    def __call__(self, logits: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
        self.held = held(self._network)
        return super().__call__(logits, tokens)


class Kept(step.Observer):
    """The gradients of an update, whole, and what this worker has of them."""

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}
        self.held: dict[str, int] = {}

    def on_gradient(self, exchange: Strategy) -> None:
        self.held = held(exchange.module)
        local_part = {name: item.grad for name, item in exchange.module.named_parameters() if item.grad is not None}
        self.found = {name: value.clone() for name, value in exchange.gather_full_tensors(local_part)}


def recipe(**train: Any) -> Recipe:
    return load_config("intent", {f"train.{name}": value for name, value in train.items()} | {"optim.lr": 1e-3}).recipe


def share_of(number: int, world: int, rank: int) -> list[TokenBatch]:
    """Passes of three rows, two of three of them the first replica's."""
    rows = make_rows(UPDATES[number], seed=number)
    every = [pick(rows, range(first, min(first + 3, len(rows)))) for first in range(0, len(rows), 3)]
    return every if world == 1 else [item for place, item in enumerate(every) if (place % 3 == 2) == (rank == 1)]


def trained(exchange: Strategy, kept: Path, **train: Any) -> list[dict[str, Any]]:
    """Four updates by AdamW; rank 0 keeps gradients and weights."""
    optimizer, actual, gradients = optimizers.build_run_optimizer(exchange, recipe(**train)), [], []
    for number, count in enumerate(UPDATES):
        share = share_of(number, exchange.num_replicas, exchange.replica_rank)
        rows = step.sum_row_ids(make_rows(count, number).row_ids)
        seen, loss = Kept(), Looking(exchange.module)
        done = step.StepRunner(exchange, optimizer, loss, pad_id=0, max_grad_norm=1.0, observer=seen).run_step(
            share, expected_row_sum=rows, measure_noise=True
        )
        entry: dict[str, Any] = {
            "loss": done.loss,
            "norm": done.gradient_norm,
            "rows": done.rows,
            "passes": done.micro_batches,
        }
        noise = {"noise": done.noise_measurement is not None, "tells_noise": exchange.supports_noise_scale}
        actual.append(entry | noise | {"inside": loss.held, "after": seen.held})
        gradients.append(seen.found)
    weights = dict(
        exchange.gather_full_tensors({name: item.detach() for name, item in exchange.module.named_parameters()})
    )
    moments = dict(exchange.gather_full_tensors(checkpoint_format.collect_optimizer_state(exchange.module, optimizer)))
    if weights:
        kept.mkdir()
        for name, value in (("gradients", gradients), ("weights", weights), ("moments", moments)):
            torch.save(value, kept / f"{name}.pt")
    return actual


class Overflowing(losses.RunLoss):
    """A loss too large for its number format."""

    def __call__(self, logits: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
        return super().__call__(logits, tokens) * float("inf")


class Spoiling(step.Observer):
    """It makes infinite what this worker alone has of some cut tensor's gradient, if it has any."""

    def on_gradient(self, exchange: Strategy) -> None:
        every = [item.grad for item in exchange.module.parameters() if item.grad is not None]
        for item in [item for item in every if 0 < dtensor_utils.local_tensor(item).numel() < item.numel()][:1]:
            dtensor_utils.local_tensor(item).fill_(float("inf"))


def scaled(exchange: Strategy, **train: Any) -> dict[str, Any]:
    """Updates whose loss is scaled, as it is in fp16. In the second one the last worker's loss overflows, in the third
    one only what it has of a tensor that is cut, in layouts that cut any."""
    optimizer = optimizers.build_run_optimizer(exchange, recipe(**train))
    network = exchange.module
    last = distributed.get_world_size() - 1
    usual, actual = losses.RunLoss(TASK, DistillConfig(), Head()), dict[str, Any]()
    cuts = any(dtensor_utils.local_tensor(item).numel() < item.numel() for item in network.parameters())
    for name, number in (("first", 0), ("loss", 3), *((("share", 3),) if cuts else ()), ("after", 1)):
        is_last = distributed.get_rank() == last
        loss = Overflowing(TASK, DistillConfig(), Head()) if name == "loss" and is_last else usual
        observer = Spoiling() if name == "share" and is_last else step.Observer()
        before = [dtensor_utils.local_tensor(item).detach().clone() for item in network.parameters()]
        share = share_of(number, exchange.num_replicas, exchange.replica_rank)
        done = step.StepRunner(exchange, optimizer, loss, pad_id=0, max_grad_norm=1.0, observer=observer).run_step(
            share, scale=1024.0
        )
        same = all(
            torch.equal(dtensor_utils.local_tensor(item), old)
            for item, old in zip(network.parameters(), before, strict=True)
        )
        actual[name] = {"norm": done.gradient_norm, "skipped": done.is_skipped, "unchanged": same}
    return actual


class Failing:
    """A task that cannot tell what its second pass has come to."""

    def __init__(self) -> None:
        self.passes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(TASK, name)

    def row_results(self, *given: Any) -> Any:
        self.passes += 1
        if self.passes == 2:
            raise ValueError("no outcome")
        return TASK.row_results(*given)


class Dying(losses.RunLoss):
    """The loss of a worker that dies between a forward pass and its backward pass."""

    def __call__(self, logits: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
        os._exit(0)


DYING = "dying"


def die_within_step(rank: int, folder: Path, train: dict[str, Any], micro_batches: list[TokenBatch]) -> None:
    """The second of two workers dies within a micro-batch. The first one keeps its error in the file `told`."""
    joined(rank, 2, folder / DYING)
    network = make_network(folder / "encoder")
    strategy = build_strategy(network, recipe(**train).train)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    try:
        loss = LOSS if rank == 0 else Dying(TASK, DistillConfig(), Head())
        step.StepRunner(strategy, optimizer, loss, pad_id=0).run_step(micro_batches)
    except RuntimeError as error:
        (folder / DYING / "told").write_text(str(error))


def masked_lm_gradient(
    folder: Path, train: dict[str, Any] | None, *, pads: bool = False, recomputes: bool = False
) -> tuple[dict[str, torch.Tensor], torch.nn.Module]:
    """The gradient of a masked language model in a step of three micro-batches, on rank 0, and the network after the
    step. `train`: the layout; None for a single worker."""
    network: Any = builder.build_network(folder, test_masked_lm.TASK, (), seed=0, pack=not pads).double().train()
    if recomputes:
        builder.enable_activation_checkpointing(network)
    strategy = Strategy(network) if train is None else build_strategy(network, recipe(**train).train)
    head = test_masked_lm.HEAD
    rows = test_masked_lm.TASK.prepare(test_masked_lm.rows(6, length=31), head, 0, 0)
    micro_batches = [rows.take([0, 4, 5]), rows.take([1, 2]), rows.take([3])]
    if strategy.num_replicas == 2:
        micro_batches = [micro_batches[1:], micro_batches[:1]][strategy.replica_rank]
    loss, seen = losses.make_loss(test_masked_lm.TASK, DistillConfig(), head), Kept()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, foreach=False)
    step.StepRunner(strategy, optimizer, loss, pad_id=0, observer=seen).run_step(micro_batches)
    return seen.found, network


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


def told(ran: test_trainer.Ran) -> dict[str, Any]:
    """What a run has come to, as the tests compare it."""
    assert ran.outcome is not None
    return {
        "from": ran.recorder.of("started")[0]["step"],
        "scores": ran.outcome.scores,
        "ledger": ran.outcome.ledger,
        "losses": [fields["loss"] for fields in ran.recorder.of("evaluated") if "loss" in fields],
    }


def check_the_same(folder: Path, name: str, like: str, encoder: str = "encoder") -> None:
    """The gradients of all updates, the weights and the moments of a layout are those that one worker alone has."""
    for item, reference in zip(kept(folder, name, "gradients"), kept(folder, like, "gradients"), strict=True):
        assert item.keys() == reference.keys()
        assert distance(item, reference) < 1e-10
    start = {item: value.detach() for item, value in make_network(folder / encoder).named_parameters()}
    weights, reference = (kept(folder, item, "weights") for item in (name, like))
    assert weights.keys() == reference.keys()
    moved_to = norm({item: value - start[item] for item, value in reference.items()})
    assert norm({item: value - reference[item] for item, value in weights.items()}) < 1e-8 * moved_to
    moments, rest = (kept(folder, item, "moments") for item in (name, like))
    assert {item: value.shape for item, value in moments.items()} == {item: value.shape for item, value in rest.items()}
    assert distance(moments, rest) < 1e-8


def kept(folder: Path, name: str, what: str) -> Any:
    return torch.load(folder / name / f"{what}.pt", weights_only=True)


def weights_of(folder: Path, name: str, update: int) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(checkpoint_format.checkpoint_path(folder / name / "checkpoints", update) / "model.safetensors")
