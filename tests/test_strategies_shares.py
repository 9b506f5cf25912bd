"""Runs with the optimizer's state in shares: the same checkpoints, bit for bit, also resumed."""

import atexit
import json
import shutil
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rtrain.checkpoint import format as checkpoint_format
from rtrain.config import Recipe, load
from rtrain.parallel import factory, zero
from rtrain.trainer import optimizers
from tests import test_training_loop
from tests.test_exchange_transport import Network
from tests.workers import joined, run

WORLDS = (2, 3)
RADAM = {"name": "radam", "layer_decay": 0.8}
SHARDED = {"shard": 1}
BF16 = {"gradient_compression": "bf16"}
KILLED_AT = 2
# Name -> settings until the run is killed in its third update (None: it is not), and settings of the rest of it.
RUNS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "plain": (None, {}),
    "plain, killed": ({}, {}),
    "sharded": (None, SHARDED),
    "sharded, resumed plain": (SHARDED, {}),
    "plain, resumed sharded": ({}, SHARDED),
    "bf16": (None, BF16),
    "bf16, killed": (BF16, BF16),
}
OF_THREE = ("plain", "sharded", "plain, resumed sharded")
"""Those of three workers too, whose gradients are added in Gloo's order."""


def runs(world: int) -> list[str]:
    return [name for name in RUNS if world == 2 or name in OF_THREE]


def _worker(rank: int, folder: Path) -> None:
    for world in sorted(WORLDS, reverse=True):
        if rank < world:
            joined(rank, world, folder)
            found = {
                "runs": {name: _run(folder, name, world, rank) for name in runs(world)},
                "bytes": _bytes(world, rank),
            }
            (folder / f"{world}-{rank}.json").write_text(json.dumps(found))
            dist.destroy_process_group()


def _run(folder: Path, name: str, world: int, rank: int) -> dict[str, Any]:
    ground, place = folder / "ground", folder / f"{world} {name}"
    before, after = RUNS[name]
    chosen: dict[str, Any] = {"save_every": 1, "keep": 9, "world": world, "rank": rank, "rules": RADAM}
    if before is not None:
        test_training_loop.start(ground, place, kill=KILLED_AT, **chosen, **before)
    ran = test_training_loop.start(ground, place, **chosen, **after)
    assert ran.outcome is not None
    said = {kind: ran.recorder.of(kind) for kind in ("compressed", "sharded")}
    return {
        "from": ran.recorder.of("started")[0]["update"],
        "weights": test_training_loop.weights_digest(ran.network),
        **said,
    }


def recipe(**train: Any) -> Recipe:
    """A recipe of 64 rows an update, 8 times those for which beta2 is meant."""
    chosen = {"optim.beta2_scaling": "rows", "optim.lr_rows": 8, "train.rows_per_update": 64}
    return load("intent", chosen | {f"train.{name}": value for name, value in train.items()}).recipe


def _bytes(world: int, rank: int) -> dict[str, Any]:
    """Bytes of state: what is said, what a worker has after an update, and what rank 0 has inside `whole`."""
    torch.manual_seed(5)  # as all workers of a run do
    network = Network()
    network.layers[3].requires_grad_(False)
    said: list[list[int]] = []

    def say(kind: str, **fields: Any) -> None:
        said.extend([fields["state_bytes"]] if kind == "sharded" else [])

    exchange = factory.build(network, recipe(**SHARDED).train, say=say)
    optimizer = optimizers.of_run(exchange, recipe(**SHARDED))
    other = Network()
    other.load_state_dict(network.state_dict())
    other.layers[3].requires_grad_(False)
    plain = optimizers.build(other, recipe().optim, beta2=0.999**8)
    for seed in range(2):
        torch.manual_seed(seed)
        for parameter, copy in zip(network.parameters(), other.parameters(), strict=True):
            if parameter.requires_grad and parameter is not network.layers[5].bias:
                parameter.grad = torch.randn_like(parameter)
                copy.grad = parameter.grad.clone()
        optimizer.step()
        plain.step()
        assert all(torch.equal(one, two) for one, two in zip(network.parameters(), other.parameters(), strict=True))
    own = _size(optimizer)
    whole = dict(exchange.whole(checkpoint_format.moments_of(network, optimizer)))
    expected = checkpoint_format.moments_of(other, plain)
    same = (whole.keys() == expected.keys()) == (rank == 0) and all(
        torch.equal(value, expected[key]) for key, value in whole.items()
    )
    size = sum(value.nbytes for value in whole.values())
    return {"said": said, "own": own, "whole": size, "plain": _size(plain), "after": _size(optimizer), "same": same}


def _size(optimizer: torch.optim.Optimizer) -> int:
    return sum(value.nbytes for state in optimizer.state.values() for value in state.values())


Results = tuple[dict[tuple[int, int], dict[str, Any]], Path]


@lru_cache(maxsize=1)
def _ran_once() -> Results | Exception:
    folder = Path(mkdtemp(prefix="rtrain-sharded-"))
    atexit.register(shutil.rmtree, folder)
    try:
        test_training_loop.make_ground(folder / "ground")
        run(_worker, (folder,), max(WORLDS), within=400.0)
    except Exception as error:
        return error
    places = [(world, rank) for world in WORLDS for rank in range(world)]
    return {(world, rank): json.loads((folder / f"{world}-{rank}.json").read_text()) for world, rank in places}, folder


def on_workers() -> Results:
    found = _ran_once()
    if isinstance(found, Exception):
        raise found
    return found


def checkpoints(folder: Path, world: int, name: str) -> list[dict[str, str]]:
    """For every update, SHA-256 of weights, optimizer and state."""
    run = folder / f"{world} {name}"
    return [test_training_loop.fingerprint(run, update) for update in range(1, test_training_loop.UPDATES + 1)]


SAME = [
    *((2, name, "plain") for name in RUNS if "bf16" not in name and name != "plain"),
    (2, "bf16, killed", "bf16"),
    (3, "sharded", "plain"),
    (3, "plain, resumed sharded", "plain"),
]


@pytest.mark.parametrize(("world", "name", "like"), SAME)
def test_every_checkpoint_is_the_same(world: int, name: str, like: str) -> None:
    results, folder = on_workers()
    assert checkpoints(folder, world, name) == checkpoints(folder, world, like)
    weights = {results[world, rank]["runs"][one]["weights"] for rank in range(world) for one in (name, like)}
    assert len(weights) == 1


@pytest.mark.parametrize("world", WORLDS)
def test_the_runs_are_what_their_names_say(world: int) -> None:
    results, folder = on_workers()
    for name in runs(world):
        before, after = RUNS[name]
        for rank in range(world):
            found = results[world, rank]["runs"][name]
            assert found["from"] == (0 if before is None else KILLED_AT)
            assert [0 < event["error"] < 2.0**-7 for event in found["compressed"]] == [True] * ("bf16" in name)
            assert len(found["sharded"]) == ("shard" in after)
    if "bf16" in runs(world):
        assert checkpoints(folder, world, "bf16")[0] != checkpoints(folder, world, "plain")[0]


@pytest.mark.parametrize("world", WORLDS)
def test_a_worker_has_its_share_of_the_state_and_rank_0_all_of_it_while_it_saves(world: int) -> None:
    results, _ = on_workers()
    found = [results[world, rank]["bytes"] for rank in range(world)]
    unused = 2 * 4 * 300 + 4  # the bias that had no gradient has no state
    assert all(one["said"] == found[0]["said"] for one in found)
    [sizes] = found[0]["said"]
    assert sum(sizes) == found[0]["plain"] + unused
    assert max(sizes) < 1.5 * sum(sizes) / world
    assert sum(one["own"] for one in found) == found[0]["plain"]
    assert all(size - one["own"] in (0, unused) for size, one in zip(sizes, found, strict=True))
    assert [one["after"] for one in found] == [one["own"] for one in found]
    assert found[0]["whole"] == found[0]["plain"]
    assert all(one["same"] for one in found)


@pytest.mark.parametrize(
    ("sizes", "world", "expected"),
    [
        ([5, 3, 3, 2], 2, [0, 1, 1, 0]),
        ([1, 1, 8], 3, [1, 2, 0]),
        ([7], 3, [0]),
        ([], 2, []),
        ([2, 2, 2, 2], 2, [0, 1, 0, 1]),
    ],
)
def test_the_largest_goes_to_whoever_has_least(sizes: list[int], world: int, expected: list[int]) -> None:
    assert zero.owners(sizes, world) == expected


def test_one_worker_has_the_whole_optimizer() -> None:
    network = Network()
    exchange = factory.build(network, recipe(**SHARDED).train)
    optimizer = optimizers.of_run(exchange, recipe(**SHARDED))
    assert type(optimizer) is torch.optim.AdamW
    assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.999**8)] * 2
    assert dict(exchange.whole({"weight": torch.ones(1)})) == {"weight": 1.0}
