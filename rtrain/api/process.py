"""The user's own process during a call: a script, or the kernel of a notebook.

A call sets rtrain's environment, and restores the working directory, the environment variables, the module path, the
handlers of signals and the garbage collector's threshold. Ray is connected once: a Ray that rtrain has started serves
later calls too, until the process ends or a call fails. A Ray that the user has started is used and left alone.
"""

import atexit
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtrain.core import env, signals
from rtrain.core.errors import TemporaryFailureError, UserError
from rtrain.core.run_folder import Run

if TYPE_CHECKING:
    from rtrain.config import Config

OnEvent = Callable[[dict[str, Any]], None]
RESTORED_SIGNALS = (signal.SIGINT, signal.SIGTERM)
AUTHENTICATION_VARIABLES = ("RAY_AUTH_MODE",)
"""Variables that stay set: Ray reads its mode once, when it is imported, and a later start must agree with it."""


class RunInterruptedError(KeyboardInterrupt):
    """Ctrl-C, or the stop button of a notebook, has ended a run or a search. Its newest checkpoint is saved."""

    def __init__(self, folder: Path):
        self.folder = folder
        super().__init__(f"{folder} is saved; the same call with out={str(folder)!r} and resume=True continues it")


@contextmanager
def restore_process() -> Iterator[None]:
    """Set rtrain's environment for a block or for a function, and restore the process at its end."""
    folder, environment, path, threshold = Path.cwd(), dict(os.environ), [*sys.path], gc.get_threshold()
    handlers = {number: signal.getsignal(number) for number in RESTORED_SIGNALS}
    try:
        env.set_env_defaults()
        with signals.raise_on_sigterm():
            yield
    finally:
        os.chdir(folder)
        for name in os.environ.keys() - environment.keys() - {*AUTHENTICATION_VARIABLES}:
            del os.environ[name]
        os.environ.update(environment)
        sys.path[:] = path
        gc.set_threshold(*threshold)
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if handler is not None:  # None: installed by a library in C
                    signal.signal(number, handler)


# --------------------------------------------------------------------------------------------------------------- Ray


_local_rays: list[tuple[int, ExitStack]] = []
"""(CPUs, session) of the Ray that a call has started for later calls, or empty."""
_single_command_depth: list[None] = []
"""Not empty in the command line, where Ray ends with each call."""


@contextmanager
def end_ray_with_calls() -> Iterator[None]:
    """End Ray with each call within the block, as a command does."""
    _single_command_depth.append(None)
    try:
        yield
    finally:
        _single_command_depth.pop()


@contextmanager
def connect_ray(config: "Config", folder: Path, on_event: OnEvent, concurrent_runs: int = 1) -> Iterator[None]:
    """Connect to Ray for a call, as `connection.session` does; a Ray that it starts serves later calls too."""
    from rtrain.cluster import connection

    cpus = connection.count_local_cpus(config, concurrent_runs)
    is_local = connection.resolve_address(config) is None
    # The user may have called ray.shutdown().
    if _local_rays and not (is_local and not connection.would_start_ray(config) and cpus <= _local_rays[0][0]):
        close_ray()
    if _single_command_depth or not (_local_rays or connection.would_start_ray(config)):
        with connection.session(config, folder, on_event, concurrent_runs):
            yield
        return
    if not _local_rays:
        receivers, stack = [on_event], ExitStack()
        stack.enter_context(connection.session(config, folder, lambda event: receivers[-1](event), concurrent_runs))
        receivers.append(lambda event: None)  # the progress of this call ends before Ray
        _local_rays.append((cpus, stack))
    try:
        yield
    except UserError:
        raise
    except BaseException:  # its workers may be in any state
        close_ray()
        raise


def close_ray() -> None:
    """End the Ray that rtrain has started, if it runs. The end of the process does the same."""
    while _local_rays:
        _local_rays.pop()[1].close()


atexit.register(close_ray)


# ---------------------------------------------------------------------------------------------------------- progress


@contextmanager
def show_progress(on_event: OnEvent | None) -> Iterator[OnEvent]:
    """Yield the receiver of a call's events: `on_event`, else a card in a notebook, a live line on a terminal, or
    plain lines."""
    if on_event is not None:
        yield on_event
        return
    from rtrain.api.notebook import NotebookProgress, is_notebook
    from rtrain.report.progress import ProgressLine

    with NotebookProgress() if is_notebook() else ProgressLine() as progress:
        yield progress


@contextmanager
def save_on_interrupt() -> Iterator[None]:
    """Within the block, let the first Ctrl-C save a checkpoint after the current step, where a run trains; a second one
    ends it at once. Commands, which Ctrl-C ends at once, and programs with their own handler are left alone."""
    from rtrain.runs.stop_request import StopOnSignal

    is_main_thread = threading.current_thread() is threading.main_thread()
    if _single_command_depth or not is_main_thread or signal.getsignal(signal.SIGINT) != signal.default_int_handler:
        yield
        return
    requests: list[int] = []

    def handle(signal_number: int, frame: object) -> None:
        receiver = getattr(signal.getsignal(signal.SIGUSR1), "__self__", None)
        if requests or not isinstance(receiver, StopOnSignal):
            raise KeyboardInterrupt
        requests.append(signal_number)
        os.write(2, b"saving a checkpoint after this step; interrupt again to end at once\n")  # print is not reentrant
        signal.raise_signal(signal.SIGUSR1)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    except TemporaryFailureError:
        if not requests:
            raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if requests:
        raise KeyboardInterrupt


@contextmanager
def name_interrupted_run(folder: Path) -> Iterator[None]:
    """Raise `RunInterruptedError` for an interrupted run, if its folder has been created."""
    try:
        yield
    except RunInterruptedError:
        raise
    except KeyboardInterrupt:
        if not (Run(folder).exists or Run(folder / "fold-0").exists):
            raise
        raise RunInterruptedError(folder) from None
