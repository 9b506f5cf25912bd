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

from rtrain.data.store.store import Store
from rtrain.models import builder
from rtrain.parallel.base import Strategy
from rtrain.parallel.layout import build_strategy
from rtrain.trainer import evaluate
from tests.support.strategies import check_the_same, masked_lm_gradient, recipe, trained, weights_of
from tests.support.tiny import make_masked, make_modern
from tests.support.workers import joined, run
from tests.unit.trainer import test_trainer
from tests.unit.trainer.test_step import TASK, distance, make_network, make_still_encoder, norm

pytestmark = pytest.mark.timeout(900)
FOUR: dict[str, dict[str, Any]] = {
    "pipeline, tensor": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "pipeline, zero 3": {"pipeline_parallel_size": 2, "zero_stage": 3},
    "interleaved, zero 2": {"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved", "zero_stage": 2},
    "tensor, zero 3": {"tensor_parallel_size": 2, "zero_stage": 3},
    "context of 2": {"context_parallel_size": 2},
    "sequence, zero 2": {"tensor_parallel_size": 2, "sequence_parallel": True, "zero_stage": 2},
}
SLOW = ("interleaved, zero 2", "context of 2", "sequence, zero 2")
"""Grids of the slow tests: each of their two axes stands in another one, or is a layout of `test_strategies`."""
EIGHT: dict[str, dict[str, Any]] = {
    "2x2x2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "2x2x2, zero 3": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "zero_stage": 3},
}
HEADS: dict[str, dict[str, Any]] = {"context 4": {"context_parallel_size": 4}}
"""The same for a model of four attention heads, ModernBERT's form."""
FAMILIES = ("bert", "modernbert")
"""Masked language models, whose word embedding is tied to their head."""
FEWER: dict[str, dict[str, Any]] = {
    "zero 0": {},
    "tensor": {"tensor_parallel_size": 2},
    "1f1b": {"pipeline_parallel_size": 2},
}
"""Layouts in which two workers go on with what four had shares of; one worker goes on with that again."""
BITS = ("pipeline, zero 3", "pipeline, tensor")
"""Layouts in which a run with dropout is killed and resumed."""
KILLED_AT, LAYERS = 2, 4


def scored(folder: Path, train: dict[str, Any] | None) -> list[float]:
    """Outcomes of all rows, in passes of eight."""
    store = Store(next((folder / "still" / ".tokens").iterdir()))
    network: Any = builder.build_network(folder / "encoder", TASK, store.manifest.labels, 0).double()
    exchange = Strategy(network) if train is None else build_strategy(network, recipe(**train).train)
    evaluate.MAX_ROWS_PER_MICRO_BATCH = 8
    actual = evaluate.gather_row_results(exchange, TASK, store, "train", pad_id=0, precision="fp64")
    return [float(value) for value in actual.values]


def _fewer(folder: Path, name: str, rank: int, world: int, kill: int | None, **train: Any) -> list[int]:
    """A part of the run that four workers begin, two go on with, and one ends. From which update it went on."""
    options: dict[str, Any] = {"save_every": 1, "keep_checkpoints": 9, "workers": world, **train}
    attempt = test_trainer.start(folder / "still", folder / f"run {name}", kill=kill, world=world, rank=rank, **options)
    return [event["step"] for event in attempt.recorder.of("started")]


def _grids(rank: int, folder: Path, slow: bool) -> dict[str, Any]:
    actual: dict[str, Any] = {"scores": {}, "resumed": {}}
    for name in (name for name in FOUR if (name in SLOW) == slow):
        train = FOUR[name]
        exchange = build_strategy(make_network(folder / "encoder"), recipe(**train).train)
        trained(exchange, folder / name, workers=4, **train)
        for family in FAMILIES:
            torch.save(masked_lm_gradient(folder / family, train)[0], folder / f"{family}-{name}-{rank}.pt")
        actual["scores"][name] = scored(folder, train)
    return actual


def _worker(rank: int, folder: Path) -> None:
    joined(rank, 4, folder)
    actual = _grids(rank, folder, slow=False)
    for name, train in HEADS.items():
        trained(
            build_strategy(make_network(folder / "four"), recipe(**train).train),
            folder / name,
            workers=4,
            **train,
        )
    for name in FEWER:
        _fewer(folder, name, rank, 4, KILLED_AT, zero_stage=3)
    dist.destroy_process_group()
    if rank < 2:
        joined(rank, 2, folder)
        for name, train in FEWER.items():
            actual["resumed"][name] = _fewer(folder, name, rank, 2, KILLED_AT + 2, **train)
    (folder / f"{rank}.json").write_text(json.dumps(actual))


def _eight(rank: int, folder: Path) -> None:
    joined(rank, 8, folder)
    for name, train in EIGHT.items():
        trained(build_strategy(make_network(folder / "encoder"), recipe(**train).train), folder / name, **train)
    dist.destroy_process_group()
    if rank < 4:
        joined(rank, 4, folder)
        for name in BITS:
            for place, kill in (("straight", None), ("killed", KILLED_AT), ("killed", None)):
                _whole(folder, f"{name}, {place}", rank, kill, **FOUR[name])
        (folder / f"{rank}.json").write_text(json.dumps(_grids(rank, folder, slow=True)))


def _whole(folder: Path, name: str, rank: int, kill: int | None, **train: Any) -> None:
    options: dict[str, Any] = {"save_every": 1, "keep_checkpoints": 9, "workers": 4, **train}
    test_trainer.start(folder / "ground", folder / name, kill=kill, world=4, rank=rank, **options)


Results = tuple[list[dict[str, Any]], Path]


@cache
def _ran_once(slow: bool) -> Results | Exception:
    folder = Path(mkdtemp(prefix="rtrain-grids-"))
    atexit.register(shutil.rmtree, folder)
    try:
        make_still_encoder(folder / "encoder", layers=LAYERS)
        for ground in ("ground", "still") if slow else ("still",):
            test_trainer.make_ground(folder / ground)
        make_still_encoder(folder / "still" / "encoder")
        for family in FAMILIES:
            make_masked(folder / family, family, layers=LAYERS)
        make_modern(folder / "four", num_attention_heads=4, num_hidden_layers=LAYERS)
        for place, name in (("encoder", "alone"), ("four", "alone, four")):
            trained(Strategy(make_network(folder / place)), folder / name)
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
    actual = _ran_once(slow)
    if isinstance(actual, Exception):
        raise actual
    return actual


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
    reference, actual = (
        masked_lm_gradient(folder / family, None)[0],
        torch.load(folder / f"{family}-{name}-0.pt", weights_only=True),
    )
    assert actual.keys() == reference.keys()
    assert distance(actual, reference) < 1e-10


@pytest.mark.parametrize("name", GRIDS)
def test_rows_are_scored_as_by_one_worker(name: str) -> None:
    results, folder = on_workers(slow=name in SLOW)
    reference = scored(folder, None)
    for actual in results:
        assert actual["scores"][name] == pytest.approx(reference, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", FEWER)
def test_what_four_workers_had_shares_of_two_go_on_with_and_then_one(name: str) -> None:
    results, folder = on_workers()
    assert [actual["resumed"][name] for actual in results[:2]] == [[KILLED_AT]] * 2
    assert results[0]["ended"][name] == [KILLED_AT + 2]
    last = test_trainer.UPDATES
    weights, rest, start = (
        weights_of(folder, *place) for place in ((f"run {name}", last), ("run whole", last), ("run whole", 1))
    )
    assert weights.keys() == rest.keys()
    moved_to = norm({item: rest[item] - start[item] for item in rest})
    # In fp32 and past Adam's amplification of rounding where the true gradient is zero.
    assert norm({item: weights[item] - rest[item] for item in rest}) < 1e-2 * moved_to


@pytest.mark.slow
@pytest.mark.parametrize("name", BITS)
def test_a_run_in_a_grid_resumes_bit_for_bit_with_dropout(name: str) -> None:
    _, folder = on_workers(slow=True)
    for update in range(1, test_trainer.UPDATES + 1):
        item, other = (test_trainer.fingerprint(folder / f"{name}, {way}", update) for way in ("straight", "killed"))
        assert item == other
