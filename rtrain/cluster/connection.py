"""One connection to Ray per command: a private local cluster, or the one that the configuration or the job names."""

import importlib.util
import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from rtrain import ray_internals
from rtrain.cluster import address as addresses, capacity
from rtrain.core import env, events, signals
from rtrain.core.errors import UserError

if TYPE_CHECKING:
    from rtrain.config import Config

IN_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray's job manager sets it for the entry point of a job."""

HEALTH_CHECK = ("RAY_health_check_timeout_ms", "5000")
"""A node is lost when five answers in a row, asked for every 3 s, have not come within that time; Ray's own is 10 s.
Until then a run waits for workers that are gone, although another node has long come in their place."""
NAMESPACE = "external_storage_namespace"
"""Ray's setting of the part of a Redis that is this cluster's; in the environment with RAY_ before it."""
OBJECT_STORE_BYTES = 512 << 20
"""Size of a local object store. Streams hold tens of megabytes ahead; by default Ray would set 30 % of the memory
aside, which nobody would use."""
LEAST_STORE_BYTES = 128 << 20
"""Least size of an object store in shared memory: two streams of 64 MB. Ray itself refuses less than 75 MiB."""
SHARED_MEMORY = "/dev/shm"
KEPT_S = 30.0
"""Seconds for which an endpoint goes on whose Ray has lost its store (GCS). After 60 Ray ends it where it stands, and
requests that are answered by then, and Ray's own end, take some of them."""


def package_root() -> Path:
    """The folder that holds rtrain, serve and tune: site-packages, or a checkout."""
    return Path(__file__).resolve().parents[2]


def refuse_shadowed_names() -> None:
    """Raise `UserError` if `serve` or `tune` is not rtrain's own package.

    These names are common. A user's file that hides ours would make Ray workers fail later.
    """
    for name in ("serve", "tune"):
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec and spec.origin else None
        if origin != package_root() / name / "__init__.py":
            raise UserError(
                f"the module name {name!r} leads to {origin or 'nothing'} instead of rtrain's own package; "
                "rename that file, or start rtrain from another folder",
                code="shadowed_module",
            )


def forget_folder() -> None:
    """Take the current folder off the module path, so that no file of the user's shadows a module of ours.

    In a job the folder stays on the path, since Ray has put it ahead of ours for every worker. Names that it shadows
    are then refused.
    """
    here = Path.cwd()
    if here != package_root() and IN_JOB not in os.environ:
        sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() != here]
    refuse_shadowed_names()


def leave_folder(folder: Path) -> None:
    """Change into `folder`. Neither the old folder nor the new one can shadow a module then."""
    forget_folder()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)


def ensure_token() -> None:
    """Make the file of Ray's token, readable by its owner alone. Ray would write it with the umask's permissions.

    Ray reads the file when a cluster starts, and its mode of authentication when it is imported. After an import the
    variable would contradict the mode that Ray has read; Ray then sets both for a cluster that it starts.
    """
    if os.environ.get("RAY_AUTH_MODE", "token") != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
    if not path.is_file() or not path.stat().st_size:
        make_token(path)
    if "ray" not in sys.modules:
        os.environ["RAY_AUTH_MODE"] = "token"


def make_token(path: Path) -> None:
    """Put a token there whole, in place of an empty file; of two commands that do so at once, one's counts."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.touch(mode=0o600, exist_ok=False)
        draft.write_text(secrets.token_hex(32))
        if path.exists():
            draft.replace(path)
        else:
            with suppress(FileExistsError):
                _link(draft, path)
    except OSError as error:
        raise UserError(
            f"the token of Ray cannot be written to {path} ({error.strerror}); set RAY_AUTH_TOKEN_PATH to a file in a "
            "folder that this user may write to, or HOME to such a folder",
            code="not_writable",
        ) from None
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def _link(source: Path, target: Path) -> None:
    """Give a file another name. Raises `FileExistsError`."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:  # storage without hard links
        source.rename(target)


class Needs(NamedTuple):
    """What a private cluster is started with, beyond what its configuration says."""

    ahead: int | None = None
    """Worker processes that are started before there is work for them; None: one for each core."""
    environment: Mapping[str, str] = MappingProxyType({})
    """Variables of all its processes but this one."""
    first: str | None = None
    """A function by its dotted name, which each worker process calls before it takes work; None: `env.collect_less`."""
    meanwhile: Callable[[], object] | None = None
    """Called in a thread while Ray starts."""


def starts_ray(config: "Config") -> bool:
    """Whether `session` would start a cluster of its own."""
    ray = sys.modules.get("ray")
    return addresses.of(config) is None and (ray is None or not ray.is_initialized())


@contextmanager
def session(
    config: "Config",
    folder: Path,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    at_once: int = 1,
    needs: Needs | None = None,
) -> Iterator[None]:
    """Connect to Ray for the `with` block, from inside `folder`.

    A private cluster, which this call starts as it `needs`, has room for `at_once` trainings with the recipe's workers,
    and ends with the block; any other cluster is left alone. Raises `UserError`, before Ray is asked, where the address
    that is named leads to no cluster.
    """
    named, say = addresses.of(config), on_event or (lambda event: None)
    say(events.doing(f"connecting to Ray at {named[1]}" if named else "starting Ray", "Ray"))
    if named is None:
        ensure_token()
    env.collect_less()
    import ray

    if ray.is_initialized():
        yield
        return
    if named is not None:
        addresses.check(*named)
    leave_folder(folder)
    quiet()
    if named is None:
        workers = config.recipe.train.workers
        _start_local(
            at_once * (workers + capacity.data_cpus(config.deploy.cluster.data_cpus, workers)), needs or Needs()
        )
    else:
        try:
            ray.init(address=named[1], runtime_env=_worker_env(), log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:  # what could not be seen from outside
            cause = str(error.__cause__ or error).strip().splitlines()[-1]
            raise UserError(
                f"{named[0]}={named[1]}: Ray could not connect to it: {cause}", code="unreachable"
            ) from None
    # Ray Data sets its own level when it is imported, which not every command does. This process alone gets it: the
    # others have inherited their environment by now, and write what they tell into files.
    os.environ.setdefault("RAY_DATA_LOG_LEVEL", "ERROR")
    signals.take()  # ray.init has put handlers of its own: one that exits with 15, and one that prints a C++ stack
    try:
        yield
    finally:
        say(events.doing("ending Ray" if named is None else "leaving Ray", "Ray"))
        if named is None:
            _end_local()
        else:
            ray.shutdown()


def _end_local() -> None:
    """End a private cluster, and kill what Ray leaves of it: its agents where the store is lost, which would wait for
    ever to tell the store that they end, and workers that a raylet under load has forgotten."""
    import psutil
    import ray

    known = ray_internals.processes()
    ray.shutdown()
    for process in known:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _worker_env() -> dict[str, dict[str, str]]:
    """Environment settings for Ray's processes on a cluster that others started, which would not inherit them."""
    os.environ["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"  # else Ray refuses values that the job has set already
    return {"env_vars": {name: os.environ[name] for name in env.SETTINGS if name in os.environ}}


def on_node_start(parameters: Any, head: bool) -> None:
    """The hook RAY_START_HOOK of cluster.yaml, which Ray calls when a node starts.

    It closes the Ray Client's port, which `ray start --head` opens without an option against it. A head misses a node
    that is gone without a word after 40 s, in place of Ray's 65. On the head it leaves jobs the path of the
    autoscaler's file, which says what nodes there may be (`supply.most`).

    In a Redis each address of a head has a part of its own. The nodes of a head that was lost look for it at its
    address alone: one that comes back there goes on with them, and one at another address would count on nodes that
    never come, with jobs that nobody runs.
    """
    import ray

    parameters.ray_client_server_port = None
    if head:
        os.environ.setdefault(*HEALTH_CHECK)
        if "RAY_REDIS_ADDRESS" in os.environ and f"RAY_{NAMESPACE}" not in os.environ:
            at = parameters.node_ip_address or ray.util.get_node_ip_address()
            parameters._system_config = {NAMESPACE: f"head-{at}", **(parameters._system_config or {})}
    if head and parameters.autoscaling_config:
        os.environ[capacity.AUTOSCALER_FILE] = str(Path(parameters.autoscaling_config).expanduser())


class ObjectStore(NamedTuple):
    """Size and place of Ray's object store, and what to tell the user about it."""

    size: int
    """Bytes."""
    folder: str | None = None
    """Its folder; None for Ray's own choice, which is shared memory on Linux and the temporary folder elsewhere."""
    notice: str | None = None


def object_store(platform: str, free: int | None) -> ObjectStore:
    """Size and place of a local Ray's object store. `free`: free bytes of /dev/shm, None if there is no /dev/shm.

    Docker gives a container 64 MB of /dev/shm, too little for Ray's object store. Then it goes to a file on disk. That
    is slower, as the system writes it back, but better than refusing a training that needs a few megabytes at a time.
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


def _start_local(cpus: int, needs: Needs) -> None:
    import ray

    # Processes that Ray starts must find rtrain where this one found it, also in a checkout that is not installed.
    root = str(package_root())
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != root]
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *paths])
    free = shutil.disk_usage(SHARED_MEMORY).free if os.path.isdir(SHARED_MEMORY) else None
    store = object_store(sys.platform, free)
    for notice in (env.notice(), store.notice):
        if notice:
            sys.stderr.write(f"{notice}\n")
    ahead = env.cores() if needs.ahead is None else needs.ahead
    first = needs.first or f"{env.__name__}.{env.collect_less.__name__}"
    # ray.init stays in this thread: it sets handlers of signals.
    with ThreadPoolExecutor(1) as beside, ray_internals.lean(ahead, needs.environment, first):
        done = beside.submit(needs.meanwhile) if needs.meanwhile else None
        ray.init(
            address="local",
            num_cpus=max(env.cores(), cpus),
            include_dashboard=False,
            object_store_memory=store.size,
            _plasma_directory=store.folder,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        ray_internals.mark()
        if done:
            done.result()


def quiet() -> None:
    """Silence Ray's libraries, which log each step of each data set at INFO; rtrain's own line says what users need."""
    # Raylets report dead workers on stdout, where --json has promised one object; the run's log and progress report
    # them too. Nothing else is printed this way, since the workers' output is not forwarded.
    ray_internals.drop_forwarded_output()
    for name in ("ray", "ray.data", "ray.train", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # A search says itself what became of a process that died; Tune would add its stack.
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)


def until_interrupted() -> None:
    """Wait until Ctrl-C or SIGTERM, which raise KeyboardInterrupt. Raises `UserError` where this command's own Ray has
    lost its store, early enough that nothing of it is left behind."""
    died: float | None = None
    while died is None or time.monotonic() - died < KEPT_S:
        time.sleep(0.2)
        if died is None and ray_internals.store_has_ended():
            died = time.monotonic()
    raise UserError("the store of this command's Ray (its GCS) has died; start the command again", code="store_lost")
