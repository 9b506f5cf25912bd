"""An address without a Ray cluster is refused at once, in one line."""

import contextlib
import http.server
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from rtrain import config, ray_internals
from rtrain.cluster import connection
from rtrain.config import Config
from rtrain.core.errors import ConfigError, UserError
from tests.support.root import ROOT


def config_with_address(value: str) -> Config:
    return config.load_config("intent", {"cluster.address": value})


def refused(value: str, name: str = "cluster.address") -> str:
    """The code of the error about an address, which is one line."""
    with pytest.raises(UserError) as caught:
        connection.check_address(name, value)
    assert "\n" not in str(caught.value)
    if isinstance(caught.value, ConfigError):
        [problem] = caught.value.problems
        assert (problem.field, problem.value) == (name, value)
        return problem.code
    return caught.value.code


@contextlib.contextmanager
def silent() -> Iterator[int]:
    """A port whose program takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@contextlib.contextmanager
def web() -> Iterator[int]:
    """A port that speaks HTTP/1.1, as Ray's dashboard does."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def other_grpc(*handlers: grpc.GenericRpcHandler) -> Iterator[int]:
    """A port that speaks gRPC and knows none of Ray's services, as that of Ray's client; or what `handlers` know."""
    server = grpc.server(futures.ThreadPoolExecutor(1), handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


def test_where_nothing_listens_nothing_answers() -> None:
    with silent() as port:
        pass
    assert refused(f"127.0.0.1:{port}") == "unreachable"


@pytest.mark.parametrize("listens", [silent, web, other_grpc])
def test_what_listens_may_be_something_else(listens: type[contextlib.AbstractContextManager[int]]) -> None:
    with listens() as port:
        assert refused(f"127.0.0.1:{port}", "RAY_ADDRESS") == "not_ray"


@pytest.mark.parametrize("value", ["head", "head:", ":6379", "head:port", "head:0", "head:65536", "a b:c"])
def test_what_is_no_address_is_refused(value: str) -> None:
    assert refused(value) == "invalid_address"


def test_a_host_that_nobody_knows() -> None:
    assert refused("no-such-host.invalid:6379") == "unreachable"


@pytest.mark.parametrize("value", ["ray://head:10001", "ray://10.0.0.1", "http://head:8265", "ray://[fd00::1]:10001"])
def test_an_address_of_ray_s_client_is_refused(value: str) -> None:
    assert refused(value) == "unsupported"


@pytest.mark.parametrize("value", ["fd00::1", "fd00::beef", "fd00::1:6379", "::1:6379", "[::1:6379"])
def test_a_head_of_ipv6_is_named_in_brackets(value: str) -> None:
    assert refused(value) == "invalid_address"


@pytest.mark.parametrize(
    ("setting", "variable", "expected"),
    [
        (None, None, None),
        (None, "", None),
        (None, "local", None),
        ("local", "host:1", None),
        (None, "host:1", ("RAY_ADDRESS", "host:1")),
        ("host:2", "host:1", ("cluster.address", "host:2")),
        ("auto", None, ("cluster.address", "auto")),
    ],
)
def test_the_setting_goes_before_the_variable(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, variable: str | None, expected: tuple[str, str] | None
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    assert connection.resolve_address(config.load_config("intent", {"cluster.address": setting})) == expected


@pytest.mark.ray
def test_a_head_that_runs_is_let_through_and_its_node_s_port_is_not(ray_session: Path) -> None:
    import ray

    context = ray.get_runtime_context()
    connection.check_address("cluster.address", context.gcs_address)
    assert re.fullmatch(r"[\w.:\[\]]+:\d+", ray_internals.local_cluster_address() or "")  # another Ray may run here too
    [node] = ray.nodes()
    port = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
    assert refused(port) == "not_ray"


CONNECTING = """
import sys
from pathlib import Path
from rtrain import config
from rtrain.cluster.connection import session
from rtrain.core.errors import UserError
events = []
try:
    with session(config.load_config("intent", {"cluster.address": "127.0.0.1:1"}), Path(sys.argv[1]), events.append):
        pass
except UserError as error:
    print(len(events), *(problem.code for problem in error.problems))
"""


def test_a_session_says_where_it_connects_before_it_tries(tmp_path: Path) -> None:
    """In a process without Ray: one that has it keeps it."""
    command = [sys.executable, "-c", CONNECTING, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["1", "unreachable"]


class Closed(grpc.GenericRpcHandler):  # type: ignore[misc]  # it has no types
    """In place of a head that was started with a token: it lets nobody in."""

    def service(self, call: Any) -> Any:
        def answer(request: bytes, context: Any) -> bytes:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


def test_a_cluster_that_asks_for_a_token_says_so() -> None:
    with other_grpc(Closed()) as port:
        assert refused(f"127.0.0.1:{port}") == "wrong_token"


def test_auto_where_no_ray_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_internals, "local_cluster_address", lambda: None)
    assert refused("auto") == "unreachable"


def test_a_machine_that_is_no_node_is_told_to_submit_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_internals, "probe_head", lambda address, timeout_s: "open")
    monkeypatch.setattr(ray_internals, "local_node_ids", set)
    with silent() as port:
        assert refused(f"127.0.0.1:{port}") == "not_a_node"
