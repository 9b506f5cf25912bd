"""Listening address of the endpoint: find a free port, or report the port in use."""

import errno
import http.client
import socket
import ssl
from dataclasses import dataclass

from rtrain.core.errors import UserError

PORTS_TRIED = 20
"""How many ports above one in use are tried, to name a free one."""


@dataclass(frozen=True)
class Address:
    host: str
    port: int
    tls: bool = False

    @property
    def connect_host(self) -> str:
        """A host to connect to, where `host` means every interface."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    @property
    def url(self) -> str:
        host = f"[{self.connect_host}]" if ":" in self.connect_host else self.connect_host
        return f"http{'s' if self.tls else ''}://{host}:{self.port}"

    def open_connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """To ask oneself: the certificate, which is for the name that clients know, is not verified."""
        if not self.tls:
            return http.client.HTTPConnection(self.connect_host, self.port, timeout=timeout_s)
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return http.client.HTTPSConnection(self.connect_host, self.port, timeout=timeout_s, context=context)

    def is_free(self) -> bool:
        try:
            _probe_port(self.host, self.port)
        except OSError:
            return False
        return True


def find_free_address(host: str, port: int) -> Address:
    """The address to serve on; port 0 takes a free one. Ray's proxy itself would share a port with another program."""
    try:
        return Address(host, _probe_port(host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(_describe_port_in_use(host, port), code="port_in_use") from None
        reason = error.strerror or error
        raise UserError(
            f"cannot listen on {host}, port {port}: {reason}; correct serve.host or serve.port", code="cannot_listen"
        ) from None


def open_listener(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """Open a listening TCP socket. `create_server` leaves the protocol number empty, so asyncio would not set
    TCP_NODELAY, and a second write would wait 40 ms for the client's acknowledgement of the first one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=backlog)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it from their listener
    return listener


def refuse_grpc_port(host: str, port: int | None) -> None:
    """Raise `UserError` where a port that gRPC is to listen at is in use. gRPC itself would share it with another
    program that shares it too, and their requests would go to either."""
    if port and not Address(host, port).is_free():
        place = f"port {port} on {host} is in use"
        raise UserError(
            f"serve.grpc_port: {place}; stop the program that uses it, or use another port", code="port_in_use"
        )


def _describe_port_in_use(host: str, port: int) -> str:
    """That a port is in use, and which one is free instead."""
    free_port = next(
        (candidate for candidate in range(port + 1, port + 1 + PORTS_TRIED) if Address(host, candidate).is_free()), 0
    )
    port_option = f"--port {free_port}, which is free" if free_port else "--port 0, which takes a free one"
    return f"port {port} on {host} is in use; stop the program that uses it, or use {port_option}"


def _probe_port(host: str, port: int) -> int:
    """The port that was bound, and let go again."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        # As servers do: without it, connections that ended a minute ago still hold the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        bound_port: int = listener.getsockname()[1]
    return bound_port
