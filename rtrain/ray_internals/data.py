"""Ray Data: the CPUs that its tasks reserve, the nodes that it asks for, and the actors that it starts."""

import time
import uuid
from typing import TYPE_CHECKING, Any

from rtrain.ray_internals import private

if TYPE_CHECKING:
    import ray.data

LOOK_S = 0.01
"""Between two looks, while a stream rests, whether its reader waits: as often as Ray's reader looks for a block."""
LOOKS = 5
"""Most of them between two steps of a stream that has as much as it may hold and whose reader has enough."""


def without_data_actors() -> None:
    """Have the data sets of this process start none of Ray Data's own two actors, where Ray is private. One gathers
    figures for a dashboard, which is not there; the other shares out a cluster that may grow, which this does not.
    Each is a process that imports Ray Data: a second of a core as a run starts, and 100 MB."""
    if not private.is_private():
        return
    import ray
    from ray.data._internal import stats
    from ray.data._internal.cluster_autoscaler import rate_based_cluster_autoscaler

    class Whole:
        """The cluster as it is, for whoever asks."""

        def __init__(self, **given: Any):
            self._all = {"": ray.cluster_resources()}

        def request_resources(self, *given: Any, **named: Any) -> None:
            pass

        def cancel_request(self) -> None:
            pass

        def get_reserved_resources(self) -> dict[str, dict[str, float]]:
            return self._all

    manager: Any = stats._StatsManager
    for name in ("update_execution_metrics", "update_iteration_metrics", "register_dataset_to_stats_actor"):
        setattr(manager, name, staticmethod(lambda *given, **named: None))
    manager.gen_dataset_id_from_stats_actor = staticmethod(lambda: uuid.uuid4().hex)
    scaling: Any = rate_based_cluster_autoscaler
    scaling.DefaultAutoscalingCoordinator = Whole


def stream_within(cpus: float) -> None:
    """Have the data sets that this process streams ask for no nodes, count on so many CPUs at least, and rest while
    their reader has enough.

    Each of them would ask for twice what it has, as long as its tasks keep that busy, for itself alone. And what
    others have asked for counts as theirs: where that is all, a stream has none, and says so.

    A stream is steered by a thread of this process, step by step. A step waits until a task has something, and takes
    it if the limit of memory allows that. At the limit a task always has something and nothing is taken: without rests
    the thread takes 0.9 of a core, and Python's lock from the training. A small model on a GPU trained at a tenth to
    a half of its speed.
    """
    from ray.data import ExecutionResources
    from ray.data._internal.cluster_autoscaler import rate_based_cluster_autoscaler, resource_utilization_gauge
    from ray.data._internal.execution import streaming_executor, streaming_executor_state

    usual: Any = rate_based_cluster_autoscaler.RateBasedClusterAutoscaler
    gauge = resource_utilization_gauge.RollingLogicalUtilizationGauge

    class Within(usual):  # type: ignore[misc]
        def _is_cluster_utilization_low(self, utilization: Any) -> bool:
            return True

        def get_total_resources(self) -> ExecutionResources:
            found: ExecutionResources = super().get_total_resources()
            return found.copy(cpu=max(found.cpu, cpus))

    step = streaming_executor_state.process_completed_tasks

    def resting(topology: Any, *given: Any, **named: Any) -> int:
        last = next(reversed(topology.values()))
        is_done = last.output_queue.num_blocks and not last.op.num_active_tasks()
        if last.op._in_task_output_backpressure or is_done:
            # What a reader has taken ahead counts as the stream's: it may be full while nothing lies ready.
            for _ in range(LOOKS):
                if last.num_waiting_consumers:
                    break
                time.sleep(LOOK_S)
        return step(topology, *given, **named)

    executor: Any = streaming_executor
    executor.process_completed_tasks = resting
    executor.create_cluster_autoscaler = lambda topology, resources, context, *, execution_id: Within(
        list(topology),
        execution_id=execution_id,
        max_cluster_limits=context.execution_options.resource_limits,
        utility_calculator=gauge(resources),
    )


def numbers(count: int, blocks: int, cpus: float) -> "ray.data.Dataset":
    """`ray.data.range` whose tasks reserve so many CPUs, with those that follow them in the same process."""
    import ray.data
    from ray.data._internal.datasource.range_datasource import RangeDatasource

    source = RangeDatasource(n=count, block_format="arrow", column_name="id")
    found: ray.data.Dataset = ray.data.read_datasource(source, num_cpus=cpus, override_num_blocks=blocks)
    return found
