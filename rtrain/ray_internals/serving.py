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


HAPROXY_POLL_INTERVAL_S = 0.02
"""Seconds between two health checks of a started HAProxy."""


def controller_name_and_namespace() -> tuple[str, str]:
    """Return name and namespace of Ray Serve's controller; its other actors are in the same namespace."""
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    return SERVE_CONTROLLER_NAME, SERVE_NAMESPACE


def serve_host() -> str | None:
    """Return the listen address of Ray Serve's proxies; None without any."""
    import ray

    if not ray.is_initialized():
        return None
    name, namespace = controller_name_and_namespace()
    try:
        controller: Any = ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None
    return str(ray.get(controller.get_http_config.remote()).host)


async def collect_broadcast_results(response: Any, timeout_s: float | None = None) -> list[Any]:
    """Return each replica's reply to a broadcast, or an exception for a failure or a timeout. Ray's own `results_async`
    drops all replies if one is late."""
    results = await asyncio.wait_for(response._fetch_replica_results_async(), timeout_s)
    answers = (asyncio.wait_for(result.get_async(), timeout_s) for result in results)
    return list(await asyncio.gather(*answers, return_exceptions=True))


def import_serve() -> None:
    """Import the modules of Ray Serve's controller, proxy and replica, without pandas. Ray Serve imports pandas for
    replies that are tables, which takes half as long as the rest; a blocked import looks to it like a missing
    package."""
    is_pandas_blocked = "pandas" not in sys.modules
    if is_pandas_blocked:
        sys.modules["pandas"] = None  # type: ignore[assignment]
    gc.disable()  # collections would take a seventh of the import's time
    try:
        import ray.serve._private.controller  # noqa: F401
    finally:
        gc.enable()
        if is_pandas_blocked:
            del sys.modules["pandas"]


def start_serve(
    proxy_location: Any, http_options: Any, controller_options: Mapping[str, Any], logging_config: Any
) -> Callable[[], None]:
    """Call `ray.serve.start` without its wait for the proxies: they start in parallel to the replicas. The returned
    function waits for them. It raises Ray's errors if one does not start, and TimeoutError."""
    import ray
    from ray.serve._private import api, client, constants
    from ray.serve.context import _set_global_client

    serve_api: Any = api
    controller, proxies = serve_api._create_controller_and_proxy_refs(
        http_options=http_options,
        grpc_options=None,
        global_logging_config=logging_config,
        global_tracing_config=None,
        controller_options=serve_api._coerce_controller_options(dict(controller_options)),
        proxy_location=proxy_location,
    )
    _set_global_client(client.ServeControllerClient(controller))

    def wait_for_proxies() -> None:
        timeout_s = constants.HTTP_PROXY_TIMEOUT
        try:
            ray.get(proxies, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(f"the proxy is not ready after {timeout_s} s") from None

    return wait_for_proxies


def set_polling_interval(seconds: float) -> None:
    """Set the interval of this process's checks whether a deployed application runs; Ray's own is 1 s."""
    from ray.serve._private import client

    client_module: Any = client
    client_module.CLIENT_POLLING_INTERVAL_S = seconds


def disable_fallback_proxy() -> None:
    """In the controller: start no fallback proxy of Ray for requests without a replica. It is an extra process, and
    HAProxy answers these requests itself."""
    from ray.serve._private import proxy_state

    manager_class: Any = proxy_state.ProxyStateManager
    manager_class._start_fallback_proxy_if_needed = lambda manager, *place: None


def prepare_actor_process() -> None:
    """In a process of an actor of Ray Serve: import Ray Serve, and if the actor manages HAProxy, check every few
    milliseconds that HAProxy is up. Ray checks every half second, at each change of replicas."""
    import_serve()
    from ray.serve._private import constants, haproxy

    haproxy_api: Any = haproxy.HAProxyApi
    original_wait = haproxy_api._wait_for_hap_availability
    default_timeout_s = constants.RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S

    async def wait_for_haproxy(api: Any, process: Any, timeout_s: int = default_timeout_s) -> None:
        deadline = time.monotonic() + timeout_s
        while process.returncode is None and time.monotonic() < deadline:
            if await api._get_running_pid() == process.pid:
                return
            await asyncio.sleep(HAPROXY_POLL_INTERVAL_S)
        await original_wait(api, process, timeout_s)  # it says why

    haproxy_api._wait_for_hap_availability = wait_for_haproxy


DRAIN_GRACE_S = 1.0
"""Seconds for which an ending proxy of Ray Serve still answers its connections, one request each."""


def stop_proxies(timeout_s: float) -> None:
    """Make Ray Serve's own proxies accept no more connections, and wait until accepted requests are answered, for at
    most `timeout_s`. Ray itself would kill them with their requests."""
    import ray
    from ray.serve._private.constants import SERVE_PROXY_NAME

    namespace = controller_name_and_namespace()[1]
    actor_names = [
        actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == namespace
    ]
    proxies: list[Any] = [ray.get_actor(name, namespace) for name in actor_names if name.startswith(SERVE_PROXY_NAME)]
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(ray.exceptions.RayError):  # a dead proxy has no requests
        ray.get([proxy.__ray_call__.remote(_stop_server) for proxy in proxies], timeout=timeout_s)
        while time.monotonic() < deadline:
            if all(ray.get([proxy.__ray_call__.remote(_is_server_stopped) for proxy in proxies], timeout=timeout_s)):
                return
            time.sleep(0.05)


def _stop_server(proxy: Any) -> None:
    """In a proxy's process: shut its HTTP server down gracefully. uvicorn closes idle connections at once, although a
    client may be sending a request; so each connection first gets `Connection: close` with its next reply."""
    server = proxy._start_http_server_task.result()[1]
    close_header = (b"connection", b"close")
    server.config.encoded_headers = [*server.config.encoded_headers, close_header]
    server.server_state.default_headers = [*server.server_state.default_headers, close_header]
    for listener in server.servers:
        listener.close()
    asyncio.get_running_loop().call_later(DRAIN_GRACE_S, setattr, server, "should_exit", True)


def _is_server_stopped(proxy: Any) -> bool:
    return bool(proxy._start_http_server_task.result()[0].done())


def with_version(deployment: "Deployment", version: str) -> "Deployment":
    """Return the deployment with a fixed code version. Ray Serve draws a new version at each `run`, and restarts all
    replicas for it; with the same version, a changed `user_config` goes to the running replicas."""
    return deployment.options(version=version, _internal=True)


class ReplicaServer(NamedTuple):
    """The HTTP server of a starting replica of Ray Serve, to which a proxy connects."""

    application: Callable[..., Awaitable[None]]
    """Ray's own ASGI application of the deployment; it answers the proxy's health check at `/-/healthz`."""
    track_request: Callable[[int], None]
    """Called with 1 at the start of a request and -1 at its end: Ray waits for open requests before it ends the
    replica."""
    options: Any
    """Ray's HTTPOptions: host, port, keep_alive_timeout_s."""
    loop: Any
    """The event loop of the server."""


def replace_replica_server(start_server: Callable[[ReplicaServer], Awaitable[tuple[Any, Any] | None]]) -> None:
    """Make this replica start its HTTP server by `start_server`, which returns the server's task and the
    uvicorn.Server; or None, for Ray's own server. Call it in the deployment's constructor: the server starts later."""
    import ray.serve._private.replica
    from ray.serve._private.common import RequestMetadata, RequestProtocol

    replica_module: Any = ray.serve._private.replica
    original_start = replica_module.start_asgi_http_server
    request_metadata = RequestMetadata("", "", _request_protocol=RequestProtocol.HTTP, is_direct_ingress=True)

    async def start_http_server(app: Any, options: Any, *, event_loop: Any, **kwargs: Any) -> tuple[Any, Any]:
        metrics = app.__self__._metrics_manager

        def track_request(change: int) -> None:
            (metrics.inc_num_ongoing_requests if change > 0 else metrics.dec_num_ongoing_requests)(request_metadata)

        server = await start_server(ReplicaServer(app, track_request, options, event_loop))
        return server or await original_start(app, options, event_loop=event_loop, **kwargs)

    replica_module.start_asgi_http_server = start_http_server
