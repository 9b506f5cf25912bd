"""The endpoint as one process, without Ray: uvicorn, and the application that a replica has.

For small machines and for images that only answer. There is one process and one version: no replicas, no change while
it runs, and no HAProxy before it, which shuts out clients that send their headers slowly; where strangers can reach the
address, another proxy should stand there.
"""

import asyncio
import socket
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import uvicorn

from rtrain.config import ServeConfig
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.inference.predictor import Predictor
from rtrain.ray_internals import ReplicaServer
from serve.ingress import direct, tls
from serve.ingress.address import Address, find_free_address, open_listener, refuse_grpc_port
from serve.observability import tracing
from serve.ray_config import max_requests_per_replica
from serve.registry import ModelRegistry

BACKLOG = 1024
STARTUP_POLL_S = 0.01
"""Between two looks whether the server listens."""


def check_standalone_settings(settings: ServeConfig) -> None:
    """Raises `ConfigError` for settings that one process cannot follow."""
    processor_reason = "--standalone answers with the processor of this machine"
    conflicts = [
        *(
            (name, "--standalone is one process", "write 1")
            for name in ("replicas", "max_replicas")
            if (getattr(settings, name) or 1) > 1
        ),
        *([("ingress", "--standalone answers without a proxy", "write auto")] if settings.ingress == "haproxy" else []),
        *((name, processor_reason, "leave it out") for name in ("gpus", "labels") if getattr(settings, name)),
    ]
    problems = [
        Problem(
            f"serve.{name}",
            getattr(settings, name),
            reason,
            f"{fix}, or leave out --standalone",
            code="conflicting_settings",
        )
        for name, reason, fix in conflicts
    ]
    if problems:
        raise ConfigError(problems)
    tracing.check_tracing(settings)


def run_standalone(artifacts: Mapping[str, Path], settings: ServeConfig, on_ready: Callable[[Address], None]) -> None:
    """Answer with artifacts, each by its name, until Ctrl-C or SIGTERM, which raise KeyboardInterrupt once requests in
    progress have ended. `on_ready` gets the address when it answers."""
    check_standalone_settings(settings)
    asyncio.run(_run(artifacts, settings, on_ready))
    raise KeyboardInterrupt  # nothing else ends it, and asyncio has taken the signal for its own


async def _run(artifacts: Mapping[str, Path], settings: ServeConfig, on_ready: Callable[[Address], None]) -> None:
    address = replace(find_free_address(settings.host, settings.port), tls=settings.tls_cert is not None)
    refuse_grpc_port(settings.host, settings.grpc_port)
    with open_listener(address.host, address.port, BACKLOG) as listener:
        model_registry = build_model_registry(settings, list(artifacts))
        await model_registry.apply({name: str(folder.resolve()) for name, folder in artifacts.items()})
        server = uvicorn.Server(_build_uvicorn_config(model_registry, settings, len(artifacts)))
        certificate_task = asyncio.create_task(_reload_certificate(server.config, settings))
        server_task = asyncio.create_task(_serve(server, listener))
        while not server.started and not server_task.done():
            await asyncio.sleep(STARTUP_POLL_S)
        if server.started:
            on_ready(address)
        await server_task
        certificate_task.cancel()
        if not server.started:
            raise UserError(
                "the HTTP server did not start; a port of the endpoint's may have been taken meanwhile",
                code="port_in_use",
            )


async def _reload_certificate(config: uvicorn.Config, settings: ServeConfig) -> None:
    """Take a renewed certificate for connections that come from then on."""
    if settings.tls_cert is None or settings.tls_key is None:
        return
    certificate_files = tls.CertificateFiles(settings.tls_cert, settings.tls_key)
    while True:
        await asyncio.sleep(tls.POLL_INTERVAL_S)
        if certificate_files.read_renewed() is not None and config.ssl is not None:
            with suppress(OSError):  # written since: the next look has the rest
                config.ssl.load_cert_chain(settings.tls_cert, settings.tls_key, password="")


async def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    with suppress(SystemExit):  # uvicorn's word for that the application could not start
        await server.serve(sockets=[listener])


def _build_uvicorn_config(model_registry: ModelRegistry, settings: ServeConfig, num_models: int) -> uvicorn.Config:
    max_requests = max_requests_per_replica(settings, num_models)
    replica_server = ReplicaServer(model_registry, lambda change: None, options=None, loop=None)
    return uvicorn.Config(
        direct.DirectIngressApp(model_registry, replica_server, max_requests),
        http=direct.HttpProtocol,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=int(settings.request_timeout_s) + 1,
        ws="none",
        lifespan="on",  # by itself uvicorn takes an error in it, as of a port of gRPC's in use, for none at all
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_level="critical",
        log_config=None,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )


def build_model_registry(settings: ServeConfig, names: Collection[str]) -> ModelRegistry:
    """Registry with the metrics of this process alone."""

    async def load_predictor(folder: Path) -> Predictor:
        return await asyncio.to_thread(Predictor.load, folder, settings.threads)

    return ModelRegistry(settings, names, load_predictor)
