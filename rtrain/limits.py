"""What a container leaves of a machine: the CPU quota and the memory of its control groups, of version 1 or 2.

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
    for folder, version in _folders(root, "cpu"):
        if version == 2:
            quota, period = (*(_words(folder / "cpu.max")), "", "")[:2]
        else:
            quota, period = ((*_words(folder / f"cpu.cfs_{name}_us"), "")[0] for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory(root: Path = ROOT) -> float | None:
    """Bytes that this process's groups may still take; None without a limit. Files that the kernel can drop at once
    count as free."""
    free = []
    for folder, version in _folders(root, "memory"):
        limit, usage, inactive = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        most, used = _words(folder / limit), _words(folder / usage)
        if most and used and most[0].isdigit() and int(most[0]) < _physical():
            stat = _words(folder / "memory.stat")
            droppable = int(stat[stat.index(inactive) + 1]) if inactive in stat else 0
            free.append(int(most[0]) - max(0, int(used[0]) - droppable))
    return max(0, min(free)) if free else None


def notice(cores: int, root: Path = ROOT) -> str | None:
    """What to tell the user of the limits; None where they leave the process its `cores` and all memory."""
    quota, free = cpus(root), memory(root)
    parts = [] if quota is None or quota >= cores else [f"{quota:g} of {cores} CPUs"]
    parts += [] if free is None else [f"{free / 1e9:.1f} GB of memory"]
    return f"limits of this container: {' and '.join(parts)}" if parts else None


def _folders(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Folders of this process's group and of those around it, each of which may set a limit, with the version."""
    for entry in _lines(root / MEMBERSHIP):
        controllers, path = (*entry.split(":", 2), "", "")[1:3]
        names = controllers.split(",")
        if not controllers:
            mounts, version = [root / GROUPS, root / GROUPS / "unified"], 2
        elif controller in names:
            mounts, version = [root / GROUPS / name for name in (controllers, controller)], 1
        else:
            continue
        # In a container the path may be the host's, whose folders are not mounted: the mount itself is its group.
        inside = Path(path.lstrip("/"))
        for mount in mounts:
            for place in (inside, *inside.parents):
                if (mount / place).is_dir():
                    yield mount / place, version


def _physical() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
