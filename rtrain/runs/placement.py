"""The CPUs or GPUs that a worker group holds, given back by us where Ray does not."""

from collections import Counter
from typing import Any

import ray.train.v2._internal.execution.callback
from ray._raylet import PlacementGroupID
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from rtrain.run import Run


class Remember(ray.train.v2._internal.execution.callback.WorkerGroupCallback):
    """Writes down which placement group the workers hold, for whoever finds their controller dead.

    A controller that is killed, by a fault or with the trial that Tune stops, cannot remove the group; Ray's own
    cleaner asks the State API, which needs the dashboard. A leaked group keeps its CPUs, and the next workers wait for
    ever.
    """

    def __init__(self, run: Run):
        self._path = run.placement_group

    def after_worker_group_start(self, worker_group: WorkerGroup) -> None:
        group = worker_group.get_worker_group_state().placement_group_handle.placement_group
        draft = self._path.with_suffix(".draft")
        draft.write_text(group.id.hex())
        draft.rename(self._path)  # at once: the driver may look at it at any moment


def workers_by_node(run: Run) -> Counter[str]:
    """How many of the run's workers are on each node, by its id; none while they wait for CPUs or GPUs."""
    path = run.placement_group
    if not path.is_file():
        return Counter()
    group = PlacementGroup(PlacementGroupID.from_hex(path.read_text()))
    table: dict[str, Any] = placement_group_table(group)
    return Counter(node for node in table.get("bundles_to_node_id", {}).values() if node)


def release(run: Run) -> bool:
    """Remove the group that is written down, with what still runs in it; whether there was one."""
    path = run.placement_group
    if not path.is_file():
        return False
    remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(path.read_text())))
    path.unlink()
    return True
