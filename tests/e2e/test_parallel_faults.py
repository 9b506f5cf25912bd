"""Four processes that are two replicas of two: one of them dies or hangs, all others end, and the run goes on.

Rank 0 is in one group with rank 1, with which it shares layers, and in another with rank 2, with which it shares
weights or exchanges gradients; rank 3 is in none with it. So some meet a fault at once, and others through these.
"""

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rtrain.config import load_config
from rtrain.parallel.watchdog import Watchdog
from rtrain.verification import drill
from tests.support.workers import forking, joined
from tests.unit.runs import test_recovery
from tests.unit.trainer import test_trainer
from tests.unit.trainer.test_step import make_still_encoder
from tests.unit.trainer.test_trainer import UPDATES, fingerprint

WORKERS = 4
Layout = dict[str, Any]
WHOLE: Layout = {"tensor_parallel_size": 1}
SHARDS: Layout = {"tensor_parallel_size": 2, "zero_stage": 3}
REPLICAS: Layout = {"tensor_parallel_size": 2}
FAILED = 3
"""Exit code of a worker that was told of the fault; one that its watch ended has 1."""
STALL_S = 4.0
ENDS_S = 200.0

pytestmark = pytest.mark.timeout(600)


def _worker(rank: int, folder: Path, name: str, layout: Layout, number: int | None, fault: tuple[int, int]) -> None:
    victim, at = fault

    def meet(update: int) -> None:
        if number is not None and (rank, update) == (victim, at):
            os.kill(os.getpid(), number)

    joined(rank, WORKERS, folder / "starts" / name)
    watch = Watchdog() if number is None else Watchdog(folder / "starts" / name / f"stalled-{rank}", STALL_S)
    settings = {"save_every": 1, "keep_checkpoints": 9, "workers": WORKERS, **layout}
    try:
        ran = test_trainer.start(
            folder, folder / name, world=WORKERS, rank=rank, watch=watch, on_update=meet, **settings
        )
    except Exception:
        os._exit(FAILED)
    watch.stop()
    assert ran.outcome is not None
    output = {"from": ran.recorder.of("started")[0]["step"], "ledger": ran.outcome.ledger}
    (folder / "starts" / name / f"{rank}.json").write_text(json.dumps(output))


def started(folder: Path, name: str, layout: Layout, number: int | None = None, fault: tuple[int, int] = (0, 0)) -> Any:
    """A start of the run `name`; at update `fault[1]` the rank `fault[0]` gets the signal `number`. Returns the exit
    codes of the others, or what the ranks told if there was no fault. Raises `TimeoutError` where some do not end."""
    place = folder / "starts" / name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    context = forking()
    arguments = (folder, name, layout, number, fault)
    processes = [context.Process(target=_worker, args=(rank, *arguments)) for rank in range(WORKERS)]
    rest = [item for rank, item in enumerate(processes) if number is None or rank != fault[0]]
    try:
        for process in processes:
            process.start()
        end = time.monotonic() + ENDS_S
        for process in rest:
            process.join(max(0.0, end - time.monotonic()))
        if any(process.is_alive() for process in rest):
            raise TimeoutError("workers that should have ended have not")
    finally:
        for process in processes:
            process.kill()
            process.join()
    if number is None:
        return [json.loads((place / f"{rank}.json").read_text()) for rank in range(WORKERS)]
    return [process.exitcode for process in rest]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows, and an encoder without dropout, whose masks depend on the layout."""
    folder = tmp_path_factory.mktemp("faults")
    test_trainer.make_ground(folder)
    make_still_encoder(folder / "encoder")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("layout", "victim"), [(SHARDS, 1), (SHARDS, 2), (REPLICAS, 1), (REPLICAS, 2), (SHARDS, 0)])
def test_a_run_that_lost_a_rank_ends_bit_for_bit(ground: Path, layout: Layout, victim: int, number: int) -> None:
    plain = f"shard-{layout.get('shard', 0)}"
    if not (ground / plain).exists():
        started(ground, plain, layout)
    name = f"{plain}-{victim}-{int(number)}"
    assert set(started(ground, name, layout, number, (victim, 2))) <= {1, FAILED}
    assert [output["from"] for output in started(ground, name, layout)] == [2] * WORKERS
    assert fingerprint(ground / name, UPDATES) == fingerprint(ground / plain, UPDATES)


def test_a_drill_meets_each_kind_of_group_twice() -> None:
    def of(**train: int) -> dict[str, int]:
        settings = {f"train.{name}": value for name, value in train.items()}
        return drill.find_group_peers(load_config("intent", settings).recipe.train, train["workers"])

    assert of(workers=4) == of(workers=4, zero_stage=1) == {}
    assert of(workers=4, zero_stage=3) == {"zero_stage=3": 1}
    assert of(workers=2, tensor_parallel_size=2) == {"tensor_parallel_size=2": 1}
    assert of(workers=4, tensor_parallel_size=2) == {"tensor_parallel_size=2": 1, "replicas": 2}
    assert of(workers=8, tensor_parallel_size=4, zero_stage=2) == {"tensor_parallel_size=4": 1, "zero_stage=2": 4}
    assert of(workers=2, pipeline_parallel_size=2) == {"pipeline_parallel_size=2": 1}
    assert of(workers=4, pipeline_parallel_size=2) == {"pipeline_parallel_size=2": 1, "replicas": 2}
    assert of(workers=4, context_parallel_size=2) == {"context_parallel_size=2": 1, "replicas": 2}
    assert of(workers=8, pipeline_parallel_size=2, tensor_parallel_size=2, zero_stage=3) == {
        "tensor_parallel_size=2": 1,
        "pipeline_parallel_size=2": 2,
        "zero_stage=3": 4,
    }
    pair = drill.group_faults(
        load_config("intent", {"train.workers": 4, "train.tensor_parallel_size": 2}).recipe.train, 4
    )
    assert [fault.name for fault in pair] == [
        f"rank {rank} by {group} {what}"
        for group, rank in (("tensor_parallel_size=2", 1), ("replicas", 2))
        for what in ("killed (SIGKILL)", "stopped (SIGSTOP)")
    ]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "layout", [{"tensor_parallel_size": 2}, {"zero_stage": 3}, {"zero_stage": 2}, {"pipeline_parallel_size": 2}]
)
def test_workers_of_each_kind_of_group_are_killed_and_stopped_on_ray(ray_session: Path, layout: Layout) -> None:
    [(name, value)] = layout.items()
    folder = ray_session / f"drill-{name}-{value}"
    options = test_recovery.settings(folder, save_every=20, **layout)
    met = drill.group_faults(options.recipe.train, 2)
    certificate = drill.run(options, folder / "run", met)
    assert certificate.passed, certificate.format_text()
    assert [fault["name"] for fault in certificate.faults] == [fault.name for fault in met]
