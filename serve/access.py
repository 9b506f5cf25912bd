"""Who can reach the endpoint, and how. No torch, no Ray: it is asked before anything starts."""

import ipaddress
from collections.abc import Callable

from rtrain.config import Serve
from rtrain.errors import ConfigError, Problem


def check(settings: Serve, say: Callable[[str], None] = lambda line: None) -> None:
    """Refuse an address that others can reach, since nobody is asked for a key; where that is wanted, say so."""
    if is_loopback(settings.host):
        return
    if not settings.insecure:
        reason = "whoever reaches this address may ask the model, without a key"
        fix = "listen on 127.0.0.1, behind a proxy that asks for one, or write --insecure"
        raise ConfigError([Problem("serve.host", settings.host, reason, fix)])
    say(f"insecure: whoever reaches {settings.host} may ask the model, unencrypted and without a key; keys come later")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def curl(url: str) -> str:
    """A command that asks the endpoint."""
    return f"curl -s {url}/predict -H 'content-type: application/json' -d '{{\"inputs\": \"Where is my parcel?\"}}'"
