"""What a private Ray is started with: processors for its data tasks, size and place of its object store."""

import errno
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import ray

from rtrain import config, ray_internals
from rtrain.cluster import connection
from rtrain.cluster.capacity import DATA_CPUS, data_cpus
from rtrain.cluster.connection import LEAST_STORE_BYTES, OBJECT_STORE_BYTES, ObjectStore, object_store
from rtrain.core.errors import UserError
from tests.conftest import STARTUP
from tests.root import ROOT

HOOK = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
MB = 1 << 20


@pytest.mark.parametrize(
    ("platform", "free", "expected"),
    [
        ("linux", 24 << 30, ObjectStore(OBJECT_STORE_BYTES)),
        ("linux", 2 * OBJECT_STORE_BYTES, ObjectStore(OBJECT_STORE_BYTES)),
        ("linux", 600 * MB, ObjectStore(300 * MB)),
        ("linux", 2 * LEAST_STORE_BYTES, ObjectStore(LEAST_STORE_BYTES)),
        ("darwin", None, ObjectStore(OBJECT_STORE_BYTES)),
    ],
)
def test_shared_memory_holds_the_store(platform: str, free: int | None, expected: ObjectStore) -> None:
    assert object_store(platform, free) == expected


@pytest.mark.parametrize("free", [64 * MB, 2 * LEAST_STORE_BYTES - 1, 0, None])
def test_without_enough_of_it_the_store_is_a_file(free: int | None) -> None:
    store = object_store("linux", free)
    assert (store.size, store.folder, bool(store.notice)) == (OBJECT_STORE_BYTES, tempfile.gettempdir(), True)


@pytest.mark.parametrize(("workers", "cpus"), [(1, 2), (2, 2), (4, 2), (7, 2), (8, 3), (16, 4), (100, 14), (1000, 127)])
def test_data_tasks_have_more_cpus_where_there_are_more_workers(workers: int, cpus: int) -> None:
    assert data_cpus(None, workers) == cpus >= DATA_CPUS


@pytest.mark.ray
@pytest.mark.slow
def test_a_container_s_shared_memory_is_enough(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system (unshare --mount)")
    command = ["unshare", "--mount", sys.executable, "-m", "tests.small_shm", str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{STARTUP}"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "104857600 bytes through the store"
    assert len([line for line in done.stderr.splitlines() if "/dev/shm" in line]) == 1


# ------------------------------------------------------------------------------------------------------------ the token


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where Ray's token is to be. This process has imported Ray, as commands have by the time they start it."""
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / ".ray" / "auth_token"))
    return tmp_path / ".ray" / "auth_token"


@pytest.mark.parametrize("begun", [False, True])
def test_a_token_is_made_where_there_is_none_and_where_a_killed_command_left_an_empty_one(
    token: Path, begun: bool
) -> None:
    if begun:
        token.parent.mkdir()
        token.touch()
    connection.ensure_token()
    assert len(token.read_text()) == 64
    assert token.stat().st_mode & 0o777 == 0o600
    first = token.read_text()
    connection.ensure_token()
    assert token.read_text() == first
    assert [path.name for path in token.parent.iterdir()] == ["auth_token"]


def test_a_command_that_is_ended_while_it_makes_the_token_leaves_none(
    token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(path: Path, text: str) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", ended)
    with pytest.raises(KeyboardInterrupt):
        connection.ensure_token()
    assert list(token.parent.iterdir()) == []


def test_a_token_is_made_on_storage_without_hard_links(token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    connection.ensure_token()
    assert len(token.read_text()) == 64
    assert token.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in token.parent.iterdir()] == ["auth_token"]


def test_where_no_token_can_be_written_the_variable_is_named(token: Path) -> None:
    token.parent.write_text("a file in place of a folder")
    with pytest.raises(UserError) as refused:
        connection.ensure_token()
    assert refused.value.code == "not_writable"


def test_of_two_commands_that_make_the_token_at_once_one_s_counts(token: Path) -> None:
    connection.make_token(token)
    first, exists = token.read_text(), Path.exists
    with pytest.MonkeyPatch.context() as patch:  # the other one has looked before
        patch.setattr(Path, "exists", lambda path: path != token and exists(path))
        connection.make_token(token)
    assert token.read_text() == first


def test_a_command_whose_own_ray_has_lost_its_store_ends_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    def store_has_ended() -> bool:
        looks.append(time.monotonic())
        return len(looks) > 1

    monkeypatch.setattr(ray_internals, "store_has_ended", store_has_ended)
    monkeypatch.setattr(connection, "KEPT_S", 0.5)
    with pytest.raises(UserError) as lost:
        connection.until_interrupted()
    assert lost.value.code == "store_lost"
    assert len(looks) == 2
    assert time.monotonic() - looks[1] >= 0.5


@pytest.mark.ray
def test_nothing_is_left_of_a_private_ray_not_even_what_its_raylet_has_lost(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.lost_worker", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{STARTUP}"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lost, known = done.stdout.split()
    assert known == "True"
    assert not psutil.pid_exists(int(lost)) or psutil.Process(int(lost)).status() == psutil.STATUS_ZOMBIE


# ----------------------------------------------------------------------------------------------------------- the start


def test_a_cluster_that_is_named_is_none_of_this_command_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert connection.starts_ray(config.load("intent"))
    assert not connection.starts_ray(config.load("intent", {"cluster.address": "10.0.0.1:6379"}))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    assert not connection.starts_ray(config.load("intent"))
