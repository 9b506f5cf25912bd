"""The endpoint as one process, without Ray: uvicorn, and the application that a replica has.

For small machines and for images that only answer. There is one process and one version: no replicas, no change while
it runs, and no HAProxy before it, which shuts out clients that send their headers slowly; where strangers can reach the
address, another proxy should stand there.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from rtrain.config import Serve
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.inference.predictor import Predictor
from rtrain.ray_internals import ReplicaServer
from serve.app import build_app
from serve.auth import middleware
from serve.ingress import direct, http_protocol, tls
from serve.ingress.address import Address, free_address, listening, refuse_grpc_port
from serve.model import Lasting
from serve.observability import tracing
from serve.ray_config import most_requests
from serve.registry import Models, build_desk, over_grpc

BACKLOG = 1024
STARTED_S = 0.01
"""Between two looks whether the server listens."""


def check(settings: Serve) -> None:
    """Raises `ConfigError` for settings that one process cannot follow."""
    found = []
    for name in ("replicas", "max_replicas"):
        if (value := getattr(settings, name)) is not None and value > 1:
            found.append(
                Problem(
                    f"serve.{name}",
                    value,
                    "--alone is one process",
                    "write 1, or leave out --alone",
                    code="conflicting_settings",
                )
            )
    if settings.ingress == "haproxy":
        reason = "--alone answers without a proxy"
        found.append(
            Problem("serve.ingress", "haproxy", reason, "write auto, or leave out --alone", code="conflicting_settings")
        )
    for name in ("gpus", "labels"):
        if value := getattr(settings, name):
            reason = "--alone answers with the processor of this machine"
            found.append(
                Problem(
                    f"serve.{name}", value, reason, "leave it out, or leave out --alone", code="conflicting_settings"
                )
            )
    if found:
        raise ConfigError(found)
    tracing.check(settings)


def run(artifacts: Mapping[str, Path], settings: Serve, tell: Callable[[Address], None]) -> None:
    """Answer with artefacts, each by its name, until Ctrl-C or SIGTERM, which raise KeyboardInterrupt once requests in
    progress have ended. `tell` gets the address when it answers."""
    check(settings)
    asyncio.run(_run(artifacts, settings, tell))
    raise KeyboardInterrupt  # nothing else ends it, and asyncio has taken the signal for its own


async def _run(artifacts: Mapping[str, Path], settings: Serve, tell: Callable[[Address], None]) -> None:
    address = replace(free_address(settings.host, settings.port), tls=settings.tls_cert is not None)
    refuse_grpc_port(settings.host, settings.grpc_port)
    with listening(address.host, address.port, BACKLOG) as bound:
        models = application(settings, list(artifacts))
        await models.become({name: str(folder.resolve()) for name, folder in artifacts.items()})
        server = uvicorn.Server(_configured(models, settings, len(artifacts)))
        renewing = asyncio.create_task(_renew(server.config, settings))
        serving = asyncio.create_task(_serve(server, bound))
        while not server.started and not serving.done():
            await asyncio.sleep(STARTED_S)
        if server.started:
            tell(address)
        await serving
        renewing.cancel()
        if not server.started:
            raise UserError(
                "the HTTP server did not start; a port of the endpoint's may have been taken meanwhile",
                code="port_in_use",
            )


async def _renew(config: uvicorn.Config, settings: Serve) -> None:
    """Take a renewed certificate for connections that come from then on."""
    if settings.tls_cert is None or settings.tls_key is None:
        return
    files = tls.CertificateFiles(settings.tls_cert, settings.tls_key)
    while True:
        await asyncio.sleep(tls.LOOK_S)
        if files.renewed() is not None and config.ssl is not None:
            with suppress(OSError):  # written since: the next look has the rest
                config.ssl.load_cert_chain(settings.tls_cert, settings.tls_key, password="")


async def _serve(server: uvicorn.Server, bound: socket.socket) -> None:
    with suppress(SystemExit):  # uvicorn's word for that the application could not start
        await server.serve(sockets=[bound])


def _configured(models: Models, settings: Serve, many: int) -> uvicorn.Config:
    most = most_requests(settings, many)
    usual = ReplicaServer(models, lambda change: None, options=None, loop=None)
    return uvicorn.Config(
        direct.Direct(models, usual, most),
        http=http_protocol.Protocol,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=int(settings.deadline_s) + 1,
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


def application(settings: Serve, names: list[str]) -> Models:
    """As a replica makes it, with the metrics of this process alone."""
    door = middleware.door(settings)
    lasting = {name: Lasting(settings, door) for name in names}

    async def make(name: str, folder: Path) -> FastAPI:
        predictor = await asyncio.to_thread(Predictor.load, folder, settings.threads)
        predictor.artifact = replace(predictor.artifact, name=name)
        return build_app(predictor, settings, None, lasting[name])

    beside = over_grpc(settings, door, shared=False)
    return Models(lasting, make, lambda models: build_desk(models, settings, door, None), beside)
