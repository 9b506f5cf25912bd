"""Drafts of killed token jobs are removed by the next one; the draft of a writer that lives is never touched."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rtrain import drafts
from rtrain.data.stores.store import Store, Writer
from tests.test_stores_store import fill, make

ROOT = Path(__file__).resolve().parents[1]
# As a token job is between its last shard and its commit.
WRITER = """
import sys, time
from pathlib import Path
from rtrain.data.stores.store import Writer
from tests.test_stores_store import fill

writer = Writer(Path(sys.argv[1]))
fill(writer)
print(writer.folder, flush=True)
time.sleep(600)
"""


class Job:
    """A token job in a process of its own, which has written its shards and does not go on."""

    def __init__(self, final: Path):
        command = [sys.executable, "-c", WRITER, str(final)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        self.draft = Path(self.process.stdout.readline().strip())
        assert len(list((self.draft / "shards").iterdir())) == 2

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait() == -signal.SIGKILL
        assert self.process.stdout
        self.process.stdout.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    started = Job(tmp_path / "abc")
    yield started
    if started.process.poll() is None:
        started.kill()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def age(folder: Path, seconds: float) -> None:
    """Let all of a folder have been written that long ago."""
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (time.time() - seconds,) * 2)


def test_the_draft_of_a_killed_job_is_removed_by_the_next(job: Job, tmp_path: Path) -> None:
    job.kill()
    assert names(tmp_path) == {job.draft.name}
    writer = Writer(tmp_path / "abc")
    assert names(tmp_path) == {writer.folder.name}
    writer.commit(fill(writer))
    assert names(tmp_path) == {"abc"}


def test_the_draft_of_a_living_job_is_not_touched(job: Job, tmp_path: Path) -> None:
    age(job.draft, 10 * drafts.SILENT_S)  # however long it takes for a shard
    before = contents(job.draft)
    assert before
    other = Writer(tmp_path / "abc")
    assert names(tmp_path) == {job.draft.name, other.folder.name}
    assert contents(job.draft) == before
    job.kill()
    third = Writer(tmp_path / "abc")
    assert names(tmp_path) == {other.folder.name, third.folder.name}


def test_a_draft_of_the_same_process_lives_until_it_is_committed_or_abandoned(tmp_path: Path) -> None:
    files = os.listdir("/proc/self/fd")
    writers = [Writer(tmp_path / "abc") for _ in range(3)]
    assert names(tmp_path) == {writer.folder.name for writer in writers}
    manifest = fill(writers[0])
    writers[1].abandon()
    writers[2].abandon()
    writers[0].commit(manifest)
    assert names(tmp_path) == {"abc"}
    assert drafts.LOCK not in names(tmp_path / "abc")
    assert os.listdir("/proc/self/fd") == files


def test_writers_at_the_same_time_leave_one_whole_store(tmp_path: Path) -> None:
    for number in range(5):
        final = tmp_path / str(number)
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda _, final=final: make(final).folder, range(16)))
        assert made == [final] * 16
        Store(final).check(size_only=True)
    assert names(tmp_path) == {"0", "1", "2", "3", "4"}


def test_drafts_of_other_stores_are_left(job: Job, tmp_path: Path) -> None:
    job.kill()
    Writer(tmp_path / "abd").abandon()
    assert names(tmp_path) == {job.draft.name}


@pytest.mark.parametrize("lock", [b"another kernel 7", b"", None])
def test_where_no_lock_can_tell_a_draft_is_removed_after_a_day_of_silence(
    tmp_path: Path, lock: bytes | None, job: Job
) -> None:
    """Written from another machine, from storage that has no locks, or killed before it had one."""
    job.kill()
    path = job.draft / drafts.LOCK
    path.unlink() if lock is None else path.write_bytes(lock)
    age(job.draft, drafts.SILENT_S + 60)
    (job.draft / "shards" / "000000-000002.arrow").touch()  # the only thing that is new
    drafts.sweep(tmp_path / "abc")
    assert names(tmp_path) == {job.draft.name}
    age(job.draft, drafts.SILENT_S + 60)
    drafts.sweep(tmp_path / "abc")
    assert names(tmp_path) == set()


def test_storage_without_locks_is_written_to_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    first, second = Writer(tmp_path / "abc"), Writer(tmp_path / "abc")
    assert names(tmp_path) == {first.folder.name, second.folder.name}
    manifest = fill(second)
    first.abandon()
    assert second.commit(manifest).rows("train") == 3
    assert names(tmp_path) == {"abc"}


def test_a_draft_is_moved_away_before_it_is_emptied(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should its writer live after all and be about to move it to the final name, that fails: no store is hurt."""
    job.kill()
    emptied: list[Path] = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: emptied.append(path))
    drafts.sweep(tmp_path / "abc")
    assert not job.draft.exists()
    assert {path.name for path in emptied} == names(tmp_path)
    monkeypatch.undo()
    drafts.sweep(tmp_path / "abc")  # as after a kill between the two
    assert names(tmp_path) == set()


def test_a_draft_that_cannot_be_removed_stops_no_job(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    job.kill()
    monkeypatch.setattr(Path, "rename", refuse)
    drafts.sweep(tmp_path / "abc")
    assert names(tmp_path) == {job.draft.name}
