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

from rtrain.batch import Head, Tokens
from rtrain.checkpoints.loss_scale import Scale
from rtrain.config import Distill, Optim
from rtrain.data.order import deal
from rtrain.exchange.replicated import Replicated
from rtrain.training import losses, optim, step
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
        results: dict[str, Any] = {"updates": _updates(world, rank, folder)}
        results["planned"] = _planned(world, rank, folder)
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
    optimizer = optim.build(network, Optim(lr=1e-3))
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


def _planned(world: int, rank: int, folder: Path) -> bool:
    """Whether updates whose targets are planned give the weights of those whose are not. Wrong rows and wrong targets
    are refused before a weight changes."""
    weights = []
    for planned in (True, False):
        network = make_network(folder / "encoder")
        exchange, optimizer = Replicated(network, by="auto"), optim.build(network, Optim(lr=1e-3))
        for number, count in enumerate(UPDATES):
            rows = make_rows(count, seed=number)
            targets = LOSS.counts(rows) if planned else None
            share, expected = _share(number, count, world, rank), step.row_sum(rows.row_ids)
            done = step.run_update(
                exchange, optimizer, LOSS, share, pad_id=0, clip_norm=1.0, rows=expected, targets=targets
            )
            assert done.loss > 0
            if planned and number == 0:
                for wrong in ({"rows": expected + 1, "targets": targets}, {"rows": expected, "targets": [99]}):
                    before = {name: value.clone() for name, value in network.state_dict().items()}
                    with pytest.raises(step.WrongRows):
                        step.run_update(exchange, optimizer, LOSS, share, pad_id=0, **wrong)
                    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
        weights.append(network.state_dict())
    return all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def _share(number: int, count: int, world: int, rank: int) -> list[Tokens]:
    rows = make_rows(count, seed=number)
    return [pick(rows, chosen.tolist()) for chosen in deal(rows.lengths, world, rank, most_rows=3)]


class _Overflowing(losses.RunLoss):
    """Whose gradient is infinite in fp16."""

    def __call__(self, logits: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        return super().__call__(logits, tokens) * 2.0**40


def _infinite(world: int, rank: int, folder: Path) -> dict[str, Any]:
    """Three updates in fp16; in the second one the gradient is infinite on the last worker alone."""
    network = make_network(folder / "encoder").float()
    optimizer, exchange = optim.build(network, Optim(lr=1e-3)), Replicated(network)
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


@pytest.mark.parametrize("world", [2, 3])
def test_planned_targets_change_no_weight(world: int) -> None:
    results, _ = on_workers()
    assert all(results[world, rank]["planned"] for rank in range(world))


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
