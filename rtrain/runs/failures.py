"""What went wrong in a start, from the error that Ray Train raises: its causes, and what a user should read of them."""

import traceback
from collections.abc import Sequence
from pathlib import Path

from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.parallel.collectives import Elsewhere
from rtrain.runs.recovery import memory_told, out_of_memory


def explain(run: Run, error: Exception) -> UserError:
    """A worker's own UserError as it is; anything else with its traceback in a file of the run."""
    found = causes(error)
    if (known := user_error(found)) is not None:
        return known
    told = f"training failed: {first_line(found)}\nThe traceback is in {keep_traceback(run, 'error', error)}"
    return UserError(told, code="out_of_memory" if out_of_memory(map(str, found)) else "training_failed")


def keep_traceback(run: Run, name: str, error: Exception) -> Path:
    """Write it into a new file of the run."""
    path = run.traceback(name)
    path.write_text("".join(traceback.format_exception(error)), encoding="utf-8", errors="backslashreplace")
    return path


def causes(error: Exception) -> list[Exception]:
    """The error, that of Ray's controller, and those of the workers; without those that only waited for another."""
    controller = getattr(error, "controller_failure", None)
    failures = list(getattr(error, "worker_failures", {}).values())
    own = [found for found in failures if not isinstance(getattr(found, "_base_exc", found), Elsewhere)]
    return [error, *([controller] if controller else []), *(own or failures)]


def user_error(found: Sequence[Exception]) -> UserError | None:
    """The first of the causes that a user can mend."""
    inner = (getattr(cause, "_base_exc", cause) for cause in found)
    return next((one for one in inner if isinstance(one, UserError)), None)


def is_unplaced(error: Exception) -> bool:
    """Whether the worker group could not be placed in time: nothing was started, and nothing is lost."""
    return any(type(cause).__name__ == "WorkerGroupStartupTimeoutError" for cause in causes(error))


SILENT = ("RayActorError", "WorkerCrashedError", Elsewhere.__name__)
"""Errors by which Ray says that a process has died, and a worker that another has failed."""
OF_A_PEER = ("by peer", "remote process exited")
"""Words by which Gloo and NCCL say that another worker has gone."""


def maybe_of_a_node(found: Sequence[Exception]) -> bool:
    """Whether a node may have gone: a process died and said nothing, or workers only tell that another has failed."""

    def is_silent(error: Exception) -> bool:
        return any(kind.__name__ in SILENT for kind in type(getattr(error, "_base_exc", error)).__mro__)

    return any(is_silent(one) or any(words in str(one) for words in OF_A_PEER) for one in found)


def is_of_the_program(found: Sequence[Exception]) -> bool:
    """Whether a worker raised an error of Python's own accord: no process died, no peer left, no disk or net failed."""
    inner = [getattr(cause, "_base_exc", cause) for cause in found[1:]]
    return bool(inner) and not maybe_of_a_node(found) and not any(isinstance(one, OSError) for one in inner)


def first_line(found: Sequence[Exception]) -> str:
    """The last line of a traceback says what happened; where a process died, the first sentence does, and where it was
    ended for want of memory, who used it."""
    if told := memory_told(map(str, found)):
        return told
    lines = [line for line in str(found[-1]).splitlines() if line.strip()]
    died = next((line for line in lines if line.startswith("Worker exit type")), None)
    text = died or (lines[-1] if lines else type(getattr(found[-1], "_base_exc", found[-1])).__name__)
    return text if len(text) <= 200 else text[:200] + " ..."
