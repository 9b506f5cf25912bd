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
from rtrain.config import Serve
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.models import device
from serve import model_specs, ray_config
from serve.auth import preflight
from serve.ingress import ingress_choice
from serve.ingress.address import Address, free_address, refuse_grpc_port
from serve.observability import tracing
from serve.ray_config import APPLICATION, most_replicas, most_requests
from serve.replica import Replica
from serve.rollout import autoscaling, canary, controller as rollout_controller, placement
from serve.rollout.controller import Rollout
from serve.rollout.ray_app import Application

logger = logging.getLogger(__name__)

DEPLOYMENT = "rtrain"
CONSTRUCTOR_ATTEMPTS = 1
"""What fails while an artefact is loaded fails again; Ray's default of 20 attempts takes minutes."""
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 1.0, 5.0
"""A dead replica is replaced after the next question, a hung one after three misses; Ray's defaults need ten seconds
and two minutes for that."""
READY_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 30.0
LOOK_S = 0.05
"""Between two looks whether the application runs."""


class Endpoint:
    """A running endpoint; leaving its `with` block ends it and all that it started."""

    def __init__(
        self, address: Address, settings: Serve, front: ingress_choice.Ingress | None, application: Application
    ):
        self.url = address.url
        self.rollouts = {model: Rollout(application, model, settings) for model in application.decided}
        """By the name of the model."""
        self._address, self._settings, self._front, self._application = address, settings, front, application
        self._closed = False

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def port(self) -> int:
        return self._address.port

    def change(self, question: Mapping[str, Any]) -> str:
        """Do what another command asks for, and say what was done: `{"update": FOLDER}`, with `"trial"`, a `judge.Aim`,
        where it has to prove itself first; `{"rollback": true}`; `{"status": true}`, which is answered as JSON. All
        may name a `"model"`; the first two have to, where there are several."""
        model = question.get("model")
        if question.get("status"):
            asked = self.rollouts.values() if model is None else [self._rollout(model)]
            return json.dumps({"address": self.url, "models": rollout_controller.status(self._application, asked)})
        if question.get("rollback"):
            return self._rollout(model).back()
        if isinstance(given := question.get("update"), str):
            folder, trial = Path(given).resolve(), question.get("trial")
            return self._rollout(model).update(folder, canary.Aim(*trial) if trial else None)
        raise UserError("this endpoint knows the questions update, rollback and status", code="unknown_question")

    def _rollout(self, model: str | None) -> Rollout:
        """That of the model of that name; without a name that of the only model."""
        if model is None and len(self.rollouts) == 1:
            return next(iter(self.rollouts.values()))
        names = ", ".join(self.rollouts)
        if model is None:
            raise UserError(
                f"several models are served; name the one that is meant by --model: {names}", code="ambiguous"
            )
        if model not in self.rollouts:
            raise UserError(f"no model of the name {model} is served here; there are {names}", code="unknown_name")
        return self.rollouts[model]

    def close(self) -> None:
        """Let requests in progress end, stop Ray Serve, wait until nothing of it is left. Again is harmless."""
        # Where Ray has ended, so has the endpoint; to ask for its actors would start another Ray.
        if self._closed or not ray.is_initialized():
            return
        self._closed = True
        if ray_internals.store_has_ended():  # Ray answers no question any more
            if self._front is not None:
                # Ray ends its processes 60 s after the store's death, and half of that may have passed (`session`).
                ingress_choice.drain(self._front.folder, min(self._settings.deadline_s + 1, 15.0))
                ingress_choice.remove(self._front.folder)
            return
        for one in self.rollouts.values():
            one.close()
        if self._front is not None:
            self._front.drain(self._settings.deadline_s + 1)
        else:
            ray_internals.end_proxies(self._settings.deadline_s + 1)
        controller: Any = _controller()
        if controller is not None:
            # ray.serve.shutdown() alone awaits a call that dies with the controller, which Ray reports on stdout.
            ray.get(controller.graceful_shutdown.remote(wait=False))
            _until(lambda: _controller() is None, CLOSE_TIMEOUT_S)
        ray.serve.shutdown()
        # The proxy is told to go before the controller goes, and may outlive it by a moment.
        _until(lambda: not _actors(), CLOSE_TIMEOUT_S)
        if self._front is not None:
            self._front.drain(0.0)  # what its manager has started since
        _until(self._address.is_free, CLOSE_TIMEOUT_S)
        if self._front is not None:
            self._front.remove()


def start(
    artifacts: Path | Mapping[str, Path],
    settings: Serve,
    name: str | None = None,
    tell: Callable[[str], None] = lambda line: None,
    chosen: ingress_choice.Chosen | None = None,
) -> Endpoint:
    """Serve the artefact on the Ray that this process is connected to, or several, each by the name that it is given;
    returns when `/v2/health/ready` answers 200. `name`: the application's on Ray Serve.
    `tell` gets a line where it is served otherwise than asked: by the slower proxy, or without CPUs of its own.
    `chosen`: what takes the requests, where that was settled before this Ray was started.

    Refuses, before anything starts, an address that is open to others, a damaged artefact, a port in use and a Ray that
    serves already: the HTTP settings of a running Ray Serve cannot be changed, and `close` would end the other's
    endpoint with ours.
    """
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # importing ray.serve has set it to INFO, a line a step
    preflight.check(settings)
    tracing.check(settings)
    settings = preflight.absolute(settings)
    if isinstance(artifacts, Path):
        artifacts = {rtrain.inference.artifact.read(artifacts, verify=False).name: artifacts}
    artifacts = {model: folder.resolve() for model, folder in artifacts.items()}
    model_specs.admit(artifacts, settings)
    if _controller() is not None:
        raise UserError(
            "this Ray runs Ray Serve already; close that endpoint first, or start a Ray of your own",
            code="already_serving",
        )
    address = replace(free_address(settings.host, settings.port), tls=settings.tls_cert is not None)
    refuse_grpc_port(settings.host, settings.grpc_port)
    if chosen is None:
        front = ingress_choice.choose(settings, most_requests(settings, len(artifacts)), most_replicas(settings), tell)
        environment = {"runtime_env": {"env_vars": ingress_choice.variables(front)}}
    else:  # Ray's processes have inherited the variables, and processes are there that have no others
        front, environment = chosen.front, {}
    ray_internals.look_every(LOOK_S)
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    try:
        deployment = _configured(settings, len(artifacts), environment, quiet, tell)
        application = Application(deployment, name or APPLICATION, settings, artifacts, quiet)
    except BaseException:
        if front is not None:
            front.remove()
        raise
    endpoint = Endpoint(address, settings, front, application)
    try:
        with placement.said(partial(_message, application.name), tell):
            _deploy(settings, application, address.port, front, environment, quiet)
        _await_ready(address)
    except BaseException:  # Ctrl-C too must leave nothing behind
        endpoint.close()
        raise
    return endpoint


def _configured(
    settings: Serve, models: int, environment: Mapping[str, Any], quiet: LoggingConfig, tell: Callable[[str], None]
) -> ray.serve.Deployment:
    labels = settings.labels
    if problems := capacity.absent("serve.labels", labels):
        raise ConfigError(problems)
    if settings.gpus and not device.usable():
        fix = "install a build of torch for GPUs, or write 0"
        raise ConfigError(
            [Problem("serve.gpus", settings.gpus, "this build of torch cannot use them", fix, code="unavailable")]
        )
    if problem := placement.without_gpus(settings, [*capacity.here(labels), *capacity.types(labels).values()]):
        raise ConfigError([problem])
    free = [host.has for host in capacity.free() if capacity.has(host.labels, labels)]
    cpus, line = placement.reserved(settings, free, capacity.here(labels), capacity.may("cpu", labels), models)
    if line:
        tell(line)
    configured = ray.serve.deployment(
        **deployment_options(settings, models),
        **_number(settings),
        ray_actor_options={**ray_config.actor_options(settings, cpus), **environment},
        backpressure_config=BackpressureConfig(status_code=503, retry_after_s=1),
        graceful_shutdown_wait_loop_s=0.1,
        logging_config=quiet,
    )
    return configured(Replica)


def deployment_options(settings: Serve, models: int) -> dict[str, Any]:
    """What Ray Serve is told of the replicas, whoever deploys them."""
    ongoing = most_requests(settings, models)
    return {
        "name": DEPLOYMENT,
        "max_ongoing_requests": ongoing,
        "max_queued_requests": ongoing,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "max_constructor_retry_count": CONSTRUCTOR_ATTEMPTS,
        # A request is over by its deadline; what is still running then will not be answered.
        "graceful_shutdown_timeout_s": settings.deadline_s + 1,
    }


def _number(settings: Serve) -> dict[str, Any]:
    """How many replicas, as Ray Serve is told: a number, or bounds and who decides."""
    if most_replicas(settings) == settings.copies:
        return {"num_replicas": settings.copies}
    return {"autoscaling_config": AutoscalingConfig(**autoscaling.bounds(settings.copies, most_replicas(settings)))}


def _deploy(
    settings: Serve,
    application: Application,
    port: int,
    front: ingress_choice.Ingress | None,
    environment: Mapping[str, Any],
    quiet: LoggingConfig,
) -> None:
    """The proxy and the replicas start beside each other."""
    with _explained(front):
        proxies_are_up = ray_internals.begin_serve(
            ProxyLocation.HeadOnly, _options(settings, port, front), environment, quiet
        )
    try:
        application.begin()
    except RuntimeError as error:
        raise UserError(
            f"the model cannot be served: {cause(_message(application.name) or str(error))}", code="cannot_be_served"
        ) from None
    with _explained(front):
        proxies_are_up()


@contextmanager
def _explained(front: ingress_choice.Ingress | None) -> Iterator[None]:
    try:
        yield
    except (ray.exceptions.RayError, TimeoutError) as error:
        hint = "; or write serve.ingress=stock" if front else ""
        raise UserError(f"the proxy does not start: {cause(str(error))}{hint}", code="proxy_failed") from None


def _message(application: str) -> str:
    """What Ray Serve writes of the replicas; empty where it knows of none, or does not answer."""
    try:
        status = ray.serve.status().applications.get(application)
    except ray.exceptions.RayError:  # the controller is starting, or busy
        return ""
    return str(status.deployments[DEPLOYMENT].message) if status and status.deployments else ""


def _options(settings: Serve, port: int, front: ingress_choice.Ingress | None) -> HTTPOptions:
    """HAProxy takes the address and the certificate; else Ray's own proxy does."""
    if front is not None:
        return HTTPOptions(host=front.host, port=port, keep_alive_timeout_s=settings.keep_alive_s)
    return HTTPOptions(
        host=settings.host,
        port=port,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        keep_alive_timeout_s=settings.keep_alive_s,
    )


def _await_ready(address: Address) -> None:
    """Over HTTP, as a client would: the proxy learns of a new route some time after the replicas are up."""

    def ready() -> bool:
        connection = address.connection(timeout_s=5)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    if not _until(ready, READY_TIMEOUT_S):
        raise UserError(
            f"{address.url} was not ready after {READY_TIMEOUT_S:.0f} s; see the logs of Ray Serve", code="not_ready"
        )


def cause(message: str) -> str:
    """What was raised at the end of a traceback, without its class; the whole where there is no traceback."""
    lines = message.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  ")]
    return re.sub(r"^[\w.]+: ", "", "\n".join(lines[frames[-1] + 1 :])) if frames else message


def _controller() -> ActorHandle[Any] | None:
    try:
        name, namespace = ray_internals.serve_controller()
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None


def _actors() -> list[str]:
    """Ray Serve's own actors: controller, proxies, replicas."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == ray_internals.serve_controller()[1]]


def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    give_up = time.monotonic() + timeout_s
    while not (met := condition()) and time.monotonic() < give_up:
        time.sleep(0.02)
    return met
