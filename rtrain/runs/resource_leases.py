"""The CPUs or GPUs that a worker group holds. rtrain gives them back where Ray does not."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from ray.util.placement_group import placement_group_table, remove_placement_group

from rtrain import ray_internals
from rtrain.core.run_folder import Run


def remember(run: Run) -> Any:
    """A callback that writes down which placement group the workers hold, for whoever finds their controller dead.

    A controller that is killed, by a fault or with the trial that Tune stops, cannot remove the group; Ray's own
    cleaner asks the State API, which needs the dashboard. A leaked group keeps its CPUs, and the next workers wait for
    ever.
    """
    return ray_internals.on_group_start(partial(_write_down, run.placement_group))


def _write_down(path: Path, group: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(group)
    draft.rename(path)  # at once: the driver may look at it at any moment


def lend(owner: Run, run: Run) -> None:
    """Write down that the workers of `run` are those that `owner` holds; whoever looks for them finds them there."""
    if owner.placement_group.is_file() and not run.placement_group.is_file():
        _write_down(run.placement_group, owner.placement_group.read_text())


def workers_by_node(run: Run) -> Counter[str]:
    """How many of the run's workers are on each node, by its id; none while they wait for CPUs or GPUs."""
    path = run.placement_group
    if not path.is_file():
        return Counter()
    group = ray_internals.placement_group(path.read_text())
    table: dict[str, Any] = placement_group_table(group)
    return Counter(node for node in table.get("bundles_to_node_id", {}).values() if node)


def release(run: Run) -> bool:
    """Remove the group that is written down, with what still runs in it. Returns whether there was one."""
    path = run.placement_group
    if not path.is_file():
        return False
    remove_placement_group(ray_internals.placement_group(path.read_text()))
    path.unlink()
    return True
