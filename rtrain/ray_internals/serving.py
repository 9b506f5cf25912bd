"""Ray Serve: its controller, its proxies, and the server of a replica."""

import asyncio
import contextlib
import gc
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ray.serve import Deployment


HAPROXY_S = 0.02
"""Seconds between two questions whether a HAProxy that was started answers."""


def serve_controller() -> tuple[str, str]:
    """Name and namespace of Ray Serve's controller; its other actors are in the same namespace."""
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    return SERVE_CONTROLLER_NAME, SERVE_NAMESPACE


def serve_host() -> str | None:
    """The address on which the proxies of Ray Serve listen; None where this process knows of none."""
    import ray

    if not ray.is_initialized():
        return None
    name, namespace = serve_controller()
    try:
        controller: Any = ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None
    return str(ray.get(controller.get_http_config.remote()).host)


async def broadcast_results(response: Any, timeout_s: float | None = None) -> list[Any]:
    """What each replica answers to a broadcast; an exception for each that fails, or has not answered in time. Ray's
    own `results_async` drops all answers where one is late."""
    results = await asyncio.wait_for(response._fetch_replica_results_async(), timeout_s)
    answers = (asyncio.wait_for(result.get_async(), timeout_s) for result in results)
    return list(await asyncio.gather(*answers, return_exceptions=True))


def import_serve() -> None:
    """Import what a controller, a proxy and a replica of Ray Serve are made of, without pandas. Ray Serve imports that
    for answers that are tables, which takes half as long as all the rest; it does without where pandas is not
    installed, and so it does where its import is barred."""
    barred = "pandas" not in sys.modules
    if barred:
        sys.modules["pandas"] = None  # type: ignore[assignment]
    gc.disable()  # it would look through the modules again and again, a seventh of their import's time
    try:
        import ray.serve._private.controller  # noqa: F401
    finally:
        gc.enable()
        if barred:
            del sys.modules["pandas"]


def begin_serve(
    proxy_location: Any, http_options: Any, controller_options: Mapping[str, Any], logging_config: Any
) -> Callable[[], None]:
    """`ray.serve.start` where nothing serves yet, without its wait for the proxies: they start beside the replicas.
    What is given back waits for them. It raises what Ray raises where one does not start, and TimeoutError."""
    import ray
    from ray.serve._private import api, client, constants
    from ray.serve.context import _set_global_client

    starts: Any = api
    controller, proxies = starts._create_controller_and_proxy_refs(
        http_options=http_options,
        grpc_options=None,
        global_logging_config=logging_config,
        global_tracing_config=None,
        controller_options=starts._coerce_controller_options(dict(controller_options)),
        proxy_location=proxy_location,
    )
    _set_global_client(client.ServeControllerClient(controller))

    def wait() -> None:
        most = constants.HTTP_PROXY_TIMEOUT
        try:
            ray.get(proxies, timeout=most)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(f"the proxy is not ready after {most} s") from None

    return wait


def look_every(seconds: float) -> None:
    """How often this process looks whether an application that it deploys runs; Ray's own 1 s is long."""
    from ray.serve._private import client

    found: Any = client
    found.CLIENT_POLLING_INTERVAL_S = seconds


def without_fallback_proxy() -> None:
    """In the controller: start no proxy of Ray's own beside HAProxy, for requests that find no replica. It is a process
    more, and HAProxy answers those requests itself."""
    from ray.serve._private import proxy_state

    states: Any = proxy_state.ProxyStateManager
    states._start_fallback_proxy_if_needed = lambda manager, *place: None


def before_actors() -> None:
    """In a process that becomes an actor of Ray Serve: have it imported; and where that manages HAProxy, have it see
    within milliseconds that HAProxy is up, where Ray looks every half second at each change of replicas."""
    import_serve()
    from ray.serve._private import constants, haproxy

    kind: Any = haproxy.HAProxyApi
    usual, most = kind._wait_for_hap_availability, constants.RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S

    async def wait(api: Any, process: Any, timeout_s: int = most) -> None:
        give_up = time.monotonic() + timeout_s
        while process.returncode is None and time.monotonic() < give_up:
            if await api._get_running_pid() == process.pid:
                return
            await asyncio.sleep(HAPROXY_S)
        await usual(api, process, timeout_s)  # it says why

    kind._wait_for_hap_availability = wait


LAST_ANSWERS_S = 1.0
"""Seconds for which connections to a proxy of Ray Serve that is to end are still answered, one request each."""


def end_proxies(seconds: float) -> None:
    """Have Ray Serve's own proxies take no more connections, and wait until what they have accepted is answered, at
    most for so long. Ray itself kills them, with what they have in hand."""
    import ray
    from ray.serve._private.constants import SERVE_PROXY_NAME

    space = serve_controller()[1]
    named = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == space]
    proxies: list[Any] = [ray.get_actor(name, space) for name in named if name.startswith(SERVE_PROXY_NAME)]
    give_up = time.monotonic() + seconds
    with contextlib.suppress(ray.exceptions.RayError):  # one that has died has nothing in hand
        ray.get([proxy.__ray_call__.remote(_end_server) for proxy in proxies], timeout=seconds)
        while time.monotonic() < give_up:
            if all(ray.get([proxy.__ray_call__.remote(_server_has_ended) for proxy in proxies], timeout=seconds)):
                return
            time.sleep(0.05)


def _end_server(proxy: Any) -> None:
    """In a proxy's process: end its HTTP server softly. uvicorn ends connections that wait for a request at once, and a
    client may just be sending one; so each is first told, with its next answer, that this was the last."""
    server = proxy._start_http_server_task.result()[1]
    last = (b"connection", b"close")
    server.config.encoded_headers = [*server.config.encoded_headers, last]
    server.server_state.default_headers = [*server.server_state.default_headers, last]
    for listening in server.servers:
        listening.close()
    asyncio.get_running_loop().call_later(LAST_ANSWERS_S, setattr, server, "should_exit", True)


def _server_has_ended(proxy: Any) -> bool:
    return bool(proxy._start_http_server_task.result()[0].done())


def with_version(deployment: "Deployment", version: str) -> "Deployment":
    """The deployment with a code version of ours. Ray Serve draws one at each `run`, and starts all replicas anew for
    it; where it is the same, a change of `user_config` is handed to the replicas there are."""
    return deployment.options(version=version, _internal=True)


class ReplicaServer(NamedTuple):
    """The HTTP server that a replica of Ray Serve is about to start, for a proxy that connects to it."""

    application: Callable[..., Awaitable[None]]
    """Ray's own way to the deployment, ASGI; it answers the proxy's question at `/-/healthz`."""
    track: Callable[[int], None]
    """Told 1 for a request that begins, -1 for one that ends: Ray waits for them before it ends the replica."""
    options: Any
    """Ray's HTTPOptions: host, port, keep_alive_timeout_s."""
    loop: Any
    """The event loop on which it is to run."""


def replace_replica_server(start: Callable[[ReplicaServer], Awaitable[tuple[Any, Any] | None]]) -> None:
    """Have the replica that this process is start its HTTP server by `start`, which gives the server's task and the
    uvicorn.Server; or None, for Ray's own. To be called in the deployment's constructor: the server starts after it."""
    import ray.serve._private.replica
    from ray.serve._private.common import RequestMetadata, RequestProtocol

    replicas: Any = ray.serve._private.replica
    usual = replicas.start_asgi_http_server
    counted = RequestMetadata("", "", _request_protocol=RequestProtocol.HTTP, is_direct_ingress=True)

    async def started(app: Any, options: Any, *, event_loop: Any, **others: Any) -> tuple[Any, Any]:
        metrics = app.__self__._metrics_manager

        def track(change: int) -> None:
            (metrics.inc_num_ongoing_requests if change > 0 else metrics.dec_num_ongoing_requests)(counted)

        found = await start(ReplicaServer(app, track, options, event_loop))
        return found or await usual(app, options, event_loop=event_loop, **others)

    replicas.start_asgi_http_server = started
