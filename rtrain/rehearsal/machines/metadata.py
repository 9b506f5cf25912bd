"""Fake metadata services of three clouds on loopback, one path per machine."""

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
class FakeInstanceMetadata:
    """Metadata of a machine; it may change at any time."""

    terminates_at: float | None = None
    """Time of the preemption, in seconds since 1970."""
    rebalance_at: float | None = None
    """Time of a rebalance recommendation (AWS)."""
    name: str = "node-1"
    event_resources: tuple[str, ...] = ("node-1",)
    """Azure: the machines of an event."""
    tokens: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    remaining_failures: int = 0
    """Number of failing responses before the first success."""

    def format_time(self, seconds: float) -> str:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def respond(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        """Status and text, as in the cloud's documentation."""
        self.requests.append(f"{method} {path}")
        if self.remaining_failures:
            self.remaining_failures -= 1
            return 503, "later"
        if path.startswith("/latest/"):
            return self._respond_aws(method, path, headers)
        if path.startswith("/computeMetadata/"):
            if headers.get("metadata-flavor") != "Google":
                return 403, "Missing Metadata-Flavor:Google header."
            return 200, "FALSE" if self.terminates_at is None else "TRUE"
        if headers.get("metadata") != "true":
            return 400, json.dumps({"error": "Bad request. Required metadata header not specified"})
        if path.startswith("/metadata/instance/compute/name"):
            return 200, self.name
        events = []
        if self.terminates_at is not None:
            not_before = format_datetime(datetime.fromtimestamp(self.terminates_at, UTC), usegmt=True)
            events = [{"EventType": "Preempt", "NotBefore": not_before, "Resources": list(self.event_resources)}]
        return 200, json.dumps({"DocumentIncarnation": 1, "Events": events})

    def _respond_aws(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if path == "/latest/api/token":
            if method != "PUT" or "x-aws-ec2-metadata-token-ttl-seconds" not in headers:
                return 405, ""
            token = f"token-{len(self.requests)}"
            self.tokens.add(token)
            return 200, token
        if headers.get("x-aws-ec2-metadata-token") not in self.tokens:
            return 401, ""
        if path.endswith("/spot/instance-action") and self.terminates_at is not None:
            return 200, json.dumps({"action": "terminate", "time": self.format_time(self.terminates_at)})
        if path.endswith("/events/recommendations/rebalance") and self.rebalance_at is not None:
            return 200, json.dumps({"noticeTime": self.format_time(self.rebalance_at)})
        return 404, ""


MetadataByMachine = defaultdict[str, FakeInstanceMetadata]
"""Metadata by machine name; unknown machines have defaults."""


class _MetadataServer(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connection errors: a watcher on a busy machine may retry before it gets its response."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def serve_metadata(machines: MetadataByMachine) -> Iterator[str]:
    """Serve the metadata; yields the base URL: `URL/NAME` belongs to the machine NAME."""

    class Handler(BaseHTTPRequestHandler):
        def _reply(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            _, name, rest = self.path.split("/", 2)
            status, text = machines[name].respond(self.command, f"/{rest}", headers)
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = _reply

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = _MetadataServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
