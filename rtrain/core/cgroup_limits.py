"""What a container leaves of a machine: the CPU quota and the memory of its control groups, of version 2.

A quota changes no affinity, and a memory limit leaves the machine's free memory as it is: `docker run --cpus=1 -m 3g`
shows in these files alone.
"""

import os
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("sys/fs/cgroup")
MEMBERSHIP = Path("proc/self/cgroup")
ROOT = Path("/")


def cpus(root: Path = ROOT) -> float | None:
    """CPUs that the quota of this process's groups allows; None without a quota. `root`: folder with sys and proc."""
    quotas = []
    for folder in _folders(root):
        quota, period = (*(_words(folder / "cpu.max")), "", "")[:2]
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory(root: Path = ROOT) -> float | None:
    """Bytes that this process's groups may still take; None without a limit. Files that the kernel can drop at once
    count as free."""
    free = []
    for folder in _folders(root):
        most, used = _words(folder / "memory.max"), _words(folder / "memory.current")
        if most and used and most[0].isdigit() and int(most[0]) < _physical():
            stat = _words(folder / "memory.stat")
            droppable = int(stat[stat.index("inactive_file") + 1]) if "inactive_file" in stat else 0
            free.append(int(most[0]) - max(0, int(used[0]) - droppable))
    return max(0, min(free)) if free else None


def notice(cores: int, root: Path = ROOT) -> str | None:
    """What to tell the user of the limits; None where they leave the process its `cores` and all memory."""
    quota, free = cpus(root), memory(root)
    parts = [] if quota is None or quota >= cores else [f"{quota:g} of {cores} CPUs"]
    parts += [] if free is None else [f"{free / 1e9:.1f} GB of memory"]
    return f"limits of this container: {' and '.join(parts)}" if parts else None


def _folders(root: Path) -> Iterator[Path]:
    """Folders of this process's group and of those around it, each of which may set a limit."""
    for entry in _lines(root / MEMBERSHIP):
        if entry.startswith("0::"):
            # In a container the path may be the host's, whose folders are not mounted: the mount itself is its group.
            inside = Path(entry.removeprefix("0::").lstrip("/"))
            for place in (inside, *inside.parents):
                if (root / GROUPS / place).is_dir():
                    yield root / GROUPS / place


def _physical() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
