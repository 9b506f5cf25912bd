"""Who can reach the endpoint, and how, and what it may serve. No torch, no Ray: it is asked before anything starts."""

import importlib.util
import ipaddress
import re
import ssl
from collections.abc import Callable
from pathlib import Path

from rtrain.config import Serve
from rtrain.core import engines
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.core.run_folder import shown
from rtrain.inference import remote
from rtrain.inference.artifact import Artifact, ArtifactError, is_compressed, refusal
from rtrain.models import int8_support

STDERR = "-"
"""`serve.access_log` where lines go to stderr."""


def check(settings: Serve, say: Callable[[str], None] = lambda line: None) -> None:
    """Refuse files of keys and certificates that are no good, and an address that others can reach without a key;
    where that is wanted, say so."""
    _check_files(settings)
    check_grpc(settings)
    if is_loopback(settings.host):
        return
    if settings.keys is None and not settings.insecure:
        reason = "whoever reaches this address may ask the model, without a key"
        fix = "make keys (rtrain serve keys add FILE NAME) and write --keys FILE, or listen on 127.0.0.1, or write"
        raise ConfigError([Problem("serve.host", settings.host, reason, f"{fix} --insecure", code="open_to_others")])
    if settings.keys is None:
        say(f"insecure: whoever reaches {settings.host} may ask the model without a key")
    if settings.tls_cert is None:
        what = "texts" if settings.keys is None else "keys and texts"
        say(
            f"{what} go over the network unencrypted; set serve.tls_cert and serve.tls_key, or let a proxy encrypt them"
        )


def _check_files(settings: Serve) -> None:
    from serve.auth import api_keys  # the extra `serve` has what it imports; other verbs than `serve` need none of it

    problems = []
    if settings.keys is not None:
        try:
            api_keys.read(Path(settings.keys))
        except UserError as error:
            problems.append(
                Problem(
                    "serve.keys", settings.keys, str(error), "correct the file, or name another", code="unreadable_keys"
                )
            )
    if settings.tls_cert is not None and settings.tls_key is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Without a passphrase it would be asked for on the terminal.
            context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
        except OSError as error:  # ssl's own errors are among them
            reason = f"with serve.tls_key={settings.tls_key} it cannot be used: {error.strerror or error}"
            fix = "both are files in PEM, the key without a passphrase, and belong together"
            problems.append(Problem("serve.tls_cert", settings.tls_cert, reason, fix, code="unusable_certificate"))
    if settings.access_log is not None and settings.access_log != STDERR:
        try:
            Path(settings.access_log).open("ab").close()
        except OSError as error:
            fix = "name a file in a folder that is there and that this user may write, or - for stderr"
            reason = f"no line can be written to it: {error.strerror}"
            problems.append(Problem("serve.access_log", settings.access_log, reason, fix, code="unwritable"))
    if problems:
        raise ConfigError(problems)


def absolute(settings: Serve) -> Serve:
    """With paths that stay right in another folder and in other processes."""
    named = {name: getattr(settings, name) for name in ("keys", "tls_cert", "tls_key", "access_log")}
    paths = {
        name: str(Path(path).expanduser().absolute()) for name, path in named.items() if path not in (None, STDERR)
    }
    return settings.model_copy(update=paths)


def check_grpc(settings: Serve) -> None:
    """Refuse gRPC where its library is missing."""
    if settings.grpc_port is not None and importlib.util.find_spec("tritonclient") is None:
        reason = "gRPC needs tritonclient, which is not installed"
        fix = "pip install 'rtrain[grpc]', or leave the setting out"
        raise ConfigError([Problem("serve.grpc_port", settings.grpc_port, reason, fix, code="not_installed")])


def admit(made: Artifact, folder: Path, settings: Serve, say: Callable[[str], None] = lambda line: None) -> None:
    """Refuse an artefact that the gate has refused, and a compressed one that it has not looked at; say so of one that
    it has held, which may be as good as its base: the rows are few, or the machine that gated it was busy. The float
    model of a run needs no gate: there is nothing that it must not be worse than, unless somebody has set it beside
    another one."""
    if slower := _slower_here(made):
        say(f"artefact {folder}: {slower}; to know: rtrain gate {shown(folder)}")
    if settings.ungated or not (is_compressed(made) or refusal(made.gate, made.version)):
        return
    gate = f"gate it: rtrain gate {shown(folder)} --against BASE"
    if remote.is_copy(folder):
        gate = "it is a copy: gate it where it is made, and publish it with its verdict"
    ways = f"{gate}; or serve it all the same, by --ungated"
    if made.gate is None:
        raise ArtifactError(
            f"artefact {folder} was made smaller, and no gate has looked at it; {ways}", code="not_gated"
        )
    if made.gate.get("version") != made.version:
        raise ArtifactError(
            f"the verdict in artefact {folder} is that of another one, {made.gate.get('version')}; {ways}",
            code="not_gated",
        )
    word, reasons = made.gate.get("verdict"), "; ".join(made.gate.get("reasons") or ["no reason given"])
    if word == "hold":
        say(f"the gate could not tell whether artefact {folder} is good enough: {reasons}")
    elif word != "promote":
        said = "refused" if word == "refuse" else "not promoted"
        raise ArtifactError(
            f"artefact {folder} was {said} by the gate: {reasons}. To serve it all the same: --ungated",
            code="refused_by_gate",
        )


def _slower_here(made: Artifact) -> str | None:
    """Why the gate's latency of an int8 artefact does not hold on this processor."""
    if engines.get(made.engine).gradients or not made.gate:
        return None
    return int8_support.slower_here((made.gate.get("host") or {}).get("int8"), int8_support.of_processor())


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_private(settings: Serve) -> bool:
    """Whether clients need a key, or run on this machine. Names in `serve.allowed_hosts` are those of a proxy, which
    opens a loopback address to others."""
    return settings.keys is not None or (is_loopback(settings.host) and not settings.allowed_hosts)


def allows_host(settings: Serve, value: str) -> bool:
    """Whether a request may name that host in its header Host. A client with a key, and one that reaches an open
    address, may name any; a browser that another site has led here by DNS rebinding sends that site's name."""
    if settings.keys is not None or not (settings.allowed_hosts or is_loopback(settings.host)):
        return True
    name = re.sub(r":\d*$", "", value).lower()
    return name in settings.allowed_hosts or is_loopback(name.removeprefix("[").removesuffix("]").rstrip("."))


def curl(url: str, settings: Serve) -> str:
    """A command that asks the endpoint."""
    key = "-H 'authorization: Bearer KEY' " if settings.keys else ""
    body = "-H 'content-type: application/json' -d '{\"inputs\": \"Where is my parcel?\"}'"
    return f"curl -s {url}/predict {key}{body}"
