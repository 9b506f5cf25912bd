"""Freed memory, and the CPUs and memory that control groups leave."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from rtrain.core import env

SCRIPT = """
import ctypes, re, sys
from pathlib import Path
from rtrain.core import env

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
MB = 1 << 20

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) // 1024

def kept():
    "Megabytes that are left of 20 blocks of 4 MB, of which a small one after each stays."
    blocks, small, before = [], [], resident()
    for _ in range(20):
        blocks.append(libc.malloc(4 * MB))
        ctypes.memset(blocks[-1], 1, 4 * MB)
        small.append(libc.malloc(1000))
    for block in blocks:
        libc.free(block)
    return resident() - before

results = []
with env.trim_malloc(sys.argv[1] == "True"):
    results.append(kept())
results.append(kept())
print(*results)
"""


@pytest.mark.parametrize(
    ("is_enabled", "settings", "is_kept"),
    [(True, {}, False), (False, {}, True), (True, {"MALLOC_MMAP_THRESHOLD_": "33554432"}, True)],
)
def test_freed_blocks_are_returned_inside_and_kept_outside(
    is_enabled: bool, settings: dict[str, str], is_kept: bool
) -> None:
    """They are kept inside too if it is disabled, or if the user has set a threshold."""
    words, environment = [sys.executable, "-c", SCRIPT, str(is_enabled)], {**env.ENV_DEFAULTS, **settings}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    inside, outside = map(int, done.stdout.split())
    assert inside > 60 if is_kept else (inside < 8 and outside > 60)


# ------------------------------------------------------------------------------------------------- control groups

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
    assert env.cpu_quota(machine(tmp_path, membership, files)) == cpus


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
    assert env.free_memory_bytes(machine(tmp_path, membership, files)) == free


def test_the_user_is_told_of_limits_that_there_are(tmp_path: Path) -> None:
    files = {"cpu.max": "100000 100000", "memory.max": str(3_000_000_000), "memory.current": "0"}
    root = machine(tmp_path / "small", "0::/", files)
    assert env.describe_container_limits(16, root) == "limits of this container: 1 of 16 CPUs and 3.0 GB of memory"
    assert env.describe_container_limits(16, machine(tmp_path / "whole", "0::/", {"cpu.max": "1600000 100000"})) is None
