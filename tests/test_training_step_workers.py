"""One update on several workers: together they take the gradient of one, and end with its weights."""

import atexit
import json
import os
import shutil
from datetime import timedelta
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from rtrain.checkpoint.loss_scale import Scale
from rtrain.config import Distill, Optim
from rtrain.core.ragged import Head, Tokens
from rtrain.data.order import deal
from rtrain.parallel import ddp
from rtrain.parallel.ddp import Replicated
from rtrain.trainer import losses, optimizers, step
from tests.test_training_step import (
    LOSS,
    TASK,
    Gradients,
    distance,
    gradients,
    make_network,
    make_rows,
    make_still_encoder,
    norm,
    pick,
)
from tests.workers import run

# Rows of the updates that worker processes train on, in passes of at most 3: with two workers the third update leaves
# one idle, with three the second one does too.
UPDATES = (13, 2, 1, 12)
WORLDS = (1, 2, 3)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_still_encoder(tmp_path_factory.mktemp("encoder"))


def _worker(rank: int, folder: Path) -> None:
    """One of three processes. All three train and evaluate together, then the first two, then the first alone."""
    torch.set_num_threads(1)
    for world in sorted(WORLDS, reverse=True):
        if rank < world:
            _in_world(rank, world, folder)


def _in_world(rank: int, world: int, folder: Path) -> None:
    if world > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "cpu:gloo" if world == 2 else "gloo",  # by kind of device, as beside GPUs
            init_method=f"file://{folder}/rendezvous-{world}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=60),
        )
    try:
        _updates(world, rank, folder, freeze="encoder")
        results = {"updates": _updates(world, rank, folder), "exchanges": _exchanges(world, rank, folder)}
        results["rows"] = _touched_rows(world, rank, folder)
        results["collectives"] = _collectives(world, rank, folder)
        results["infinite"] = _infinite(world, rank, folder)
        from tests import test_exchange_noise, test_training_evaluate, test_training_loop, test_training_loop_faults

        results["noise"] = test_exchange_noise.on_a_worker(world, rank, folder / "encoder")

        results["scores"] = test_training_evaluate.scores_of(
            Replicated(make_network(folder / "encoder")), folder / "store"
        )
        results["loop"] = test_training_loop.straight_and_resumed(folder / "loop", world, rank)
        results["faults"] = test_training_loop_faults.faults_on_workers(folder / "loop", world, rank)
        (folder / f"{world}-{rank}.json").write_text(json.dumps(results))
    finally:
        if world > 1:
            dist.destroy_process_group()


def _updates(world: int, rank: int, folder: Path, freeze: Literal["none", "encoder"] = "none") -> list[dict[str, Any]]:
    """Four updates by AdamW; every rank keeps its gradients and its weights."""
    network = make_network(folder / "encoder", freeze)
    kept = folder / freeze
    kept.mkdir(exist_ok=True)
    optimizer = optimizers.build(network, Optim(lr=1e-3))
    exchange = Replicated(network)
    found = []
    for number, count in enumerate(UPDATES):
        share, rows = _share(number, count, world, rank), step.row_sum(make_rows(count, seed=number).row_ids)
        with pytest.raises(step.WrongRows):  # on every worker, so that none waits for the others
            step.run_update(exchange, optimizer, LOSS, share, pad_id=0, rows=rows + 1)
        done = step.run_update(exchange, optimizer, LOSS, share, pad_id=0, clip_norm=1.0, rows=rows)
        found.append({"loss": done.loss, "norm": done.gradient_norm, "rows": done.rows, "passes": done.passes})
        torch.save(gradients(network), kept / f"gradients-{world}-{rank}-{number}.pt")
    torch.save(network.state_dict(), kept / f"weights-{world}-{rank}.pt")
    return found


def _collectives(world: int, rank: int, folder: Path) -> dict[str, Any]:
    """How often the workers wait for each other in an update whose targets are planned and in one whose are not;
    and whether both give the same weights."""
    if world == 1:
        return {}
    calls, real = [0], {name: getattr(dist, name) for name in COLLECTIVES}

    def counted(name: str) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            calls[0] += 1
            return real[name](*given, **named)

        return call

    found: dict[str, Any] = {}
    weights = []
    for planned in (True, False):
        network = make_network(folder / "encoder")
        exchange, optimizer = Replicated(network), optimizers.build(network, Optim(lr=1e-3))
        for name in COLLECTIVES:
            setattr(dist, name, counted(name))
        try:
            most = 0
            for number, count in enumerate(UPDATES):
                rows = make_rows(count, seed=number)
                targets = LOSS.counts(rows) if planned else None
                share, calls[0] = _share(number, count, world, rank), 0
                expected = step.row_sum(rows.row_ids)
                done = step.run_update(
                    exchange, optimizer, LOSS, share, pad_id=0, clip_norm=1.0, rows=expected, targets=targets
                )
                most = max(most, calls[0])
                assert done.loss > 0
                if planned and number == 0:
                    for wrong in ({"rows": expected + 1, "targets": targets}, {"rows": expected, "targets": [99]}):
                        before = {name: value.clone() for name, value in network.state_dict().items()}
                        with pytest.raises(step.WrongRows):
                            step.run_update(exchange, optimizer, LOSS, share, pad_id=0, **wrong)
                        assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
        finally:
            for name, function in real.items():
                setattr(dist, name, function)
        found["planned" if planned else "unplanned"] = most
        weights.append(network.state_dict())
    return {**found, "same": all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())}


COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "barrier", "_broadcast_coalesced")


def _share(number: int, count: int, world: int, rank: int) -> list[Tokens]:
    """One of three workers gets most of the rows: sums do not depend on how rows are dealt."""
    rows, speeds = make_rows(count, seed=number), (1.0, 0.5, 0.25) if world == 3 else ()
    return [pick(rows, chosen.tolist()) for chosen in deal(rows.lengths, world, rank, most_rows=3, speeds=speeds)]


def _exchanges(world: int, rank: int, folder: Path) -> list[int]:
    """How often DDP sums gradients, per update."""
    if world == 1:
        return [0] * len(UPDATES)
    network = make_network(folder / "encoder")
    exchange = Replicated(network)
    calls, started = 0, ddp._started

    def counted(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        return started(*given)

    ddp._started = counted  # type: ignore[assignment]
    found = []
    for number, count in enumerate(UPDATES):
        before = calls
        optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
        step.run_update(exchange, optimizer, LOSS, _share(number, count, world, rank), pad_id=0)
        found.append(calls - before)
    ddp._started = started
    return found


def _touched_rows(world: int, rank: int, folder: Path) -> dict[str, Any]:
    """The word embedding's gradient as touched rows beside the stock exchange's, for one pass a worker and for more."""
    found: dict[str, Any] = {"one pass": [], "more": [], "touched": []}
    for number, count in enumerate(UPDATES):
        for name, most_rows in (("one pass", 100), ("more", 3)):
            rows = make_rows(count, seed=number)
            passes = [pick(rows, chosen.tolist()) for chosen in deal(rows.lengths, world, rank, most_rows)]
            both = []
            for touched in (True, False):
                network = make_network(folder / "encoder")
                exchange = Replicated(network, touched_rows=touched)
                assert (exchange.rows is not None) == touched
                optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
                for _ in range(2):  # the second finds the first one's rows
                    step.run_update(exchange, optimizer, LOSS, passes, pad_id=0)
                both.append(gradients(network))
            table = "bert.embeddings.word_embeddings.weight"
            same = all(torch.equal(both[0][one], both[1][one]) for one in both[1])
            found[name].append(same if name == "one pass" else distance(both[0], both[1]))
        found["touched"].append(int((both[0][table] != 0).any(dim=1).sum()))
    return found


class _Overflowing(losses.RunLoss):
    """Whose gradient is infinite in fp16."""

    def __call__(self, logits: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        return super().__call__(logits, tokens) * 2.0**40


def _infinite(world: int, rank: int, folder: Path) -> dict[str, Any]:
    """Three updates in fp16; in the second one the gradient is infinite on the last worker alone."""
    network = make_network(folder / "encoder").float()
    optimizer, exchange = optimizers.build(network, Optim(lr=1e-3)), Replicated(network)
    scale, overflowing = Scale(2.0**10), _Overflowing(TASK, Distill(), Head())
    local = False
    found: dict[str, Any] = {"skipped": [], "scales": [], "weights": []}

    def look(gradient: torch.Tensor) -> None:  # before the workers' gradients are added
        nonlocal local
        local = local or not bool(torch.isfinite(gradient).all())

    network.classifier.bias.register_hook(look)  # type: ignore[union-attr, operator]
    for number in range(3):
        loss = overflowing if (number, rank) == (1, world - 1) else LOSS
        done = step.run_update(
            exchange,
            optimizer,
            loss,
            _share(0, 13, world, rank),
            pad_id=0,
            precision="fp16",
            scale=scale.value,
            clip_norm=1.0,
        )
        scale = scale.after(finite=not done.skipped)
        found["skipped"].append(done.skipped)
        found["scales"].append(scale.value)
        found["weights"].append(
            sha256(b"".join(p.detach().numpy().tobytes() for p in network.parameters())).hexdigest()
        )
    return {**found, "local": local}


Results = tuple[dict[tuple[int, int], dict[str, Any]], Path]


def on_workers() -> Results:
    """Results of each (world, rank), and the folder of weights."""
    found = _ran_once()
    if isinstance(found, Exception):
        raise found
    return found


@lru_cache(maxsize=1)
def _ran_once() -> Results | Exception:
    """One start of three processes serves all tests; so does one failure."""
    try:
        return _run_workers()
    except Exception as error:
        return error


def _run_workers() -> Results:
    from tests import test_training_evaluate, test_training_loop

    folder = Path(mkdtemp(prefix="rtrain-workers-"))
    atexit.register(shutil.rmtree, folder)
    make_still_encoder(folder / "encoder")
    test_training_evaluate.make_scored_store(folder / "store", folder / "encoder")
    test_training_loop.make_ground(folder / "loop")
    run(_worker, (folder,), max(WORLDS))
    found = {
        (world, rank): json.loads((folder / f"{world}-{rank}.json").read_text())
        for world in WORLDS
        for rank in range(world)
    }
    return found, folder


def loaded(path: Path) -> Gradients:
    found: Gradients = torch.load(path, weights_only=True)
    return found


def test_the_cases_leave_workers_idle() -> None:
    idle = [
        [sum(not _share(n, count, world, rank) for rank in range(world)) for n, count in enumerate(UPDATES)]
        for world in WORLDS
    ]
    assert idle == [[0, 0, 0, 0], [0, 0, 1, 0], [0, 1, 2, 0]]
    passes = [[len(_share(0, 13, world, rank)) for rank in range(world)] for world in WORLDS]
    assert passes == [[5], [3, 2], [3, 1, 1]]


@pytest.mark.parametrize("freeze", ["none", "encoder"])
@pytest.mark.parametrize("world", [2, 3])
def test_workers_together_take_the_gradient_of_one_worker(world: int, freeze: str) -> None:
    folder = on_workers()[1] / freeze
    for number in range(len(UPDATES)):
        alone = loaded(folder / f"gradients-1-0-{number}.pt")
        assert set(alone) >= {"classifier.weight", "classifier.bias"}
        assert (len(alone) == 2) == (freeze == "encoder")
        for rank in range(world):
            # From the second update on the weights differ by rounding already.
            assert distance(loaded(folder / f"gradients-{world}-{rank}-{number}.pt"), alone) < 1e-10


def test_two_workers_wait_for_each_other_five_times_an_update() -> None:
    """For the gradients, for which rows of the word embedding there are, how many, and their mean, and for all numbers
    of the update."""
    results, _ = on_workers()
    for rank in range(2):
        found = results[2, rank]["collectives"]
        assert found == {"planned": 5, "unplanned": 6, "same": True}
    assert all(results[3, rank]["collectives"]["same"] for rank in range(3))


@pytest.mark.parametrize("freeze", ["none", "encoder"])
@pytest.mark.parametrize("world", [2, 3])
def test_workers_together_end_with_the_weights_of_one_worker(world: int, freeze: str, encoder: Path) -> None:
    folder = on_workers()[1] / freeze
    start = {name: value.clone() for name, value in make_network(encoder).state_dict().items()}
    alone = loaded(folder / "weights-1-0.pt")
    moved = {name: alone[name] - start[name] for name in start}
    assert norm(moved) > 0.01
    assert (norm({name: value for name, value in moved.items() if name.startswith("bert.")}) == 0) == (
        freeze == "encoder"
    )
    first = loaded(folder / f"weights-{world}-0.pt")
    # A share of the distance moved, not of the weights: AdamW's four steps are short.
    assert norm({name: first[name] - alone[name] for name in alone}) < 1e-10 * norm(alone)
    assert norm({name: first[name] - alone[name] for name in alone}) < 1e-8 * norm(moved)
    for rank in range(1, world):
        other = loaded(folder / f"weights-{world}-{rank}.pt")
        assert all(torch.equal(other[name], first[name]) for name in first)


@pytest.mark.parametrize("world", [2, 3])
def test_every_worker_reports_the_loss_of_all_rows_and_its_own_counts(world: int) -> None:
    results, _ = on_workers()
    alone = results[1, 0]["updates"]
    for number, count in enumerate(UPDATES):
        reports = [results[world, rank]["updates"][number] for rank in range(world)]
        assert [report["loss"] for report in reports] == pytest.approx([alone[number]["loss"]] * world, rel=1e-9)
        assert [report["norm"] for report in reports] == pytest.approx([alone[number]["norm"]] * world, rel=1e-9)
        assert sum(report["rows"] for report in reports) == count
        assert [report["passes"] for report in reports] == [
            len(_share(number, count, world, rank)) for rank in range(world)
        ]


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_are_exchanged_once_an_update_also_by_the_idle(world: int) -> None:
    results, _ = on_workers()
    # One bucket: the tiny model's 0.4 MB fit into DDP's first one.
    assert [results[world, rank]["exchanges"] for rank in range(world)] == [[1, 1, 1, 1]] * world


@pytest.mark.parametrize("world", WORLDS)
def test_touched_rows_are_the_stock_exchange_s_gradient(world: int) -> None:
    results, _ = on_workers()
    for rank in range(world):
        rows = results[world, rank]["rows"]
        # Two workers' terms have one order of summation; three are added in another order than DDP's.
        assert rows["one pass"] == [True] * len(UPDATES) or world > 2
        assert max(rows["more"]) < 1e-14
        assert all(1 < touched < 200 for touched in rows["touched"])
