"""Ray Data: the CPUs of its tasks, its requests for nodes, and its actors."""

import time
import uuid
from typing import TYPE_CHECKING, Any

from rtrain.ray_internals import private

if TYPE_CHECKING:
    import ray.data

POLL_INTERVAL_S = 0.01
"""Seconds between two checks whether the reader of a paused stream waits, equal to the interval of Ray's reader."""
MAX_POLLS = 5
"""Most checks between two steps of a stream at its memory limit whose reader has enough blocks."""


def disable_data_actors() -> None:
    """Disable Ray Data's own two actors for the data sets of this process, in a private Ray. One collects figures for a
    dashboard, which does not exist; the other distributes a growing cluster, and this one does not grow.
    Each is a process that imports Ray Data: a second of a core as a run starts, and 100 MB."""
    if not private.is_private():
        return
    import ray
    from ray.data._internal import stats
    from ray.data._internal.cluster_autoscaler import rate_based_cluster_autoscaler

    class StaticCoordinator:
        """A coordinator of a cluster of fixed size."""

        def __init__(self, **kwargs: Any):
            self._resources = {"": ray.cluster_resources()}

        def request_resources(self, *args: Any, **kwargs: Any) -> None:
            pass

        def cancel_request(self) -> None:
            pass

        def get_reserved_resources(self) -> dict[str, dict[str, float]]:
            return self._resources

    manager: Any = stats._StatsManager
    for name in ("update_execution_metrics", "update_iteration_metrics", "register_dataset_to_stats_actor"):
        setattr(manager, name, staticmethod(lambda *given, **named: None))
    manager.gen_dataset_id_from_stats_actor = staticmethod(lambda: uuid.uuid4().hex)
    scaling: Any = rate_based_cluster_autoscaler
    scaling.DefaultAutoscalingCoordinator = StaticCoordinator


def limit_stream(cpus: float) -> None:
    """Make streams of this process request no nodes, count on at least `cpus` CPUs, and pause while their reader has
    enough blocks.

    Each stream would request twice its resources while its tasks use them, for itself alone. And Ray subtracts the
    requests of others: where these cover the cluster, a stream has no resources, and warns about it.

    A thread of this process drives a stream in steps. A step waits until a task has output, and takes it if the memory
    limit allows. At the limit tasks always have output and nothing is taken: without pauses the thread uses 0.9 of a
    core, and holds the GIL that the training needs. A small model on a GPU trained at a tenth to a half of its
    speed.
    """
    from ray.data import ExecutionResources
    from ray.data._internal.cluster_autoscaler import rate_based_cluster_autoscaler, resource_utilization_gauge
    from ray.data._internal.execution import streaming_executor, streaming_executor_state

    base_autoscaler: Any = rate_based_cluster_autoscaler.RateBasedClusterAutoscaler
    gauge = resource_utilization_gauge.RollingLogicalUtilizationGauge

    class LimitedAutoscaler(base_autoscaler):  # type: ignore[misc]
        def _is_cluster_utilization_low(self, utilization: Any) -> bool:
            return True

        def get_total_resources(self) -> ExecutionResources:
            resources: ExecutionResources = super().get_total_resources()
            return resources.copy(cpu=max(resources.cpu, cpus))

    process_tasks = streaming_executor_state.process_completed_tasks

    def process_tasks_with_pauses(topology: Any, *args: Any, **kwargs: Any) -> int:
        last_operator = next(reversed(topology.values()))
        is_done = last_operator.output_queue.num_blocks and not last_operator.op.num_active_tasks()
        if last_operator.op._in_task_output_backpressure or is_done:
            # Blocks that a reader has prefetched count for the stream: it may be full without a ready block.
            for _ in range(MAX_POLLS):
                if last_operator.num_waiting_consumers:
                    break
                time.sleep(POLL_INTERVAL_S)
        return process_tasks(topology, *args, **kwargs)

    executor_module: Any = streaming_executor
    executor_module.process_completed_tasks = process_tasks_with_pauses
    executor_module.create_cluster_autoscaler = lambda topology, resources, context, *, execution_id: LimitedAutoscaler(
        list(topology),
        execution_id=execution_id,
        max_cluster_limits=context.execution_options.resource_limits,
        utility_calculator=gauge(resources),
    )


def range_dataset(count: int, blocks: int, cpus: float) -> "ray.data.Dataset":
    """Make a `ray.data.range` whose tasks, and the tasks fused with them, reserve `cpus` CPUs each."""
    import ray.data
    from ray.data._internal.datasource.range_datasource import RangeDatasource

    source = RangeDatasource(n=count, block_format="arrow", column_name="id")
    dataset: ray.data.Dataset = ray.data.read_datasource(source, num_cpus=cpus, override_num_blocks=blocks)
    return dataset
