"""One HTTP endpoint on Ray Serve: a proxy on the head (`ingress`), and replicas that each hold the whole path.

A replica is engine, batcher and application in one process: a second deployment for the model would add a hop that
costs more than the model does.
"""

import asyncio
import importlib
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import ray.serve
from fastapi import FastAPI
from ray.actor import ActorHandle
from ray.serve.config import (
    AutoscalingConfig,
    AutoscalingPolicy,
    BackpressureConfig,
    HTTPOptions,
    ProxyLocation,
)
from ray.serve.schema import LoggingConfig

import rtrain.artifact
from rtrain import ray_internals
from rtrain.cluster import supply
from rtrain.config import Serve
from rtrain.errors import UserError
from rtrain.predict import Predictor
from serve.app import build_app
from serve.change.rollout import Rollout
from serve.change.versions import Versions
from serve.door import access
from serve.front import direct, ingress
from serve.front.address import Address, free_address
from serve.watching import tracing
from serve.watching.sums import sum_expositions

logger = logging.getLogger(__name__)

DEPLOYMENT = "rtrain"
CONSTRUCTOR_ATTEMPTS = 1
"""What fails while an artefact is loaded fails again; Ray's default of 20 attempts takes minutes."""
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 2.0, 5.0
"""A hung replica is replaced after three misses; Ray's defaults need two minutes for that."""
READY_TIMEOUT_S = 60.0
RAY_SERVE = {
    # Ray ends a proxy that is not up after 5 s, which a busy machine needs for its imports.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
    # Between two reports of a replica's load, by which the number of replicas is decided; Ray's own 10 s are slow.
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
    # The application on the replica's own event loop: nothing of ours blocks it (engine, files and long texts have
    # threads), and a second loop costs every request a hop to it and one back.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
}
"""Ray Serve's settings of its controller and of all that it starts."""
CLOSE_TIMEOUT_S = 30.0
LOOK_BACK_S, UP_S, DOWN_S = 12.0, 3.0, 60.0
"""Seconds over which a replica's load is averaged, and for which more or fewer replicas must have been wanted."""

Nodes = Sequence[supply.Node]


@ray.serve.ingress()
class Replica:
    """Answers with the artefact that Ray hands it as `user_config`; a bad one never takes traffic."""

    def __init__(self, settings: Serve):
        self._settings = settings
        self._versions = Versions(self._make, self._beside)
        self._change: asyncio.Task[None] | None = None
        direct.install(self._versions, most_requests(settings))

    def __serve_build_asgi_app__(self) -> Versions:
        return self._versions

    def _beside(self, versions: Versions) -> AbstractAsyncContextManager[Any]:
        if self._settings.grpc_port is None:
            return nullcontext()
        grpc = importlib.import_module("serve.grpc")  # its libraries are an extra
        opened: AbstractAsyncContextManager[Any] = grpc.serving(
            versions.answering, self._settings, self._settings.grpc_port
        )
        return opened

    async def _make(self, artifact: Path) -> FastAPI:
        predictor = await asyncio.to_thread(Predictor.load, artifact, self._settings.threads)
        several = most_replicas(self._settings) > 1
        return build_app(predictor, self._settings, self._sum_of_replicas if several else None)

    async def reconfigure(self, wish: dict[str, str]) -> None:
        """At the start, load what is to be served. Later only note the wish: Ray routes nothing to a replica while this
        runs, and ends one in which it raises."""
        if self._versions.current is None:
            await self._versions.become(wish["artifact"])
        else:
            self._change = asyncio.create_task(self._become(wish["artifact"]))

    async def _become(self, artifact: str) -> None:
        try:
            await self._versions.become(artifact)
        except Exception:  # whatever it is, what answers goes on
            logger.exception("the artefact %s cannot be served", artifact)

    async def load(self, artifact: str) -> str:
        """Load and prove a candidate; why that fails, or nothing."""
        try:
            await self._versions.load(artifact)
        except UserError as error:
            return str(error)
        except Exception as error:  # of an engine, say: no candidate may end what answers
            logger.exception("the artefact %s cannot be loaded", artifact)
            return f"{type(error).__name__}: {error}"
        return ""

    async def drop(self) -> None:
        self._versions.drop()

    async def serves(self) -> str:
        return self._versions.current.folder if self._versions.current else ""

    def check_health(self) -> None:
        current = self._versions.current
        if current is not None and not current.service.ready:
            raise RuntimeError("an engine call has not returned within the deadline")

    def exposition(self) -> str:
        current = self._versions.current
        return current.service.exposition() if current else ""

    def record_autoscaling_stats(self) -> dict[str, float]:
        current = self._versions.current
        return current.service.load() if current else {}

    async def _sum_of_replicas(self) -> str:
        context = ray.serve.get_replica_context()
        handle = ray.serve.get_deployment_handle(context.deployment, context.app_name)
        return sum_expositions(await handle.broadcast("exposition").results_async())


class Endpoint:
    """A running endpoint; leaving its `with` block ends it and all that it started."""

    def __init__(self, address: Address, settings: Serve, front: ingress.Ingress | None, rollout: Rollout):
        self.url = address.url
        self.rollout = rollout
        self._address, self._settings, self._front = address, settings, front
        self._closed = False

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def port(self) -> int:
        return self._address.port

    def change(self, question: Mapping[str, Any]) -> str:
        """Do what another command asks for: `{"update": FOLDER}` or `{"rollback": true}`; says what was done."""
        if question.get("rollback"):
            return self.rollout.back()
        if isinstance(folder := question.get("update"), str):
            return self.rollout.update(Path(folder).resolve())
        raise UserError("this endpoint knows the questions update and rollback")

    def close(self) -> None:
        """Let requests in progress end, stop Ray Serve, wait until nothing of it is left. Again is harmless."""
        # Where Ray has ended, so has the endpoint; to ask for its actors would start another Ray.
        if self._closed or not ray.is_initialized():
            return
        self._closed = True
        if self._front is not None:
            self._front.drain(self._settings.deadline_s + 1)
        controller: Any = _controller()
        if controller is not None:
            # ray.serve.shutdown() alone awaits a call that dies with the controller, which Ray reports on stdout.
            ray.get(controller.graceful_shutdown.remote(wait=False))
            _until(lambda: _controller() is None, CLOSE_TIMEOUT_S)
        ray.serve.shutdown()
        # The proxy is told to go before the controller goes, and may outlive it by a moment.
        _until(lambda: not _actors(), CLOSE_TIMEOUT_S)
        _until(self._address.is_free, CLOSE_TIMEOUT_S)
        if self._front is not None:
            self._front.remove()


def start(
    artifact: Path, settings: Serve, name: str | None = None, tell: Callable[[str], None] = lambda line: None
) -> Endpoint:
    """Serve the artefact on the Ray that this process is connected to; returns when `/v2/health/ready` answers 200.
    `tell` gets a line where it is served otherwise than asked: by the slower proxy, or without CPUs of its own.

    Refuses, before anything starts, an address that is open to others, a damaged artefact, a port in use and a Ray that
    serves already: the HTTP settings of a running Ray Serve cannot be changed, and `close` would end the other's
    endpoint with ours.
    """
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # importing ray.serve has set it to INFO, a line a step
    access.check(settings)
    tracing.check(settings)
    settings = access.absolute(settings)
    checked = rtrain.artifact.read(artifact)
    access.admit(checked, artifact, settings)
    if _controller() is not None:
        raise UserError("this Ray runs Ray Serve already; close that endpoint first, or start a Ray of your own")
    address = replace(free_address(settings.host, settings.port), tls=settings.tls_cert is not None)
    if settings.grpc_port and not Address(settings.host, settings.grpc_port).is_free():
        place = f"port {settings.grpc_port} on {settings.host} is in use"
        raise UserError(f"serve.grpc_port: {place}; end the program that has it, or write another port")
    front = ingress.choose(settings, tell)
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    try:
        rollout = Rollout(_configured(settings, front, quiet, tell), name or checked.name, settings, quiet)
    except BaseException:
        if front is not None:
            front.remove()
        raise
    endpoint = Endpoint(address, settings, front, rollout)
    try:
        _deploy(artifact.resolve(), settings, rollout, address.port, front, quiet)
        _await_ready(address)
    except BaseException:  # Ctrl-C too must leave nothing behind
        endpoint.close()
        raise
    return endpoint


def _configured(
    settings: Serve, front: ingress.Ingress | None, quiet: LoggingConfig, tell: Callable[[str], None]
) -> ray.serve.Deployment:
    cpus, line = reserved(settings, supply.free(), supply.here(), supply.may("cpu"))
    if line:
        tell(line)
    ongoing = most_requests(settings)
    configured = ray.serve.deployment(
        name=DEPLOYMENT,
        **_number(settings),
        ray_actor_options={"num_cpus": cpus, **_environment(front)},
        max_ongoing_requests=ongoing,
        max_queued_requests=ongoing,
        backpressure_config=BackpressureConfig(status_code=503, retry_after_s=1),
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        max_constructor_retry_count=CONSTRUCTOR_ATTEMPTS,
        # A request is over by its deadline; what is still running then will not be answered.
        graceful_shutdown_timeout_s=settings.deadline_s + 1,
        graceful_shutdown_wait_loop_s=0.1,
        logging_config=quiet,
    )
    return configured(Replica)


def most_replicas(settings: Serve) -> int:
    return settings.max_replicas or settings.replicas


def most_requests(settings: Serve) -> int:
    """Requests of a replica at a time. Each holds a text at least, so that this many reach our own queue, whose 503
    says when to come back."""
    return max(64, settings.max_queue_rows + 2 * settings.max_batch_rows)


def _number(settings: Serve) -> dict[str, Any]:
    """How many replicas, as Ray Serve is told: a number, or bounds and who decides."""
    if most_replicas(settings) == settings.replicas:
        return {"num_replicas": settings.replicas}
    scaled = AutoscalingConfig(
        min_replicas=settings.replicas,
        initial_replicas=settings.replicas,
        max_replicas=most_replicas(settings),
        look_back_period_s=LOOK_BACK_S,
        upscale_delay_s=UP_S,
        downscale_delay_s=DOWN_S,
        policy=AutoscalingPolicy(policy_function="serve.change.scaling:policy"),
    )
    return {"autoscaling_config": scaled}


def _environment(front: ingress.Ingress | None) -> dict[str, Any]:
    return {"runtime_env": {"env_vars": {**RAY_SERVE, **(front.environment if front else {})}}}


def _deploy(
    artifact: Path,
    settings: Serve,
    rollout: Rollout,
    port: int,
    front: ingress.Ingress | None,
    quiet: LoggingConfig,
) -> None:
    try:
        ray.serve.start(
            proxy_location=ProxyLocation.HeadOnly,
            http_options=HTTPOptions(host=front.host if front else settings.host, port=port),
            controller_options=_environment(front),
            logging_config=quiet,
        )
    except (ray.exceptions.RayError, TimeoutError) as error:
        hint = "; or write serve.ingress=stock" if front else ""
        raise UserError(f"the proxy does not start: {cause(str(error))}{hint}") from None
    try:
        rollout.begin(artifact)
    except RuntimeError as error:
        status = ray.serve.status().applications.get(rollout.name)
        message = status.deployments[DEPLOYMENT].message if status and status.deployments else str(error)
        raise UserError(f"the model cannot be served: {cause(message)}") from None


def reserved(settings: Serve, free: Nodes, up: Nodes, may: Nodes) -> tuple[int, str]:
    """How many logical CPUs a replica is to reserve, and what to tell where that is not as many as it has threads, or
    not at once. `free`: what nobody holds of each node that is up; `up`: all that these nodes have; `may`: the nodes
    that there can be.

    Ray starts nodes for what is reserved and missing, where it can. Where it cannot, a replica would wait for ever
    without a word; without a reservation its threads share what processors there are.
    """
    now, coming = _room(free, settings), _room(may, settings) - _room(up, settings)
    if now >= settings.replicas:
        return settings.threads, ""
    wanted = f"serve.replicas={settings.replicas} with serve.threads={settings.threads} ask for more CPUs than"
    if now + coming >= settings.replicas:
        return settings.threads, f"{wanted} are free: waiting for nodes"
    has = sum(node.get("CPU", 0.0) for node in free)
    return 0, f"{wanted} Ray has free ({has:g}), and no node can come: replicas reserve none, and share what there is"


def _room(nodes: Nodes, settings: Serve) -> int:
    """How many replicas the nodes have room for."""
    return sum(int(node.get("CPU", 0.0) // settings.threads) for node in nodes)


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
        raise UserError(f"{address.url} was not ready after {READY_TIMEOUT_S:.0f} s; see the logs of Ray Serve")


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
