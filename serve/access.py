"""Who can reach the endpoint, and how, and what it may serve. No torch, no Ray: it is asked before anything starts."""

import importlib.util
import ipaddress
from collections.abc import Callable
from pathlib import Path

from rtrain.artifact import Artifact, ArtifactError, is_compressed, refusal
from rtrain.config import Serve
from rtrain.errors import ConfigError, Problem
from rtrain.run import shown


def check(settings: Serve, say: Callable[[str], None] = lambda line: None) -> None:
    """Refuse an address that others can reach, since nobody is asked for a key; where that is wanted, say so."""
    check_grpc(settings)
    if is_loopback(settings.host):
        return
    if not settings.insecure:
        reason = "whoever reaches this address may ask the model, without a key"
        fix = "listen on 127.0.0.1, behind a proxy that asks for one, or write --insecure"
        raise ConfigError([Problem("serve.host", settings.host, reason, fix)])
    say(f"insecure: whoever reaches {settings.host} may ask the model, unencrypted and without a key; keys come later")


def check_grpc(settings: Serve) -> None:
    """Refuse gRPC where its library is missing, and where others could reach it: it asks nobody for a key."""
    if settings.grpc_port is None:
        return
    problems, none = [], "or leave the setting out"
    if importlib.util.find_spec("tritonclient") is None:
        reason = "gRPC needs tritonclient, which is not installed"
        problems.append(Problem("serve.grpc_port", settings.grpc_port, reason, f"pip install 'rtrain[grpc]', {none}"))
    if not is_loopback(settings.host) and not settings.insecure:
        reason = "gRPC asks nobody for a key, and others can reach this address"
        problems.append(Problem("serve.grpc_port", settings.grpc_port, reason, f"listen on 127.0.0.1, {none}"))
    if problems:
        raise ConfigError(problems)


def admit(made: Artifact, folder: Path, settings: Serve, say: Callable[[str], None] = lambda line: None) -> None:
    """Refuse an artefact that the gate has refused, and a compressed one that it has not looked at; say so of one that
    it has held, which may be as good as its base: the rows are few, or the machine that gated it was busy. The float
    model of a run needs no gate: there is nothing that it must not be worse than, unless somebody has set it beside
    another one."""
    if settings.ungated or not (is_compressed(made) or refusal(made.gate, made.version)):
        return
    ways = f"gate it: rtrain gate {shown(folder)} --against BASE; or serve it all the same, by --ungated"
    if made.gate is None:
        raise ArtifactError(f"artefact {folder} was made smaller, and no gate has looked at it; {ways}")
    if made.gate.get("version") != made.version:
        raise ArtifactError(
            f"the verdict in artefact {folder} is that of another one, {made.gate.get('version')}; {ways}"
        )
    word, reasons = made.gate.get("verdict"), "; ".join(made.gate.get("reasons") or ["no reason given"])
    if word == "hold":
        say(f"the gate could not tell whether artefact {folder} is good enough: {reasons}")
    elif word != "promote":
        said = "refused" if word == "refuse" else "not promoted"
        raise ArtifactError(f"artefact {folder} was {said} by the gate: {reasons}. To serve it all the same: --ungated")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def curl(url: str) -> str:
    """A command that asks the endpoint."""
    return f"curl -s {url}/predict -H 'content-type: application/json' -d '{{\"inputs\": \"Where is my parcel?\"}}'"
