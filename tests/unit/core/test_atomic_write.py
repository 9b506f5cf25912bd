"""Drafts of killed token jobs are removed by the next one; the draft of a writer that lives is never touched."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rtrain.core import atomic_write
from rtrain.core.run_folder import Run
from rtrain.data.store.store import Store, StoreManifest, StoreWriter
from rtrain.inference import artifact
from tests.support import system_calls
from tests.support.root import ROOT
from tests.unit.data.test_store import fill, make

# As a token job is between its last shard and its commit.
WRITER = """
import sys, time
from pathlib import Path
from rtrain.data.store.store import StoreWriter
from tests.unit.data.test_store import fill

writer = StoreWriter(Path(sys.argv[1]))
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
    writer = StoreWriter(tmp_path / "abc")
    assert names(tmp_path) == {writer.folder.name}
    writer.commit(fill(writer))
    assert names(tmp_path) == {"abc"}


def test_the_draft_of_a_living_job_is_not_touched(job: Job, tmp_path: Path) -> None:
    age(job.draft, 10 * atomic_write.STALE_AFTER_S)  # however long it takes for a shard
    before = contents(job.draft)
    assert before
    other = StoreWriter(tmp_path / "abc")
    assert names(tmp_path) == {job.draft.name, other.folder.name}
    assert contents(job.draft) == before
    job.kill()
    third = StoreWriter(tmp_path / "abc")
    assert names(tmp_path) == {other.folder.name, third.folder.name}


def test_a_draft_of_the_same_process_lives_until_it_is_committed_or_abandoned(tmp_path: Path) -> None:
    files = os.listdir("/proc/self/fd")
    writers = [StoreWriter(tmp_path / "abc") for _ in range(3)]
    assert names(tmp_path) == {writer.folder.name for writer in writers}
    manifest = fill(writers[0])
    writers[1].abandon()
    writers[2].abandon()
    writers[0].commit(manifest)
    assert names(tmp_path) == {"abc"}
    assert atomic_write.LOCK_FILE not in names(tmp_path / "abc")
    assert os.listdir("/proc/self/fd") == files


def test_writers_at_the_same_time_leave_one_whole_store(tmp_path: Path) -> None:
    for number in range(5):
        final = tmp_path / str(number)
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda _, final=final: make(final).folder, range(16)))
        assert made == [final] * 16
        Store(final).check(size_only=True)
    assert names(tmp_path) == {"0", "1", "2", "3", "4"}


@pytest.mark.parametrize("lock", [b"another kernel 7", b"", None])
def test_where_no_lock_can_tell_a_draft_is_removed_after_a_day_of_silence(
    tmp_path: Path, lock: bytes | None, job: Job
) -> None:
    """Written from another machine, from storage that has no locks, or killed before it had one."""
    job.kill()
    path = job.draft / atomic_write.LOCK_FILE
    path.unlink() if lock is None else path.write_bytes(lock)
    age(job.draft, atomic_write.STALE_AFTER_S + 60)
    (job.draft / "shards" / "000000-000002.arrow").touch()  # the only thing that is new
    atomic_write.remove_stale_drafts(tmp_path / "abc")
    assert names(tmp_path) == {job.draft.name}
    age(job.draft, atomic_write.STALE_AFTER_S + 60)
    atomic_write.remove_stale_drafts(tmp_path / "abc")
    assert names(tmp_path) == set()


def test_storage_without_locks_is_written_to_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    first, second = StoreWriter(tmp_path / "abc"), StoreWriter(tmp_path / "abc")
    assert names(tmp_path) == {first.folder.name, second.folder.name}
    manifest = fill(second)
    first.abandon()
    assert second.commit(manifest).num_rows("train") == 3
    assert names(tmp_path) == {"abc"}


def test_a_draft_is_moved_away_before_it_is_emptied(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should its writer live after all and be about to move it to the final name, that fails: no store is hurt."""
    job.kill()
    emptied: list[Path] = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: emptied.append(path))
    atomic_write.remove_stale_drafts(tmp_path / "abc")
    assert not job.draft.exists()
    assert {path.name for path in emptied} == names(tmp_path)
    monkeypatch.undo()
    atomic_write.remove_stale_drafts(tmp_path / "abc")  # as after a kill between the two
    assert names(tmp_path) == set()


# ----------------------------------------------------------------------------------------- faults at every system call

FAULTS = [errno.ENOSPC, errno.EACCES, errno.EIO, None]


def faults_of(
    work: Callable[[], object], error: int | None, prepare: Callable[[], object], **rest: Any
) -> Iterator[bool]:
    """Whether the work succeeded, with a fault at each of its file system calls in turn."""
    prepare()
    calls = len(system_calls.trace(work, **rest).calls)
    assert calls > 3
    for number in range(calls):
        prepare()
        yield system_calls.trace(work, number, error, **rest).succeeded


def folder_of(path: Path, files: dict[str, bytes]) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


OLD, NEW = {"a": b"old", "b": b"old"}, {"a": b"new", "c": b"new"}


@system_calls.needed
@pytest.mark.parametrize("error", FAULTS)
@pytest.mark.parametrize("refused", [(), ("renameat2",)], ids=["exchanged", "no exchange"])
def test_a_folder_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, error: int | None, refused: tuple[str]) -> None:
    final, draft, moved = tmp_path / "artifact", tmp_path / ".artifact.0123abcd", tmp_path / ".artifact.old"

    def prepare() -> None:
        folder_of(final, OLD)
        folder_of(draft, NEW)
        shutil.rmtree(moved, ignore_errors=True)

    for succeeded in faults_of(lambda: artifact.publish_artifact(draft, final), error, prepare, refused=refused):
        held = contents(final)
        if error is None and refused and not held:
            assert contents(moved) == OLD  # killed between two renames
        else:
            assert held in ((NEW,) if succeeded else (OLD, NEW))
        artifact.publish_artifact(folder_of(tmp_path / ".again", NEW), final)
        assert contents(final) == NEW


@system_calls.needed
@pytest.mark.parametrize("error", FAULTS)
def test_a_decision_is_kept_whole_or_not_at_all(tmp_path: Path, error: int | None) -> None:
    run = Run(tmp_path)
    before, after = {"precision": "fp32"}, {"precision": "fp32", "device": "cpu"}

    def prepare() -> None:
        for path in tmp_path.iterdir():
            path.unlink()
        run.decide_once("precision", "fp32")

    for succeeded in faults_of(lambda: run.decide_once("device", "cpu"), error, prepare):
        assert run.decisions in ((after,) if succeeded else (before, after))
        if error is not None and error != errno.EACCES:
            assert len(list(tmp_path.iterdir())) <= 2


@system_calls.needed
@pytest.mark.parametrize("error", FAULTS)
def test_a_token_store_is_committed_whole_or_not_at_all(tmp_path: Path, error: int | None) -> None:
    final, begun = tmp_path / "store", list[tuple[StoreWriter, StoreManifest]]()

    def prepare() -> None:
        for writer, _ in begun:
            writer.abandon()
        shutil.rmtree(final, ignore_errors=True)
        writer = StoreWriter(final)
        begun[:] = [(writer, fill(writer))]

    for succeeded in faults_of(lambda: begun[0][0].commit(begun[0][1]), error, prepare):
        assert final.is_dir() or not succeeded
        if final.is_dir():
            assert Store(final).num_rows("train") > 0


@system_calls.needed
def test_what_gets_its_name_is_on_the_disk_before(tmp_path: Path) -> None:
    """A machine that loses its power may keep a rename and lose what was written before it."""
    folder_of(tmp_path / ".draft", NEW)
    traced = system_calls.trace(lambda: atomic_write.publish_folder(tmp_path / ".draft", tmp_path / "final"))
    calls = [name for name in traced.calls if name != "openat"]
    assert calls == [*["fsync"] * 3, "rename", "fsync"]
    calls = [name for name in system_calls.trace(lambda: Run(tmp_path).decide_once("a", 1)).calls if name != "openat"]
    assert calls == ["write", "fsync", "rename", "fsync"]
