"""Shared by all tests: the environment before any heavy import, one Ray per session, small files of rows."""

import csv
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rtrain.core import env

if TYPE_CHECKING:
    from rtrain.runs.worker_pool import ReusableWorkerGroup
    from tests.support.heads import Head
    from tests.support.trained import Trained

# Compiled graphs are a user's own to keep.
os.environ.setdefault("RTRAIN_CACHE", "")
env.set_env_defaults()
# One thread per process: tests start several processes on few cores, and equal sums need equal thread counts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A background job of a shell ignores Ctrl-C, and so would every program that a test starts and interrupts. A handler of
# Python's own is not handed on: what is started has the system's default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# No test asks the model hub; those of it have a hub of their own.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Half of the tests' processor time is the start of processes.
STARTUP = str(Path(__file__).parent / "startup")
if STARTUP not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [STARTUP, os.environ.get("PYTHONPATH")]))


TOGETHER = {
    "trained": ("trained: Trained",),
    "ray": ("ray_session",),
    "programs": ("mark.ray", "mark.serve"),
    "workers": ("on_workers",),
}
"""What runs in one process, by words in the test files; the first that fits. Those that share a Ray and a trained run;
those that share a Ray; those that start Rays of their own, as programs; those that look at one start of three workers.
Two trainings at a time are what two cores bear."""
FIRST = (
    *("ray", "trained", "programs", "workers"),
    "tests/unit/compress/test_quantize_fallback.py",
    "tests/unit/planning/test_memory_needs.py",
    "tests/unit/core/test_signals.py",
)
"""What begins before the files with most tests: groups, and files whose few tests take long. Begun last, any would run
on alone, when the other process has nothing left to do."""


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one file run in one process, and so do the files that `TOGETHER` names. The two groups that share a
    Ray begin, side by side and each in a process that has had none; then the rest of `FIRST`, then the files with most
    tests."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            text = (config.rootpath / path).read_text(encoding="utf-8")
            return next((name for name, words in TOGETHER.items() if any(word in text for word in words)), path)

        def _assign_work_unit(self, node: Any) -> None:
            for name in reversed(FIRST):
                if name in self.workqueue:
                    self.workqueue.move_to_end(name, last=False)
            super()._assign_work_unit(node)

    return ByFile(config, log)


def pytest_collection_finish() -> None:
    """Thousands of tests are no garbage: not to be looked at whenever Python looks for some."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ray_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One private Ray of 4 logical CPUs for the whole session: two workers and the data tasks of one training."""
    from rtrain import config
    from rtrain.cluster.connection import session

    before = Path.cwd()
    folder = tmp_path_factory.mktemp("ray")
    with session(config.load_config("intent"), folder):
        yield folder
    os.chdir(before)


@pytest.fixture(scope="session")
def trained(ray_session: Path) -> "Trained":
    """A finished run of two workers; whoever makes another beside it takes another name."""
    from tests.support.trained import train

    return train(ray_session / "trained")


@pytest.fixture(scope="module")
def kept_workers(ray_session: Path, request: pytest.FixtureRequest) -> Iterator["ReusableWorkerGroup"]:
    """Worker processes that all starts of a module may share: new ones take 10 s and more each time."""
    import ray

    from rtrain.core.run_folder import Run
    from rtrain.runs.worker_pool import ReusableWorkerGroup, start_mailbox_server

    office = start_mailbox_server()
    made = ReusableWorkerGroup(Run(ray_session / f"kept-{request.module.__name__}"), office)
    yield made
    made.shut_down()
    ray.kill(office)


@pytest.fixture(scope="module")
def head() -> Iterator["Head"]:
    """A head as cluster.yaml starts it, with its job API. Kept for the session, it would idle for minutes, which takes
    more of a core than to start it twice."""
    from tests.support.heads import started

    with started() as made:
        yield made


Row = tuple[str, str]


def write_rows(path: Path, rows: list[Row], header: tuple[str, str] = ("text", "label")) -> Path:
    """A csv file of (text, label) rows."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return path


WORDS = {
    "refund": ("money back", "refund", "return my money", "reimburse"),
    "parcel": ("parcel", "delivery", "package", "shipment"),
    "login": ("password", "sign in", "account locked", "login"),
}


def labelled_rows(count: int) -> list[Row]:
    """Rows that a small encoder can learn: each label has words of its own."""
    labels = sorted(WORDS)
    rows = []
    for number in range(count):
        label = labels[number % len(labels)]
        word = WORDS[label][number // len(labels) % 4]
        rows.append((f"please help with {word} {'again and ' * (number % 7)}number {number}", label))
    return rows
