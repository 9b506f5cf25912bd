"""Limits of a container: the CPU quota and the memory of its control groups (cgroup v2).

A quota does not change the affinity, and a memory limit does not change the machine's free memory: only these files
show `docker run --cpus=1 -m 3g`.
"""

import os
from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("sys/fs/cgroup")
CGROUP_MEMBERSHIP_FILE = Path("proc/self/cgroup")
ROOT = Path("/")


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPUs that the quota of this process's groups allows; None without a quota. `root`: folder with sys and proc."""
    quotas = []
    for folder in _cgroup_folders(root):
        quota, period = (*(_read_words(folder / "cpu.max")), "", "")[:2]
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def free_memory_bytes(root: Path = ROOT) -> float | None:
    """Bytes that this process's groups may still take; None without a limit. Files that the kernel can drop at once
    count as free."""
    free_bytes = []
    for folder in _cgroup_folders(root):
        limit_words, usage_words = _read_words(folder / "memory.max"), _read_words(folder / "memory.current")
        if limit_words and usage_words and limit_words[0].isdigit() and int(limit_words[0]) < _physical_memory_bytes():
            stat_words = _read_words(folder / "memory.stat")
            reclaimable_bytes = (
                int(stat_words[stat_words.index("inactive_file") + 1]) if "inactive_file" in stat_words else 0
            )
            free_bytes.append(int(limit_words[0]) - max(0, int(usage_words[0]) - reclaimable_bytes))
    return max(0, min(free_bytes)) if free_bytes else None


def describe_container_limits(cores: int, root: Path = ROOT) -> str | None:
    """Describe the limits for the user; None where the process has all `cores` and all memory."""
    quota, free_bytes = cpu_quota(root), free_memory_bytes(root)
    parts = [] if quota is None or quota >= cores else [f"{quota:g} of {cores} CPUs"]
    parts += [] if free_bytes is None else [f"{free_bytes / 1e9:.1f} GB of memory"]
    return f"limits of this container: {' and '.join(parts)}" if parts else None


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's group and its parents; each may set a limit."""
    for entry in _read_lines(root / CGROUP_MEMBERSHIP_FILE):
        if entry.startswith("0::"):
            # In a container the path may be the host's, whose folders are not mounted: the mount itself is its group.
            group_path = Path(entry.removeprefix("0::").lstrip("/"))
            for candidate_path in (group_path, *group_path.parents):
                if (root / CGROUP_ROOT / candidate_path).is_dir():
                    yield root / CGROUP_ROOT / candidate_path


def _physical_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read_words(path: Path) -> list[str]:
    return " ".join(_read_lines(path)).split()


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
