"""Start of a private cluster: CPUs for its data tasks, size and folder of its object store."""

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
from rtrain.cluster.connection import MIN_OBJECT_STORE_BYTES, OBJECT_STORE_BYTES, ObjectStore, choose_object_store
from rtrain.cluster.data_tasks import MIN_DATA_CPUS, resolve_data_cpus
from tests.conftest import STARTUP
from tests.support.refusals import refused_with
from tests.support.root import ROOT

HOOK = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
MB = 1 << 20


@pytest.mark.parametrize(
    ("platform", "free", "expected"),
    [
        ("linux", 24 << 30, ObjectStore(OBJECT_STORE_BYTES)),
        ("linux", 2 * OBJECT_STORE_BYTES, ObjectStore(OBJECT_STORE_BYTES)),
        ("linux", 600 * MB, ObjectStore(300 * MB)),
        ("linux", 2 * MIN_OBJECT_STORE_BYTES, ObjectStore(MIN_OBJECT_STORE_BYTES)),
        ("darwin", None, ObjectStore(OBJECT_STORE_BYTES)),
    ],
)
def test_shared_memory_holds_the_store(platform: str, free: int | None, expected: ObjectStore) -> None:
    assert choose_object_store(platform, free) == expected


@pytest.mark.parametrize("free", [64 * MB, 2 * MIN_OBJECT_STORE_BYTES - 1, 0, None])
def test_without_enough_of_it_the_store_is_a_file(free: int | None) -> None:
    store = choose_object_store("linux", free)
    assert (store.size_bytes, store.folder, bool(store.warning)) == (OBJECT_STORE_BYTES, tempfile.gettempdir(), True)


@pytest.mark.parametrize(("workers", "cpus"), [(1, 2), (2, 2), (4, 2), (7, 2), (8, 3), (16, 4), (100, 14), (1000, 127)])
def test_data_tasks_have_more_cpus_where_there_are_more_workers(workers: int, cpus: int) -> None:
    assert resolve_data_cpus(None, workers) == cpus >= MIN_DATA_CPUS


@pytest.mark.ray
@pytest.mark.slow
def test_a_container_s_shared_memory_is_enough(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system (unshare --mount)")
    command = ["unshare", "--mount", sys.executable, "-m", "tests.support.small_shm", str(tmp_path)]
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


@pytest.mark.parametrize("started_at", [False, True])
def test_a_token_is_made_where_there_is_none_and_where_a_killed_command_left_an_empty_one(
    token: Path, started_at: bool
) -> None:
    if started_at:
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
    with refused_with("not_writable"):
        connection.ensure_token()


def test_of_two_commands_that_make_the_token_at_once_one_s_counts(token: Path) -> None:
    connection.write_token(token)
    first, exists = token.read_text(), Path.exists
    with pytest.MonkeyPatch.context() as patch:  # the other one has looked before
        patch.setattr(Path, "exists", lambda path: path != token and exists(path))
        connection.write_token(token)
    assert token.read_text() == first


def test_a_command_whose_own_ray_has_lost_its_store_ends_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    def is_gcs_dead() -> bool:
        looks.append(time.monotonic())
        return len(looks) > 1

    monkeypatch.setattr(ray_internals, "is_gcs_dead", is_gcs_dead)
    monkeypatch.setattr(connection, "STORE_LOSS_GRACE_S", 0.5)
    with refused_with("store_lost"):
        connection.wait_until_interrupted()
    assert len(looks) == 2
    assert time.monotonic() - looks[1] >= 0.5


@pytest.mark.ray
def test_nothing_is_left_of_a_private_ray_not_even_what_its_raylet_has_lost(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.lost_worker", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{STARTUP}"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lost, is_known = done.stdout.split()
    assert is_known == "True"
    assert not psutil.pid_exists(int(lost)) or psutil.Process(int(lost)).status() == psutil.STATUS_ZOMBIE


# ----------------------------------------------------------------------------------------------------------- the start


def test_a_cluster_that_is_named_is_none_of_this_command_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert connection.would_start_ray(config.load_config("intent"))
    assert not connection.would_start_ray(config.load_config("intent", {"cluster.address": "10.0.0.1:6379"}))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    assert not connection.would_start_ray(config.load_config("intent"))
