"""A call leaves the user's process unchanged."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from rtrain import config
from rtrain.api import notebook, process
from rtrain.cluster import connection
from rtrain.core import env
from rtrain.core.errors import UserError
from tests.support import stock


@pytest.fixture
def own_handler() -> Iterator[Any]:
    """A SIGTERM handler of the user's program."""

    def handle(number: int, frame: FrameType | None) -> None: ...

    previous = signal.signal(signal.SIGTERM, handle)
    yield handle
    signal.signal(signal.SIGTERM, previous)


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_a_call_restores_folder_environment_path_and_handlers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_handler: Any, error: type[BaseException] | None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_TQDM", "1")
    monkeypatch.delenv("TUNE_DISABLE_SIGINT_HANDLER", raising=False)
    folder, environment, path, threshold = Path.cwd(), dict(os.environ), [*sys.path], gc.get_threshold()

    @process.restore_process()
    def call() -> str:
        assert os.environ["TUNE_DISABLE_SIGINT_HANDLER"] == env.ENV_DEFAULTS["TUNE_DISABLE_SIGINT_HANDLER"]
        assert os.environ["RAY_TQDM"] == "1"  # the user's own value
        assert signal.getsignal(signal.SIGTERM) is not own_handler
        os.chdir("/")
        os.environ.update(ADDED="1", RAY_TQDM="2")
        del os.environ["PATH"]
        sys.path.insert(0, "elsewhere")
        gc.set_threshold(12_345)
        if error is not None:
            raise error
        return "done"

    if error is None:
        assert call() == "done"
    else:
        with pytest.raises(error):
            call()
    assert (Path.cwd(), dict(os.environ), sys.path, gc.get_threshold()) == (folder, environment, path, threshold)
    assert signal.getsignal(signal.SIGTERM) is own_handler


def test_an_interrupted_run_is_named_if_it_exists(tmp_path: Path) -> None:
    run = stock.make(tmp_path / "run", ended="interrupted")
    with pytest.raises(KeyboardInterrupt) as caught, process.name_interrupted_run(run.folder):
        raise KeyboardInterrupt
    assert isinstance(caught.value, process.RunInterruptedError)
    assert caught.value.folder == run.folder
    with pytest.raises(KeyboardInterrupt) as unnamed, process.name_interrupted_run(tmp_path / "none"):
        raise KeyboardInterrupt
    assert type(unnamed.value) is KeyboardInterrupt


def test_events_go_to_the_caller_a_notebook_or_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    with process.show_progress(seen.append) as progress:
        progress({"kind": "stage", "text": "here"})
    assert [event["text"] for event in seen] == ["here"]
    shown: list[str] = []
    handle = SimpleNamespace(update=lambda html: shown.append(html.text))

    def display(html: Any, display_id: bool) -> Any:
        shown.append(html.text)
        return handle

    shell = type("ZMQInteractiveShell", (), {})()
    ipython = SimpleNamespace(
        get_ipython=lambda: shell,
        display=SimpleNamespace(display=display, HTML=lambda text: SimpleNamespace(text=text)),
    )
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    with process.show_progress(None) as progress:
        progress({"kind": "stage", "text": "<b>rows</b>"})
        progress({"kind": "progress", "step": 1, "total_steps": 4, "loss": 0.5, "time": 1e9})
    assert isinstance(progress, notebook.NotebookProgress)
    assert "&lt;b&gt;rows" in shown[0]
    assert 'value="0.250"' in shown[1]
    assert len(shown) == 3  # the last one has no status any more
    assert "0.5000" not in shown[2]


class Sessions:
    """`connection.session` without Ray: its starts and ends, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.is_connected = False

    @contextmanager
    def session(self, settings: Any, folder: Path, on_event: Any, concurrent_runs: int = 1) -> Iterator[None]:
        address = settings.deploy.cluster.address or "local"
        self.log.append(f"start {address}")
        self.is_connected = True
        on_event({"kind": "stage", "text": "started"})
        yield
        self.is_connected = False
        self.log.append(f"end {address}")
        on_event({"kind": "stage", "text": "ended"})

    def would_start_ray(self, settings: Any) -> bool:
        return settings.deploy.cluster.address is None and not self.is_connected


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sessions]:
    stand_in = Sessions()
    monkeypatch.setattr(connection, "session", stand_in.session)
    monkeypatch.setattr(connection, "would_start_ray", stand_in.would_start_ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield stand_in
    process.close_ray()


def connect(tmp_path: Path, error: BaseException | None = None, runs: int = 1, **overrides: Any) -> list[str]:
    """One call that connects to Ray; return the texts of its events."""
    texts: list[str] = []
    settings = config.load_config("intent", {name.replace("__", "."): value for name, value in overrides.items()})
    with process.connect_ray(settings, tmp_path, lambda event: texts.append(event["text"]), runs):
        if error is not None:
            raise error
    return texts


def test_ray_is_started_once_for_several_calls_and_ends_once(tmp_path: Path, sessions: Sessions) -> None:
    texts = connect(tmp_path)
    assert connect(tmp_path) == []
    process.close_ray()
    process.close_ray()
    assert sessions.log == ["start local", "end local"]
    assert texts == ["started"]  # nothing after its call


def test_ray_starts_again_for_more_cpus_another_address_and_after_its_end(tmp_path: Path, sessions: Sessions) -> None:
    connect(tmp_path)
    connect(tmp_path, runs=1000)
    connect(tmp_path, cluster__address="host:6379")
    assert sessions.log == ["start local", "end local"] * 2 + ["start host:6379", "end host:6379"]
    connect(tmp_path)
    sessions.is_connected = False  # the user's ray.shutdown()
    connect(tmp_path)
    assert sessions.log[6:] == ["start local", "end local", "start local"]


def test_ray_ends_with_an_interruption_and_stays_after_an_error_of_the_user(tmp_path: Path, sessions: Sessions) -> None:
    with pytest.raises(UserError):
        connect(tmp_path, UserError("wrong"))
    assert sessions.log == ["start local"]
    with pytest.raises(KeyboardInterrupt):
        connect(tmp_path, KeyboardInterrupt())
    assert sessions.log == ["start local", "end local"]


def test_a_command_ends_ray_itself(tmp_path: Path, sessions: Sessions) -> None:
    with process.end_ray_with_calls():
        assert connect(tmp_path) == ["started", "ended"]
    assert sessions.log == ["start local", "end local"]
