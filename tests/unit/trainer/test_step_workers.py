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

from rtrain.checkpoint.format import LossScale
from rtrain.config import DistillConfig, OptimConfig
from rtrain.core.ragged import Head, TokenBatch
from rtrain.data.order import assign_micro_batches
from rtrain.parallel import ddp
from rtrain.parallel.ddp import DDPStrategy
from rtrain.trainer import losses, optimizers, step
from tests.support.workers import run
from tests.unit.trainer.test_step import (
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

# Rows of the updates that worker processes train on, in passes of at most 3: with two workers the third update leaves
# one idle, with three the second one does too.
UPDATES = (13, 2, 1, 12)
WORLDS = (1, 2, 3)
TOUCHED = (0, 2)
"""Updates whose touched rows are compared: one with rows on each worker, one with idle workers."""


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
        from tests.unit.parallel import test_gradient_noise
        from tests.unit.trainer import test_evaluate, test_trainer, test_trainer_faults

        results["noise"] = test_gradient_noise.on_a_worker(world, rank, folder / "encoder")

        results["scores"] = test_evaluate.scores_of(DDPStrategy(make_network(folder / "encoder")), folder / "store")
        results["loop"] = test_trainer.straight_and_resumed(folder / "loop", world, rank)
        results["faults"] = test_trainer_faults.faults_on_workers(folder / "loop", world, rank)
        (folder / f"{world}-{rank}.json").write_text(json.dumps(results))
    finally:
        if world > 1:
            dist.destroy_process_group()


def _updates(world: int, rank: int, folder: Path, freeze: Literal["none", "encoder"] = "none") -> list[dict[str, Any]]:
    """Four updates by AdamW; every rank keeps its gradients and its weights."""
    network = make_network(folder / "encoder", freeze)
    stored = folder / freeze
    stored.mkdir(exist_ok=True)
    optimizer = optimizers.build_optimizer(network, OptimConfig(lr=1e-3))
    exchange = DDPStrategy(network)
    actual = []
    for number, count in enumerate(UPDATES):
        share, rows = _share(number, count, world, rank), step.sum_row_ids(make_rows(count, seed=number).row_ids)
        with pytest.raises(step.WrongRows):  # on every worker, so that none waits for the others
            step.StepRunner(exchange, optimizer, LOSS, pad_id=0).run_step(share, expected_row_sum=rows + 1)
        done = step.StepRunner(exchange, optimizer, LOSS, pad_id=0, max_grad_norm=1.0).run_step(
            share, expected_row_sum=rows
        )
        actual.append({"loss": done.loss, "norm": done.gradient_norm, "rows": done.rows, "passes": done.micro_batches})
        torch.save(gradients(network), stored / f"gradients-{world}-{rank}-{number}.pt")
    torch.save(network.state_dict(), stored / f"weights-{world}-{rank}.pt")
    return actual


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

    actual: dict[str, Any] = {}
    weights = []
    for planned in (True, False):
        network = make_network(folder / "encoder")
        exchange, optimizer = DDPStrategy(network), optimizers.build_optimizer(network, OptimConfig(lr=1e-3))
        for name in COLLECTIVES:
            setattr(dist, name, counted(name))
        try:
            maximum = 0
            for number, count in enumerate(UPDATES):
                rows = make_rows(count, seed=number)
                targets = LOSS.count_targets(rows) if planned else None
                share, calls[0] = _share(number, count, world, rank), 0
                expected = step.sum_row_ids(rows.row_ids)
                done = step.StepRunner(exchange, optimizer, LOSS, pad_id=0, max_grad_norm=1.0).run_step(
                    share, expected_row_sum=expected, expected_targets=targets
                )
                maximum = max(maximum, calls[0])
                assert done.loss > 0
                if planned and number == 0:
                    for wrong in (
                        {"expected_row_sum": expected + 1, "expected_targets": targets},
                        {"expected_row_sum": expected, "expected_targets": [99]},
                    ):
                        before = {name: value.clone() for name, value in network.state_dict().items()}
                        with pytest.raises(step.WrongRows):
                            step.StepRunner(exchange, optimizer, LOSS, pad_id=0).run_step(share, **wrong)
                        assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
        finally:
            for name, function in real.items():
                setattr(dist, name, function)
        actual["planned" if planned else "unplanned"] = maximum
        weights.append(network.state_dict())
    return {**actual, "same": all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())}


COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "barrier", "_broadcast_coalesced")


def _share(number: int, count: int, world: int, rank: int) -> list[TokenBatch]:
    """One of three workers gets most of the rows: sums do not depend on how rows are dealt."""
    rows, speeds = make_rows(count, seed=number), (1.0, 0.5, 0.25) if world == 3 else ()
    return [
        pick(rows, options.tolist())
        for options in assign_micro_batches(rows.window_lengths, world, rank, max_rows=3, worker_speeds=speeds)
    ]


def _exchanges(world: int, rank: int, folder: Path) -> list[int]:
    """How often DDP sums gradients, per update."""
    if world == 1:
        return [0] * len(UPDATES)
    network = make_network(folder / "encoder")
    exchange = DDPStrategy(network)
    calls, started = 0, ddp._start_all_reduce

    def counted(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        return started(*given)

    ddp._start_all_reduce = counted  # type: ignore[assignment]
    actual = []
    for number, count in enumerate(UPDATES):
        before = calls
        optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
        step.StepRunner(exchange, optimizer, LOSS, pad_id=0).run_step(_share(number, count, world, rank))
        actual.append(calls - before)
    ddp._start_all_reduce = started
    return actual


def _touched_rows(world: int, rank: int, folder: Path) -> dict[str, Any]:
    """The word embedding's gradient as touched rows beside the stock exchange's, for one pass a worker and for more."""
    actual: dict[str, Any] = {"one pass": [], "more": [], "touched": []}
    for number in TOUCHED:
        count = UPDATES[number]
        for name, most_rows in (("one pass", 100), ("more", 3)):
            rows = make_rows(count, seed=number)
            passes = [
                pick(rows, options.tolist())
                for options in assign_micro_batches(rows.window_lengths, world, rank, most_rows)
            ]
            pair = []
            for touched in (True, False):
                network = make_network(folder / "encoder")
                exchange = DDPStrategy(network, touched_rows=touched)
                assert (exchange.touched_rows is not None) == touched
                optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
                for _ in range(2):  # the second finds the first one's rows
                    step.StepRunner(exchange, optimizer, LOSS, pad_id=0).run_step(passes)
                pair.append(gradients(network))
            table = "bert.embeddings.word_embeddings.weight"
            same = all(torch.equal(pair[0][item], pair[1][item]) for item in pair[1])
            actual[name].append(same if name == "one pass" else distance(pair[0], pair[1]))
        actual["touched"].append(int((pair[0][table] != 0).any(dim=1).sum()))
    return actual


class _Overflowing(losses.RunLoss):
    """Whose gradient is infinite in fp16."""

    def __call__(self, logits: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
        return super().__call__(logits, tokens) * 2.0**40


def _infinite(world: int, rank: int, folder: Path) -> dict[str, Any]:
    """Three updates in fp16; in the second one the gradient is infinite on the last worker alone."""
    network = make_network(folder / "encoder").float()
    optimizer, exchange = optimizers.build_optimizer(network, OptimConfig(lr=1e-3)), DDPStrategy(network)
    scale, overflowing = LossScale(2.0**10), _Overflowing(TASK, DistillConfig(), Head())
    local = False
    actual: dict[str, Any] = {"skipped": [], "scales": [], "weights": []}

    def look(gradient: torch.Tensor) -> None:  # before the workers' gradients are added
        nonlocal local
        local = local or not bool(torch.isfinite(gradient).all())

    network.classifier.bias.register_hook(look)  # type: ignore[union-attr, operator]
    for number in range(3):
        loss = overflowing if (number, rank) == (1, world - 1) else LOSS
        done = step.StepRunner(exchange, optimizer, loss, pad_id=0, precision="fp16", max_grad_norm=1.0).run_step(
            _share(0, 13, world, rank), scale=scale.value
        )
        scale = scale.next_scale(is_finite=not done.is_skipped)
        actual["skipped"].append(done.is_skipped)
        actual["scales"].append(scale.value)
        actual["weights"].append(
            sha256(b"".join(p.detach().numpy().tobytes() for p in network.parameters())).hexdigest()
        )
    return {**actual, "local": local}


Results = tuple[dict[tuple[int, int], dict[str, Any]], Path]


def on_workers() -> Results:
    """Results of each (world, rank), and the folder of weights."""
    actual = _ran_once()
    if isinstance(actual, Exception):
        raise actual
    return actual


@lru_cache(maxsize=1)
def _ran_once() -> Results | Exception:
    """One start of three processes serves all tests; so does one failure."""
    try:
        return _run_workers()
    except Exception as error:
        return error


def _run_workers() -> Results:
    from tests.unit.trainer import test_evaluate, test_trainer

    folder = Path(mkdtemp(prefix="rtrain-workers-"))
    atexit.register(shutil.rmtree, folder)
    make_still_encoder(folder / "encoder")
    test_evaluate.make_scored_store(folder / "store", folder / "encoder")
    test_trainer.make_ground(folder / "loop")
    run(_worker, (folder,), max(WORLDS))
    actual = {
        (world, rank): json.loads((folder / f"{world}-{rank}.json").read_text())
        for world in WORLDS
        for rank in range(world)
    }
    return actual, folder


def loaded(path: Path) -> Gradients:
    actual: Gradients = torch.load(path, weights_only=True)
    return actual


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
        reference = loaded(folder / f"gradients-1-0-{number}.pt")
        assert set(reference) >= {"classifier.weight", "classifier.bias"}
        assert (len(reference) == 2) == (freeze == "encoder")
        for rank in range(world):
            # From the second update on the weights differ by rounding already.
            assert distance(loaded(folder / f"gradients-{world}-{rank}-{number}.pt"), reference) < 1e-10


def test_two_workers_wait_for_each_other_five_times_an_update() -> None:
    """For the gradients, for which rows of the word embedding there are, how many, and their mean, and for all numbers
    of the update."""
    results, _ = on_workers()
    for rank in range(2):
        actual = results[2, rank]["collectives"]
        assert actual == {"planned": 5, "unplanned": 6, "same": True}
    assert all(results[3, rank]["collectives"]["same"] for rank in range(3))


@pytest.mark.parametrize("freeze", ["none", "encoder"])
@pytest.mark.parametrize("world", [2, 3])
def test_workers_together_end_with_the_weights_of_one_worker(world: int, freeze: str, encoder: Path) -> None:
    folder = on_workers()[1] / freeze
    start = {name: value.clone() for name, value in make_network(encoder).state_dict().items()}
    reference = loaded(folder / "weights-1-0.pt")
    moved_to = {name: reference[name] - start[name] for name in start}
    assert norm(moved_to) > 0.01
    assert (norm({name: value for name, value in moved_to.items() if name.startswith("bert.")}) == 0) == (
        freeze == "encoder"
    )
    first = loaded(folder / f"weights-{world}-0.pt")
    # A share of the distance moved, not of the weights: AdamW's four steps are short.
    assert norm({name: first[name] - reference[name] for name in reference}) < 1e-10 * norm(reference)
    assert norm({name: first[name] - reference[name] for name in reference}) < 1e-8 * norm(moved_to)
    for rank in range(1, world):
        other = loaded(folder / f"weights-{world}-{rank}.pt")
        assert all(torch.equal(other[name], first[name]) for name in first)


@pytest.mark.parametrize("world", [2, 3])
def test_every_worker_reports_the_loss_of_all_rows_and_its_own_counts(world: int) -> None:
    results, _ = on_workers()
    reference = results[1, 0]["updates"]
    for number, count in enumerate(UPDATES):
        reports = [results[world, rank]["updates"][number] for rank in range(world)]
        assert [report["loss"] for report in reports] == pytest.approx([reference[number]["loss"]] * world, rel=1e-9)
        assert [report["norm"] for report in reports] == pytest.approx([reference[number]["norm"]] * world, rel=1e-9)
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
        assert rows["one pass"] == [True] * len(TOUCHED) or world > 2
        assert max(rows["more"]) < 1e-14
        assert all(1 < touched < 200 for touched in rows["touched"])
