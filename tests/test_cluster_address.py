"""An address that leads to no Ray is refused at once, in one line; one that does is not."""

import contextlib
import http.server
import re
import socket
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from rtrain import config, ray_internals
from rtrain.cluster import address
from rtrain.cluster.session import session
from rtrain.config import Config
from rtrain.errors import ConfigError, UserError


def named(value: str) -> Config:
    return config.load("intent", {"cluster.address": value})


def refused(value: str, name: str = "cluster.address") -> str:
    """What is said about an address, on one line."""
    with pytest.raises(UserError) as caught:
        address.check(name, value)
    text = str(caught.value)
    assert text.startswith(f"{name}={value}: ")
    assert "\n" not in text
    return text


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


def test_it_is_over_in_five_seconds() -> None:
    assert address.CONNECT_S + address.ANSWER_S < 5


def test_where_nothing_listens_nothing_answers() -> None:
    with silent() as port:
        pass
    assert f"nothing answers at 127.0.0.1:{port} (Connection refused); write HOST:PORT" in refused(f"127.0.0.1:{port}")


@pytest.mark.parametrize("listens", [silent, web, other_grpc])
def test_what_listens_may_be_something_else(listens: type[contextlib.AbstractContextManager[int]]) -> None:
    with listens() as port:
        text = refused(f"127.0.0.1:{port}", "RAY_ADDRESS")
    assert f"what listens at 127.0.0.1:{port} is not the head of a Ray cluster" in text


@pytest.mark.parametrize("value", ["head", "head:", ":6379", "head:port", "head:0", "head:65536", "a b:c"])
def test_what_is_no_address_is_refused(value: str) -> None:
    assert "not an address; write HOST:PORT" in refused(value)


def test_a_host_that_nobody_knows() -> None:
    assert "nothing answers at no-such-host.invalid:6379 (" in refused("no-such-host.invalid:6379")


@pytest.mark.parametrize("value", ["ray://head:10001", "ray://10.0.0.1", "http://head:8265"])
def test_an_address_of_ray_s_client_is_refused_with_what_to_write(value: str) -> None:
    host = re.split(r"//|:\d", value)[1]
    text = refused(value)
    assert f"ray job submit --address http://{host}:8265 -- python -m rtrain" in text


def test_a_head_of_ipv6_is_named_in_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--address http://[fd00::1]:8265 --" in refused("ray://[fd00::1]:10001")
    for value in ("fd00::1", "fd00::beef", "fd00::1:6379", "::1:6379", "[::1:6379"):
        assert "write an IPv6 address in brackets, before the port: [fd00::1]:6379" in refused(value)
    monkeypatch.setattr(ray_internals, "head", lambda where, seconds: "open")
    monkeypatch.setattr(ray_internals, "nodes_here", set)
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        assert "--address http://[::1]:8265 --" in refused(f"[::1]:{port}")


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
    assert address.of(config.load("intent", {"cluster.address": setting})) == expected


@pytest.mark.ray
def test_a_head_that_runs_is_let_through_and_its_node_s_port_is_not(ray_session: Path) -> None:
    import ray

    context = ray.get_runtime_context()
    address.check("cluster.address", context.gcs_address)
    assert re.fullmatch(r"[\w.:\[\]]+:\d+", ray_internals.running_here() or "")  # another Ray may run here too
    [node] = ray.nodes()
    port = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
    assert f"what listens at {port} is not the head" in refused(port)


@pytest.mark.ray
def test_a_session_says_where_it_connects_before_it_tries(tmp_path: Path, ray_session: Path) -> None:
    said: list[dict[str, Any]] = []
    with session(named("127.0.0.1:1"), tmp_path, said.append):
        pass  # this process has a Ray already, and keeps it
    assert [event["text"] for event in said] == ["connecting to Ray at 127.0.0.1:1"]


class Closed(grpc.GenericRpcHandler):  # type: ignore[misc]  # it has no types
    """In place of a head that was started with a token: it lets nobody in."""

    def service(self, call: Any) -> Any:
        def answer(request: bytes, context: Any) -> bytes:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


def test_a_cluster_that_asks_for_a_token_says_so() -> None:
    with other_grpc(Closed()) as port:
        text = refused(f"127.0.0.1:{port}")
    assert "asks for its own token; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH" in text


def test_auto_where_no_ray_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_internals, "running_here", lambda: None)
    assert "no Ray runs on this machine; write HOST:PORT" in refused("auto")


def test_a_machine_that_is_no_node_is_told_to_submit_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_internals, "head", lambda where, seconds: "open")
    monkeypatch.setattr(ray_internals, "nodes_here", set)
    with silent() as port:
        text = refused(f"127.0.0.1:{port}")
    assert "this machine is none of its nodes" in text
    assert not issubclass(ConfigError, type(text))
