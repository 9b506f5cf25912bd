"""Where the endpoint listens: an address that is free, or what to do about one that is not."""

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
    def reachable(self) -> str:
        """A host to connect to, where `host` means every interface."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    @property
    def url(self) -> str:
        host = f"[{self.reachable}]" if ":" in self.reachable else self.reachable
        return f"http{'s' if self.tls else ''}://{host}:{self.port}"

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """To ask oneself: the certificate, which is for the name that clients know, is not verified."""
        if not self.tls:
            return http.client.HTTPConnection(self.reachable, self.port, timeout=timeout_s)
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return http.client.HTTPSConnection(self.reachable, self.port, timeout=timeout_s, context=context)

    def is_free(self) -> bool:
        try:
            _bind(self.host, self.port)
        except OSError:
            return False
        return True


def free_address(host: str, port: int) -> Address:
    """The address to serve on; port 0 takes a free one. Ray's proxy itself would share a port with another program."""
    try:
        return Address(host, _bind(host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(_in_use(host, port), code="port_in_use") from None
        reason = error.strerror or error
        raise UserError(
            f"cannot listen on {host}, port {port}: {reason}; correct serve.host or serve.port", code="cannot_listen"
        ) from None


def listening(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """A socket that takes connections. What is written to them leaves at once: asyncio sees to that for sockets that
    say they are TCP, which those of `create_server` do not, and a second write would wait 40 ms for the client's
    word that it has the first one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.create_server((host, port), family=family, backlog=backlog)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections have it from their listener
    return found


def refuse_grpc_port(host: str, port: int | None) -> None:
    """Raise `UserError` where a port that gRPC is to listen at is in use. gRPC itself would share it with another
    program that shares it too, and their requests would go to either."""
    if port and not Address(host, port).is_free():
        place = f"port {port} on {host} is in use"
        raise UserError(
            f"serve.grpc_port: {place}; end the program that has it, or write another port", code="port_in_use"
        )


def _in_use(host: str, port: int) -> str:
    """That a port is in use, and which one is free instead."""
    after = next((one for one in range(port + 1, port + 1 + PORTS_TRIED) if Address(host, one).is_free()), 0)
    free = f"--port {after}, which is free" if after else "--port 0, which takes a free one"
    return f"port {port} on {host} is in use; end the program that has it, or write {free}"


def _bind(host: str, port: int) -> int:
    """The port that was bound, and let go again."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        # As servers do: without it, connections that ended a minute ago still hold the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        found: int = listener.getsockname()[1]
    return found
