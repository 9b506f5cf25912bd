"""One connection to Ray per command: a private local cluster, or the one that the configuration or the job names."""

import importlib.util
import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rtrain import env, ray_internals
from rtrain.cluster import supply
from rtrain.config import Config
from rtrain.errors import UserError

IN_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray's job manager sets it for the entry point of a job."""

DATA_CPUS = 2
"""Ray Data needs logical CPUs of its own beside the workers', or the stream starves without a word. These are the
fewest: a task that reads, and one that may wait for it."""
WORKERS_PER_DATA_CPU = 8
OBJECT_STORE_BYTES = 512 << 20
"""Streams hold tens of megabytes ahead; Ray's default of 30 % of the memory would be counted as used by no one."""
LEAST_STORE_BYTES = 128 << 20
"""Of shared memory: two streams of 64 MB. Ray itself refuses less than 75 MiB."""
SHARED_MEMORY = "/dev/shm"


def package_root() -> Path:
    """The folder that holds rtrain, serve and tune: site-packages, or a checkout."""
    return Path(__file__).resolve().parents[2]


def refuse_shadowed_names() -> None:
    """`serve` and `tune` are common names: a file of the user's that hides ours would fail later, in a Ray worker."""
    for name in ("serve", "tune"):
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec and spec.origin else None
        if origin != package_root() / name / "__init__.py":
            raise UserError(
                f"the module name {name!r} leads to {origin or 'nothing'} instead of rtrain's own package; "
                "rename that file, or start rtrain from another folder"
            )


def forget_folder() -> None:
    """Take the current folder off the module path, so that no file of the user's shadows a module of ours.

    In a job it stays, and what it shadows is refused: Ray has put it on the path of every worker, ahead of ours.
    """
    here = Path.cwd()
    if here != package_root() and IN_JOB not in os.environ:
        sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() != here]
    refuse_shadowed_names()


def leave_folder(folder: Path) -> None:
    """Change into `folder`; neither the old folder nor the new one is left to shadow a module."""
    forget_folder()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)


def _token_file() -> None:
    """Ray writes its token with the umask's permissions; make the file first, readable by its owner alone.

    Ray reads its mode once, when it is imported: where that has happened, its own default (token mode) is left alone.
    """
    if "ray" in sys.modules or os.environ.get("RAY_AUTH_MODE", "token") != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_MODE"] = "token"


@contextmanager
def session(config: Config, folder: Path) -> Iterator[None]:
    """Be connected to Ray, from inside `folder`. A cluster started by this call ends with it; another is left alone."""
    address = config.deploy.cluster.address or os.environ.get("RAY_ADDRESS")
    if address is None:
        _token_file()
    import ray

    if ray.is_initialized():
        yield
        return
    leave_folder(folder)
    _quiet()
    if address is None:
        workers = config.recipe.train.workers
        _start_local(workers, data_cpus(config.deploy.cluster.data_cpus, workers))
    else:
        ray.init(address=address, runtime_env=_worker_env(), log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def _worker_env() -> dict[str, dict[str, str]]:
    """The settings that processes of a cluster started by others would not inherit. A job's own have gone before."""
    os.environ["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"  # the same values again are no conflict
    return {"env_vars": {name: os.environ[name] for name in env.SETTINGS if name in os.environ}}


def on_node_start(parameters: Any, head: bool) -> None:
    """RAY_START_HOOK of cluster.yaml: `ray start --head` opens the Ray Client's port, and has no option against it. And
    the head leaves its jobs the path of its autoscaler's file, which says what nodes there may be (`supply.most`)."""
    parameters.ray_client_server_port = None
    if head and parameters.autoscaling_config:
        os.environ[supply.AUTOSCALER_FILE] = str(Path(parameters.autoscaling_config).expanduser())


def data_cpus(asked: int | None, workers: int) -> int:
    """Logical CPUs for the data tasks of so many workers; `asked` is `cluster.data_cpus`."""
    return DATA_CPUS + workers // WORKERS_PER_DATA_CPU if asked is None else asked


class ObjectStore(NamedTuple):
    size: int
    """Bytes."""
    folder: str | None = None
    """Where it lies; None for Ray's own choice: shared memory on Linux, the folder for temporary files elsewhere."""
    notice: str | None = None


def object_store(platform: str, free: int | None) -> ObjectStore:
    """Size and place of a local Ray's object store; `free`: bytes of /dev/shm, None where there is none.

    Docker gives a container 64 MB of it, of which Ray can make no object store. A file on disk does as well, slower by
    what the system writes back; that is better than to refuse a training that needs a few megabytes at a time.
    """
    if platform != "linux":
        return ObjectStore(OBJECT_STORE_BYTES)
    size = min(OBJECT_STORE_BYTES, (free or 0) // 2)
    if size >= LEAST_STORE_BYTES:
        return ObjectStore(size)
    folder = tempfile.gettempdir()
    has = "there is no /dev/shm" if free is None else f"/dev/shm has {free >> 20} MB free"
    notice = f"{has}: Ray's objects go to {folder}, which is slower; in Docker, write docker run --shm-size=2g"
    return ObjectStore(OBJECT_STORE_BYTES, folder, notice)


def _start_local(workers: int, spare: int) -> None:
    import ray

    # Processes that Ray starts find rtrain where this one found it, also in a checkout that is not installed.
    root = str(package_root())
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != root]
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *paths])
    free = shutil.disk_usage(SHARED_MEMORY).free if os.path.isdir(SHARED_MEMORY) else None
    store = object_store(sys.platform, free)
    if store.notice:
        sys.stderr.write(f"{store.notice}\n")
    ray.init(
        address="local",
        num_cpus=max(env.cores(), workers + spare),
        include_dashboard=False,
        object_store_memory=store.size,
        _plasma_directory=store.folder,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    ray_internals.end_log_monitor()  # it serves drivers that have logs forwarded, which this one has not


def _quiet() -> None:
    """Ray's libraries log each step of each data set at INFO; rtrain's own line says what a user needs."""

    # What raylets have to say of dead workers goes to stdout, where --json has promised one object; the run's log and
    # progress tell it too. Nothing else is printed this way, since the workers' output is not forwarded.
    ray_internals.drop_forwarded_output()
    for name in ("ray", "ray.data", "ray.train", "ray.tune", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)


def until_interrupted() -> None:
    """Stay until Ctrl-C (KeyboardInterrupt) or SIGTERM (SystemExit, by Ray's handler)."""
    while True:
        time.sleep(0.2)
