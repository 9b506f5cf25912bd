"""Four workers, and eight, in grids of two and three axes: the gradient and the weights of one worker, and runs that go
on with fewer workers."""

import atexit
import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rtrain.config import Distill
from rtrain.data.store.store import Store
from rtrain.models import builder
from rtrain.parallel import factory
from rtrain.parallel.data_parallel import Replicas
from rtrain.trainer import evaluate, losses, step
from tests import test_tasks_masked_lm, test_training_loop
from tests.strategies import Kept, check_the_same, recipe, trained, weights_of
from tests.test_training_step import TASK, distance, make_network, make_still_encoder, norm
from tests.tiny import make_masked, make_modern
from tests.workers import joined, run

pytestmark = pytest.mark.timeout(900)
FOUR: dict[str, dict[str, Any]] = {
    "pipeline, tensor": {"pipeline": 2, "tensor": 2},
    "pipeline, shard 3": {"pipeline": 2, "shard": 3},
    "interleaved, shard 2": {"pipeline": 2, "schedule": "interleaved", "shard": 2},
    "tensor, shard 3": {"tensor": 2, "shard": 3},
    "context of 2": {"context": 2},
    "sequence, shard 2": {"tensor": 2, "sequence": True, "shard": 2},
}
SLOW = ("interleaved, shard 2", "context of 2", "sequence, shard 2")
"""Grids of the slow tests: each of their two axes stands in another one, or is a layout of `test_strategies`."""
EIGHT: dict[str, dict[str, Any]] = {
    "2x2x2": {"pipeline": 2, "tensor": 2},
    "2x2x2, shard 3": {"pipeline": 2, "tensor": 2, "shard": 3},
}
HEADS: dict[str, dict[str, Any]] = {"context 4": {"context": 4}}
"""The same for a model of four attention heads, ModernBERT's form."""
FAMILIES = ("bert", "modernbert")
"""Masked language models, whose word embedding is tied to their head."""
FEWER: dict[str, dict[str, Any]] = {"shard 0": {}, "tensor": {"tensor": 2}, "1f1b": {"pipeline": 2}}
"""Layouts in which two workers go on with what four had shares of; one worker goes on with that again."""
BITS = ("pipeline, shard 3", "pipeline, tensor")
"""Layouts in which a run with dropout is killed and resumed."""
KILLED_AT, LAYERS = 2, 4


def guessed(folder: Path, family: str, train: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """The gradient of an update of three passes, on rank 0, by a layout or by one worker that is alone."""
    network: Any = builder.build(folder / family, test_tasks_masked_lm.TASK, (), seed=0).double().train()
    exchange = Replicas(network) if train is None else factory.build(network, recipe(**train).train)
    head = test_tasks_masked_lm.HEAD
    rows = test_tasks_masked_lm.TASK.prepare(test_tasks_masked_lm.rows(6, length=31), head, 0, 0)
    passes = [rows.pick([0, 4, 5]), rows.pick([1, 2]), rows.pick([3])]
    if exchange.world == 2:
        passes = [passes[1:], passes[:1]][exchange.rank]
    loss, seen = losses.for_run(test_tasks_masked_lm.TASK, Distill(), head), Kept()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, foreach=False)
    step.run_update(exchange, optimizer, loss, passes, pad_id=0, observer=seen)
    return seen.found


def scored(folder: Path, train: dict[str, Any] | None) -> list[float]:
    """Outcomes of all rows, in passes of eight."""
    store = Store(next((folder / "still" / ".tokens").iterdir()))
    network: Any = builder.build(folder / "encoder", TASK, store.manifest.labels, 0).double()
    exchange = Replicas(network) if train is None else factory.build(network, recipe(**train).train)
    evaluate.ROWS_PER_PASS = 8
    found = evaluate.gathered(exchange, TASK, store, "train", pad_id=0, precision="fp64")
    return [float(value) for value in found.values]


def _fewer(folder: Path, name: str, rank: int, world: int, kill: int | None, **train: Any) -> list[int]:
    """A part of the run that four workers begin, two go on with, and one ends. From which update it went on."""
    chosen: dict[str, Any] = {"save_every": 1, "keep": 9, "workers": world, **train}
    begun = test_training_loop.start(
        folder / "still", folder / f"run {name}", kill=kill, world=world, rank=rank, **chosen
    )
    return [event["update"] for event in begun.recorder.of("started")]


def _grids(rank: int, folder: Path, slow: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"scores": {}, "resumed": {}}
    for name in (name for name in FOUR if (name in SLOW) == slow):
        train = FOUR[name]
        exchange = factory.build(make_network(folder / "encoder"), recipe(**train).train)
        trained(exchange, folder / name, workers=4, **train)
        for family in FAMILIES:
            torch.save(guessed(folder, family, train), folder / f"{family}-{name}-{rank}.pt")
        found["scores"][name] = scored(folder, train)
    return found


def _worker(rank: int, folder: Path) -> None:
    joined(rank, 4, folder)
    found = _grids(rank, folder, slow=False)
    for name, train in HEADS.items():
        trained(factory.build(make_network(folder / "four"), recipe(**train).train), folder / name, workers=4, **train)
    for name in FEWER:
        _fewer(folder, name, rank, 4, KILLED_AT, shard=3)
    dist.destroy_process_group()
    if rank < 2:
        joined(rank, 2, folder)
        for name, train in FEWER.items():
            found["resumed"][name] = _fewer(folder, name, rank, 2, KILLED_AT + 2, **train)
    (folder / f"{rank}.json").write_text(json.dumps(found))


def _eight(rank: int, folder: Path) -> None:
    joined(rank, 8, folder)
    for name, train in EIGHT.items():
        trained(factory.build(make_network(folder / "encoder"), recipe(**train).train), folder / name, **train)
    dist.destroy_process_group()
    if rank < 4:
        joined(rank, 4, folder)
        for name in BITS:
            for place, kill in (("straight", None), ("killed", KILLED_AT), ("killed", None)):
                _whole(folder, f"{name}, {place}", rank, kill, **FOUR[name])
        (folder / f"{rank}.json").write_text(json.dumps(_grids(rank, folder, slow=True)))


def _whole(folder: Path, name: str, rank: int, kill: int | None, **train: Any) -> None:
    chosen: dict[str, Any] = {"save_every": 1, "keep": 9, "workers": 4, **train}
    test_training_loop.start(folder / "ground", folder / name, kill=kill, world=4, rank=rank, **chosen)


Results = tuple[list[dict[str, Any]], Path]


@cache
def _ran_once(slow: bool) -> Results | Exception:
    folder = Path(mkdtemp(prefix="rtrain-grids-"))
    atexit.register(shutil.rmtree, folder)
    try:
        make_still_encoder(folder / "encoder", layers=LAYERS)
        for ground in ("ground", "still") if slow else ("still",):
            test_training_loop.make_ground(folder / ground)
        make_still_encoder(folder / "still" / "encoder")
        for family in FAMILIES:
            make_masked(folder / family, family, layers=LAYERS)
        make_modern(folder / "four", num_attention_heads=4, num_hidden_layers=LAYERS)
        for place, name in (("encoder", "alone"), ("four", "alone, four")):
            trained(Replicas(make_network(folder / place)), folder / name)
        if not slow:
            _fewer(folder, "whole", 0, 1, None)
        run(_eight if slow else _worker, (folder,), 8 if slow else 4, within=800.0)
        results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]
        if not slow:
            results[0]["ended"] = {name: _fewer(folder, name, 0, 1, None) for name in FEWER}
    except Exception as error:
        return error
    return results, folder


def on_workers(slow: bool = False) -> Results:
    found = _ran_once(slow)
    if isinstance(found, Exception):
        raise found
    return found


GRIDS = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in FOUR]
LAYOUTS = [*GRIDS, *HEADS, *(pytest.param(name, marks=pytest.mark.slow) for name in EIGHT)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_and_weights_are_those_of_one_worker(name: str) -> None:
    """Also of an update that leaves a replica idle."""
    _, folder = on_workers(slow=name in (*EIGHT, *SLOW))
    place, like = ("four", "alone, four") if name in HEADS else ("encoder", "alone")
    check_the_same(folder, name, like, place)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", GRIDS)
def test_tied_heads_have_the_gradient_of_one_worker(name: str, family: str) -> None:
    _, folder = on_workers(slow=name in SLOW)
    alone, found = guessed(folder, family, None), torch.load(folder / f"{family}-{name}-0.pt", weights_only=True)
    assert found.keys() == alone.keys()
    assert distance(found, alone) < 1e-10


@pytest.mark.parametrize("name", GRIDS)
def test_rows_are_scored_as_by_one_worker(name: str) -> None:
    results, folder = on_workers(slow=name in SLOW)
    alone = scored(folder, None)
    for found in results:
        assert found["scores"][name] == pytest.approx(alone, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", FEWER)
def test_what_four_workers_had_shares_of_two_go_on_with_and_then_one(name: str) -> None:
    results, folder = on_workers()
    assert [found["resumed"][name] for found in results[:2]] == [[KILLED_AT]] * 2
    assert results[0]["ended"][name] == [KILLED_AT + 2]
    last = test_training_loop.UPDATES
    weights, others, start = (
        weights_of(folder, *place) for place in ((f"run {name}", last), ("run whole", last), ("run whole", 1))
    )
    assert weights.keys() == others.keys()
    moved = norm({one: others[one] - start[one] for one in others})
    # In fp32 and past Adam's amplification of rounding where the true gradient is zero.
    assert norm({one: weights[one] - others[one] for one in others}) < 1e-2 * moved


@pytest.mark.slow
@pytest.mark.parametrize("name", BITS)
def test_a_run_in_a_grid_resumes_bit_for_bit_with_dropout(name: str) -> None:
    _, folder = on_workers(slow=True)
    for update in range(1, test_training_loop.UPDATES + 1):
        one, other = (
            test_training_loop.fingerprint(folder / f"{name}, {way}", update) for way in ("straight", "killed")
        )
        assert one == other
