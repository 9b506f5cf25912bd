"""One HTTP endpoint on Ray Serve: a proxy on the head (`ingress`), and replicas that each hold the whole path.

A replica is engine, batcher and application in one process: a second deployment for the model would add a hop that
costs more than the model does.
"""

import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import prometheus_client
import ray
import ray.serve
from fastapi import FastAPI
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from ray.actor import ActorHandle
from ray.serve.config import BackpressureConfig, HTTPOptions, ProxyLocation
from ray.serve.schema import LoggingConfig

import rtrain.artifact
from rtrain import ray_internals
from rtrain.cluster import supply
from rtrain.config import Serve
from rtrain.errors import UserError
from rtrain.predict import Predictor
from serve import access, ingress
from serve.address import Address, free_address
from serve.app import Service, build_app

DEPLOYMENT = "rtrain"
CONSTRUCTOR_ATTEMPTS = 1
"""What fails while an artefact is loaded fails again; Ray's default of 20 attempts takes minutes."""
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 2.0, 5.0
"""A hung replica is replaced after three misses; Ray's defaults need two minutes for that."""
READY_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 30.0

Nodes = Sequence[supply.Node]


@ray.serve.ingress()
class Replica:
    """Loads the artefact in its constructor, so that a bad one never takes traffic."""

    def __init__(self, artifact: Path, settings: Serve):
        self._predictor = Predictor.load(artifact, settings.threads)
        self._settings = settings

    def __serve_build_asgi_app__(self) -> FastAPI:
        several = self._settings.replicas > 1
        app = build_app(self._predictor, self._settings, self._sum_of_replicas if several else None)
        self._service: Service = app.state.service
        return app

    def check_health(self) -> None:
        if not self._service.ready:
            raise RuntimeError("an engine call has not returned within the deadline")

    def exposition(self) -> str:
        return self._service.exposition()

    async def _sum_of_replicas(self) -> str:
        context = ray.serve.get_replica_context()
        handle = ray.serve.get_deployment_handle(context.deployment, context.app_name)
        return sum_expositions(await handle.broadcast("exposition").results_async())


class Endpoint:
    """A running endpoint; leaving its `with` block ends it and all that it started."""

    def __init__(self, address: Address, settings: Serve, front: ingress.Ingress | None):
        self.url = address.url
        self._address, self._settings, self._front = address, settings, front
        self._closed = False

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

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
    endpoint = Endpoint(address, settings, front)
    try:
        _deploy(artifact.resolve(), settings, name or checked.name, address.port, front, tell)
        _await_ready(address)
    except BaseException:  # Ctrl-C too must leave nothing behind
        endpoint.close()
        raise
    return endpoint


def _deploy(
    artifact: Path,
    settings: Serve,
    name: str,
    port: int,
    front: ingress.Ingress | None,
    tell: Callable[[str], None],
) -> None:
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    # Each request holds a text at least, so that this many reach our own queue, whose 503 says when to come back.
    ongoing = settings.max_queue_rows + 2 * settings.max_batch_rows
    cpus, line = reserved(settings, supply.free(), supply.here(), supply.may("cpu"))
    if line:
        tell(line)
    environment = {"runtime_env": {"env_vars": front.environment}} if front else {}
    configured = ray.serve.deployment(
        name=DEPLOYMENT,
        num_replicas=settings.replicas,
        ray_actor_options={"num_cpus": cpus, **environment},
        max_ongoing_requests=max(64, ongoing),
        max_queued_requests=max(64, ongoing),
        backpressure_config=BackpressureConfig(status_code=503, retry_after_s=1),
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        max_constructor_retry_count=CONSTRUCTOR_ATTEMPTS,
        # A request is over by its deadline; what is still running then will not be answered.
        graceful_shutdown_timeout_s=settings.deadline_s + 1,
        graceful_shutdown_wait_loop_s=0.1,
        logging_config=quiet,
    )
    application = configured(Replica).bind(artifact, settings)
    try:
        ray.serve.start(
            proxy_location=ProxyLocation.HeadOnly,
            http_options=HTTPOptions(
                host=front.host if front else settings.host,
                port=port,
                # HAProxy decrypts, and asks replicas on loopback.
                ssl_keyfile=None if front else settings.tls_key,
                ssl_certfile=None if front else settings.tls_cert,
            ),
            controller_options=environment,
            logging_config=quiet,
        )
    except ray.exceptions.RayTaskError as error:
        raise UserError(f"the proxy does not start: {cause(str(error))}; or write serve.ingress=stock") from None
    try:
        ray.serve.run(application, name=name, route_prefix="/", logging_config=quiet)
    except RuntimeError as error:
        status = ray.serve.status().applications.get(name)
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


# ----------------------------------------------------------------------------------------------------------- metrics


class _Families(NamedTuple):
    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families


def sum_expositions(texts: Iterable[str]) -> str:
    """One exposition whose samples are the sums over `texts`: right for counters, histograms and lengths of queues."""
    families: dict[str, Metric] = {}
    totals: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            if family.name.endswith("_created"):  # times of creation have no sum
                continue
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            sums = totals.setdefault(family.name, {})
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.items()))
                sums[key] = sums.get(key, 0.0) + sample.value
    for name, sums in totals.items():
        for (sample_name, labels), value in sums.items():
            families[name].add_sample(sample_name, dict(labels), value)
    return prometheus_client.generate_latest(_Families(list(families.values()))).decode()
