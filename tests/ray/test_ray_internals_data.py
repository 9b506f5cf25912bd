"""Ray Data: its private names still exist and mean the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rtrain import ray_internals
from rtrain.ray_internals import data
from tests.support.root import ROOT

STREAM = """
import json, os, sys, time
from types import SimpleNamespace
os.environ["RAY_AUTH_MODE"] = "disabled"
from rtrain.core import env
env.set_env_defaults()
import numpy as np, ray
ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
from ray.data import ExecutionResources
from ray.data._internal.execution import streaming_executor_state
from rtrain import ray_internals
from rtrain.ray_internals import data
step, made = streaming_executor_state.process_completed_tasks, []
def counted(*given, **named):
    made.append("s")
    return step(*given, **named)
def slept(seconds):
    made.append("r")
    time.sleep(seconds)
def megabyte(batch):
    return {"id": batch["id"], "filling": np.zeros((len(batch["id"]), 1 << 20), dtype=np.uint8)}
streaming_executor_state.process_completed_tasks = counted
data.time = SimpleNamespace(sleep=slept)
ray_internals.limit_stream(0.5)
dataset = ray_internals.range_dataset(40, 40, 0.5).map_batches(megabyte, batch_size=None, num_cpus=0.5)
options = dataset.context.execution_options
options.preserve_order, options.resource_limits = True, ExecutionResources(object_store_memory=4 << 20)
read = iter(dataset.iter_batches(batch_size=None, prefetch_batches=int(sys.argv[1])))
numbers = [int(next(read)["id"][0])]
in_turn = ("r" * data.MAX_POLLS + "s") * 6
for _ in range(600):  # until it has read ahead
    if rests := "".join(made[-20:]) in in_turn:
        break
    time.sleep(0.1)
numbers += [int(batch["id"][0]) for batch in read]
print(json.dumps([rests, numbers, made.count("r"), made.count("s")]))
ray.shutdown()
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("ahead", [1, 4])
def test_a_stream_rests_while_its_reader_has_enough(ahead: int) -> None:
    """Ray's own goes round and round at its limit of memory, for most of a core and of Python's lock: with blocks that
    lie ready, and with none where the reader's own fill it. In a process and a Ray of its own, as a training worker's
    is."""
    done = subprocess.run(
        [sys.executable, "-c", STREAM, str(ahead)], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rests, numbers, rested, steps = json.loads(next(line for line in done.stdout.splitlines() if line[:1] == "["))
    assert rests
    assert numbers == list(range(40))
    assert 0 < rested < data.MAX_POLLS * steps  # none is made while tasks have nothing yet


@pytest.mark.ray
def test_numbers_come_from_tasks_that_reserve_what_is_said_and_are_fused(ray_session: Path) -> None:
    dataset = ray_internals.range_dataset(10, 2, 0.25).map_batches(lambda batch: batch, batch_size=None, num_cpus=0.25)
    assert sorted(row["id"] for row in dataset.take_all()) == list(range(10))  # blocks come as they are done
    assert "ReadRange->MapBatches" in dataset.stats()
