"""Private names of Ray: each still exists and means the same. They stand in one room, those of torch in one module."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from rtrain import ray_internals, torch_internals
from rtrain.ray_internals import cluster
from tests.support.root import ROOT

PRIVATE = re.compile(r"\b(ray|torch)(\.\w+)*\._\w+|\bray\.[\w.]*_internal\b|_set_params_and_buffers|__internal_head__")


def test_private_names_stand_in_their_modules() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("rtrain", "serve", "tune")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "torch_internals.py" and path.parent.name != "ray_internals"
        for line in path.read_text().splitlines()
        if PRIVATE.search(line)
    }
    assert found == set()
    for module in (cluster, torch_internals):
        assert PRIVATE.search(Path(str(module.__file__)).read_text())


def test_without_a_connection_there_is_no_session() -> None:
    import ray

    assert ray.is_initialized() or ray_internals.session_folder() is None
    assert ray.is_initialized() or ray_internals.list_processes() == []
    assert not ray_internals.is_gcs_dead()


@pytest.mark.ray
def test_what_ray_knows_of_its_cluster(ray_session: Path) -> None:
    import ray

    [node] = ray.nodes()
    free = ray_internals.available_resources_by_node()
    assert set(free) == {node["NodeID"]}
    assert 0 <= free[node["NodeID"]]["CPU"] <= node["Resources"]["CPU"]
    assert node["Resources"][ray_internals.HEAD_RESOURCE] == 1.0
    assert ray_internals.draining_node_ids() == set()
    folder = ray_internals.session_folder()
    assert folder is not None
    assert (folder / "logs").is_dir()
    assert not ray_internals.is_gcs_dead()
    assert ray_internals.is_private()


@pytest.mark.ray
def test_what_ray_knows_of_an_actor_and_of_a_placement_group(ray_session: Path) -> None:
    import ray
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    class Quiet:
        def seen(self) -> tuple[int, int]:
            return os.getpid(), os.nice(0)

    actor: Any = ray.remote(num_cpus=0)(Quiet).remote()
    pid, niceness = ray.get(actor.seen.remote())
    assert niceness == os.nice(0)  # no background work (env.SETTINGS)
    [known] = [one for one in ray_internals.list_actors() if one["Pid"] == pid]
    assert known["ActorClassName"].endswith("Quiet")
    assert (known["State"], known["JobID"]) == ("ALIVE", ray.get_runtime_context().get_job_id())
    assert known["Address"]["NodeID"] == ray.get_runtime_context().get_node_id()
    ray.kill(actor)
    made = placement_group([{"CPU": 0.001}])
    assert made.wait(30)
    again = ray_internals.get_placement_group(made.id.hex())
    assert placement_group_table(again) == placement_group_table(made)
    remove_placement_group(again)
