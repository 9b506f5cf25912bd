"""Gradient synchronization on real processes: sums, cost, and errors after a worker's death."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from rtrain.parallel import collectives
from rtrain.parallel.ddp import DDPStrategy
from tests.support.workers import begun, joined, load_results, once, run

WORLDS = (2, 3)


class Network(torch.nn.Module):
    """Layers of different sizes, for several of DDP's buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(100, 300)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(300, 300) for _ in range(12)])

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.embedding

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.embedding(ids)
        for layer in self.layers:
            value = torch.tanh(layer(value))
        return value


def _worker(rank: int, folder: Path) -> None:
    for world in sorted(WORLDS, reverse=True):
        if rank < world:
            joined(rank, world, folder)
            actual = {
                "networks": {settings: _network(rank, world, settings, folder) for settings in ("none", "bf16")},
                "added": _added(rank, world, folder),
            }
            (folder / f"{world}-{rank}.json").write_text(json.dumps(actual))
            dist.destroy_process_group()


def _added(rank: int, world: int, folder: Path) -> int:
    """Tensors of two types, large and small, added up; the number of calls that it took."""
    calls, complete = [], dist.all_reduce

    def counted(*tensors: Any, **named: Any) -> Any:
        calls.append(1)
        return complete(*tensors, **named)

    small = [torch.full((number, 3), float(rank + number)) for number in range(40)]
    large = torch.arange(2.0 * collectives.MIN_SEPARATE_ELEMENTS).view(-1, 2) * (rank + 1)
    tensors = [*(item.clone() for item in small), small[7].double(), large, large.clone().t()]
    setattr(dist, "all_reduce", counted)  # noqa: B010
    try:
        collectives.all_reduce_sum(tensors, None)
    finally:
        setattr(dist, "all_reduce", complete)  # noqa: B010
    torch.save(tensors, folder / f"added-{world}-{rank}.pt")
    return len(calls)


def _network(rank: int, world: int, compressed: str, folder: Path) -> dict[str, Any]:
    """Three steps of two micro-batches; the last worker has no rows in the last one."""
    torch.manual_seed(5)
    message: list[tuple[str, dict[str, Any]]] = []
    network = Network()
    exchange = DDPStrategy(
        network, log_event=lambda kind, **fields: message.append((kind, fields)), compression=compressed
    )
    assert exchange.touched_rows is not None
    gradients = []
    torch.manual_seed(rank)
    for update in range(3):
        exchange.begin_step()
        network.zero_grad(set_to_none=False)
        before = [None if item.grad is None else item.grad.clone() for item in network.layers.parameters()]
        idle = update == 2 and rank == world - 1
        for last in (False, True):
            with exchange.micro_batch(is_last=last):
                loss = exchange.model(torch.randint(0, 100, (4, 7))).square().mean()
                (loss * (0.0 if idle else 1.0 + update)).backward()
            if not last and before[0] is not None:
                assert all(item is not None and not item.any() for item in before)
        gradients.append(
            {name: item.grad.clone() for name, item in network.named_parameters() if item.grad is not None}
        )
    torch.save(gradients, folder / f"network-{world}-{rank}-{compressed}.pt")
    numbers = sum(item.numel() for item in network.layers.parameters()) + exchange.touched_rows.gradient.numel()
    sent = numbers * (2 if compressed == "bf16" else 4)
    return {"said": message, "cost": exchange.comm_cost(), "sent": sent}


Results = tuple[dict[tuple[int, int], dict[str, Any]], Path]


@once("rtrain-transport-")
def on_workers(folder: Path) -> Results:
    run(_worker, (folder,), max(WORLDS))
    return load_results(folder, WORLDS), folder


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("world", WORLDS)
def test_compression_says_what_it_loses(world: int) -> None:
    results, folder = on_workers()
    first = load(folder / f"network-{world}-0-bf16.pt")
    for rank in range(world):
        exact = load(folder / f"network-{world}-{rank}-none.pt")
        lossy = load(folder / f"network-{world}-{rank}-bf16.pt")
        distances = [
            float(
                sum((lossy[at][name] - exact[at][name]).double().square().sum() for name in exact[at])
                / sum(item.double().square().sum() for item in exact[at].values())
            )
            ** 0.5
            for at in range(3)
        ]
        # Each term is rounded to 8 bits, by at most 2^-9 of itself, and so is each sum of them.
        assert all(2.0**-12 < value < 2.0**-7 for value in distances)
        errors = [
            fields["error"]
            for kind, fields in results[world, rank]["networks"]["bf16"]["said"]
            if kind == "gradient_compression"
        ]
        assert errors == [pytest.approx(distances[0], rel=1e-4)]
        for at in range(3):
            assert all(torch.equal(lossy[at][name], first[at][name]) for name in first[at])


@pytest.mark.parametrize("world", WORLDS)
def test_small_tensors_are_added_up_together(world: int) -> None:
    results, folder = on_workers()
    # Two large tensors, one of them not contiguous, so that it is sent with the small ones; and one of another dtype.
    assert [results[world, rank]["added"] for rank in range(world)] == [3] * world
    ranks = sum(range(world))
    expected = [torch.full((number, 3), float(ranks + world * number)) for number in range(40)]
    large = torch.arange(2.0 * collectives.MIN_SEPARATE_ELEMENTS).view(-1, 2) * (ranks + world)
    for rank in range(world):
        actual = load(folder / f"added-{world}-{rank}.pt")
        for item, other in zip(actual, [*expected, expected[7].double(), large, large.t()], strict=True):
            assert torch.equal(item, other)


@pytest.mark.parametrize("world", WORLDS)
def test_an_exchange_says_what_it_cost(world: int) -> None:
    actual, _ = on_workers()
    for rank in range(world):
        for name, item in actual[world, rank]["networks"].items():
            assert item["cost"]["bytes"] == item["sent"], name
            assert 0 < item["cost"]["seconds"] < 60, name


def test_an_error_is_measured_once_and_not_of_zeros(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/alone", rank=0, world_size=1)
    try:
        actual = collectives.CompressionErrorProbe(1, torch.bfloat16)
        assert not actual.mean(torch.zeros(5)).any()
        assert actual.pop_error() is None
        tensors = torch.tensor([1.0, 2.0 + 2.0**-7])  # halfway between two numbers of bf16: to the even one
        assert actual.mean(tensors).tolist() == [1.0, 2.0]
        assert actual.pop_error() == pytest.approx(2.0**-7 / (1 + (2 + 2.0**-7) ** 2) ** 0.5)
        assert actual.pop_error() is None
        actual.mean(torch.ones(5))
        assert actual.pop_error() is None
    finally:
        dist.destroy_process_group()


def _killed(rank: int, folder: Path) -> None:
    """Three workers exchange for ever; the last one dies in its third exchange."""
    joined(rank, 3, folder)
    instance = collectives.ProcessGroupTransport(3)
    for number in range(1_000_000):
        if rank == 2 and number == 2:
            instance.start_mean(torch.ones(500_000))
            (folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            instance.mean(torch.ones(500_000))
        except RuntimeError:
            (folder / f"failed-{rank}").write_text(str(time.time()))
            os._exit(0)  # where the process group ends with the interpreter, Gloo's own thread may abort it


def test_the_others_fail_at_once_when_a_worker_is_killed(tmp_path: Path) -> None:
    context = begun(_killed, (tmp_path,), 3)
    for process in context.processes:
        process.join(timeout=120)
    assert [process.exitcode for process in context.processes] == [0, 0, -signal.SIGKILL]
    killed = float((tmp_path / "killed").read_text())
    assert all(float((tmp_path / f"failed-{rank}").read_text()) - killed < 10 for rank in range(2))
    with pytest.raises((ProcessExitedException, ProcessRaisedException)):
        context.join()
