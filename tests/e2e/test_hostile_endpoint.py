"""Hostile requests over sockets, through HAProxy and Ray Serve: none is answered 5xx, and none ends a process. By hand:
the figures are on stderr."""

import contextlib
import re
import select
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, given, settings

from rtrain.config import ServeConfig
from serve.deployment import Endpoint, start_endpoint
from tests.e2e.test_rollout import replicas
from tests.serve.test_deployment import openvino_artifact, processes
from tests.support import hostile
from tests.support.hostile import Case

pytestmark = [pytest.mark.slow, pytest.mark.serve, pytest.mark.usefixtures("ray_session")]

PATIENCE_S = 20.0
MORE_S = 0.3
"""Seconds without an answer after which the client ends its request."""
FRAMED = (b"content-length", b"transfer-encoding")


@pytest.fixture(scope="module")
def endpoint(ray_session: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    artifact = openvino_artifact(tmp_path_factory.mktemp("artifact"))
    with start_endpoint(artifact, ServeConfig(ungated=True, port=0, replicas=2)) as endpoint:
        yield endpoint


@pytest.fixture
def nothing_dies(endpoint: Endpoint) -> Iterator[None]:
    def alive() -> set[psutil.Process]:
        return {*replicas(), *processes("haproxy.cfg"), *processes("ray::HAProxyManager")}

    before: set[psutil.Process] = set()
    while len(before) < 5 or alive() != before:  # HAProxy is replaced as replicas come
        before = alive()
        time.sleep(3)
    yield
    assert alive() == before
    answer = httpx.post(f"{endpoint.url}/predict", json={"inputs": "hello"}, trust_env=False)
    assert answer.status_code == 200


def on_the_wire(case: Case) -> bytes:
    """The case as a client would send it that cares for no rule: of the body only a half where the client leaves."""
    target = case.path.encode("utf-8", "surrogateescape") + (b"?" + case.query if case.query else b"")
    lines = [case.method.encode() + b" " + target + b" HTTP/1.1"]
    names = {name.lower() for name, _ in case.headers}
    headers = [*case.headers, (b"connection", b"close")]
    if b"host" not in names:
        headers.append((b"host", b"localhost"))
    body = case.body
    if not names.intersection(FRAMED):
        if case.cuts:
            chunks = [message["body"] for message in case.messages() if message.get("body")]
            body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
            headers.append((b"transfer-encoding", b"chunked"))
        else:
            headers.append((b"content-length", b"%d" % len(body)))
    lines += [name + b": " + value for name, value in headers]
    return b"\r\n".join((*lines, b"", body[: len(body) // 2] if case.leaves else body))


def status_of(port: int, case: Case) -> int:
    """The answer's; 0 where the connection was ended without one."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
        with contextlib.suppress(OSError):  # it was cut off
            client.sendall(on_the_wire(case))
            if not case.leaves and not select.select([client], [], [], MORE_S)[0]:
                client.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while not case.leaves and (part := client.recv(1 << 16)):
                received += part
    statuses = [int(status) for status in re.findall(rb"^HTTP/1\.1 (\d+) ", received, re.MULTILINE)]
    return next((status for status in statuses if status >= 200), 0)


def test_five_thousand_hostile_requests_are_the_client_s_fault(endpoint: Endpoint, nothing_dies: None) -> None:
    statuses: Counter[int] = Counter()
    for case in hostile.by_hand():
        statuses[status_of(endpoint.port, case)] += 1

    @given(hostile.CASES)
    @settings(max_examples=3500, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    def ask(case: Case) -> None:
        statuses[status_of(endpoint.port, case)] += 1

    ask()
    sys.stderr.write(f"\n{statuses.total()} hostile requests: {dict(sorted(statuses.items()))}\n")
    assert statuses.total() >= 5000
    assert [status for status in statuses if status >= 500] == []
    assert len(statuses) >= 8, "the cases reach too little"
