"""Every strategy on real processes: the gradient and the weights of one worker, one checkpoint for all of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rtrain.data.store.store import Store
from rtrain.models import builder
from rtrain.parallel import collectives
from rtrain.parallel.base import Strategy
from rtrain.parallel.layout import build_strategy
from rtrain.trainer import evaluate
from tests.support.strategies import (
    UPDATES,
    Failing,
    check_the_same,
    die_within_step,
    kept,
    masked_lm_gradient,
    recipe,
    scaled,
    share_of,
    told,
    told_alone,
    trained,
)
from tests.support.tiny import make_masked
from tests.support.workers import joined, once, run
from tests.unit.trainer import test_trainer
from tests.unit.trainer.test_step import TASK, distance, make_network, make_still_encoder

LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 0": {},
    "zero 1": {"zero_stage": 1},
    "zero 2": {"zero_stage": 2},
    "zero 3": {"zero_stage": 3},
    "tensor 2": {"tensor_parallel_size": 2},
    "tensor 2, sequence": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "context 2": {"context_parallel_size": 2},
}
REPLICA = ("tensor 2", "tensor 2, sequence", "context 2")
"""Layouts in which both workers are one replica."""
SHARDED = ("zero 2", "zero 3")
CUT = (*SHARDED, "tensor 2", "tensor 2, sequence")
"""Those in which a worker has a share of some tensors' gradients."""
SHARES = [name for name in LAYOUTS if name not in ("zero 0", "zero 1")]
KILLED_AT = 2
# Name -> layout of a run.
RUNS: dict[str, str] = {"3": "zero 3", "tensor": "tensor 2", "context": "context 2"}
STILL = "still"
"""The ground whose encoder drops nothing."""


FAMILIES: dict[str, tuple[str, ...]] = {
    "bert": ("zero 2", "tensor 2, sequence", "context 2"),
    "distilbert": ("zero 3", "tensor 2"),
    "modernbert": ("zero 3", "tensor 2", "context 2"),
    "roberta": ("zero 2", "tensor 2, sequence"),
}
"""Masked language models, whose word embedding is tied to their head, and layouts of them; the layers of the last are
computed again in the backward pass."""


def _worker(rank: int, folder: Path) -> None:
    joined(rank, 2, folder)
    actual: dict[str, Any] = {"updates": {}, "runs": {}, "said": {}, "scaled": {}}
    for name, train in LAYOUTS.items():
        events: dict[str, Any] = {}
        network = make_network(folder / "encoder")
        exchange = build_strategy(
            network, recipe(**train).train, log_event=lambda kind, events=events, **fields: events.update(fields)
        )
        actual["updates"][name] = trained(exchange, folder / name, **train)
        actual["said"][name] = events
        del exchange, network
        actual["scaled"][name] = scaled(
            build_strategy(make_network(folder / "encoder"), recipe(**train).train), **train
        )
    for name in SHARES:
        network = make_network(folder / "encoder", "encoder")
        trained(build_strategy(network, recipe(**LAYOUTS[name]).train), folder / f"{name}, frozen", **LAYOUTS[name])
    for family, names in FAMILIES.items():
        for name in names:
            torch.save(_gradient(folder, family, LAYOUTS[name]), folder / f"{family}-{name}-{rank}.pt")
    for name, layout in RUNS.items():
        actual["runs"] |= _run(folder, name, LAYOUTS[layout], rank)
    actual["failed"] = {name: _failing(folder, LAYOUTS[name], rank) for name in SHARES}
    (folder / f"{rank}.json").write_text(json.dumps(actual))


def _gradient(folder: Path, family: str, train: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    return masked_lm_gradient(folder / family, train, recomputes=family == "roberta")[0]


def _failing(folder: Path, train: dict[str, Any], rank: int) -> str:
    """How an evaluation ends in which the second worker fails. Its layers' weights are needed by the first one."""
    store = Store(next((folder / STILL / ".tokens").iterdir()))
    exchange = build_strategy(
        builder.build_network(folder / "encoder", TASK, store.manifest.labels, 0), recipe(**train).train
    )
    task: Any = Failing() if rank == 1 else TASK
    evaluate.MAX_ROWS_PER_MICRO_BATCH = 8
    try:
        evaluate.gather_row_results(exchange, task, store, "train", pad_id=0, precision="fp32")
    except (ValueError, collectives.OtherRankFailed) as error:
        return type(error).__name__
    return ""


def _left_alone(rank: int, folder: Path) -> None:
    die_within_step(rank, folder, {"zero_stage": 3}, share_of(0, 2, rank))


def _run(folder: Path, name: str, layout: dict[str, Any], rank: int) -> dict[str, Any]:
    """An undisturbed run, and a run that is killed in its third step and resumed."""
    options: dict[str, Any] = {"save_every": 1, "keep_checkpoints": 9, "world": 2, "rank": rank, "workers": 2, **layout}
    complete = told(test_trainer.start(folder / "ground", folder / name, **options))
    killed = f"{name}, killed"
    test_trainer.start(folder / "ground", folder / killed, kill=KILLED_AT, **options)
    return {name: complete, killed: told(test_trainer.start(folder / "ground", folder / killed, **options))}


Results = tuple[list[dict[str, Any]], Path]


@once("rtrain-strategies-")
def on_workers(folder: Path) -> Results:
    make_still_encoder(folder / "encoder")
    test_trainer.make_ground(folder / "ground")
    shutil.copytree(folder / "ground", folder / STILL)
    make_still_encoder(folder / STILL / "encoder")
    for family in FAMILIES:
        make_masked(folder / family, family)
    trained(Strategy(make_network(folder / "encoder")), folder / "alone")
    trained(Strategy(make_network(folder / "encoder", "encoder")), folder / "alone, frozen")
    run(_worker, (folder,), 2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)], folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_says_whether_it_tells_the_noise_of_gradients(name: str) -> None:
    """Rows are dealt at random for it, which costs time."""
    entry, _ = on_workers()
    for actual in entry:
        updates = actual["updates"][name]
        assert updates[0]["tells_noise"] is updates[0]["noise"] is (name not in (*SHARDED, "context 2"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_weights_and_moments_are_those_of_one_worker(name: str) -> None:
    _, folder = on_workers()
    check_the_same(folder, name, "alone")


@pytest.mark.parametrize("name", SHARES)
def test_the_gradient_of_a_head_alone_is_that_of_one_worker(name: str) -> None:
    """Its encoder is frozen."""
    _, folder = on_workers()
    actual, expected = (kept(folder, item, "gradients") for item in (f"{name}, frozen", "alone, frozen"))
    for item, reference in zip(actual, expected, strict=True):
        assert item.keys() == reference.keys()
        assert distance(item, reference) < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
def test_architectures_and_tied_heads_have_the_gradient_of_one_worker(family: str) -> None:
    _, folder = on_workers()
    reference = _gradient(folder, family, None)
    for name in FAMILIES[family]:
        actual = torch.load(folder / f"{family}-{name}-0.pt", weights_only=True)
        assert actual.keys() == reference.keys()
        assert distance(actual, reference) < 1e-10


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_scaled_loss_is_the_same_and_one_worker_s_overflow_is_an_update_that_all_leave_out(name: str) -> None:
    """As in fp16: a worker may overflow alone, in weights without a shard on the others."""
    entry, _ = on_workers()
    for actual in entry:
        updates, plain = actual["scaled"][name], actual["updates"][name]
        assert ("share" in updates) is (name in CUT)
        for update, item in updates.items():
            assert item["skipped"] is item["unchanged"] is (update in ("loss", "share"))
        # The loss is scaled by a power of two, and the second rows are trained on in the end.
        assert updates["first"]["norm"] == pytest.approx(plain[0]["norm"], rel=1e-12)
        assert updates["after"]["norm"] == pytest.approx(plain[1]["norm"], rel=1e-9)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_worker_knows_loss_and_norm_and_its_own_rows(name: str) -> None:
    results, _folder = on_workers()
    first, second = (actual["updates"][name] for actual in results)
    reference = results[0]["updates"]["zero 0"]
    for number, (item, other, plain) in enumerate(zip(first, second, reference, strict=True)):
        assert item["loss"] == other["loss"] == pytest.approx(plain["loss"], rel=1e-9)
        assert item["norm"] == other["norm"] == pytest.approx(plain["norm"], rel=1e-9)
        replicas = [item] if name in REPLICA else [item, other]
        assert sum(entry["rows"] for entry in replicas) == UPDATES[number]
    assert [item["passes"] for item in second] == ([5, 1, 1, 4] if name in REPLICA else [1, 0, 0, 1])


@pytest.mark.parametrize("name", SHARDED)
def test_each_worker_has_half_of_the_optimizer_s_state(name: str) -> None:
    results, folder = on_workers()
    sizes = results[0]["said"][name]["state_bytes"]
    complete = sum(value.nbytes for key, value in kept(folder, "alone", "moments").items() if not key.endswith(":step"))
    assert 0 < sum(sizes) - complete < 0.01 * complete
    assert max(sizes) < 0.52 * sum(sizes)


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_worker_has_its_share_of_weights_and_gradients(name: str) -> None:
    """Between an update's passes and the optimizer's step, and within the last pass. Stage 2 has whole weights until
    the last micro-batch; stage 3 has those of the current layer, and those outside of layers."""
    results, folder = on_workers()
    size = sum(value.nbytes for value in kept(folder, "alone", "weights").values())
    inside, after = ([actual["updates"][name][0][when] for actual in results] for when in ("inside", "after"))
    if name in SHARDED:
        for tensor_kind in ("weights", "gradients"):
            assert sum(item[tensor_kind] for item in after) == size
            assert max(item[tensor_kind] for item in after) < 0.52 * size
        assert all(item["weights"] == size if name == "zero 2" else item["weights"] < 0.75 * size for item in inside)
    else:
        share = (0.6, 0.75) if "tensor" in name else (1.0, 1.0)
        assert all(item["weights"] <= share[0] * size and item["gradients"] <= share[1] * size for item in after)
        assert [item["weights"] for item in inside] == [item["weights"] for item in after]


@pytest.mark.parametrize("name", SHARES)
def test_a_worker_that_fails_in_an_evaluation_leaves_no_other_waiting(name: str) -> None:
    results, _folder = on_workers()
    assert [actual["failed"][name] for actual in results] == ["OtherRankFailed", "ValueError"]


def test_a_worker_whose_neighbour_dies_within_a_pass_ends_with_an_error() -> None:
    _, folder = on_workers()
    assert told_alone(_left_alone, folder)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_in_shares_resumes_bit_for_bit_with_dropout(name: str) -> None:
    results, folder = on_workers()
    for update in range(1, test_trainer.UPDATES + 1):
        files = [test_trainer.fingerprint(folder / item, update) for item in (name, f"{name}, killed")]
        assert files[0] == files[1]
    assert [actual["runs"][f"{name}, killed"]["from"] for actual in results] == [KILLED_AT] * 2
    assert results[0]["runs"][f"{name}, killed"]["scores"] == results[1]["runs"][name]["scores"]
