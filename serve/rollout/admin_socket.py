"""Admin socket: how another command talks to a running `rtrain serve`. It lies in the temporary folder, for its user
alone.

The serving command holds the connection to Ray. A command that changes the deployment sends one line of JSON, prints
the reply, which is one line of JSON too, and ends.
"""

import contextlib
import json
import os
import socket
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rtrain.core.errors import UserError

SOCKET_FOLDER = "/tmp/rtrain-{user}"
"""Short, since a socket's path has at most 107 bytes."""
MAX_COMMAND_BYTES = 1 << 16
"""Bytes of a question. What answers is the user's own, and may tell of any number of replicas."""
RESPONSE_TIMEOUT_S = 300.0
"""Seconds that an answer may take: an artifact is loaded and proven by every replica first."""
COMMAND_TIMEOUT_S = 10.0
"""Seconds in which a question has to arrive, and its answer to be taken."""
POLL_INTERVAL_S = 0.2

CommandHandler = Callable[[dict[str, Any]], str]


def resolve_socket_path(port: int, folder: str = SOCKET_FOLDER) -> Path:
    """The socket of the endpoint on that port. Raises `UserError` where its folder is open to others."""
    folder_path = Path(folder.format(user=os.getuid()))
    with contextlib.suppress(FileExistsError):
        folder_path.mkdir(mode=0o700)
    folder_stat = folder_path.lstat()
    if (
        folder_stat.st_uid != os.getuid()
        or not stat.S_ISDIR(folder_stat.st_mode)
        or stat.S_IMODE(folder_stat.st_mode) & 0o077
    ):
        raise UserError(
            f"{folder_path} must be a private folder of this user; remove it, or run chmod 700", code="not_private"
        )
    return folder_path / f"serve-{port}.sock"


@contextlib.contextmanager
def serve_admin_socket(port: int, handler: CommandHandler, folder: str = SOCKET_FOLDER) -> Iterator[None]:
    """Serve commands for the `with` block; each command has its own thread, so a long change blocks no other command.
    User errors go to the client. Raises `UserError` if another endpoint of this user has the port at another
    address."""
    _check_port_free(port, folder)
    socket_path = resolve_socket_path(port, folder)
    socket_path.unlink(missing_ok=True)
    stop_event = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(socket_path))
        listener.listen()
        listener.settimeout(POLL_INTERVAL_S)

        def accept_clients() -> None:
            while not stop_event.is_set():
                with contextlib.suppress(OSError):  # one of them is TimeoutError
                    client, _ = listener.accept()
                    threading.Thread(
                        target=_handle_client, args=(client, handler), name="admin-socket", daemon=True
                    ).start()

        thread = threading.Thread(target=accept_clients, name="admin-socket", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop_event.set()
            thread.join(timeout=2 * POLL_INTERVAL_S)
            socket_path.unlink(missing_ok=True)


def _check_port_free(port: int, folder: str) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(POLL_INTERVAL_S)
        try:
            client.connect(str(resolve_socket_path(port, folder)))
        except (FileNotFoundError, ConnectionRefusedError):  # no socket, or a stale one
            return
        except TimeoutError:
            pass
    raise UserError(
        f"a `rtrain serve` of this user's has port {port} at another address, and a command names an endpoint by its "
        "port alone; take another port",
        code="port_in_use",
    )


def send_command(port: int, command: dict[str, Any], folder: str = SOCKET_FOLDER) -> str:
    """Send a command to the endpoint on that port; returns its message. Raises `UserError` with its error, or if no
    endpoint runs there."""
    socket_path = resolve_socket_path(port, folder)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(RESPONSE_TIMEOUT_S)
        try:
            client.connect(str(socket_path))
            client.sendall(json.dumps(command).encode() + b"\n")
            reply = json.loads(_read_line(client, None))
        except (FileNotFoundError, ConnectionRefusedError):
            raise UserError(
                f"no `rtrain serve` of this user runs on port {port}; choose its port with --port. An endpoint "
                "started with --standalone has no commands: use its /info and /metrics",
                code="not_running",
            ) from None
        except (OSError, ValueError):
            raise UserError(f"the `rtrain serve` on port {port} ended without a reply", code="no_answer") from None
    if "error" in reply:
        raise UserError(reply["error"], code=reply["code"])
    return str(reply["message"])


def _handle_client(client: socket.socket, handler: CommandHandler) -> None:
    with client, contextlib.suppress(OSError):  # whoever asked may have gone
        client.settimeout(COMMAND_TIMEOUT_S)
        try:
            reply = {"message": handler(json.loads(_read_line(client, MAX_COMMAND_BYTES)))}
        except UserError as error:
            reply = {"error": str(error), "code": error.code}
        except json.JSONDecodeError:
            reply = {"error": "a command is one line of JSON", "code": "invalid_command"}
        except Exception as error:  # what Ray raises: whoever asked has to know it
            reply = {"error": f"{type(error).__name__}: {error}", "code": "failed"}
        client.sendall(json.dumps(reply).encode() + b"\n")


def _read_line(client: socket.socket, max_bytes: int | None) -> bytes:
    """Read up to the end of a line, at most `max_bytes` (None: no limit)."""
    received = bytearray()
    while not received.endswith(b"\n") and (max_bytes is None or len(received) < max_bytes):
        chunk = client.recv(1 << 16)
        if not chunk:
            break
        received += chunk
    return bytes(received)


def format_status(document: Mapping[str, Any]) -> str:
    """What `rtrain serve status` prints. `document`: what `Endpoint.handle_command` says to the question status."""
    return "\n\n".join(_format_model(model, document["address"]) for model in document["models"])


def _format_model(document: Mapping[str, Any], address: str) -> str:
    replicas = document["replicas"]
    versions = Counter(replica["version"] or "starting" for replica in replicas)
    lines = [
        f"{document['name']} at {address}",
        f"artifact   {document['artifact']}",
        f"version    {', '.join(f'{version} ({count} of {len(replicas)})' for version, count in versions.items())}",
    ]
    if canary := document["canary"]:
        lines += _format_canary(canary)
    live_replicas = [replica for replica in replicas if replica["version"]]
    rows, tokens = (sum(replica["queue"][name] for replica in live_replicas) for name in ("rows", "tokens"))
    requests: Counter[str] = Counter()
    for replica in live_replicas:
        requests.update(replica["requests"])
    request_counts = ", ".join(f"{count:,} with {status}" for status, count in sorted(requests.items())) or "none"
    lines += [
        f"replicas   {len(live_replicas)} of {len(replicas)} up, "
        f"{sum(replica['ready'] for replica in live_replicas)} ready",
        f"queue      {rows:,} texts, {tokens:,} tokens",
        f"requests   {request_counts}",
        f"drift      {_format_drift([replica['drift'] for replica in live_replicas if replica['drift']])}",
    ]
    return "\n".join(lines)


def _format_canary(canary: Mapping[str, Any]) -> list[str]:
    stats, policy = canary["stats"], canary["policy"]
    stage = canary["stage"] if canary["stage"] != "weighted" else f"answers {canary['weight']:.0%} of the requests"
    lines = [f"candidate  {canary['version']}: {stage}" + (f" ({canary['reason']})" if canary["reason"] else "")]
    if stats["rows"]:
        ratio = f", {canary['ratio']:.2f} times as long" if canary["ratio"] else ""
        rows = f"{stats['rows']:,} of {policy['min_rows']:,} texts"
        lines.append(f"           {rows}, the same answer to {stats['same_answers']:,}{ratio}")
    if stats["requests"]:
        lines.append(
            f"           {stats['requests']:,} requests answered, {stats['errors']:,} of them with 500 or above"
        )
    return lines


def _format_drift(drift_reports: list[Mapping[str, Any]]) -> str:
    """The farthest of the replicas, of each histogram."""
    if not drift_reports:
        return "not measured: the artifact has no baseline"
    max_distances: dict[str, float] = {}
    for report in drift_reports:
        for name, value in report["distances"].items():
            max_distances[name] = max(value, max_distances.get(name, 0.0))
    alarm = "unknown input" if any(report["alarm"] for report in drift_reports) else "no alarm"
    distances = ", ".join(f"{name} {value:.2f}" for name, value in sorted(max_distances.items())) or "no text yet"
    return f"{alarm}; {distances}"
