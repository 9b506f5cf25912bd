"""Metadata services of three clouds on loopback, as the machines of a cluster see them: each under its own name."""

import json
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Told:
    """What the services say of a machine; it may change while they answer."""

    ends: float | None = None
    """When it is taken away, in seconds since 1970."""
    rebalance: float | None = None
    """When a recommendation to leave was given (AWS)."""
    name: str = "node-1"
    meant: tuple[str, ...] = ("node-1",)
    """Azure: the machines that an event names."""
    tokens: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    failures: int = 0
    """So many answers are an error of the service first."""

    def iso(self, seconds: float) -> str:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        """Status and text, as the cloud's documentation has them."""
        self.asked.append(f"{method} {path}")
        if self.failures:
            self.failures -= 1
            return 503, "later"
        if path.startswith("/latest/"):
            return self._aws(method, path, headers)
        if path.startswith("/computeMetadata/"):
            if headers.get("metadata-flavor") != "Google":
                return 403, "Missing Metadata-Flavor:Google header."
            return 200, "FALSE" if self.ends is None else "TRUE"
        if headers.get("metadata") != "true":
            return 400, json.dumps({"error": "Bad request. Required metadata header not specified"})
        if path.startswith("/metadata/instance/compute/name"):
            return 200, self.name
        events = []
        if self.ends is not None:
            before = format_datetime(datetime.fromtimestamp(self.ends, UTC), usegmt=True)
            events = [{"EventType": "Preempt", "NotBefore": before, "Resources": list(self.meant)}]
        return 200, json.dumps({"DocumentIncarnation": 1, "Events": events})

    def _aws(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if path == "/latest/api/token":
            if method != "PUT" or "x-aws-ec2-metadata-token-ttl-seconds" not in headers:
                return 405, ""
            token = f"token-{len(self.asked)}"
            self.tokens.add(token)
            return 200, token
        if headers.get("x-aws-ec2-metadata-token") not in self.tokens:
            return 401, ""
        if path.endswith("/spot/instance-action") and self.ends is not None:
            return 200, json.dumps({"action": "terminate", "time": self.iso(self.ends)})
        if path.endswith("/events/recommendations/rebalance") and self.rebalance is not None:
            return 200, json.dumps({"noticeTime": self.iso(self.rebalance)})
        return 404, ""


Machines = defaultdict[str, Told]
"""What the services say, by the name of the machine; of one that nobody has named they know nothing."""


class _Services(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A watcher on a busy machine asks again before it has its answer, and is no fault of the service."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def serving(machines: Machines) -> Iterator[str]:
    """The address under which the services answer: `ADDRESS/NAME` is that of the machine of that name."""

    class Handler(BaseHTTPRequestHandler):
        def _reply(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            _, name, rest = self.path.split("/", 2)
            status, text = machines[name].answer(self.command, f"/{rest}", headers)
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = _reply

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = _Services(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
