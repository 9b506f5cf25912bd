"""Every strategy on real processes: the gradient and the weights of one worker, one checkpoint for all of them."""

import atexit
import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from rtrain.config import Distill
from rtrain.core.ragged import Head
from rtrain.data.store.store import Store
from rtrain.models import builder
from rtrain.parallel import collectives, factory
from rtrain.parallel.data_parallel import Replicas
from rtrain.trainer import evaluate, losses, step
from tests import test_tasks_masked_lm, test_training_loop
from tests.strategies import (
    DYING,
    UPDATES,
    Dying,
    Failing,
    Kept,
    check_the_same,
    kept,
    recipe,
    scaled,
    share_of,
    told,
    told_alone,
    trained,
)
from tests.test_training_step import LOSS, TASK, distance, make_network, make_still_encoder
from tests.tiny import make_masked
from tests.workers import joined, run

LAYOUTS: dict[str, dict[str, Any]] = {
    "shard 0": {},
    "shard 1": {"shard": 1},
    "shard 2": {"shard": 2},
    "shard 3": {"shard": 3},
    "tensor 2": {"tensor": 2},
    "tensor 2, sequence": {"tensor": 2, "sequence": True},
    "context 2": {"context": 2},
}
REPLICA = ("tensor 2", "tensor 2, sequence", "context 2")
"""Layouts in which both workers are one replica."""
SHARDED = ("shard 2", "shard 3")
CUT = (*SHARDED, "tensor 2", "tensor 2, sequence")
"""Those in which a worker has a share of some tensors' gradients."""
SHARES = [name for name in LAYOUTS if name not in ("shard 0", "shard 1")]
KILLED_AT = 2
# Name -> layout of a run.
RUNS: dict[str, str] = {"3": "shard 3", "tensor": "tensor 2", "context": "context 2"}
STILL = "still"
"""The ground whose encoder drops nothing."""


FAMILIES = ("bert", "distilbert", "modernbert", "roberta")
"""Masked language models, whose word embedding is tied to their head; the layers of the last are computed again in
the backward pass."""


def guessed(folder: Path, family: str, layout: str | None) -> dict[str, torch.Tensor]:
    """The gradient of an update of two passes, on rank 0, by a layout or by one worker that is alone."""
    network: Any = builder.build(folder / family, test_tasks_masked_lm.TASK, (), seed=0).double().train()
    if family == FAMILIES[-1]:
        builder.keep_inputs_alone(network)
    exchange = Replicas(network) if layout is None else factory.build(network, recipe(**LAYOUTS[layout]).train)
    head = test_tasks_masked_lm.HEAD
    rows = test_tasks_masked_lm.TASK.prepare(test_tasks_masked_lm.rows(6, length=31), head, 0, 0)
    passes = [rows.pick([0, 4, 5]), rows.pick([1, 2, 3])][exchange.rank :: exchange.world]
    loss, seen = losses.for_run(test_tasks_masked_lm.TASK, Distill(), head), Kept()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0, foreach=False)
    step.run_update(exchange, optimizer, loss, passes, pad_id=0, observer=seen)
    return seen.found


def _worker(rank: int, folder: Path) -> None:
    joined(rank, 2, folder)
    found: dict[str, Any] = {"updates": {}, "runs": {}, "said": {}, "scaled": {}}
    for name, train in LAYOUTS.items():
        said: dict[str, Any] = {}
        network = make_network(folder / "encoder")
        exchange = factory.build(
            network, recipe(**train).train, say=lambda kind, said=said, **fields: said.update(fields)
        )
        found["updates"][name] = trained(exchange, folder / name, **train)
        found["said"][name] = said
        del exchange, network
        found["scaled"][name] = scaled(factory.build(make_network(folder / "encoder"), recipe(**train).train), **train)
    for name in SHARES:
        network = make_network(folder / "encoder", "encoder")
        trained(factory.build(network, recipe(**LAYOUTS[name]).train), folder / f"{name}, frozen", **LAYOUTS[name])
    for family in FAMILIES:
        for name in SHARES:
            torch.save(guessed(folder, family, name), folder / f"{family}-{name}-{rank}.pt")
    for name, layout in RUNS.items():
        found["runs"] |= _run(folder, name, LAYOUTS[layout], rank)
    found["failed"] = {name: _failing(folder, LAYOUTS[name], rank) for name in SHARES}
    (folder / f"{rank}.json").write_text(json.dumps(found))


def _failing(folder: Path, train: dict[str, Any], rank: int) -> str:
    """How an evaluation ends in which the second worker fails. Its layers' weights are needed by the first one."""
    store = Store(next((folder / STILL / ".tokens").iterdir()))
    exchange = factory.build(builder.build(folder / "encoder", TASK, store.manifest.labels, 0), recipe(**train).train)
    task: Any = Failing() if rank == 1 else TASK
    evaluate.ROWS_PER_PASS = 8
    try:
        evaluate.gathered(exchange, task, store, "train", pad_id=0, precision="fp32")
    except (ValueError, collectives.Elsewhere) as error:
        return type(error).__name__
    return ""


def _left_alone(rank: int, folder: Path) -> None:
    """Keep what a worker in the middle of a pass is told when the other one dies."""
    joined(rank, 2, folder / DYING)
    network = make_network(folder / "encoder")
    exchange, optimizer = factory.build(network, recipe(shard=3).train), torch.optim.SGD(network.parameters(), lr=0.0)
    try:
        loss = LOSS if rank == 0 else Dying(TASK, Distill(), Head())
        step.run_update(exchange, optimizer, loss, share_of(0, 2, rank), pad_id=0)
    except RuntimeError as error:
        (folder / DYING / "told").write_text(str(error))


def _run(folder: Path, name: str, layout: dict[str, Any], rank: int) -> dict[str, Any]:
    """A run that goes through, and one that is killed in its third update and goes on."""
    chosen: dict[str, Any] = {"save_every": 1, "keep": 9, "world": 2, "rank": rank, "workers": 2, **layout}
    whole = told(test_training_loop.start(folder / "ground", folder / name, **chosen))
    killed = f"{name}, killed"
    test_training_loop.start(folder / "ground", folder / killed, kill=KILLED_AT, **chosen)
    return {name: whole, killed: told(test_training_loop.start(folder / "ground", folder / killed, **chosen))}


Results = tuple[list[dict[str, Any]], Path]


@cache
def _ran_once() -> Results | Exception:
    folder = Path(mkdtemp(prefix="rtrain-strategies-"))
    atexit.register(shutil.rmtree, folder)
    try:
        make_still_encoder(folder / "encoder")
        test_training_loop.make_ground(folder / "ground")
        shutil.copytree(folder / "ground", folder / STILL)
        make_still_encoder(folder / STILL / "encoder")
        for family in FAMILIES:
            make_masked(folder / family, family)
        trained(Replicas(make_network(folder / "encoder")), folder / "alone")
        trained(Replicas(make_network(folder / "encoder", "encoder")), folder / "alone, frozen")
        run(_worker, (folder,), 2)
    except Exception as error:
        return error
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)], folder


def on_workers() -> Results:
    found = _ran_once()
    if isinstance(found, Exception):
        raise found
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_says_whether_it_tells_the_noise_of_gradients(name: str) -> None:
    """Rows are dealt at random for it, which costs time."""
    each, _ = on_workers()
    for found in each:
        updates = found["updates"][name]
        assert updates[0]["tells_noise"] is updates[0]["noise"] is (name not in (*SHARDED, "context 2"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_weights_and_moments_are_those_of_one_worker(name: str) -> None:
    _, folder = on_workers()
    check_the_same(folder, name, "alone")


@pytest.mark.parametrize("name", SHARES)
def test_the_gradient_of_a_head_alone_is_that_of_one_worker(name: str) -> None:
    """Its encoder is frozen."""
    _, folder = on_workers()
    found, expected = (kept(folder, one, "gradients") for one in (f"{name}, frozen", "alone, frozen"))
    for one, alone in zip(found, expected, strict=True):
        assert one.keys() == alone.keys()
        assert distance(one, alone) < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
def test_architectures_and_tied_heads_have_the_gradient_of_one_worker(family: str) -> None:
    _, folder = on_workers()
    alone = guessed(folder, family, None)
    for name in SHARES:
        found = torch.load(folder / f"{family}-{name}-0.pt", weights_only=True)
        assert found.keys() == alone.keys()
        assert distance(found, alone) < 1e-10


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_scaled_loss_is_the_same_and_one_worker_s_overflow_is_an_update_that_all_leave_out(name: str) -> None:
    """As fp16 needs it: a worker may overflow alone, in weights of which others have no share."""
    each, _ = on_workers()
    for found in each:
        updates, plain = found["scaled"][name], found["updates"][name]
        assert ("share" in updates) is (name in CUT)
        for update, one in updates.items():
            assert one["skipped"] is one["unchanged"] is (update in ("loss", "share"))
        # The loss is scaled by a power of two, and the second rows are trained on in the end.
        assert updates["first"]["norm"] == pytest.approx(plain[0]["norm"], rel=1e-12)
        assert updates["after"]["norm"] == pytest.approx(plain[1]["norm"], rel=1e-9)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_worker_knows_loss_and_norm_and_its_own_rows(name: str) -> None:
    results, _folder = on_workers()
    first, second = (found["updates"][name] for found in results)
    alone = results[0]["updates"]["shard 0"]
    for number, (one, other, plain) in enumerate(zip(first, second, alone, strict=True)):
        assert one["loss"] == other["loss"] == pytest.approx(plain["loss"], rel=1e-9)
        assert one["norm"] == other["norm"] == pytest.approx(plain["norm"], rel=1e-9)
        replicas = [one] if name in REPLICA else [one, other]
        assert sum(each["rows"] for each in replicas) == UPDATES[number]
    assert [one["passes"] for one in second] == ([5, 1, 1, 4] if name in REPLICA else [1, 0, 0, 1])


@pytest.mark.parametrize("name", SHARDED)
def test_each_worker_has_half_of_the_optimizer_s_state(name: str) -> None:
    results, folder = on_workers()
    sizes = results[0]["said"][name]["state_bytes"]
    whole = sum(value.nbytes for key, value in kept(folder, "alone", "moments").items() if not key.endswith(":step"))
    assert 0 < sum(sizes) - whole < 0.01 * whole
    assert max(sizes) < 0.52 * sum(sizes)


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_worker_has_its_share_of_weights_and_gradients(name: str) -> None:
    """Between an update's passes and the optimizer's step, and within the last pass. Stage 2 has whole weights until
    the passes are over; stage 3 those of the layer that computes, and what is in no layer."""
    results, folder = on_workers()
    size = sum(value.nbytes for value in kept(folder, "alone", "weights").values())
    inside, after = ([found["updates"][name][0][when] for found in results] for when in ("inside", "after"))
    if name in SHARDED:
        for what in ("weights", "gradients"):
            assert sum(one[what] for one in after) == size
            assert max(one[what] for one in after) < 0.52 * size
        assert all(one["weights"] == size if name == "shard 2" else one["weights"] < 0.75 * size for one in inside)
    else:
        share = (0.6, 0.75) if "tensor" in name else (1.0, 1.0)
        assert all(one["weights"] <= share[0] * size and one["gradients"] <= share[1] * size for one in after)
        assert [one["weights"] for one in inside] == [one["weights"] for one in after]


@pytest.mark.parametrize("name", SHARES)
def test_a_worker_that_fails_in_an_evaluation_leaves_no_other_waiting(name: str) -> None:
    results, _folder = on_workers()
    assert [found["failed"][name] for found in results] == ["Elsewhere", "ValueError"]


def test_a_worker_whose_neighbour_dies_within_a_pass_ends_with_an_error() -> None:
    _, folder = on_workers()
    assert told_alone(_left_alone, folder)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_in_shares_resumes_bit_for_bit_with_dropout(name: str) -> None:
    results, folder = on_workers()
    for update in range(1, test_training_loop.UPDATES + 1):
        files = [test_training_loop.fingerprint(folder / one, update) for one in (name, f"{name}, killed")]
        assert files[0] == files[1]
    assert [found["runs"][f"{name}, killed"]["from"] for found in results] == [KILLED_AT] * 2
    assert results[0]["runs"][f"{name}, killed"]["scores"] == results[1]["runs"][name]["scores"]
