"""Recovery policy: the cause of a failure, whether a run makes another attempt, and with how many workers. Pure
functions."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rtrain.core.errors import TemporaryFailureError, UserError
from rtrain.parallel.collectives import OtherRankFailed

FailureCause = Literal["crash", "memory", "node_lost", "preemption", "refused"]
"""`memory`: out of memory; micro-batches are halved afterwards. `node_lost`: a node with workers was lost without
notice. `refused`: an error that the user must fix; a retry would fail again."""

OUT_OF_MEMORY_PHRASES = (
    *("MemoryError", "out of memory", "can't allocate memory", "not enough memory", "low on memory", "ALLOC_FAILED"),
)
"""Phrases of Python, CUDA, torch's CPU allocator, Ray's memory monitor, cuBLAS and cuDNN."""
PROCESS_DEATH_ERRORS = ("RayActorError", "WorkerCrashedError", OtherRankFailed.__name__)
"""Types of errors after the death of a process: Ray's, and the one of ranks that waited for it."""
PEER_LOSS_MESSAGES = ("by peer", "remote process exited")
"""Phrases of Gloo and NCCL for a lost peer."""
MIN_MICRO_BATCH_TOKENS = 64
"""Minimum tokens of a micro-batch. Smaller ones save no memory: weights and optimizer state dominate."""

# ---------------------------------------------------------------------------------------------------------- decisions


def count_halvings(events: Iterable[Mapping[str, Any]]) -> int:
    """Return how many attempts ran out of memory. Each halves the micro-batch, for resumes too."""
    return sum(event["kind"] == "crashed" and event["cause"] == "memory" for event in events)


def halve_micro_batch_tokens(requested_tokens: int, num_halvings: int) -> int:
    """Return the tokens of a micro-batch after so many halvings. A step keeps its rows in more micro-batches."""
    return max(min(requested_tokens, MIN_MICRO_BATCH_TOKENS), requested_tokens >> num_halvings)


@dataclass
class RetryBudget:
    """Retry budget of a run. Preemptions and lost spot nodes do not count.

    Crashes are counted since the last progress: a run of weeks may meet many, but a crash that repeats at the same step
    is caused by the run itself.
    """

    max_failures: int
    failures: int = 0
    last_crash_step: int = -1
    """Step of the newest checkpoint at the last crash."""
    last_error: str | None = None
    """Message of the last crash if it was a program error."""

    def should_retry(
        self, cause: FailureCause, checkpoint_step: int, is_spot_loss: bool = False, error: str | None = None
    ) -> bool:
        """Return whether to make another attempt.

        Args:
            checkpoint_step: step of the newest checkpoint.
            is_spot_loss: all lost nodes were spot nodes.
            error: message of a program error (no dead process, no failed disk); the same error at the same step ends
                the run.
        """
        if cause == "refused":
            return False
        if cause == "preemption" or (cause == "node_lost" and is_spot_loss):
            return True
        if error is not None and error == self.last_error and checkpoint_step <= self.last_crash_step:
            return False
        self.last_error = error
        self.failures = 1 if checkpoint_step > self.last_crash_step else self.failures + 1
        self.last_crash_step = max(self.last_crash_step, checkpoint_step)
        return self.failures <= self.max_failures


def usable_workers(max_workers: int, min_workers: int | None, available_workers: int) -> int:
    """Return the workers of the next attempt; 0: wait for more.

    Without `min_workers` the number is fixed, and Ray waits for the resources.
    """
    if min_workers is None:
        return max_workers
    workers = min(max_workers, available_workers)
    return workers if workers >= min_workers else 0


def next_worker_limit(was_placed: bool, workers: int, min_workers: int | None, max_workers: int) -> int:
    """Return the maximum workers of the next attempt: `max_workers`, or one fewer than the last attempt if Ray could
    not place it: the free resources are fragmented or in use, and the same number would time out again."""
    return max_workers if was_placed or min_workers is None else max(min_workers, workers - 1)


@dataclass
class GrowthTimer:
    """Decides when a run restarts with more workers: after the cluster had room for more for `delay_s` seconds.

    Every poll of that time must show the room in the cluster's total capacity: nodes that come and go would cost
    restarts. One poll must show it free, otherwise other jobs hold it; not every poll, since the run's own data tasks
    take CPUs for moments.
    """

    delay_s: float
    started_at: float | None = None
    max_free_workers: int = 0

    def should_grow(self, now: float, workers: int, total_workers: int, free_workers: int) -> bool:
        """Update the timer; return whether to grow. `total_workers`: capacity of the whole cluster; `free_workers`:
        free now."""
        if total_workers <= workers:
            self.started_at, self.max_free_workers = None, 0
            return False
        self.started_at = now if self.started_at is None else self.started_at
        self.max_free_workers = max(self.max_free_workers, free_workers)
        if now - self.started_at < self.delay_s:
            return False
        can_grow, self.started_at, self.max_free_workers = self.max_free_workers > workers, None, 0
        return can_grow


# -------------------------------------------------------------------------------------------------- causes of a failure


def find_causes(error: Exception) -> list[Exception]:
    """Return the error, the Ray controller's error and the workers' errors, without ranks that waited for a failed
    one."""
    controller_error = getattr(error, "controller_failure", None)
    worker_errors = list(getattr(error, "worker_failures", {}).values())
    primary_errors = [
        error for error in worker_errors if not isinstance(getattr(error, "_base_exc", error), OtherRankFailed)
    ]
    return [error, *([controller_error] if controller_error else []), *(primary_errors or worker_errors)]


def find_user_error(causes: Sequence[Exception]) -> UserError | None:
    """Return the first cause that the user can fix."""
    base_errors = (getattr(cause, "_base_exc", cause) for cause in causes)
    return next((error for error in base_errors if isinstance(error, UserError)), None)


def classify_failure(causes: Sequence[Exception], *, is_preempted: bool) -> FailureCause:
    """Return the cause of a failed attempt; a crash may turn out to be a lost node.

    Args:
        is_preempted: the attempt was asked to stop for a preemption.
    """
    user_error = find_user_error(causes)
    if user_error is not None and not isinstance(user_error, TemporaryFailureError):
        return "refused"
    if is_preempted or any(getattr(cause, "preempted", False) for cause in causes):
        return "preemption"
    return "memory" if is_out_of_memory(map(str, causes)) else "crash"


def is_out_of_memory(errors: Iterable[str]) -> bool:
    return any(phrase in error for error in errors for phrase in OUT_OF_MEMORY_PHRASES)


def is_placement_timeout(error: Exception) -> bool:
    """Return whether Ray could not place the worker group in time; no worker was started."""
    return any(type(cause).__name__ == "WorkerGroupStartupTimeoutError" for cause in find_causes(error))


def may_be_node_loss(causes: Sequence[Exception]) -> bool:
    """Return whether a node may be lost: a process died without an error, or ranks report a lost peer."""

    def is_process_death(error: Exception) -> bool:
        return any(kind.__name__ in PROCESS_DEATH_ERRORS for kind in type(getattr(error, "_base_exc", error)).__mro__)

    return any(is_process_death(cause) or any(words in str(cause) for words in PEER_LOSS_MESSAGES) for cause in causes)


def is_program_error(causes: Sequence[Exception]) -> bool:
    """Return whether a worker raised a Python error: no dead process, lost peer, disk or network error."""
    base_errors = [getattr(cause, "_base_exc", cause) for cause in causes[1:]]
    return (
        bool(base_errors)
        and not may_be_node_loss(causes)
        and not any(isinstance(error, OSError) for error in base_errors)
    )


def summarize_causes(causes: Sequence[Exception]) -> str:
    """Return one line: the last line of a traceback, Ray's exit message of a dead process, or the memory users after an
    out-of-memory kill."""
    if memory_message := describe_out_of_memory(map(str, causes)):
        return memory_message
    lines = [line for line in str(causes[-1]).splitlines() if line.strip()]
    exit_line = next((line for line in lines if line.startswith("Worker exit type")), None)
    summary = exit_line or (lines[-1] if lines else type(getattr(causes[-1], "_base_exc", causes[-1])).__name__)
    return summary if len(summary) <= 200 else summary[:200] + " ..."


_NODE_MEMORY = re.compile(
    r"Memory on the node \(IP: (?P<node>[^,]+), .*?was (?P<used>[\d.]+)GB used / (?P<limit>[\d.]+)GB limit"
)
_MEMORY_THRESHOLD = re.compile(r"exceeded threshold of .*?\((?P<share>[\d.]+)% of")
_KILLED_WORKER = re.compile(r"Selected to kill: .*?pid=(?P<pid>\d+), actual memory used=(?P<used>[\d.]+)GB")
_PROCESS_MEMORY = re.compile(r"^(?P<pid>\d+)\t(?P<used>[\d.]+)\t(?P<command>.+)$", re.MULTILINE)
MAX_NAMED_PROCESSES = 3
"""Maximum number of processes in an error message."""
MAX_COMMAND_CHARACTERS = 60


def describe_out_of_memory(errors: Iterable[str]) -> str | None:
    """Return the memory users and a fix, if Ray's memory monitor killed a worker; otherwise None.

    The monitor's own message has forty lines and names Ray's settings only.
    """
    monitor_message = next((error for error in errors if _NODE_MEMORY.search(error)), None)
    if monitor_message is None or not (node_match := _NODE_MEMORY.search(monitor_message)):
        return None
    share_text = (
        f", above {float(match['share']):.3g} %" if (match := _MEMORY_THRESHOLD.search(monitor_message)) else ""
    )
    # By process: a worker group's error repeats the message, and idle processes are killed with a worker.
    killed_by_pid = {match["pid"]: float(match["used"]) for match in _KILLED_WORKER.finditer(monitor_message)}
    usage_by_pid = {
        match["pid"]: f"{match['used']} GB {match['command'].strip()[:MAX_COMMAND_CHARACTERS]} ({match['pid']})"
        for match in _PROCESS_MEMORY.finditer(monitor_message)
    }
    largest_pid = max(killed_by_pid, key=lambda pid: killed_by_pid[pid], default=None)
    other_processes = f" and {len(killed_by_pid) - 1} more" if len(killed_by_pid) > 1 else ""
    killed_description = (
        f"; Ray ended process {largest_pid} with {killed_by_pid[largest_pid]:.2f} GB{other_processes}"
        if largest_pid
        else ""
    )
    largest_description = (
        f". The largest processes there: {'; '.join(list(usage_by_pid.values())[:MAX_NAMED_PROCESSES])}"
        if usage_by_pid
        else ""
    )
    return (
        f"node {node_match['node']} ran out of memory: {node_match['used']} of {node_match['limit']} GB were "
        f"used{share_text}{killed_description}{largest_description}. "
        "Lower train.max_tokens_per_micro_batch or data.max_tokens, take fewer train.workers on a node, or nodes "
        "with more memory"
    )
