"""Tests that send signals to their own process. `test_signals` runs them in one that runs nothing else: beside all that
other tests load, a signal was not heard in time, and ended the process that ran the tests."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import typer

from rtrain.api import process
from rtrain.cli import app, options
from rtrain.core import signals
from rtrain.core.errors import CommandInterruptedError
from rtrain.report import PhaseTimer
from rtrain.runs import stop_request
from tests.support import stock
from tests.support.tiny import make_artifact


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_it_is_raised_once_and_cleaning_up_is_not_broken_off() -> None:
    done = []

    def work() -> None:
        try:
            terminate()
        finally:
            terminate()  # `timeout` sends it twice
            done.append("cleaned up")

    with pytest.raises(KeyboardInterrupt), signals.raise_on_sigterm():
        work()
    assert (signals.describe_interruption(), done) == (("ended by SIGTERM", 143), ["cleaned up"])
    with pytest.raises(KeyboardInterrupt), signals.raise_on_sigterm():
        raise KeyboardInterrupt
    assert signals.describe_interruption() == ("interrupted", 130)


@pytest.mark.parametrize(("number", "ended"), [(signal.SIGTERM, "ended by SIGTERM"), (signal.SIGINT, "interrupted")])
def test_a_signal_that_comes_in_a_finalizer_still_ends_the_command(number: signal.Signals, ended: str) -> None:
    class Last:
        def __del__(self) -> None:
            os.kill(os.getpid(), number)
            time.sleep(0.01)

    def work() -> None:
        signals.install_sigterm_handler()  # Ray has set its own handlers in between
        Last()
        time.sleep(30)

    hook, told = sys.unraisablehook, list[object]()
    sys.unraisablehook = lambda error: told.append(error.exc_value)
    try:
        with pytest.raises(KeyboardInterrupt), signals.raise_on_sigterm():
            work()
        assert (signals.describe_interruption()[0], told) == (ended, [])
        with signals.raise_on_sigterm():
            failing = type("Failing", (), {"__del__": lambda self: 1 / 0})()
            del failing
        assert [type(error) for error in told] == [ZeroDivisionError]
    finally:
        sys.unraisablehook = hook


def test_a_second_sigterm_just_after_one_in_a_finalizer_does_not_undo_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Last:
        def __del__(self) -> None:
            terminate()
            time.sleep(0.01)

    class Timer(threading.Timer):
        def start(self) -> None:
            terminate()  # `timeout` sends it twice, and the hook starts this timer
            time.sleep(0.01)
            super().start()

    def work() -> None:
        Last()
        time.sleep(5)

    monkeypatch.setattr(threading, "Timer", Timer)
    with pytest.raises(KeyboardInterrupt), signals.raise_on_sigterm():
        work()
    assert signals.describe_interruption()[0] == "ended by SIGTERM"


def test_the_handler_of_before_is_back_afterwards() -> None:
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with pytest.raises(KeyboardInterrupt), signals.raise_on_sigterm():
            terminate()
        terminate()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


def make_context() -> typer.Context:
    return typer.Context(typer.main.get_command(app.app), obj=PhaseTimer())


@pytest.mark.parametrize(
    ("number", "code", "said"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "ended by SIGTERM")]
)
def test_a_run_that_is_there_is_gone_on_with(tmp_path: Path, number: int, code: int, said: str) -> None:
    run = tmp_path / "my run"

    def interrupted() -> CommandInterruptedError:
        with (
            pytest.raises(CommandInterruptedError) as caught,
            signals.raise_on_sigterm(),
            options.follow_verb(make_context(), "distill", "a teacher"),
            process.name_interrupted_run(run),
        ):
            os.kill(os.getpid(), number)
        return caught.value

    assert (interrupted().exit_code, str(interrupted())) == (code, said)  # nothing is there yet
    run.mkdir()
    (run / "config.yaml").touch()
    assert str(interrupted()) == f"{said}; next: rtrain distill 'a teacher' --resume --out '{run}'"
    make_artifact(run / "artifact")
    assert str(interrupted()) == f"{said}; next: rtrain report '{run}'"


@pytest.fixture
def default_interrupt() -> Iterator[None]:
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def test_an_interruption_requests_a_checkpoint_where_a_run_trains(tmp_path: Path, default_interrupt: None) -> None:
    run, stages = stock.make(tmp_path / "run", ended=None), list[str]()

    @process.save_on_interrupt()
    def train(interruptions: int) -> None:
        with stop_request.StopOnSignal(run):
            for _ in range(interruptions):
                signal.raise_signal(signal.SIGINT)
            stages.append(f"{stop_request.consume_stop(run)}")
        raise stop_request.StoppedByRequest("saved")

    with pytest.raises(KeyboardInterrupt):
        train(1)
    assert stages == [stop_request.SIGNALED]
    with pytest.raises(KeyboardInterrupt):
        train(2)
    assert len(stages) == 1
    with pytest.raises(stop_request.StoppedByRequest):  # of a batch system
        train(0)


@pytest.mark.parametrize("around", [nullcontext, process.end_ray_with_calls])
def test_an_interruption_ends_a_call_at_once_where_nothing_trains(default_interrupt: None, around: Any) -> None:
    stages: list[str] = []

    @process.save_on_interrupt()
    def read_rows() -> None:
        signal.raise_signal(signal.SIGINT)
        stages.append("never")

    with around(), pytest.raises(KeyboardInterrupt):
        read_rows()
    assert stages == []
