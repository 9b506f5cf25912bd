"""What processes do with memory that they have freed, and what users have said about it."""

import subprocess
import sys
from collections.abc import Mapping

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

found = []
with env.trim_malloc(sys.argv[1] == "True"):
    found.append(kept())
found.append(kept())
print(*found)
"""


def left(wanted: bool, **settings: str) -> list[int]:
    """Megabytes that a process of rtrain's settings and these keeps inside, and then outside."""
    given: Mapping[str, str] = {**env.ENV_DEFAULTS, **settings}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(wanted)], env=dict(given), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [int(one) for one in done.stdout.split()]


def test_freed_blocks_go_back_inside_and_are_kept_outside() -> None:
    inside, outside = left(True)
    assert inside < 8
    assert outside > 60


@pytest.mark.parametrize(("wanted", "settings"), [(False, {}), (True, {"MALLOC_MMAP_THRESHOLD_": "33554432"})])
def test_they_are_kept_where_it_is_not_wanted_or_the_user_has_said_so(wanted: bool, settings: dict[str, str]) -> None:
    inside, _ = left(wanted, **settings)
    assert inside > 60
