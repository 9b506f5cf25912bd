"""Environment settings that must precede the imports that read them. Nothing else in rtrain sets environment variables.

`prepare()` is called by the command line before any heavy import; processes that Ray starts inherit the values.
A value that the user has set already always wins.
"""

import os
from collections.abc import MutableMapping

SETTINGS = {
    # Ray's own progress bars and forwarded logs flood the terminal (a line per operator and worker); rtrain prints one.
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_TQDM": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "1",
    # A thread of Tune's that outlives an interrupted session would start a Ray of its own with its next call.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    # Tune swallows the first Ctrl-C and returns as if finished; without its handler, Python's own raises as always.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # Train's controller looks at its workers every 2 s by default: that is 2 s at each start, report and end of a run.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # rtrain sees by itself which nodes are to go (training/notice.py). A second watch would be one more process: each
    # that idles takes 1 % of a core, which on a small machine is the workers'.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # The agent of each node measures its processes every 5 s, for a dashboard that a private cluster does not have.
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
    # Metrics of Ray's own need a Prometheus that a laptop does not run.
    "RAY_TRAIN_METRICS_ENABLED": "0",
    # Tune's default is to change into a folder per trial; relative paths would then point elsewhere in each worker.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # A fast tokenizer that forks after its thread pool has started warns and then runs on one thread anyway.
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    # MLflow's defaults are seven tries of two minutes each, which a run would wait for at its start and at its end.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # glibc gives blocks over 128 KB back to the kernel at once; a training step then pays for page faults on every
    # activation. Keeping them costs memory that the next step uses anyway (measured elsewhere at 5 to 13 % of a step).
    # Blocks above the threshold go back all the same: of changing sizes, they would leave holes of gigabytes.
    "MALLOC_MMAP_THRESHOLD_": "67108864",
    "MALLOC_TRIM_THRESHOLD_": "536870912",
    "MALLOC_ARENA_MAX": "4",
}


def cores() -> int:
    """Processor cores that this process may use: fewer than the machine's where a container or taskset says so."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_limits(answer_s: float, placement_s: float | None) -> None:
    """How long Ray Train waits for a worker process that does not answer (its default is ten minutes), and for CPUs."""
    os.environ["RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"] = str(answer_s)
    if placement_s is None:
        os.environ.pop("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", None)
    else:
        os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(placement_s)


def prepare(environ: MutableMapping[str, str] | None = None) -> None:
    """Put `SETTINGS` into the environment, leaving alone what the user has set."""
    environ = os.environ if environ is None else environ
    for name, value in SETTINGS.items():
        environ.setdefault(name, value)
