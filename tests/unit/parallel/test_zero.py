"""Runs with the optimizer's state in shares: the same checkpoints, bit for bit, also resumed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rtrain.checkpoint import format as checkpoint_format
from rtrain.config import Recipe, load_config
from rtrain.parallel import layout, zero
from rtrain.trainer import optimizers
from tests.support.workers import joined, load_results, once, run
from tests.unit.parallel.test_transport import Network
from tests.unit.trainer import test_trainer

WORLDS = (2, 3)
RADAM = {"name": "radam", "layerwise_lr_decay": 0.8}
SHARDED = {"zero_stage": 1}
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
            actual = {
                "runs": {name: _run(folder, name, world, rank) for name in runs(world)},
                "bytes": _bytes(world, rank),
            }
            (folder / f"{world}-{rank}.json").write_text(json.dumps(actual))
            dist.destroy_process_group()


def _run(folder: Path, name: str, world: int, rank: int) -> dict[str, Any]:
    ground, place = folder / "ground", folder / f"{world} {name}"
    before, after = RUNS[name]
    options: dict[str, Any] = {"save_every": 1, "keep_checkpoints": 9, "world": world, "rank": rank, "rules": RADAM}
    if before is not None:
        test_trainer.start(ground, place, kill=KILLED_AT, **options, **before)
    ran = test_trainer.start(ground, place, **options, **after)
    assert ran.outcome is not None
    message = {kind: ran.recorder.of(kind) for kind in ("gradient_compression", "optimizer_sharding")}
    return {
        "from": ran.recorder.of("started")[0]["step"],
        "weights": test_trainer.weights_digest(ran.network),
        **message,
    }


def recipe(**train: Any) -> Recipe:
    """A recipe of 64 rows an update, 8 times those for which beta2 is meant."""
    options = {"optim.beta2_scaling": "rows", "optim.lr_reference_batch_size": 8, "train.global_batch_size": 64}
    return load_config("intent", options | {f"train.{name}": value for name, value in train.items()}).recipe


def _bytes(world: int, rank: int) -> dict[str, Any]:
    """Bytes of state: logged, on a worker after a step, and on rank 0 inside `gather_full_tensors`."""
    torch.manual_seed(5)  # as all workers of a run do
    network = Network()
    network.layers[3].requires_grad_(False)
    message: list[list[int]] = []

    def say(kind: str, **fields: Any) -> None:
        message.extend([fields["state_bytes"]] if kind == "optimizer_sharding" else [])

    exchange = layout.build_strategy(network, recipe(**SHARDED).train, log_event=say)
    optimizer = optimizers.build_run_optimizer(exchange, recipe(**SHARDED))
    other = Network()
    other.load_state_dict(network.state_dict())
    other.layers[3].requires_grad_(False)
    plain = optimizers.build_optimizer(other, recipe().optim, beta2=0.999**8)
    for seed in range(2):
        torch.manual_seed(seed)
        for parameter, copy in zip(network.parameters(), other.parameters(), strict=True):
            if parameter.requires_grad and parameter is not network.layers[5].bias:
                parameter.grad = torch.randn_like(parameter)
                copy.grad = parameter.grad.clone()
        optimizer.step()
        plain.step()
        assert all(torch.equal(item, two) for item, two in zip(network.parameters(), other.parameters(), strict=True))
    local_part = _size(optimizer)
    complete = dict(exchange.gather_full_tensors(checkpoint_format.collect_optimizer_state(network, optimizer)))
    expected = checkpoint_format.collect_optimizer_state(other, plain)
    same = (complete.keys() == expected.keys()) == (rank == 0) and all(
        torch.equal(value, expected[key]) for key, value in complete.items()
    )
    size = sum(value.nbytes for value in complete.values())
    return {
        "said": message,
        "own": local_part,
        "whole": size,
        "plain": _size(plain),
        "after": _size(optimizer),
        "same": same,
    }


def _size(optimizer: torch.optim.Optimizer) -> int:
    return sum(value.nbytes for state in optimizer.state.values() for value in state.values())


Results = tuple[dict[tuple[int, int], dict[str, Any]], Path]


@once("rtrain-sharded-")
def on_workers(folder: Path) -> Results:
    test_trainer.make_ground(folder / "ground")
    run(_worker, (folder,), max(WORLDS), within=400.0)
    return load_results(folder, WORLDS), folder


def checkpoints(folder: Path, world: int, name: str) -> list[dict[str, str]]:
    """For every update, SHA-256 of weights, optimizer and state."""
    run = folder / f"{world} {name}"
    return [test_trainer.fingerprint(run, update) for update in range(1, test_trainer.UPDATES + 1)]


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
    weights = {results[world, rank]["runs"][item]["weights"] for rank in range(world) for item in (name, like)}
    assert len(weights) == 1


@pytest.mark.parametrize("world", WORLDS)
def test_the_runs_are_what_their_names_say(world: int) -> None:
    results, folder = on_workers()
    for name in runs(world):
        before, after = RUNS[name]
        for rank in range(world):
            actual = results[world, rank]["runs"][name]
            assert actual["from"] == (0 if before is None else KILLED_AT)
            assert [0 < event["error"] < 2.0**-7 for event in actual["gradient_compression"]] == [True] * (
                "bf16" in name
            )
            assert len(actual["optimizer_sharding"]) == ("zero_stage" in after)
    if "bf16" in runs(world):
        assert checkpoints(folder, world, "bf16")[0] != checkpoints(folder, world, "plain")[0]


@pytest.mark.parametrize("world", WORLDS)
def test_a_worker_has_its_share_of_the_state_and_rank_0_all_of_it_while_it_saves(world: int) -> None:
    results, _ = on_workers()
    actual = [results[world, rank]["bytes"] for rank in range(world)]
    unused = 2 * 4 * 300 + 4  # the bias that had no gradient has no state
    assert all(item["said"] == actual[0]["said"] for item in actual)
    [sizes] = actual[0]["said"]
    assert sum(sizes) == actual[0]["plain"] + unused
    assert max(sizes) < 1.5 * sum(sizes) / world
    assert sum(item["own"] for item in actual) == actual[0]["plain"]
    assert all(size - item["own"] in (0, unused) for size, item in zip(sizes, actual, strict=True))
    assert [item["after"] for item in actual] == [item["own"] for item in actual]
    assert actual[0]["whole"] == actual[0]["plain"]
    assert all(item["same"] for item in actual)


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
    assert zero.assign_owners(sizes, world) == expected


def test_one_worker_has_the_whole_optimizer() -> None:
    network = Network()
    exchange = layout.build_strategy(network, recipe(**SHARDED).train)
    optimizer = optimizers.build_run_optimizer(exchange, recipe(**SHARDED))
    assert type(optimizer) is torch.optim.AdamW
    assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.999**8)] * 2
    assert dict(exchange.gather_full_tensors({"weight": torch.ones(1)})) == {"weight": 1.0}
