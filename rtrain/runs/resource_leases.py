"""The placement group of a worker group. rtrain removes it if Ray does not."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from ray.util.placement_group import placement_group_table, remove_placement_group

from rtrain import ray_internals
from rtrain.core.run_folder import Run


def placement_callback(run: Run) -> Any:
    """Return a Ray Train callback that writes the id of the workers' placement group to a file of the run.

    A killed controller cannot remove the group, and Ray's own cleaner asks the State API, which needs the dashboard. A
    leaked group keeps its CPUs, and the next workers wait for ever.

    """
    return ray_internals.make_group_start_callback(partial(_write_group_id, run.placement_group))


def _write_group_id(path: Path, group_id: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(group_id)
    draft.rename(path)  # atomic: the driver may read it at any moment


def share_group(owner: Run, run: Run) -> None:
    """Record `owner`'s placement group as the one of `run`."""
    if owner.placement_group.is_file() and not run.placement_group.is_file():
        _write_group_id(run.placement_group, owner.placement_group.read_text())


def workers_by_node(run: Run) -> Counter[str]:
    """Return the number of the run's workers by node id; empty while they wait for CPUs or GPUs."""
    path = run.placement_group
    if not path.is_file():
        return Counter()
    group = ray_internals.get_placement_group(path.read_text())
    table: dict[str, Any] = placement_group_table(group)
    return Counter(node for node in table.get("bundles_to_node_id", {}).values() if node)


def release_group(run: Run) -> bool:
    """Remove the recorded group and its processes. Returns whether there was one."""
    path = run.placement_group
    if not path.is_file():
        return False
    remove_placement_group(ray_internals.get_placement_group(path.read_text()))
    path.unlink()
    return True
