"""The address of a Ray cluster, tried before Ray tries it, which takes 20 s or a minute and ends in a traceback.

An address is `host:port` of a head (the port of `ray start --head`, by default 6379) or `auto`, which Ray resolves to
the cluster that this machine is a node of. `local` and no address at all mean a private Ray.
"""

import os
import re
import socket
from typing import TYPE_CHECKING

from rtrain import ray_internals
from rtrain.core.errors import ConfigError, Problem, UserError

if TYPE_CHECKING:
    from rtrain.config import Config

LOCAL, AUTO = "local", "auto"
CONNECT_S, ANSWER_S = 1.5, 3.0
"""Seconds in which the head must take a connection, and answer on it."""
FIX = "write HOST:PORT of a running head, as `ray start --head` prints it, or leave it out for a private Ray"


def of(config: "Config") -> tuple[str, str] | None:
    """(the setting or variable that names it, the address); None for a private Ray."""
    named = config.deploy.cluster.address
    name, value = ("cluster.address", named) if named else ("RAY_ADDRESS", os.environ.get("RAY_ADDRESS"))
    return None if not value or value == LOCAL else (name, value)


def check(name: str, address: str) -> None:
    """Raise an error of one line where no Ray that this process can use answers at `address`, which `name` names."""
    if "://" in address:
        reason = "a driver of rtrain runs on a node of the cluster, not through Ray's client"
        rest = address.split("://", 1)[1]
        host = f"{rest.partition(']')[0]}]" if rest.startswith("[") else re.split(r"[:/]", rest)[0] or "HOST"
        fix = f"submit a job ({_job(host)}), or start rtrain there with {AUTO}"
        raise ConfigError([Problem(name, address, reason, fix, code="unsupported")])
    if address == AUTO:
        found = ray_internals.running_here()
        if found is None:
            raise _refused(name, address, "no Ray runs on this machine")
        ray_internals.use_token_of_this_machine()
    else:
        found = address
    host, port = _parts(name, address, found)
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError as error:
        reason = f"nothing answers at {found} ({error.strerror or error})"
        raise _refused(name, address, reason) from None
    head = ray_internals.head(found, ANSWER_S)
    if head == "none":
        reason = f"what listens at {found} is not the head of a Ray cluster"
        raise ConfigError([Problem(name, address, reason, FIX, code="not_ray")])
    if head == "closed":
        fix = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file that holds it"
        raise UserError(f"{name}={address}: the cluster at {found} asks for its own token; {fix}", code="wrong_token")
    if not ray_internals.nodes_here():
        raise UserError(
            f"{name}={address}: the cluster answers, but this machine is none of its nodes; start rtrain on one, or "
            f"submit a job there: {_job(found.rpartition(':')[0])}",
            code="not_a_node",
        )


def _job(host: str) -> str:
    """The command that submits a job; an IPv6 `host` is in brackets."""
    return f"ray job submit --address http://{host}:8265 -- python -m rtrain ..."


def _parts(name: str, address: str, found: str) -> tuple[str, int]:
    host, separator, port = found.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if ":" in bare and host != f"[{bare}]":
        fix = "write an IPv6 address in brackets, before the port: [fd00::1]:6379"
        raise ConfigError(
            [Problem(name, address, "where the host ends and the port begins is not told", fix, code="invalid_address")]
        )
    if not separator or not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError([Problem(name, address, "not an address", FIX, code="invalid_address")])
    return bare, int(port)


def _refused(name: str, address: str, reason: str) -> ConfigError:
    return ConfigError([Problem(name, address, reason, FIX, code="unreachable")])
