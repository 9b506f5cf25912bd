"""One HTTP endpoint on Ray Serve: a proxy on the head (`ingress`), and replicas that each hold the whole path.

A replica is engine, batcher and application in one process: a second deployment for the model would add a hop that
costs more than the model does.
"""

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.serve
from ray.actor import ActorHandle
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.schema import LoggingConfig

import rtrain.inference.artifact
from rtrain import ray_internals
from rtrain.cluster import capacity
from rtrain.config import ServeConfig
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.models import device
from serve import ray_config
from serve.auth import preflight
from serve.ingress import ingress_choice
from serve.ingress.address import Address, find_free_address, refuse_grpc_port
from serve.observability import tracing
from serve.ray_config import APPLICATION_NAME, DEPLOYMENT_NAME, max_replica_count, max_requests_per_replica
from serve.replica import ServeReplica
from serve.rollout import canary, controller as rollout_controller
from serve.rollout.controller import RayApp, Rollout

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 30.0
STATUS_POLL_S = 0.05
"""Between two looks whether the application runs."""
NOTIFY_INTERVAL_S = 30.0
NodeResources = Sequence[capacity.NodeResources]


class Endpoint:
    """A running endpoint; leaving its `with` block ends it and all that it started."""

    def __init__(
        self, address: Address, settings: ServeConfig, haproxy: ingress_choice.HAProxyIngress | None, ray_app: RayApp
    ):
        self.url = address.url
        self.rollouts = {model: Rollout(ray_app, model, settings) for model in ray_app.targets}
        """Rollout of each model, by name."""
        self._address, self._settings, self._haproxy, self._ray_app = address, settings, haproxy, ray_app
        self._closed = False

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def port(self) -> int:
        return self._address.port

    def handle_command(self, command: Mapping[str, Any]) -> str:
        """Run a command of the admin socket and return its message: `{"update": FOLDER}`, with `"policy"`, a
        `canary.CanaryPolicy`, for a canary; `{"rollback": true}`; `{"status": true}`, which returns JSON. All accept
        `"model"`; the first two require it if there are several models."""
        model = command.get("model")
        if command.get("status"):
            rollouts = self.rollouts.values() if model is None else [self._find_rollout(model)]
            return json.dumps(
                {"address": self.url, "models": rollout_controller.collect_status(self._ray_app, rollouts)}
            )
        if command.get("rollback"):
            return self._find_rollout(model).rollback()
        if isinstance(folder_name := command.get("update"), str):
            folder, policy_values = Path(folder_name).resolve(), command.get("policy")
            return self._find_rollout(model).update(
                folder, canary.CanaryPolicy(*policy_values) if policy_values else None
            )
        raise UserError("unknown command; send update, rollback or status", code="unknown_command")

    def _find_rollout(self, model: str | None) -> Rollout:
        """That of the model of that name; without a name that of the only model."""
        if model is None and len(self.rollouts) == 1:
            return next(iter(self.rollouts.values()))
        names = ", ".join(self.rollouts)
        if model is None:
            raise UserError(f"several models are served; choose one with --model: {names}", code="ambiguous")
        if model not in self.rollouts:
            raise UserError(f"model {model} is not served here; served models: {names}", code="unknown_name")
        return self.rollouts[model]

    def close(self) -> None:
        """Let requests in progress end, stop Ray Serve, wait until nothing of it is left. Again is harmless."""
        # Where Ray has ended, so has the endpoint; to ask for its actors would start another Ray.
        if self._closed or not ray.is_initialized():
            return
        self._closed = True
        if ray_internals.is_gcs_dead():  # Ray answers no question any more
            if self._haproxy is not None:
                # Ray ends its processes 60 s after the store's death, and half of that may have passed (`session`).
                ingress_choice.drain(self._haproxy.folder, min(self._settings.request_timeout_s + 1, 15.0))
                ingress_choice.remove(self._haproxy.folder)
            return
        for model_rollout in self.rollouts.values():
            model_rollout.close()
        if self._haproxy is not None:
            self._haproxy.drain(self._settings.request_timeout_s + 1)
        else:
            ray_internals.stop_proxies(self._settings.request_timeout_s + 1)
        controller: Any = _find_controller()
        if controller is not None:
            # ray.serve.shutdown() alone awaits a call that dies with the controller, which Ray reports on stdout.
            ray.get(controller.graceful_shutdown.remote(wait=False))
            _poll_until(lambda: _find_controller() is None, CLOSE_TIMEOUT_S)
        ray.serve.shutdown()
        # The proxy is asked to stop before the controller stops, and may outlive it by a moment.
        _poll_until(lambda: not _list_serve_actors(), CLOSE_TIMEOUT_S)
        if self._haproxy is not None:
            self._haproxy.drain(0.0)  # what its manager has started since
        _poll_until(self._address.is_free, CLOSE_TIMEOUT_S)
        if self._haproxy is not None:
            self._haproxy.remove()


def start_endpoint(
    artifacts: Path | Mapping[str, Path],
    settings: ServeConfig,
    name: str | None = None,
    notify: Callable[[str], None] = lambda line: None,
    selected_ingress: ingress_choice.IngressChoice | None = None,
) -> Endpoint:
    """Serve the artifact on the Ray that this process is connected to, or several, each by the name that it is given;
    returns when `/v2/health/ready` answers 200. `name`: the application's on Ray Serve.
    `notify` gets a line where it is served otherwise than asked: by the slower proxy, or without CPUs of its own.
    `selected_ingress`: what takes the requests, where that was settled before this Ray was started.

    Refuses, before anything starts, an address that is open to others, a damaged artifact, a port in use and a Ray that
    serves already: the HTTP settings of a running Ray Serve cannot be changed, and `close` would end the other's
    endpoint with ours.
    """
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # importing ray.serve has set it to INFO, a line a step
    preflight.check_access(settings)
    tracing.check_tracing(settings)
    settings = preflight.resolve_paths(settings)
    if isinstance(artifacts, Path):
        artifacts = {rtrain.inference.artifact.read_artifact(artifacts, verify=False).name: artifacts}
    artifacts = {model: folder.resolve() for model, folder in artifacts.items()}
    preflight.check_artifacts(artifacts, settings)
    if _find_controller() is not None:
        raise UserError(
            "this Ray runs Ray Serve already; close that endpoint first, or start a Ray of your own",
            code="already_serving",
        )
    address = replace(find_free_address(settings.host, settings.port), tls=settings.tls_cert is not None)
    refuse_grpc_port(settings.host, settings.grpc_port)
    if selected_ingress is None:
        haproxy = ingress_choice.select_ingress(
            settings, max_requests_per_replica(settings, len(artifacts)), max_replica_count(settings), notify
        )
        environment = {"runtime_env": {"env_vars": ingress_choice.controller_environment(haproxy)}}
    else:  # Ray's processes have inherited the variables, and processes are there that have no others
        haproxy, environment = selected_ingress.haproxy, {}
    ray_internals.set_polling_interval(STATUS_POLL_S)
    logging_config = LoggingConfig(**ray_config.LOGGING)
    try:
        deployment = _configure_deployment(settings, len(artifacts), environment, notify)
        ray_app = RayApp(deployment, name or APPLICATION_NAME, settings, artifacts, logging_config)
    except BaseException:
        if haproxy is not None:
            haproxy.remove()
        raise
    endpoint = Endpoint(address, settings, haproxy, ray_app)
    try:
        with notify_periodically(partial(_deployment_message, ray_app.name), notify):
            _deploy(settings, ray_app, address.port, haproxy, environment, logging_config)
        _await_ready(address)
    except BaseException:  # Ctrl-C too must leave nothing behind
        endpoint.close()
        raise
    return endpoint


def _configure_deployment(
    settings: ServeConfig, num_models: int, environment: Mapping[str, Any], notify: Callable[[str], None]
) -> ray.serve.Deployment:
    labels = settings.labels
    if problems := capacity.find_unmatched_labels("serve.labels", labels):
        raise ConfigError(problems)
    if settings.gpus and not device.can_use_gpus():
        fix = "install a build of torch for GPUs, or write 0"
        raise ConfigError(
            [Problem("serve.gpus", settings.gpus, "this build of torch cannot use them", fix, code="unavailable")]
        )
    if problem := check_gpus(
        settings, [*capacity.nodes_with_labels(labels), *capacity.startable_node_types(labels).values()]
    ):
        raise ConfigError([problem])
    free_nodes = [host.resources for host in capacity.available_nodes() if capacity.matches_labels(host.labels, labels)]
    cpus, message = choose_cpu_reservation(
        settings, free_nodes, capacity.nodes_with_labels(labels), capacity.potential_nodes("cpu", labels), num_models
    )
    if message:
        notify(message)
    spec = ray_config.deployment_spec(settings, num_models, cpus, environment)
    make_deployment = ray.serve.deployment(**spec, **ray_config.replica_options(settings))
    return make_deployment(ServeReplica)


def _deploy(
    settings: ServeConfig,
    ray_app: RayApp,
    port: int,
    haproxy: ingress_choice.HAProxyIngress | None,
    environment: Mapping[str, Any],
    logging_config: LoggingConfig,
) -> None:
    """The proxy and the replicas start beside each other."""
    with _explain_proxy_errors(haproxy):
        wait_for_proxies = ray_internals.start_serve(
            ProxyLocation.HeadOnly, _http_options(settings, port, haproxy), environment, logging_config
        )
    try:
        ray_app.start()
    except RuntimeError as error:
        raise UserError(
            f"the model cannot be served: {extract_cause(_deployment_message(ray_app.name) or str(error))}",
            code="cannot_be_served",
        ) from None
    with _explain_proxy_errors(haproxy):
        wait_for_proxies()


@contextmanager
def _explain_proxy_errors(haproxy: ingress_choice.HAProxyIngress | None) -> Iterator[None]:
    try:
        yield
    except (ray.exceptions.RayError, TimeoutError) as error:
        hint = "; or write serve.ingress=ray" if haproxy else ""
        raise UserError(f"the proxy does not start: {extract_cause(str(error))}{hint}", code="proxy_failed") from None


def _deployment_message(application: str) -> str:
    """What Ray Serve writes of the replicas; empty where it knows of none, or does not answer."""
    try:
        status = ray.serve.status().applications.get(application)
    except ray.exceptions.RayError:  # the controller is starting, or busy
        return ""
    return str(status.deployments[DEPLOYMENT_NAME].message) if status and status.deployments else ""


def _http_options(settings: ServeConfig, port: int, haproxy: ingress_choice.HAProxyIngress | None) -> HTTPOptions:
    """HAProxy takes the address and the certificate; else Ray's own proxy does."""
    return HTTPOptions(
        host=haproxy.host if haproxy else settings.host,
        port=port,
        ssl_certfile=None if haproxy else settings.tls_cert,
        ssl_keyfile=None if haproxy else settings.tls_key,
        keep_alive_timeout_s=settings.keep_alive_s,
    )


def _await_ready(address: Address) -> None:
    """Over HTTP, as a client would: the proxy learns of a new route some time after the replicas are up."""

    def is_ready() -> bool:
        connection = address.open_connection(timeout_s=5)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    if not _poll_until(is_ready, READY_TIMEOUT_S):
        raise UserError(
            f"{address.url} was not ready after {READY_TIMEOUT_S:.0f} s; see the logs of Ray Serve", code="not_ready"
        )


def extract_cause(message: str) -> str:
    """Message of the last exception in a traceback, without its class; the whole text if it is not a traceback."""
    lines = message.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  ")]
    return re.sub(r"^[\w.]+: ", "", "\n".join(lines[frames[-1] + 1 :])) if frames else message


def _find_controller() -> ActorHandle[Any] | None:
    try:
        name, namespace = ray_internals.controller_name_and_namespace()
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None


def _list_serve_actors() -> list[str]:
    """Ray Serve's own actors: controller, proxies, replicas."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == ray_internals.controller_name_and_namespace()[1]]


def _poll_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    give_up_at = time.monotonic() + timeout_s
    while not (is_met := condition()) and time.monotonic() < give_up_at:
        time.sleep(0.02)
    return is_met


def choose_cpu_reservation(
    settings: ServeConfig,
    free_nodes: NodeResources,
    live_nodes: NodeResources,
    potential_nodes: NodeResources,
    models: int = 1,
) -> tuple[int, str]:
    """CPUs that a replica reserves, and a message if it reserves fewer than its threads or must wait. A replica has the
    threads of one engine per model. `free_nodes`: free resources of live nodes; `live_nodes`: all their resources;
    `potential_nodes`: nodes that may exist.

    Where possible, Ray starts nodes for reservations that do not fit. Elsewhere a replica would wait forever without a
    message; without a reservation its threads share the available processors.
    """
    cpus_per_replica = settings.threads * models
    fitting_now, fitting_later = (
        _count_fitting_replicas(free_nodes, cpus_per_replica),
        _count_fitting_replicas(potential_nodes, cpus_per_replica)
        - _count_fitting_replicas(live_nodes, cpus_per_replica),
    )
    if fitting_now >= settings.min_replicas:
        return cpus_per_replica, ""
    models_text = f" for each of {models} models" if models > 1 else ""
    request_text = (
        f"serve.replicas={settings.min_replicas} with serve.threads={settings.threads}{models_text} ask "
        "for more CPUs than"
    )
    if fitting_now + fitting_later >= settings.min_replicas:
        return cpus_per_replica, f"{request_text} are free: waiting for nodes"
    free_cpus = sum(node.get("CPU", 0.0) for node in free_nodes)
    return (
        0,
        f"{request_text} Ray has free ({free_cpus:g}), and no node can come: replicas reserve none, and share what "
        "there is",
    )


def check_gpus(settings: ServeConfig, nodes: NodeResources) -> Problem | None:
    """The problem of `serve.gpus` where no node has so many, nor may have: replicas would wait for ever."""
    max_gpus = max((node.get("GPU", 0.0) for node in nodes), default=0.0)
    if settings.gpus <= max_gpus:
        return None
    reason = f"the node with most GPUs has {max_gpus:g}, and no node with more can come"
    return Problem(
        "serve.gpus", settings.gpus, reason, f"write {max_gpus:g}, or start nodes with GPUs", code="too_few_gpus"
    )


def _count_fitting_replicas(nodes: NodeResources, cpus: int) -> int:
    """How many replicas of so many CPUs the nodes have room for."""
    return sum(int(node.get("CPU", 0.0) // cpus) for node in nodes)


@contextmanager
def notify_periodically(get_message: Callable[[], str], notify: Callable[[str], None]) -> Iterator[None]:
    """While the block runs, tell every 30 s what `get_message` returns, if anything."""
    stop_event = threading.Event()

    def notify_until_stopped() -> None:
        while not stop_event.wait(NOTIFY_INTERVAL_S):
            if message := get_message():
                notify(message)

    thread = threading.Thread(target=notify_until_stopped, daemon=True, name="rtrain-waiting")
    thread.start()
    try:
        yield
    finally:
        stop_event.set()
        thread.join()
