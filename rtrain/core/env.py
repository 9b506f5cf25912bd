"""Settings of this process: environment variables that libraries read when they are imported, memory, cores.

`set_env_defaults()` is called by the command line before any heavy import; processes that Ray starts inherit the
values. A value of the user always wins.

The cores and the memory of a container are limited by its control groups (cgroup v2). A quota does not change the
affinity, and a memory limit does not change the machine's free memory: only the files of the groups show them.
"""

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

ENV_DEFAULTS = {
    # Ray's own progress bars and forwarded logs flood the terminal (a line per operator and worker); rtrain prints one.
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_TQDM": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "1",
    # Ray starts the workers of a local cluster with the priority of background work (nice 15). Next to one busy
    # process, a training or a replica would get about 3 % of a core instead of half.
    "RAY_worker_niceness": "0",
    # A thread of Tune that outlives an interrupted session would start another Ray with its next call.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    # Tune swallows the first Ctrl-C and returns as if finished; without its handler, Python's own raises as always.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # Train's controller polls its workers every 2 s by default, which costs 2 s at each start, report and end of a
    # run.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # rtrain itself watches for draining nodes (`rtrain.runs`). A second watcher would be one more process, and
    # even an idle one takes 1 % of a core of a small machine.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # Ray's own metrics need a Prometheus, which a laptop does not run.
    "RAY_TRAIN_METRICS_ENABLED": "0",
    # Tune's default is to change into a folder per trial; relative paths would then point elsewhere in each worker.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # A fast tokenizer that forks after its thread pool has started warns and then runs on one thread anyway.
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    # By default MLflow tries seven times for two minutes each; a run would wait for it at its start and at its end.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # glibc returns blocks over 128 KB to the kernel at once, so that a training step pays for page faults on every
    # activation (5 to 13 % of a step, as measured elsewhere). Kept blocks cost memory that the next step uses anyway.
    # Blocks above the threshold are still returned: their sizes vary, and they would leave holes of gigabytes.
    "MALLOC_MMAP_THRESHOLD_": "67108864",
    "MALLOC_TRIM_THRESHOLD_": "536870912",
    "MALLOC_ARENA_MAX": "4",
}
_MALLOC_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt` (malloc.h)."""
TRIMMED_MMAP_THRESHOLD, TRIMMED_HEAP_THRESHOLD = 1 << 20, 64 << 20
"""Bytes, in place of these settings; see `trim_malloc`."""
GC_THRESHOLD = 10_000
CACHE_ENV = "RTRAIN_CACHE"
"""Folder of compiled graphs (`rtrain.models.compile_cache`); empty: no cache."""
FAKE_GPUS_ENV = "RTRAIN_FAKE_GPUS"
"""Set to 1 on the nodes of a rehearsed cluster (`rtrain.rehearsal`), whose GPUs exist only as a resource of Ray: each
worker reserves one, and computes on CPUs."""
CGROUP_ROOT = Path("sys/fs/cgroup")
CGROUP_MEMBERSHIP_FILE = Path("proc/self/cgroup")
ROOT = Path("/")


def set_env_defaults(environ: MutableMapping[str, str] | None = None) -> None:
    """Set `ENV_DEFAULTS` in the environment; values of the user stay."""
    environ = os.environ if environ is None else environ
    for name, value in ENV_DEFAULTS.items():
        environ.setdefault(name, value)
    cache_root = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    # A user without a name has no home folder, and no cache.
    environ.setdefault(CACHE_ENV, os.path.join(cache_root, "rtrain") if os.path.isabs(cache_root) else "")


def uses_fake_gpus(environ: Mapping[str, str] | None = None) -> bool:
    return (os.environ if environ is None else environ).get(FAKE_GPUS_ENV) == "1"


def set_ray_train_timeouts(health_check_timeout_s: float, placement_timeout_s: float | None) -> None:
    """Set the seconds for which Ray Train waits for an unresponsive worker process (default ten minutes), and for free
    CPUs to place workers on (None: Ray Train's default)."""
    os.environ["RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"] = str(health_check_timeout_s)
    if placement_timeout_s is None:
        os.environ.pop("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", None)
    else:
        os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(placement_timeout_s)


def tune_gc() -> None:
    """Collect garbage after 10,000 new objects instead of Python's 700 or 2,000, unless the threshold is higher
    already. Importing Ray, torch and transformers allocates hundreds of thousands of live objects; collections took an
    eighth of that time."""
    young_threshold, *older_thresholds = gc.get_threshold()
    if 0 < young_threshold < GC_THRESHOLD:
        gc.set_threshold(GC_THRESHOLD, *older_thresholds)


@contextlib.contextmanager
def trim_malloc(is_enabled: bool = True) -> Iterator[None]:
    """Within the block, return freed blocks of `TRIMMED_MMAP_THRESHOLD` bytes and more to the system at once, if
    `is_enabled`.

    `ENV_DEFAULTS` keeps them for the next micro-batch, which allocates the same sizes in the same order. For blocks of
    many sizes, such as gathered weights of layers, the kept blocks are holes: up to 1.7 times the live memory, with
    another factor from run to run. A value set by the user stays.
    """
    uses_defaults = all(os.environ.get(name) == ENV_DEFAULTS[name] for name in _MALLOC_SETTINGS)
    if not (is_enabled and uses_defaults and _set_malloc_thresholds(TRIMMED_MMAP_THRESHOLD, TRIMMED_HEAP_THRESHOLD)):
        yield
        return
    try:
        yield
    finally:
        _set_malloc_thresholds(*(int(ENV_DEFAULTS[name]) for name in _MALLOC_SETTINGS))
        release_freed_memory()


def _set_malloc_thresholds(mmap_threshold: int, trim_threshold: int) -> bool:
    """Set the size from which a block has its own mapping, and the free memory at the heap's end above which it is
    returned, in bytes. Returns whether the C library took both."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        libc = ctypes.CDLL(None)
        return bool(libc.mallopt(M_MMAP_THRESHOLD, mmap_threshold) and libc.mallopt(M_TRIM_THRESHOLD, trim_threshold))
    return False


def release_freed_memory() -> None:
    """Return freed memory to the system. `ENV_DEFAULTS` keeps up to 512 MB of it for the next step, which is useless
    between two trainings."""
    with contextlib.suppress(OSError, AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)


# ---------------------------------------------------------------------------- the cores and the memory of a container


def available_cores() -> int:
    """Return the number of CPU cores for this process; a container or taskset may allow fewer than the machine has."""
    quota = cpu_quota()
    return _count_affinity_cores() if quota is None else max(1, min(_count_affinity_cores(), int(quota)))


def _count_affinity_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return the CPUs of this process's quota; None without one. `root`: folder with sys and proc."""
    quotas = []
    for folder in _cgroup_folders(root):
        quota, period = (*(_read_words(folder / "cpu.max")), "", "")[:2]
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def free_memory_bytes(root: Path = ROOT) -> float | None:
    """Return the bytes that this process's groups may still use; None without a limit. Files that the kernel can drop
    at once count as free."""
    free_bytes = []
    for folder in _cgroup_folders(root):
        limit, usage = _read_words(folder / "memory.max"), _read_words(folder / "memory.current")
        if limit and usage and limit[0].isdigit() and int(limit[0]) < _physical_memory_bytes():
            stat = _read_words(folder / "memory.stat")
            reclaimable_bytes = int(stat[stat.index("inactive_file") + 1]) if "inactive_file" in stat else 0
            free_bytes.append(int(limit[0]) - max(0, int(usage[0]) - reclaimable_bytes))
    return max(0, min(free_bytes)) if free_bytes else None


def describe_container_limits(cores: int | None = None, root: Path = ROOT) -> str | None:
    """Describe the limits for the user; None if the process has all `cores` and all memory."""
    cores = cores or _count_affinity_cores()
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
