"""Ray Data: its private names still exist and mean the same."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from rtrain import ray_internals
from rtrain.ray_internals import data
from tests.root import ROOT


def test_a_stream_of_data_asks_for_no_nodes_and_has_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own would ask for twice the two CPUs that it has been given, and for nothing where it has none."""
    from ray.data import ExecutionOptions, ExecutionResources
    from ray.data._internal.cluster_autoscaler import (
        rate_based_cluster_autoscaler as rates,
        resource_utilization_gauge as gauges,
    )
    from ray.data._internal.execution import streaming_executor

    asked, given = list[Any](), {"node": {"CPU": 2.0, "object_store_memory": 7.0}}

    class Coordinator:
        def __init__(self, **others: Any):
            pass

        def request_resources(self, resources: Any, **others: Any) -> None:
            asked.append(resources)

        def get_reserved_resources(self) -> Any:
            return given

    class Tasks:
        output_dependencies: ClassVar[list[Any]] = []
        metrics = SimpleNamespace(
            average_num_inputs_per_task=1.0, average_num_outputs_per_task=1.0, num_output_blocks_per_task_s=1.0
        )

        def per_task_resource_allocation(self) -> Any:
            return ExecutionResources(cpu=1)

        min_scheduling_resources = per_task_resource_allocation

        def get_max_concurrency_limit(self) -> None:
            return None

        def has_completed(self) -> bool:
            return False

    busy = SimpleNamespace(observe=lambda: None, get=lambda: gauges.ClusterUtil(cpu=1.0))
    executor: Any = streaming_executor
    monkeypatch.setattr(rates, "DefaultAutoscalingCoordinator", Coordinator)
    for module in (rates, gauges):
        monkeypatch.setattr(module, "RollingLogicalUtilizationGauge", lambda *given: busy)
    for name in ("create_cluster_autoscaler", "process_completed_tasks"):
        monkeypatch.setattr(executor, name, getattr(executor, name))  # and back again
    context = SimpleNamespace(
        execution_options=ExecutionOptions(),
        scheduling_strategy=None,
        scheduling_strategy_large_args=None,
    )
    for ours in (False, True):
        if ours:
            ray_internals.stream_within(0.5)
        scaling = executor.create_cluster_autoscaler({Tasks(): None}, None, context, execution_id="a")
        scaling._last_request_time = -1e9
        scaling.try_trigger_scaling()
        assert asked[-1] == ([] if ours else [{"CPU": 1.0}] * 4)
        assert scaling.get_total_resources().cpu == 2.0
    given["node"]["CPU"] = 0.0
    assert (scaling.get_total_resources().cpu, scaling.get_total_resources().object_store_memory) == (0.5, 7.0)


STREAM = """
import json, os, sys, time
from types import SimpleNamespace
os.environ["RAY_AUTH_MODE"] = "disabled"
from rtrain import env
env.prepare()
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
ray_internals.stream_within(0.5)
dataset = ray_internals.numbers(40, 40, 0.5).map_batches(megabyte, batch_size=None, num_cpus=0.5)
options = dataset.context.execution_options
options.preserve_order, options.resource_limits = True, ExecutionResources(object_store_memory=4 << 20)
read = iter(dataset.iter_batches(batch_size=None, prefetch_batches=int(sys.argv[1])))
numbers = [int(next(read)["id"][0])]
in_turn = ("r" * data.LOOKS + "s") * 6
for _ in range(600):  # until it has read ahead
    if rests := "".join(made[-20:]) in in_turn:
        break
    time.sleep(0.1)
numbers += [int(batch["id"][0]) for batch in read]
print(json.dumps([rests, numbers, made.count("r"), made.count("s")]))
ray.shutdown()
"""


@pytest.mark.ray
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
    assert 0 < rested < data.LOOKS * steps  # none is made while tasks have nothing yet


@pytest.mark.ray
def test_numbers_come_from_tasks_that_reserve_what_is_said_and_are_fused(ray_session: Path) -> None:
    dataset = ray_internals.numbers(10, 2, 0.25).map_batches(lambda batch: batch, batch_size=None, num_cpus=0.25)
    assert sorted(row["id"] for row in dataset.take_all()) == list(range(10))  # blocks come as they are done
    assert "ReadRange->MapBatches" in dataset.stats()
