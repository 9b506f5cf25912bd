"""The application under another server than Ray's, over real sockets: bytes that no library sends, and TLS."""

import contextlib
import json
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from huggingface_hub import InferenceClient, constants
from huggingface_hub.errors import HfHubHTTPError

from rtrain.config import ServeConfig
from rtrain.inference.predictor import Predictor
from serve.app import ModelApp, build_app
from serve.auth import api_keys
from serve.ingress import haproxy
from tests.support.certificates import make_certificate
from tests.support.serving import TEXT

GOOD = b'{"inputs": "where is my parcel"}'
PATIENCE_S = 10.0
"""After which a server that neither answers nor ends a connection has failed."""


@contextlib.contextmanager
def served(app: ModelApp, **tls: str) -> Iterator[int]:
    """Port of uvicorn with the application, as in Ray's proxies and replicas."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_config=None, access_log=False, **tls))  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def port(predictor: Predictor) -> Iterator[int]:
    with served(build_app(predictor, ServeConfig())) as port:
        yield port


def send(port: int, *parts: bytes) -> bytes:
    """All bytes that the server sends in reply. If the server waits for more, the client ends its side."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
        with contextlib.suppress(OSError):  # the server may have ended it
            for part in parts:
                client.sendall(part)
            if not select.select([client], [], [], 0.3)[0]:
                client.shutdown(socket.SHUT_WR)
        reply = b""
        with contextlib.suppress(ConnectionResetError):
            while part := client.recv(65536):
                reply += part
    return reply


def post(*lines: bytes, body: bytes = GOOD, path: bytes = b"/predict") -> bytes:
    return b"\r\n".join((b"POST " + path + b" HTTP/1.1", b"host: localhost", b"connection: close", *lines, b"", body))


LENGTH = b"content-length: %d" % len(GOOD)
CHUNKED = b"transfer-encoding: chunked"
CHUNKED_BODY = b"%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD), GOOD)
RAW: list[tuple[bytes, set[int]]] = [
    (post(LENGTH), {200}),
    (post(CHUNKED, body=CHUNKED_BODY), {200}),
    (post(CHUNKED, body=b"zz\r\n" + GOOD), {400, 0}),
    (post(CHUNKED, body=b"ffffffffffffffffffff\r\n" + GOOD), {400, 0}),
    (post(CHUNKED, body=b"-5\r\n" + GOOD), {400, 0}),
    (post(CHUNKED, body=b"5\r\n" + GOOD), {400, 0}),
    (post(b"content-length: 5", LENGTH), {400}),
    (post(b"content-length: -5"), {400}),
    (post(b"content-length: 5"), {400}),
    (post(b"content-length: 99999999999999999999"), {400, 413}),
    (post(b"content-length: 2000000"), {413}),
    (post(b"content-length: 5", CHUNKED, body=CHUNKED_BODY), {200, 400}),
    (post(LENGTH, *[b"x: y"] * 200), {431, 400}),
    (post(LENGTH, b"x: " + b"y" * 20_000), {431, 400}),
    (post(LENGTH, b"x" * 20_000 + b": y"), {431, 400}),
    (post(LENGTH, path=b"/" + b"a" * 20_000), {431, 400}),
    (post(LENGTH, path=b"/predict\xff"), {400, 404}),
    (post(LENGTH, path=b"/predict%00"), {404}),
    (post(LENGTH, path=b"/a/../predict"), {404}),
    (post(LENGTH, b"x: a\r\n b"), {200, 400}),
    (post(LENGTH, b"x\x00: a"), {400}),
    (post(LENGTH, b"expect: 100-continue"), {100, 200}),
    (post(LENGTH, b"upgrade: websocket", b"connection: upgrade"), {0, 200, 400, 403, 404, 426}),
    (b"GET /predict HTTP/9.9\r\n\r\n", {400, 405, 505}),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 405}),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200, {400}),
    (b"\r\n" * 1000, {0, 400}),
    (b"A" * 100_000, {400}),
    (b"", {0}),
]


@pytest.mark.parametrize(("sent", "expected"), RAW, ids=range(len(RAW)))
def test_bytes_that_are_no_request_get_an_answer_or_an_end_and_never_a_5xx(
    port: int, sent: bytes, expected: set[int]
) -> None:
    """0 is a connection that the server ended without a word."""
    reply = send(port, sent)
    assert (int(reply.split()[1]) if reply else 0) in expected, reply[:200]
    answer = httpx.post(f"http://127.0.0.1:{port}/predict", json={"inputs": TEXT}, trust_env=False)
    assert answer.status_code == 200, "a good client was harmed"


def test_slow_and_endless_clients_are_cut_off_while_good_ones_are_answered(predictor: Predictor) -> None:
    with served(build_app(predictor, ServeConfig(request_timeout_s=2.0))) as port, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S)) for _ in range(50)]
        for client in slow:
            client.sendall(post(b"content-length: 1000", body=b"{"))
        for _ in range(3):
            answer = httpx.post(f"http://127.0.0.1:{port}/predict", json={"inputs": TEXT}, trust_env=False)
            assert answer.status_code == 200
        for client in slow:
            reply = b""
            while part := client.recv(65536):
                reply += part
            assert reply.startswith(b"HTTP/1.1 408 ")
            assert b"connection: close" in reply.lower()
        endless = stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
        endless.sendall(post(CHUNKED, body=b""))
        with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):  # noqa: PT012  # the last of many sends
            for _ in range(10_000):
                endless.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")


def test_it_is_answered_encrypted_with_a_key(predictor: Predictor, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    path = tmp_path / "keys.json"
    right = {"authorization": f"Bearer {api_keys.add_key(path, 'shop')}"}
    app = build_app(predictor, ServeConfig(keys=str(path), tls_cert=certificate, tls_key=key))
    context = ssl.create_default_context(cafile=certificate)
    with served(app, ssl_certfile=certificate, ssl_keyfile=key) as port:
        url = f"https://127.0.0.1:{port}/predict"
        with httpx.Client(verify=context, trust_env=False) as client:
            answers = [client.post(url, json={"inputs": TEXT}, headers=headers) for headers in ({}, right)]
        assert [answer.status_code for answer in answers] == [401, 200]
        assert answers[1].headers["strict-transport-security"] == haproxy.HSTS_VALUE
        assert json.loads(answers[0].content)["error"]["type"] == "unauthorized"


def test_the_hugging_face_client_hands_a_key_over_as_its_token(
    predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # as the tests' own process is
    path = tmp_path / "keys.json"
    plain = api_keys.add_key(path, "shop")
    with served(build_app(predictor, ServeConfig(keys=str(path)))) as port:
        url = f"http://127.0.0.1:{port}/predict"
        [best] = InferenceClient(model=url, token=plain).text_classification(TEXT, top_k=1)
        assert best.label == predictor([TEXT])[0][0]["label"]
        with pytest.raises(HfHubHTTPError, match="401"):
            InferenceClient(model=url, token=plain[:-1]).text_classification(TEXT)
