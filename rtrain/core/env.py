"""Environment settings that libraries read when they are imported, and so must be set before.

`prepare()` is called by the command line before any heavy import; processes that Ray starts inherit the values.
A value that the user has set already always wins.
"""

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator, Mapping, MutableMapping

from rtrain.core import cgroup_limits

SETTINGS = {
    # Ray's own progress bars and forwarded logs flood the terminal (a line per operator and worker); rtrain prints one.
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_TQDM": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "1",
    # Ray gives the workers of a cluster that it starts the priority of background work (nice 15). Beside one busy
    # process of anybody's, a training or a replica would then get some 3 % of a core in place of half of it.
    "RAY_worker_niceness": "0",
    # A thread of Tune that outlives an interrupted session would start another Ray with its next call.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    # Tune swallows the first Ctrl-C and returns as if finished; without its handler, Python's own raises as always.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # Tune would write every result of its trials into files of three formats; a search has its own journal.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    # Train's controller looks at its workers every 2 s by default, which costs 2 s at each start, report and end of a
    # run.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # rtrain itself watches for nodes that are about to go (runs/notice.py). A second watch would be one more process,
    # and even an idle one takes 1 % of a core, which the workers of a small machine would lack.
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
    # glibc gives blocks over 128 KB back to the kernel at once, so that a training step pays for page faults on every
    # activation (5 to 13 % of a step, as measured elsewhere). Kept blocks cost memory that the next step uses anyway.
    # Blocks above the threshold still go back: their sizes change, and they would leave holes of gigabytes.
    "MALLOC_MMAP_THRESHOLD_": "67108864",
    "MALLOC_TRIM_THRESHOLD_": "536870912",
    "MALLOC_ARENA_MAX": "4",
}


_LIMITS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""By which glibc's `mallopt` knows them (malloc.h)."""
RETURNED, RETURNED_AT_END = 1 << 20, 64 << 20
"""Bytes, in place of these settings; see `freed_goes_back`."""
COLLECTED_AFTER = 10_000
CACHE = "RTRAIN_CACHE"
"""Folder in which compiled graphs are kept (`rtrain.models.compile_cache`); empty: none is."""
COUNTED_GPUS = "RTRAIN_COUNTED_GPUS"
"""Set to 1 on the nodes of a rehearsed cluster (`rtrain.cluster.rehearsal`), whose GPUs are counted and not there:
workers take one each, and compute on CPUs."""


def gpus_are_counted(environ: Mapping[str, str] | None = None) -> bool:
    return (os.environ if environ is None else environ).get(COUNTED_GPUS) == "1"


def cores() -> int:
    """How many processor cores this process may use; a container or taskset may allow fewer than the machine has."""
    quota = cgroup_limits.cpus()
    return _affinity() if quota is None else max(1, min(_affinity(), int(quota)))


def notice() -> str | None:
    """What to tell the user of the limits of a container; None without."""
    return cgroup_limits.notice(_affinity())


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_limits(answer_s: float, placement_s: float | None) -> None:
    """Set how many seconds Ray Train waits for a worker process that does not answer (by default ten minutes), and for
    free CPUs to place workers on (None: Ray Train's default)."""
    os.environ["RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"] = str(answer_s)
    if placement_s is None:
        os.environ.pop("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", None)
    else:
        os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(placement_s)


def give_memory_back() -> None:
    """Return to the system what this process has freed. By `SETTINGS` it keeps up to 512 MB for the next step; between
    two trainings there is none."""
    with contextlib.suppress(OSError, AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def freed_goes_back(wanted: bool = True) -> Iterator[None]:
    """Inside, this process returns freed blocks of `RETURNED` bytes and more to the system at once, if `wanted`.

    By `SETTINGS` it keeps them for the next pass, which asks for the same sizes in the same order. Where blocks of many
    sizes come and go, as weights that are gathered for a layer do, what is kept is holes: up to 1.7 times what is
    alive, and from run to run another factor. Where the user has set either figure, it stays.
    """
    ours = all(os.environ.get(name) == SETTINGS[name] for name in _LIMITS)
    if not (wanted and ours and _limit(RETURNED, RETURNED_AT_END)):
        yield
        return
    try:
        yield
    finally:
        _limit(*(int(SETTINGS[name]) for name in _LIMITS))
        give_memory_back()


def _limit(block: int, end: int) -> bool:
    """Bytes from which a block has a mapping of its own, and of free memory at the heap's end above which it is
    returned. Whether the C library took both."""
    with contextlib.suppress(OSError, AttributeError):  # another one than glibc
        libc = ctypes.CDLL(None)
        return bool(libc.mallopt(M_MMAP_THRESHOLD, block) and libc.mallopt(M_TRIM_THRESHOLD, end))
    return False


def collect_less() -> None:
    """Look for garbage after 10,000 new objects in place of Python's 700 or 2,000, unless it is less often already.
    Importing Ray, torch and transformers makes hundreds of thousands, none of them garbage; every eighth second of that
    went by with looking."""
    first, *others = gc.get_threshold()
    if 0 < first < COLLECTED_AFTER:
        gc.set_threshold(COLLECTED_AFTER, *others)


def prepare(environ: MutableMapping[str, str] | None = None) -> None:
    """Put `SETTINGS` into the environment, leaving alone what the user has set."""
    environ = os.environ if environ is None else environ
    for name, value in SETTINGS.items():
        environ.setdefault(name, value)
    caches = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    # A user without a name has no home folder, and keeps nothing.
    environ.setdefault(CACHE, os.path.join(caches, "rtrain") if os.path.isabs(caches) else "")
