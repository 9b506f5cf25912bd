"""Connect a command to Ray: to a private local cluster, or to the cluster of the configuration or the job.

An address is `host:port` of a head (the port of `ray start --head`, 6379 by default) or `auto`, which Ray resolves to
the cluster of this machine. `local` and no address mean a private cluster. The address is probed first: Ray's own
attempt takes 20 s to a minute and ends in a traceback.
"""

import importlib.util
import logging
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from rtrain import ray_internals
from rtrain.cluster import capacity, data_tasks
from rtrain.core import env, events, plugins, signals
from rtrain.core.errors import ConfigError, Problem, UserError

if TYPE_CHECKING:
    from rtrain.config import Config

LOCAL, AUTO = "local", "auto"
CONNECT_TIMEOUT_S, RESPONSE_TIMEOUT_S = 1.5, 3.0
"""Timeout in seconds for a connection to the head and for its response."""
ADDRESS_HINT = (
    "write HOST:PORT of a running head, as `ray start --head` prints it, or leave it out for a private cluster"
)
JOB_CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable that Ray's job manager sets for the entry point of a job."""
HEALTH_CHECK_SETTING = ("RAY_health_check_timeout_ms", "5000")
"""Health check timeout in ms, instead of Ray's 10 s: a node is lost after five failed checks, 3 s apart. Until then a
run waits for lost workers although a replacement node is ready."""
REDIS_NAMESPACE_SETTING = "external_storage_namespace"
"""Ray's setting for the cluster's namespace in Redis; the environment variable has the prefix RAY_."""
OBJECT_STORE_BYTES = 512 << 20
"""Size of a local object store. Streams hold tens of megabytes ahead; Ray's default of 30 % of the memory would be
unused."""
MIN_OBJECT_STORE_BYTES = 128 << 20
"""Minimum size of an object store in shared memory: two streams of 64 MB. Ray refuses less than 75 MiB."""
SHARED_MEMORY = "/dev/shm"
STORE_LOSS_GRACE_S = 30.0
"""Seconds that an endpoint keeps serving after its cluster lost the store (GCS). Ray kills it after 60 s; open requests
and Ray's own shutdown need some of them."""


class LocalClusterOptions(NamedTuple):
    """Options of a private cluster beyond its configuration."""

    prestarted_workers: int | None = None
    """Worker processes to start in advance; None: one per core."""
    environment: Mapping[str, str] = MappingProxyType({})
    """Environment variables of all its processes except this one."""
    worker_setup_function: str | None = None
    """Dotted name of a function that each worker process calls first; None: `env.tune_gc`."""
    background_task: Callable[[], object] | None = None
    """Called in a thread while Ray starts."""


@contextmanager
def session(
    config: "Config",
    folder: Path,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    concurrent_runs: int = 1,
    options: LocalClusterOptions | None = None,
) -> Iterator[None]:
    """Connect to Ray for the `with` block, from inside `folder`.

    A private cluster starts with `options`, has capacity for `concurrent_runs` runs of the recipe, and stops with the
    block; an existing cluster is left alone. Raises `UserError` before Ray is asked if no cluster responds at the
    configured address.
    """
    if (ray_module := sys.modules.get("ray")) is not None and ray_module.is_initialized():
        yield
        return
    address, emit = resolve_address(config), on_event or (lambda event: None)
    emit(events.make_phase_event(f"connecting to Ray at {address[1]}" if address else "starting Ray", "Ray"))
    if address is None:
        ensure_token()
    env.tune_gc()
    import ray

    if address is not None:
        check_address(*address)
    change_directory(folder)
    silence_ray_loggers()
    if address is None:
        _start_local(count_local_cpus(config, concurrent_runs), options or LocalClusterOptions())
    else:
        _join_cluster(*address)
    # Ray Data sets its own level when it is imported, which not every command does. Only this process gets it: the
    # others have inherited their environment already, and log into files.
    os.environ.setdefault("RAY_DATA_LOG_LEVEL", "ERROR")
    # ray.init installed its own handlers: one exits with 15, the other prints a C++ stack
    signals.install_sigterm_handler()
    try:
        yield
    finally:
        emit(events.make_phase_event("ending Ray" if address is None else "leaving Ray", "Ray"))
        if address is None:
            _stop_local()
        else:
            ray.shutdown()


def count_local_cpus(config: "Config", concurrent_runs: int = 1) -> int:
    """Return the logical CPUs of a private cluster for `concurrent_runs` runs: at least those of this machine."""
    workers = config.recipe.train.workers
    run_cpus = workers + data_tasks.resolve_data_cpus(config.deploy.cluster.data_cpus, workers)
    return max(env.available_cores(), concurrent_runs * run_cpus)


def connect(config: "Config") -> None:
    """Connect a user's own program to Ray; its folder, environment and loggers stay. A private cluster ends with it."""
    if (address := resolve_address(config)) is not None:
        check_address(*address)
        return _join_cluster(*address)
    ensure_token()
    cpus = count_local_cpus(config, config.deploy.tune.max_concurrent_trials or 1)
    environment = {name: value for name, value in env.ENV_DEFAULTS.items() if name not in os.environ}
    return _start_local(cpus, LocalClusterOptions(environment=environment))


def would_start_ray(config: "Config") -> bool:
    """Whether `session` would start a private cluster."""
    ray = sys.modules.get("ray")
    return resolve_address(config) is None and (ray is None or not ray.is_initialized())


def _join_cluster(source: str, address: str) -> None:
    """Connect to an existing cluster. Its processes would not inherit rtrain's environment, so they are sent it."""
    import ray

    os.environ["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"  # else Ray refuses values that the job has set already
    names = (*env.ENV_DEFAULTS, plugins.ENVIRONMENT_VARIABLE)
    environment: dict[str, Any] = {"env_vars": {name: os.environ[name] for name in names if name in os.environ}}
    if paths := plugins.list_upload_paths():
        environment["py_modules"] = paths
    try:
        ray.init(address=address, runtime_env=environment, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:  # not visible from outside
        cause = str(error.__cause__ or error).strip().splitlines()[-1]
        raise UserError(f"{source}={address}: Ray could not connect to it: {cause}", code="unreachable") from None


def _start_local(cpus: int, options: LocalClusterOptions) -> None:
    import ray

    # Processes that Ray starts must find rtrain where this one found it, also in a checkout that is not installed.
    root = str(package_root())
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != root]
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *paths])
    free_bytes = shutil.disk_usage(SHARED_MEMORY).free if os.path.isdir(SHARED_MEMORY) else None
    store = choose_object_store(sys.platform, free_bytes)
    for message in (env.describe_container_limits(), store.warning):
        if message:
            sys.stderr.write(f"{message}\n")
    prestarted_workers = env.available_cores() if options.prestarted_workers is None else options.prestarted_workers
    worker_setup_function = options.worker_setup_function or f"{env.__name__}.{env.tune_gc.__name__}"
    # ray.init stays in this thread: it sets handlers of signals.
    with (
        ThreadPoolExecutor(1) as executor,
        ray_internals.slim_ray_init(prestarted_workers, options.environment, worker_setup_function),
    ):
        background_future = executor.submit(options.background_task) if options.background_task else None
        ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            object_store_memory=store.size_bytes,
            _plasma_directory=store.folder,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        ray_internals.mark_private()
        if background_future:
            background_future.result()


def _stop_local() -> None:
    """Stop a private cluster, and kill leftovers: agents without a store, which would wait for ever to report their
    end, and workers that an overloaded raylet has lost."""
    import psutil
    import ray

    processes = ray_internals.list_processes()
    ray.shutdown()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


class ObjectStore(NamedTuple):
    """Size and folder of Ray's object store, and a warning for the user."""

    size_bytes: int
    folder: str | None = None
    """Its folder; None for Ray's default: shared memory on Linux, else the temporary folder."""
    warning: str | None = None


def choose_object_store(platform: str, free_bytes: int | None) -> ObjectStore:
    """Choose size and folder of a local object store. `free_bytes`: free bytes of /dev/shm, None without /dev/shm.

    Docker gives a container 64 MB of /dev/shm, too little for Ray's object store. Then a file on disk is used. It is
    slower, since the system writes it back, but a training needs only a few megabytes at a time.
    """
    if platform != "linux":
        return ObjectStore(OBJECT_STORE_BYTES)
    size = min(OBJECT_STORE_BYTES, (free_bytes or 0) // 2)
    if size >= MIN_OBJECT_STORE_BYTES:
        return ObjectStore(size)
    folder = tempfile.gettempdir()
    shm_state = "there is no /dev/shm" if free_bytes is None else f"/dev/shm has {free_bytes >> 20} MB free"
    warning = f"{shm_state}: Ray's objects go to {folder}, which is slower; in Docker, write docker run --shm-size=2g"
    return ObjectStore(OBJECT_STORE_BYTES, folder, warning)


def silence_ray_loggers() -> None:
    """Silence Ray's libraries, which log each step of each dataset at INFO; rtrain's own output has what users need."""
    # Raylets report dead workers on stdout, where --json has promised one object; the run's log and progress report
    # them too. Nothing else is printed this way, since the workers' output is not forwarded.
    ray_internals.drop_forwarded_output()
    for name in ("ray", "ray.data", "ray.train", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # A search says itself what became of a process that died; Tune would add its stack.
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)


def wait_until_interrupted() -> None:
    """Wait for Ctrl-C or SIGTERM, which raise KeyboardInterrupt. Raises `UserError` if a private cluster has lost its
    store, early enough for a clean shutdown."""
    store_died_at: float | None = None
    while store_died_at is None or time.monotonic() - store_died_at < STORE_LOSS_GRACE_S:
        time.sleep(0.2)
        if store_died_at is None and ray_internals.is_gcs_dead():
            store_died_at = time.monotonic()
    raise UserError("the store (GCS) of this command's cluster has died; start the command again", code="store_lost")


def resolve_address(config: "Config") -> tuple[str, str] | None:
    """The pair (setting or variable, address); None for a private cluster."""
    configured_address, variable = config.deploy.cluster.address, os.environ.get("RAY_ADDRESS")
    source, value = ("cluster.address", configured_address) if configured_address else ("RAY_ADDRESS", variable)
    return None if not value or value == LOCAL else (source, value)


def check_address(source: str, address: str) -> None:
    """Raise a one-line error if no usable Ray cluster responds at `address`, which comes from `source`."""
    if "://" in address:
        reason = "a driver of rtrain runs on a node of the cluster, not through Ray's client"
        rest = address.split("://", 1)[1]
        host = f"{rest.partition(']')[0]}]" if rest.startswith("[") else re.split(r"[:/]", rest)[0] or "HOST"
        fix = f"submit a job ({_job_submit_command(host)}), or start rtrain there with {AUTO}"
        raise _address_error(source, address, reason, "unsupported", fix)
    if address == AUTO:
        endpoint = ray_internals.local_cluster_address()
        if endpoint is None:
            raise _address_error(source, address, "no Ray runs on this machine", "unreachable")
        ray_internals.enable_local_token_auth()
    else:
        endpoint = address
    host, port = _split_host_port(source, address, endpoint)
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        reason = f"no response from {endpoint} ({error.strerror or error})"
        raise _address_error(source, address, reason, "unreachable") from None
    head_state = ray_internals.probe_head(endpoint, RESPONSE_TIMEOUT_S)
    if head_state == "none":
        raise _address_error(source, address, f"the server at {endpoint} is not the head of a Ray cluster", "not_ray")
    if head_state == "closed":
        fix = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file that holds it"
        raise UserError(f"{source}={address}: the cluster at {endpoint} requires its token; {fix}", code="wrong_token")
    if not ray_internals.local_node_ids():
        command = _job_submit_command(endpoint.rpartition(":")[0])
        message = "the cluster responds, but this machine is not one of its nodes; run on a node, or submit a job there"
        raise UserError(f"{source}={address}: {message}: {command}", code="not_a_node")


def _job_submit_command(host: str) -> str:
    """The command that submits a job to `host`; an IPv6 address is in brackets."""
    return f"ray job submit --address http://{host}:8265 -- python -m rtrain ..."


def _split_host_port(source: str, address: str, endpoint: str) -> tuple[str, int]:
    host, separator, port = endpoint.rpartition(":")
    unbracketed_host = host.removeprefix("[").removesuffix("]")
    if ":" in unbracketed_host and host != f"[{unbracketed_host}]":
        fix = "write an IPv6 address in brackets, before the port: [fd00::1]:6379"
        raise _address_error(source, address, "the boundary of host and port is ambiguous", "invalid_address", fix)
    if not separator or not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise _address_error(source, address, "not an address", "invalid_address")
    return unbracketed_host, int(port)


def _address_error(source: str, address: str, reason: str, code: str, fix: str = ADDRESS_HINT) -> ConfigError:
    return ConfigError([Problem(source, address, reason, fix, code=code)])


def ensure_token() -> None:
    """Create Ray's token file, readable by its owner only; Ray would use the umask. Ray reads the file when a cluster
    starts, and its authentication mode when it is imported, so the variables may change only before the import; Ray
    sets both for a cluster that it starts."""
    if os.environ.get("RAY_AUTH_MODE", "token") != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
    if not path.is_file() or not path.stat().st_size:
        write_token(path)
    if "ray" not in sys.modules:
        os.environ["RAY_AUTH_MODE"] = "token"


def write_token(path: Path) -> None:
    """Write a token atomically in place of an empty file; if two commands race, one of them wins."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.touch(mode=0o600, exist_ok=False)
        draft.write_text(secrets.token_hex(32))
        if path.exists():
            draft.replace(path)
        else:
            with suppress(FileExistsError):
                _hard_link(draft, path)
    except OSError as error:
        message = (
            f"the token of Ray cannot be written to {path} ({error.strerror}); set RAY_AUTH_TOKEN_PATH to a file in a "
            "folder that this user may write to, or HOME to such a folder"
        )
        raise UserError(message, code="not_writable") from None
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def _hard_link(source: Path, target: Path) -> None:
    """Hard-link a file. Raises `FileExistsError`."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:  # storage without hard links
        source.rename(target)


def package_root() -> Path:
    """Folder with rtrain, serve and tune: site-packages, or a checkout."""
    return Path(__file__).resolve().parents[2]


def refuse_shadowed_names(*worker_folders: Path) -> None:
    """Raise `UserError` if `serve` or `tune` is not rtrain's own package. A user's file of such a common name would
    break Ray workers later. `worker_folders`: further folders of their module path."""
    names, folders = ("serve", "tune"), list(map(str, worker_folders))
    specs = [(name, importlib.util.find_spec(name)) for name in names]
    specs += [(name, spec) for name in names if (spec := PathFinder.find_spec(name, folders)) and spec.origin]
    for name, spec in specs:
        origin = Path(spec.origin).resolve() if spec and spec.origin else None
        if origin != package_root() / name / "__init__.py":
            message = (
                f"the module name {name!r} leads to {origin or 'nothing'} instead of rtrain's own package; "
                "rename that file, or start rtrain from another folder"
            )
            raise UserError(message, code="shadowed_module")


def remove_cwd_from_path() -> None:
    """Remove the current folder from the module path, so that no user file shadows a module. In a job the folder stays,
    since Ray puts it first for every worker; shadowed names are refused then."""
    cwd = Path.cwd()
    if cwd != package_root() and JOB_CONFIG_VARIABLE not in os.environ:
        sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() != cwd]
    refuse_shadowed_names()


def change_directory(folder: Path) -> None:
    """Change into `folder`, with neither the old nor the new folder on the module path."""
    remove_cwd_from_path()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)


def on_node_start(parameters: Any, head: bool) -> None:
    """The hook RAY_START_HOOK of cluster.yaml, which Ray calls when a node starts.

    It closes the Ray Client port, which `ray start --head` opens without an option to disable it. A head detects a lost
    node after 40 s instead of Ray's 65. On the head it passes jobs the path of the autoscaler's file, which limits the
    nodes (`capacity.max_accelerators`). In Redis each head address has its own namespace. Nodes of a lost head
    reconnect to its address only: a head that restarts there resumes with them; a head at another address would wait
    for nodes that never come, with jobs that nobody runs.
    """
    import ray

    parameters.ray_client_server_port = None
    if head:
        os.environ.setdefault(*HEALTH_CHECK_SETTING)
        if "RAY_REDIS_ADDRESS" in os.environ and f"RAY_{REDIS_NAMESPACE_SETTING}" not in os.environ:
            node_ip = parameters.node_ip_address or ray.util.get_node_ip_address()
            namespace = {REDIS_NAMESPACE_SETTING: f"head-{node_ip}"}
            parameters._system_config = namespace | (parameters._system_config or {})
    if head and parameters.autoscaling_config:
        os.environ[capacity.AUTOSCALER_FILE_VARIABLE] = str(Path(parameters.autoscaling_config).expanduser())
