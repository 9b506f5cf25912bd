"""Checks before the endpoint starts: names of the artifacts, whether they may be served, and who can reach it. No
torch, no Ray."""

import importlib.util
import ipaddress
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import rtrain.inference.artifact
from rtrain.config import ServeConfig
from rtrain.core import engines
from rtrain.core.errors import ConfigError, Problem, UserError, quote_value
from rtrain.core.run_folder import quote_path
from rtrain.inference.artifact import Artifact, ArtifactError, is_cached, is_compressed, rejection_reason
from rtrain.models import precision

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""The name of one of several models: it stands in paths."""
_NAMED_ARTIFACT = re.compile(r"([^/=:]+)=(.+)")
STDERR = "-"
"""`serve.access_log` where lines go to stderr."""


def check_access(settings: ServeConfig, notify: Callable[[str], None] = lambda line: None) -> None:
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
        notify(f"insecure: whoever reaches {settings.host} may ask the model without a key")
    if settings.tls_cert is None:
        payload = "texts" if settings.keys is None else "keys and texts"
        notify(
            f"{payload} go over the network unencrypted; set serve.tls_cert and serve.tls_key, or let a proxy "
            "encrypt them"
        )


def _check_files(settings: ServeConfig) -> None:
    from serve.auth import api_keys  # lazy: its libraries belong to the extra `serve`

    problems = []
    if settings.keys is not None:
        try:
            api_keys.read_keys(Path(settings.keys))
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


def resolve_paths(settings: ServeConfig) -> ServeConfig:
    """Make paths absolute, so they hold in other folders and processes."""
    raw_paths = {name: getattr(settings, name) for name in ("keys", "tls_cert", "tls_key", "access_log")}
    paths = {
        name: str(Path(path).expanduser().absolute()) for name, path in raw_paths.items() if path not in (None, STDERR)
    }
    return settings.model_copy(update=paths)


def check_grpc(settings: ServeConfig) -> None:
    """Refuse gRPC where its library is missing."""
    if settings.grpc_port is not None and importlib.util.find_spec("tritonclient") is None:
        reason = "gRPC needs tritonclient, which is not installed"
        fix = "pip install 'rtrain[grpc]', or leave the setting out"
        raise ConfigError([Problem("serve.grpc_port", settings.grpc_port, reason, fix, code="not_installed")])


def require_servable(
    artifact: Artifact, folder: Path, settings: ServeConfig, notify: Callable[[str], None] = lambda line: None
) -> None:
    """Refuse an artifact that the gate has rejected, and a compressed artifact without a gate verdict. Warn about the
    verdict hold: too few rows, or a busy machine. The float model of a run needs no verdict, unless it was compared
    with a baseline."""
    if latency_warning := _latency_warning(artifact):
        notify(f"artifact {folder}: {latency_warning}; to know: rtrain gate {quote_path(folder)}")
    if settings.ungated or not (is_compressed(artifact) or rejection_reason(artifact.gate, artifact.version)):
        return
    gate_hint = f"gate it: rtrain gate {quote_path(folder)} --baseline BASE"
    if is_cached(folder):
        gate_hint = "it is a copy: gate it where it is made, and publish it with its verdict"
    remedy = f"{gate_hint}; or serve it all the same, by --ungated"
    if artifact.gate is None:
        raise ArtifactError(
            f"artifact {folder} was made smaller, and no gate has looked at it; {remedy}", code="not_gated"
        )
    if artifact.gate.get("version") != artifact.version:
        raise ArtifactError(
            f"the verdict in artifact {folder} is that of another one, {artifact.gate.get('version')}; {remedy}",
            code="not_gated",
        )
    verdict, reasons = artifact.gate.get("verdict"), "; ".join(artifact.gate.get("reasons") or ["no reason given"])
    if verdict == "hold":
        notify(f"the gate could not tell whether artifact {folder} is good enough: {reasons}")
    elif verdict != "promote":
        verdict_text = "refused" if verdict == "refuse" else "not promoted"
        raise ArtifactError(
            f"artifact {folder} was {verdict_text} by the gate: {reasons}. To serve it all the same: --ungated",
            code="refused_by_gate",
        )


def _latency_warning(artifact: Artifact) -> str | None:
    """Why the gate's latency of an int8 artifact does not hold on this processor."""
    if engines.get_engine(artifact.engine).has_gradients or not artifact.gate:
        return None
    return precision.slower_latency_warning((artifact.gate.get("host") or {}).get("int8"), precision.detect_int8())


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_private(settings: ServeConfig) -> bool:
    """Whether clients need a key, or run on this machine. Names in `serve.allowed_hosts` are those of a proxy, which
    opens a loopback address to others."""
    return settings.keys is not None or (is_loopback(settings.host) and not settings.allowed_hosts)


def allows_host(settings: ServeConfig, value: str) -> bool:
    """Whether the Host header may name that host. Requests with a key, and requests to an open address, may name any
    host. A page that reached this address by DNS rebinding sends its own host."""
    if settings.keys is not None or not (settings.allowed_hosts or is_loopback(settings.host)):
        return True
    name = re.sub(r":\d*$", "", value).lower()
    return name in settings.allowed_hosts or is_loopback(name.removeprefix("[").removesuffix("]").rstrip("."))


def curl_command(url: str, settings: ServeConfig) -> str:
    """A command that asks the endpoint."""
    key = "-H 'authorization: Bearer KEY' " if settings.keys else ""
    body = "-H 'content-type: application/json' -d '{\"inputs\": \"Where is my parcel?\"}'"
    return f"curl -s {url}/predict {key}{body}"


def parse_model_specs(specs: Sequence[str], resolve_folder: Callable[[str], Path]) -> dict[str, Path]:
    """Folders of artifacts by model name: the name in `NAME=ARTIFACT`, else the artifact's own name. A spec that exists
    as a path is a folder. `resolve_folder` resolves an artifact argument to a folder.

    Raises `UserError` with all errors, one per line.
    """
    errors: list[UserError] = []
    folders: dict[str, Path] = {}
    for spec in specs:
        match = None if Path(spec).exists() else _NAMED_ARTIFACT.fullmatch(spec)
        try:
            folder = resolve_folder(match[2] if match else spec)
            name = match[1] if match else rtrain.inference.artifact.read_artifact(folder, verify=False).name
        except UserError as error:
            errors.append(error)
            continue
        if (match or len(specs) > 1) and not MODEL_NAME.fullmatch(name):
            fix = f"write NAME={spec}" if match is None else "take another"
            message = f"{quote_value(name)} is no name for a model: up to 64 letters, digits and . _ -; {fix}"
            errors.append(UserError(message, code="invalid_name"))
        elif name in folders:
            both_folders = f"{quote_path(folders[name])} and {quote_path(folder)}"
            message = f"two models are called {name}, {both_folders}; name one of them otherwise: NAME={spec}"
            errors.append(UserError(message, code="already_exists"))
        else:
            folders[name] = folder
    if errors:
        raise UserError("\n".join(map(str, errors)), code=errors[0].code)
    return folders


def check_artifacts(
    artifacts: Mapping[str, Path], settings: ServeConfig, notify: Callable[[str], None] = lambda line: None
) -> None:
    """Refuse artifacts that are damaged, that the gate has not let through (`preflight.require_servable`), or that are
    to answer on GPUs and cannot, all at once."""
    errors: list[UserError] = []
    if settings.precision == "fp16" and not settings.gpus:
        fix = "write serve.gpus=1 too, or serve.precision=fp32"
        errors.append(
            ConfigError([Problem("serve.precision", "fp16", "CPUs answer in fp32", fix, code="conflicting_settings")])
        )
    for folder in artifacts.values():
        try:
            artifact = rtrain.inference.artifact.read_artifact(folder)
            if settings.gpus and not engines.get_engine(artifact.engine).supports_gpu:
                reason = f"{quote_path(folder)} answers by {artifact.engine}, on CPUs alone"
                fix = "serve the float artifact of its run, or write 0"
                raise ConfigError([Problem("serve.gpus", settings.gpus, reason, fix, code="conflicting_settings")])
            require_servable(artifact, folder, settings, notify)
        except UserError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise rtrain.inference.artifact.ArtifactError("\n".join(map(str, errors)), code=errors[0].code)
