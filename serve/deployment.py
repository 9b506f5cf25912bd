"""One HTTP endpoint on Ray Serve: a proxy on the head (`ingress`), and replicas that each hold the whole path.

A replica is engine, batcher and application in one process: a second deployment for the model would add a hop that
costs more than the model does.
"""

import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.serve
from ray.actor import ActorHandle
from ray.serve.config import (
    AutoscalingConfig,
    BackpressureConfig,
    HTTPOptions,
    ProxyLocation,
)
from ray.serve.schema import LoggingConfig

import rtrain.inference.artifact
from rtrain import ray_internals
from rtrain.cluster import capacity
from rtrain.config import ServeConfig
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.models import device
from serve import model_specs, ray_config
from serve.auth import preflight
from serve.ingress import ingress_choice
from serve.ingress.address import Address, find_free_address, refuse_grpc_port
from serve.observability import tracing
from serve.ray_config import APPLICATION_NAME, max_replica_count, max_requests_per_replica
from serve.replica import ServeReplica
from serve.rollout import autoscaling, canary, controller as rollout_controller, placement
from serve.rollout.controller import Rollout
from serve.rollout.ray_app import RayApp

logger = logging.getLogger(__name__)

DEPLOYMENT_NAME = "rtrain"
CONSTRUCTOR_ATTEMPTS = 1
"""What fails while an artifact is loaded fails again; Ray's default of 20 attempts takes minutes."""
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 1.0, 5.0
"""A dead replica is replaced after the next question, a hung one after three misses; Ray's defaults need ten seconds
and two minutes for that."""
READY_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 30.0
STATUS_POLL_S = 0.05
"""Between two looks whether the application runs."""


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
    model_specs.check_artifacts(artifacts, settings)
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
    logging_config = LoggingConfig(log_level="WARNING", enable_access_log=False)
    try:
        deployment = _configure_deployment(settings, len(artifacts), environment, logging_config, notify)
        ray_app = RayApp(deployment, name or APPLICATION_NAME, settings, artifacts, logging_config)
    except BaseException:
        if haproxy is not None:
            haproxy.remove()
        raise
    endpoint = Endpoint(address, settings, haproxy, ray_app)
    try:
        with placement.notify_periodically(partial(_deployment_message, ray_app.name), notify):
            _deploy(settings, ray_app, address.port, haproxy, environment, logging_config)
        _await_ready(address)
    except BaseException:  # Ctrl-C too must leave nothing behind
        endpoint.close()
        raise
    return endpoint


def _configure_deployment(
    settings: ServeConfig,
    num_models: int,
    environment: Mapping[str, Any],
    logging_config: LoggingConfig,
    notify: Callable[[str], None],
) -> ray.serve.Deployment:
    labels = settings.labels
    if problems := capacity.find_unmatched_labels("serve.labels", labels):
        raise ConfigError(problems)
    if settings.gpus and not device.can_use_gpus():
        fix = "install a build of torch for GPUs, or write 0"
        raise ConfigError(
            [Problem("serve.gpus", settings.gpus, "this build of torch cannot use them", fix, code="unavailable")]
        )
    if problem := placement.check_gpus(
        settings, [*capacity.nodes_with_labels(labels), *capacity.startable_node_types(labels).values()]
    ):
        raise ConfigError([problem])
    free_nodes = [host.resources for host in capacity.available_nodes() if capacity.matches_labels(host.labels, labels)]
    cpus, message = placement.choose_cpu_reservation(
        settings, free_nodes, capacity.nodes_with_labels(labels), capacity.potential_nodes("cpu", labels), num_models
    )
    if message:
        notify(message)
    make_deployment = ray.serve.deployment(
        **deployment_options(settings, num_models),
        **_replica_options(settings),
        ray_actor_options={**ray_config.ray_actor_options(settings, cpus), **environment},
        backpressure_config=BackpressureConfig(status_code=503, retry_after_s=1),
        graceful_shutdown_wait_loop_s=0.1,
        logging_config=logging_config,
    )
    return make_deployment(ServeReplica)


def deployment_options(settings: ServeConfig, num_models: int) -> dict[str, Any]:
    """Options of the Ray Serve deployment, for every way of deploying it."""
    max_requests = max_requests_per_replica(settings, num_models)
    return {
        "name": DEPLOYMENT_NAME,
        "max_ongoing_requests": max_requests,
        "max_queued_requests": max_requests,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "max_constructor_retry_count": CONSTRUCTOR_ATTEMPTS,
        # Requests end by their deadline; requests that still run after it get no reply.
        "graceful_shutdown_timeout_s": settings.request_timeout_s + 1,
    }


def _replica_options(settings: ServeConfig) -> dict[str, Any]:
    """Number of replicas for Ray Serve: fixed, or bounds and a policy."""
    if max_replica_count(settings) == settings.min_replicas:
        return {"num_replicas": settings.min_replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            **autoscaling.autoscaling_config(settings.min_replicas, max_replica_count(settings))
        )
    }


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
    if haproxy is not None:
        return HTTPOptions(host=haproxy.host, port=port, keep_alive_timeout_s=settings.keep_alive_s)
    return HTTPOptions(
        host=settings.host,
        port=port,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
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
