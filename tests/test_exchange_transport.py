"""Transports of the exchange on real processes: the same gradients, the same bits, and an end where a worker dies."""

import atexit
import json
import os
import resource
import shutil
import signal
import time
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from rtrain.exchange import compression, transport
from rtrain.exchange.replicated import Replicated
from tests.workers import begun, joined, run

WORLDS = (2, 3)
NUMBERS = 3 * transport.CHUNK // 2 + 77
"""Length of a vector: chunks of one share, no multiple of anything."""
SIZES = (NUMBERS, 1, 0, 5000)
"""Lengths of one exchange's vectors."""


class Network(torch.nn.Module):
    """Layers of which some are large, for several of DDP's buckets."""

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


def vectors(rank: int, seed: int = 0, kind: torch.dtype = torch.float32) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(1000 * seed + rank)
    return [torch.randn(size, generator=made, dtype=kind) for size in SIZES]


def _worker(rank: int, folder: Path) -> None:
    for world in sorted(WORLDS, reverse=True):
        if rank < world:
            joined(rank, world, folder)
            found = {
                "vectors": _vectors(rank, world, folder),
                "networks": {
                    f"{by} {compressed}": _network(rank, world, by, compressed, folder)
                    for by in ("stock", "shared_memory")
                    for compressed in ("none", "bf16")
                },
                "full": _without_memory(rank, world),
                "apart": _apart(rank, world),
                "added": _added(rank, world, folder),
            }
            (folder / f"{world}-{rank}.json").write_text(json.dumps(found))
            dist.destroy_process_group()


def _vectors(rank: int, world: int, folder: Path) -> list[int]:
    """Two exchanges of several vectors each, in both types; and files that this process has of the segment."""
    for kind in (torch.float32, torch.float64):
        made = transport.share(vectors(rank, kind=kind), rank, world, None)
        assert isinstance(made, transport.Shared)
        for seed in range(2):
            given = vectors(rank, seed, kind)
            futures = [made.start(one, last=place == len(given) - 1) for place, one in enumerate(given)]
            assert [future.wait() is one for future, one in zip(futures, given, strict=True)] == [True] * len(given)
            torch.save(given, folder / f"vectors-{world}-{rank}-{seed}-{kind}.pt".replace("torch.", ""))
        long = torch.cat([*vectors(rank, 7, kind), *vectors(rank, 8, kind)])  # more than the segment has room for
        expected = transport.Stock(world).mean(long.clone())
        assert made.mean(long) is long
        assert torch.allclose(long, expected, rtol=1e-6, atol=1e-7)
        assert len(segments_of(os.getpid())) == 1
        del made
    return segments_of(os.getpid())


def _added(rank: int, world: int, folder: Path) -> int:
    """Tensors of two types, large and small, added up; the number of calls that it took."""
    calls, whole = [], dist.all_reduce

    def counted(*given: Any, **named: Any) -> Any:
        calls.append(1)
        return whole(*given, **named)

    small = [torch.full((number, 3), float(rank + number)) for number in range(40)]
    large = torch.arange(2.0 * transport.SMALL).view(-1, 2) * (rank + 1)
    given = [*(one.clone() for one in small), small[7].double(), large, large.clone().t()]
    setattr(dist, "all_reduce", counted)  # noqa: B010
    try:
        transport.add_up(given, None)
    finally:
        setattr(dist, "all_reduce", whole)  # noqa: B010
    torch.save(given, folder / f"added-{world}-{rank}.pt")
    return len(calls)


def segments_of(process: int) -> list[int]:
    """Open files of a process that are segments."""
    found = []
    for entry in Path(f"/proc/{process}/fd").iterdir():
        try:
            if transport.NAME in os.readlink(entry):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _network(rank: int, world: int, by: str, compressed: str, folder: Path) -> dict[str, Any]:
    """Three updates of two passes, the last of which leaves the last worker without rows."""
    torch.manual_seed(5)
    said: list[tuple[str, dict[str, Any]]] = []
    network = Network()
    exchange = Replicated(network, say=lambda kind, **fields: said.append((kind, fields)), by=by, compressed=compressed)
    assert exchange.rows is not None
    kept = []
    torch.manual_seed(rank)
    for update in range(3):
        exchange.begin()
        network.zero_grad(set_to_none=False)
        before = [None if one.grad is None else one.grad.clone() for one in network.layers.parameters()]
        idle = update == 2 and rank == world - 1
        for last in (False, True):
            with exchange.during(last=last):
                loss = exchange.model(torch.randint(0, 100, (4, 7))).square().mean()
                (loss * (0.0 if idle else 1.0 + update)).backward()
            if not last and before[0] is not None:
                assert all(one is not None and not one.any() for one in before)
        kept.append({name: one.grad.clone() for name, one in network.named_parameters() if one.grad is not None})
    torch.save(kept, folder / f"network-{world}-{rank}-{by}-{compressed}.pt")
    buckets = exchange.model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")  # type: ignore[operator]
    numbers = sum(one.numel() for one in network.layers.parameters()) + exchange.rows.gradient.numel()
    sent = numbers * (2 if compressed == "bf16" else 4)
    return {"said": said, "buckets": len(buckets), "cost": exchange.cost(), "sent": sent}


def _without_memory(rank: int, world: int) -> list[Any]:
    """Rank 0 may make no file of the size that is needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    said: list[Any] = []
    exchange = Replicated(torch.nn.Linear(300, 300), say=lambda kind, **fields: said.append(fields), by="shared_memory")
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    exchange.model(torch.ones(1, 300)).sum().backward()
    return said


def _apart(rank: int, world: int) -> str | None:
    """The last worker finds another segment at the path that rank 0 tells: that of another process on its own host."""
    honest = transport._map
    if rank == world - 1:
        transport._map = lambda path, size, token: honest(path, size, token + 1)
    try:
        found = transport.share([torch.zeros(10)], rank, world, None)
    finally:
        transport._map = honest
    return found if isinstance(found, str) else None


Results = tuple[dict[tuple[int, int], dict[str, Any]], Path]


@lru_cache(maxsize=1)
def _ran_once() -> Results | Exception:
    folder = Path(mkdtemp(prefix="rtrain-transport-"))
    atexit.register(shutil.rmtree, folder)
    try:
        run(_worker, (folder,), max(WORLDS))
    except Exception as error:
        return error
    places = [(world, rank) for world in WORLDS for rank in range(world)]
    return {(world, rank): json.loads((folder / f"{world}-{rank}.json").read_text()) for world, rank in places}, folder


def on_workers() -> Results:
    found = _ran_once()
    if isinstance(found, Exception):
        raise found
    return found


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("world", WORLDS)
def test_the_mean_through_memory_adds_in_the_order_of_ranks_on_every_worker(world: int, kind: torch.dtype) -> None:
    _, folder = on_workers()
    for seed in range(2):
        parts = [[one / world for one in vectors(rank, seed, kind)] for rank in range(world)]
        expected = [sum(terms[1:], terms[0].clone()) for terms in zip(*parts, strict=True)]
        for rank in range(world):
            found = load(folder / f"vectors-{world}-{rank}-{seed}-{kind}.pt".replace("torch.", ""))
            assert [len(one) for one in found] == list(SIZES)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("world", WORLDS)
def test_gradients_through_memory_are_the_stock_transport_s(world: int) -> None:
    results, folder = on_workers()
    first = load(folder / f"network-{world}-0-shared_memory-none.pt")
    for rank in range(world):
        said = results[world, rank]["networks"]["shared_memory none"]
        assert said["buckets"] > 1
        assert said["said"] == [["transport", {"asked": "shared_memory", "used": "shared_memory", "reason": None}]]
        stock = load(folder / f"network-{world}-{rank}-stock-none.pt")
        shared = load(folder / f"network-{world}-{rank}-shared_memory-none.pt")
        for number, update in enumerate(stock):
            assert update.keys() == shared[number].keys()
            assert len(update) == 25
            for name, gradient in update.items():
                assert gradient.any()
                assert torch.equal(shared[number][name], first[number][name])
                # Two terms have one order of summation; Gloo adds three in another one.
                assert torch.equal(shared[number][name], gradient) or world > 2
                assert float((shared[number][name] - gradient).norm() / gradient.norm()) < 1e-6


@pytest.mark.parametrize("by", ["stock", "shared_memory"])
@pytest.mark.parametrize("world", WORLDS)
def test_compression_says_what_it_loses(world: int, by: str) -> None:
    results, folder = on_workers()
    first = load(folder / f"network-{world}-0-{by}-bf16.pt")
    for rank in range(world):
        exact = load(folder / f"network-{world}-{rank}-stock-none.pt")
        lossy = load(folder / f"network-{world}-{rank}-{by}-bf16.pt")
        apart = [
            float(
                sum((lossy[at][name] - exact[at][name]).double().square().sum() for name in exact[at])
                / sum(one.double().square().sum() for one in exact[at].values())
            )
            ** 0.5
            for at in range(3)
        ]
        # Each term is rounded to 8 bits, by at most 2^-9 of itself, and so is each sum of them.
        assert all(2.0**-12 < value < 2.0**-7 for value in apart)
        errors = [
            fields["error"]
            for kind, fields in results[world, rank]["networks"][f"{by} bf16"]["said"]
            if kind == "compressed"
        ]
        assert errors == [pytest.approx(apart[0], rel=1e-4)]
        for at in range(3):
            assert all(torch.equal(lossy[at][name], first[at][name]) for name in first[at])
    if world == 2 and by == "shared_memory":
        stock = load(folder / f"network-{world}-0-stock-bf16.pt")
        assert all(torch.equal(stock[at][name], first[at][name]) for at in range(3) for name in stock[at])


@pytest.mark.parametrize("world", WORLDS)
def test_small_tensors_are_added_up_together(world: int) -> None:
    results, folder = on_workers()
    # Two large ones, of which one lies crosswise and goes with the small ones, of its type; and one of another type.
    assert [results[world, rank]["added"] for rank in range(world)] == [3] * world
    ranks = sum(range(world))
    expected = [torch.full((number, 3), float(ranks + world * number)) for number in range(40)]
    large = torch.arange(2.0 * transport.SMALL).view(-1, 2) * (ranks + world)
    for rank in range(world):
        found = load(folder / f"added-{world}-{rank}.pt")
        for one, other in zip(found, [*expected, expected[7].double(), large, large.t()], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("world", WORLDS)
def test_an_exchange_says_what_it_cost(world: int) -> None:
    found, _ = on_workers()
    for rank in range(world):
        for name, one in found[world, rank]["networks"].items():
            assert one["cost"]["bytes"] == one["sent"], name
            assert 0 < one["cost"]["seconds"] < 60, name


@pytest.mark.parametrize("world", WORLDS)
def test_where_memory_cannot_be_shared_all_workers_take_the_stock_transport(world: int) -> None:
    results, _ = on_workers()
    for rank in range(world):
        [fields] = results[world, rank]["full"]
        assert (fields["asked"], fields["used"]) == ("shared_memory", "stock")
        assert "cannot be shared" in fields["reason"]
        assert f"workers [{world - 1}] do not share" in results[world, rank]["apart"]
    assert "File too large" in results[world, 0]["full"][0]["reason"]


@pytest.mark.parametrize("world", WORLDS)
def test_a_segment_ends_with_its_last_user(world: int) -> None:
    """It has no name in any folder, ever: nothing is left of it by a worker that is killed at any moment."""
    results, _ = on_workers()
    assert [results[world, rank]["vectors"] for rank in range(world)] == [[]] * world


def test_gradients_on_a_gpu_are_left_to_nccl() -> None:
    assert "GPU" in str(transport.share([torch.zeros(3, device="meta")], 0, 2, None))


def test_an_error_is_measured_once_and_not_of_zeros(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/alone", rank=0, world_size=1)
    try:
        found = compression.Compared(transport.Stock(1, torch.bfloat16), 1)
        assert not found.mean(torch.zeros(5)).any()
        assert found.error() is None
        given = torch.tensor([1.0, 2.0 + 2.0**-7])  # halfway between two numbers of bf16: to the even one
        assert found.mean(given).tolist() == [1.0, 2.0]
        assert found.error() == pytest.approx(2.0**-7 / (1 + (2 + 2.0**-7) ** 2) ** 0.5)
        assert found.error() is None
        found.mean(torch.ones(5))
        assert found.error() is None
    finally:
        dist.destroy_process_group()


def _killed(rank: int, folder: Path) -> None:
    """Three workers exchange for ever; the last one dies in its third exchange."""
    joined(rank, 3, folder)
    made = transport.share(vectors(rank), rank, 3, None)
    assert isinstance(made, transport.Shared)
    for number in range(1_000_000):
        if rank == 2 and number == 2:
            made.start(vectors(rank)[0], last=False)
            (folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            made.mean(vectors(rank)[0])
        except RuntimeError:
            (folder / f"failed-{rank}").write_text(str(time.time()))
            os._exit(0)  # where the process group ends with the interpreter, Gloo's own thread may abort it


def test_the_others_fail_at_once_when_a_worker_is_killed(tmp_path: Path) -> None:
    before = sorted(os.listdir("/dev/shm"))
    context = begun(_killed, (tmp_path,), 3)
    for process in context.processes:
        process.join(timeout=120)
    assert [process.exitcode for process in context.processes] == [0, 0, -signal.SIGKILL]
    killed = float((tmp_path / "killed").read_text())
    assert all(float((tmp_path / f"failed-{rank}").read_text()) - killed < 10 for rank in range(2))
    assert sorted(os.listdir("/dev/shm")) == before
    with pytest.raises((ProcessExitedException, ProcessRaisedException)):
        context.join()
