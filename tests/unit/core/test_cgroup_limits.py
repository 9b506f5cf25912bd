"""CPUs and memory that control groups leave, as containers show them."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from rtrain.core import cgroup_limits

DOCKER = "/docker/0123"
POD = "/kubepods.slice/pod1/container1"
GB = 1 << 30


def machine(root: Path, membership: str, files: Mapping[str, str]) -> Path:
    every = {"proc/self/cgroup": membership, **{f"sys/fs/cgroup/{name}": content for name, content in files.items()}}
    for name, content in every.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return root


@pytest.mark.parametrize(
    ("membership", "files", "cpus"),
    [
        ("0::/", {"cpu.max": "100000 100000"}, 1.0),
        ("0::/", {"cpu.max": "50000 100000"}, 0.5),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {}, None),
        ("", {}, None),
        (f"0::{POD}", {f"{POD[1:]}/cpu.max": "max 100000", "kubepods.slice/pod1/cpu.max": "250000 100000"}, 2.5),
        # The host's path, whose folder is not mounted in the container.
        (f"0::{DOCKER}", {"cpu.max": "300000 100000"}, 3.0),
    ],
)
def test_the_quota_of_the_groups_is_known(
    tmp_path: Path, membership: str, files: Mapping[str, str], cpus: float | None
) -> None:
    assert cgroup_limits.cpu_quota(machine(tmp_path, membership, files)) == cpus


@pytest.mark.parametrize(
    ("membership", "files", "free"),
    [
        ("0::/", {"memory.max": str(3 * GB), "memory.current": str(2 * GB)}, GB),
        (
            "0::/",
            {"memory.max": str(3 * GB), "memory.current": str(2 * GB), "memory.stat": f"anon 1\ninactive_file {GB}"},
            2 * GB,
        ),
        ("0::/", {"memory.max": "max", "memory.current": str(GB)}, None),
        ("0::/", {"memory.max": str(GB), "memory.current": str(2 * GB)}, 0),
        (
            f"0::{POD}",
            {
                f"{POD[1:]}/memory.max": str(3 * GB),
                f"{POD[1:]}/memory.current": "0",
                "kubepods.slice/memory.max": str(2 * GB),
                "kubepods.slice/memory.current": str(GB),
            },
            GB,
        ),
    ],
)
def test_the_memory_that_the_groups_leave_is_known(
    tmp_path: Path, membership: str, files: Mapping[str, str], free: int | None
) -> None:
    assert cgroup_limits.free_memory_bytes(machine(tmp_path, membership, files)) == free


def test_the_user_is_told_of_limits_that_there_are(tmp_path: Path) -> None:
    files = {"cpu.max": "100000 100000", "memory.max": str(3_000_000_000), "memory.current": "0"}
    root = machine(tmp_path / "small", "0::/", files)
    assert (
        cgroup_limits.describe_container_limits(16, root)
        == "limits of this container: 1 of 16 CPUs and 3.0 GB of memory"
    )
    assert (
        cgroup_limits.describe_container_limits(16, machine(tmp_path / "whole", "0::/", {"cpu.max": "1600000 100000"}))
        is None
    )
