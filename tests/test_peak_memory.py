"""Peak memory: children count, shared pages count once, and so do pages that nobody maps."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rtrain.report.live import peak_memory
from rtrain.report.live.peak_memory import PeakMemory

SAY_PID = "import os; print(os.getpid(), flush=True); import sys; sys.stdin.read()"
PRIVATE = f"held = bytearray(b'x') * {{size}}; {SAY_PID}"
SHARED = f"""
import mmap
with open({{path!r}}, "r+b") as file:
    held = mmap.mmap(file.fileno(), 0)
sum(held[at] for at in range(0, len(held), 4096))
{SAY_PID}
"""
MB = 1_000_000


@pytest.fixture(autouse=True)
def still_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs use /dev/shm too."""
    monkeypatch.setattr(peak_memory, "shared_memory_used", lambda: 0)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that are sampled: put some in. This one, and a Ray that it runs, would blur the figures."""
    pids: list[int] = []
    monkeypatch.setattr(peak_memory, "session_processes", lambda: pids)
    return pids


@contextmanager
def child(code: str) -> Iterator[int]:
    """A process that has run `code` up to its `print` of a process id, and ends afterwards."""
    command = [sys.executable, "-S", "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())


def test_this_process_its_children_and_theirs_belong_to_a_session() -> None:
    inner = [sys.executable, "-S", "-c", SAY_PID]
    with child(SAY_PID) as first, child(f"import subprocess; subprocess.run({inner!r})") as grandchild:
        found = set(peak_memory.session_processes())
    assert {os.getpid(), first, grandchild} <= found
    assert os.getppid() not in found
    assert not {first, grandchild} & set(peak_memory.session_processes())


def test_memory_of_a_process_is_counted(counted: list[int]) -> None:
    assert PeakMemory().sample_mb() == 0.0
    with child(PRIVATE.format(size=1)) as small, child(PRIVATE.format(size=80 * MB)) as large:
        counted[:] = [small]
        alone = PeakMemory().sample_mb()
        counted[:] = [small, large]
        both = PeakMemory().sample_mb()
    assert 1 < alone < 30
    assert 80 < both - alone < 110
    assert PeakMemory().sample_mb() == 0.0  # they have ended since they were listed


def test_pages_that_two_processes_share_count_once(counted: list[int], tmp_path: Path) -> None:
    path = tmp_path / "shared"
    path.write_bytes(b"x" * 80 * MB)
    code = SHARED.format(path=str(path))
    with child(code) as first, child(code) as second:
        counted[:] = [first, second]
        assert 80 < PeakMemory().sample_mb() < 120
        counted[:] = [first]
        assert 40 < PeakMemory().sample_mb() < 60  # half of it


def test_pages_of_shm_that_nobody_maps_count(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    used = [50 * MB]
    monkeypatch.setattr(peak_memory, "shared_memory_used", lambda: used[0])
    peak = PeakMemory()
    assert peak.sample_mb() == 0.0
    used[0] += 200 * MB
    assert peak.sample_mb() == 200.0
    used[0] = 0  # others removed theirs: less than before is no negative memory
    assert peak.sample_mb() == 0.0


def test_pages_of_shm_that_a_process_maps_count_once(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in its proportional set size already."""
    path = Path("/dev/shm") / f"rtrain-test-{os.getpid()}"
    peak = PeakMemory()
    try:
        path.write_bytes(b"x" * 30 * MB)
        monkeypatch.setattr(peak_memory, "shared_memory_used", lambda: 30 * MB)
        assert peak.sample_mb() == 30.0
        with child(SHARED.format(path=str(path))) as one:
            counted[:] = [one]
            assert 30 < peak.sample_mb() < 55  # with the interpreter; twice the file would be 60 and more
    finally:
        path.unlink(missing_ok=True)


def test_the_peak_is_the_largest_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    left, all_taken = [10.0, 70.0, 30.0], threading.Event()

    def sample(_: PeakMemory) -> float:
        if len(left) == 1:
            all_taken.set()
        return left.pop(0) if len(left) > 1 else left[0]

    monkeypatch.setattr(peak_memory, "INTERVAL_S", 0.001)
    monkeypatch.setattr(PeakMemory, "sample_mb", sample)
    with PeakMemory() as peak:
        assert all_taken.wait(10)
    assert peak.peak_mb == 70.0


def test_a_command_shorter_than_the_interval_is_sampled_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak_memory, "INTERVAL_S", 60.0)
    with PeakMemory() as peak:
        assert peak.peak_mb == 0.0
    assert peak.peak_mb > 10


def test_the_stage_of_the_peak_and_what_held_it_are_told(counted: list[int]) -> None:
    with child(PRIVATE.format(size=80 * MB)) as large, child(PRIVATE.format(size=1)) as small, PeakMemory() as peak:
        peak.stage = "search"
        counted[:] = [small, large]
    assert peak.at_peak["stage"] == "search"
    [one] = peak.at_peak["processes"]
    assert one["title"].startswith(f"{sys.executable} -S -c held"[:60])
    assert 80 <= one["anonymous_mb"] <= one["mb"] < 110
