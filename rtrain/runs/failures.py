"""Errors of Ray Train as errors for the user: causes, tracebacks and messages."""

import traceback
from collections.abc import Sequence
from pathlib import Path

from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.parallel.collectives import OtherRankFailed
from rtrain.runs.recovery import describe_out_of_memory, is_out_of_memory


def to_user_error(run: Run, error: Exception) -> UserError:
    """Return a worker's UserError unchanged, or a UserError that names the file with the traceback."""
    error_causes = find_causes(error)
    if (known_error := find_user_error(error_causes)) is not None:
        return known_error
    message = (
        f"training failed: {summarize_causes(error_causes)}\nThe traceback is in {write_traceback(run, 'error', error)}"
    )
    return UserError(message, code="out_of_memory" if is_out_of_memory(map(str, error_causes)) else "training_failed")


def write_traceback(run: Run, name: str, error: Exception) -> Path:
    """Write the error's traceback to a new file of the run."""
    path = run.new_traceback(name)
    path.write_text("".join(traceback.format_exception(error)), encoding="utf-8", errors="backslashreplace")
    return path


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


def is_placement_timeout(error: Exception) -> bool:
    """Return whether Ray could not place the worker group in time; no worker was started."""
    return any(type(cause).__name__ == "WorkerGroupStartupTimeoutError" for cause in find_causes(error))


PROCESS_DEATH_ERRORS = ("RayActorError", "WorkerCrashedError", OtherRankFailed.__name__)
"""Types of errors after the death of a process: Ray's, and the one of ranks that waited for it."""
PEER_LOSS_MESSAGES = ("by peer", "remote process exited")
"""Phrases of Gloo and NCCL for a lost peer."""


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
