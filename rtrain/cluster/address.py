"""Resolve and probe the address of a Ray cluster. Ray's own attempt takes 20 s to a minute and ends in a traceback.

An address is `host:port` of a head (the port of `ray start --head`, 6379 by default) or `auto`, which Ray resolves to
the cluster of this machine. `local` and no address mean a private cluster.
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
CONNECT_TIMEOUT_S, RESPONSE_TIMEOUT_S = 1.5, 3.0
"""Timeout in seconds for a connection to the head and for its response."""
ADDRESS_HINT = (
    "write HOST:PORT of a running head, as `ray start --head` prints it, or leave it out for a private cluster"
)


def resolve_address(config: "Config") -> tuple[str, str] | None:
    """The pair (setting or variable, address); None for a private cluster."""
    configured_address = config.deploy.cluster.address
    source, value = (
        ("cluster.address", configured_address)
        if configured_address
        else ("RAY_ADDRESS", os.environ.get("RAY_ADDRESS"))
    )
    return None if not value or value == LOCAL else (source, value)


def check_address(source: str, address: str) -> None:
    """Raise a one-line error if no usable Ray cluster responds at `address`, which comes from `source`."""
    if "://" in address:
        reason = "a driver of rtrain runs on a node of the cluster, not through Ray's client"
        rest = address.split("://", 1)[1]
        host = f"{rest.partition(']')[0]}]" if rest.startswith("[") else re.split(r"[:/]", rest)[0] or "HOST"
        fix = f"submit a job ({_job_submit_command(host)}), or start rtrain there with {AUTO}"
        raise ConfigError([Problem(source, address, reason, fix, code="unsupported")])
    if address == AUTO:
        endpoint = ray_internals.local_cluster_address()
        if endpoint is None:
            raise _unreachable_error(source, address, "no Ray runs on this machine")
        ray_internals.enable_local_token_auth()
    else:
        endpoint = address
    host, port = _split_host_port(source, address, endpoint)
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        reason = f"no response from {endpoint} ({error.strerror or error})"
        raise _unreachable_error(source, address, reason) from None
    head_state = ray_internals.probe_head(endpoint, RESPONSE_TIMEOUT_S)
    if head_state == "none":
        reason = f"the server at {endpoint} is not the head of a Ray cluster"
        raise ConfigError([Problem(source, address, reason, ADDRESS_HINT, code="not_ray")])
    if head_state == "closed":
        fix = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file that holds it"
        raise UserError(f"{source}={address}: the cluster at {endpoint} requires its token; {fix}", code="wrong_token")
    if not ray_internals.local_node_ids():
        raise UserError(
            f"{source}={address}: the cluster responds, but this machine is not one of its nodes; run on a node, or "
            f"submit a job there: {_job_submit_command(endpoint.rpartition(':')[0])}",
            code="not_a_node",
        )


def _job_submit_command(host: str) -> str:
    """The command that submits a job to `host`; an IPv6 address is in brackets."""
    return f"ray job submit --address http://{host}:8265 -- python -m rtrain ..."


def _split_host_port(source: str, address: str, endpoint: str) -> tuple[str, int]:
    host, separator, port = endpoint.rpartition(":")
    unbracketed_host = host.removeprefix("[").removesuffix("]")
    if ":" in unbracketed_host and host != f"[{unbracketed_host}]":
        fix = "write an IPv6 address in brackets, before the port: [fd00::1]:6379"
        raise ConfigError(
            [Problem(source, address, "the boundary of host and port is ambiguous", fix, code="invalid_address")]
        )
    if not separator or not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError([Problem(source, address, "not an address", ADDRESS_HINT, code="invalid_address")])
    return unbracketed_host, int(port)


def _unreachable_error(source: str, address: str, reason: str) -> ConfigError:
    return ConfigError([Problem(source, address, reason, ADDRESS_HINT, code="unreachable")])
