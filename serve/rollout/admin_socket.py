"""How another command speaks to a running `rtrain serve`: by a socket in the temporary folder, its user's alone.

The command that serves holds the connection to Ray; a command that changes what is served asks it, and prints what it
says. One line of JSON each way.
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

FOLDER = "/tmp/rtrain-{user}"
"""Short, since a socket's path has at most 107 bytes."""
LONGEST = 1 << 16
"""Bytes of a question. What answers is the user's own, and may tell of any number of replicas."""
TIMEOUT_S = 300.0
"""Seconds that an answer may take: an artefact is loaded and proven by every replica first."""
QUESTION_S = 10.0
"""Seconds in which a question has to arrive, and its answer to be taken."""
POLL_S = 0.2

Act = Callable[[dict[str, Any]], str]


def path(port: int, folder: str = FOLDER) -> Path:
    """The socket of the endpoint on that port. Raises `UserError` where its folder is open to others."""
    found = Path(folder.format(user=os.getuid()))
    with contextlib.suppress(FileExistsError):
        found.mkdir(mode=0o700)
    facts = found.lstat()
    if facts.st_uid != os.getuid() or not stat.S_ISDIR(facts.st_mode) or stat.S_IMODE(facts.st_mode) & 0o077:
        raise UserError(
            f"{found} is not a folder of this user's alone; remove it, or make it so (chmod 700)", code="not_private"
        )
    return found / f"serve-{port}.sock"


@contextlib.contextmanager
def listening(port: int, act: Act, folder: str = FOLDER) -> Iterator[None]:
    """For the block, answer each question with what `act` says, in a thread of its own: nobody waits behind a change.
    An error that a user can act on goes to who asked. Raises `UserError` where an endpoint of this user's has that port
    already, at another address."""
    _refuse_taken(port, folder)
    place = path(port, folder)
    place.unlink(missing_ok=True)
    over = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen()
        listener.settimeout(POLL_S)

        def run() -> None:
            while not over.is_set():
                with contextlib.suppress(OSError):  # one of them is TimeoutError
                    client, _ = listener.accept()
                    threading.Thread(target=_answer, args=(client, act), name="control", daemon=True).start()

        thread = threading.Thread(target=run, name="control", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(timeout=2 * POLL_S)
            place.unlink(missing_ok=True)


def _refuse_taken(port: int, folder: str) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(POLL_S)
        try:
            client.connect(str(path(port, folder)))
        except (FileNotFoundError, ConnectionRefusedError):  # none, or one that was left behind
            return
        except TimeoutError:
            pass
    raise UserError(
        f"a `rtrain serve` of this user's has port {port} at another address, and a command names an endpoint by its "
        "port alone; take another port",
        code="port_in_use",
    )


def ask(port: int, question: dict[str, Any], folder: str = FOLDER) -> str:
    """What the endpoint on that port says. Raises `UserError` with its error, and where there is none."""
    place = path(port, folder)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(TIMEOUT_S)
        try:
            client.connect(str(place))
            client.sendall(json.dumps(question).encode() + b"\n")
            answer = json.loads(_line(client, None))
        except (FileNotFoundError, ConnectionRefusedError):
            raise UserError(
                f"no `rtrain serve` of this user's answers on port {port}; name its port by --port. One that was "
                "started with --alone answers no such command: ask its /info and /metrics",
                code="not_running",
            ) from None
        except (OSError, ValueError):
            raise UserError(f"the `rtrain serve` on port {port} ended without an answer", code="no_answer") from None
    if "error" in answer:
        raise UserError(answer["error"], code=answer["code"])
    return str(answer["said"])


def _answer(client: socket.socket, act: Act) -> None:
    with client, contextlib.suppress(OSError):  # whoever asked may have gone
        client.settimeout(QUESTION_S)
        try:
            answer = {"said": act(json.loads(_line(client, LONGEST)))}
        except UserError as error:
            answer = {"error": str(error), "code": error.code}
        except json.JSONDecodeError:
            answer = {"error": "a question is one line of JSON", "code": "malformed"}
        except Exception as error:  # what Ray raises: whoever asked has to know it
            answer = {"error": f"{type(error).__name__}: {error}", "code": "failed"}
        client.sendall(json.dumps(answer).encode() + b"\n")


def _line(client: socket.socket, most: int | None) -> bytes:
    """What comes to the end of a line, of at most so many bytes or of any number."""
    read = bytearray()
    while not read.endswith(b"\n") and (most is None or len(read) < most):
        part = client.recv(1 << 16)
        if not part:
            break
        read += part
    return bytes(read)


def format_status(document: Mapping[str, Any]) -> str:
    """What `rtrain serve status` prints. `document`: what `Endpoint.change` says to the question status."""
    return "\n\n".join(_model(one, document["address"]) for one in document["models"])


def _model(document: Mapping[str, Any], address: str) -> str:
    replicas = document["replicas"]
    versions = Counter(replica["version"] or "starting" for replica in replicas)
    lines = [
        f"{document['name']} at {address}",
        f"artefact   {document['artifact']}",
        f"version    {', '.join(f'{version} ({count} of {len(replicas)})' for version, count in versions.items())}",
    ]
    if trial := document["trial"]:
        lines += _trial(trial)
    up = [replica for replica in replicas if replica["version"]]
    rows, tokens = (sum(replica["queue"][name] for replica in up) for name in ("rows", "tokens"))
    requests: Counter[str] = Counter()
    for replica in up:
        requests.update(replica["requests"])
    answered = ", ".join(f"{count:,} with {status}" for status, count in sorted(requests.items())) or "none"
    lines += [
        f"replicas   {len(up)} of {len(replicas)} up, {sum(replica['ready'] for replica in up)} ready",
        f"queue      {rows:,} texts, {tokens:,} tokens",
        f"requests   {answered}",
        f"drift      {_drift([replica['drift'] for replica in up if replica['drift']])}",
    ]
    return "\n".join(lines)


def _trial(trial: Mapping[str, Any]) -> list[str]:
    seen, aim = trial["seen"], trial["aim"]
    what = trial["stage"] if trial["stage"] != "weighted" else f"answers {trial['weight']:.0%} of the requests"
    lines = [f"candidate  {trial['version']}: {what}" + (f" ({trial['reason']})" if trial["reason"] else "")]
    if seen["rows"]:
        ratio = f", {trial['ratio']:.2f} times as long" if trial["ratio"] else ""
        rows = f"{seen['rows']:,} of {aim['rows']:,} texts"
        lines.append(f"           {rows}, the same answer to {seen['agreed']:,}{ratio}")
    if seen["requests"]:
        lines.append(f"           {seen['requests']:,} requests answered, {seen['errors']:,} of them with 500 or above")
    return lines


def _drift(found: list[Mapping[str, Any]]) -> str:
    """The farthest of the replicas, of each histogram."""
    if not found:
        return "not watched: the artefact has no reference"
    worst: dict[str, float] = {}
    for one in found:
        for name, value in one["distance"].items():
            worst[name] = max(value, worst.get(name, 0.0))
    alarm = "unknown input" if any(one["alarm"] for one in found) else "no alarm"
    told = ", ".join(f"{name} {value:.2f}" for name, value in sorted(worst.items())) or "no text yet"
    return f"{alarm}; {told}"
