"""HAProxy in front of full replicas: rejections and their Retry-After."""

import contextlib
import http.client
import json
import socket
import threading
import time

from serve.ingress import haproxy
from tests.unit.serve.test_haproxy import Replica, ask, proxy, serving, wait_until


def test_more_than_the_replicas_take_is_refused_at_once_on_a_connection_that_stays() -> None:
    with (
        serving(Replica) as first_replica,
        serving(Replica) as second_replica,
        proxy([first_replica, second_replica], max_requests=1) as (port, _, _),
    ):
        answers: list[tuple[int, str]] = []
        threads = [threading.Thread(target=lambda: answers.append(ask(port, 2.0))) for _ in range(2)]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        with contextlib.closing(connection):
            refused = set[socket.socket]()
            for client in threads:
                assert answers == []
                client.start()
                time.sleep(0.3)
            for _ in range(3):
                connection.request("POST", "/predict", "0")
                answer = connection.getresponse()
                assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                assert json.loads(answer.read())["error"]["type"] == "overloaded"
                assert haproxy.security_headers(tls=False).items() <= dict(answer.headers.items()).items()
                refused.add(connection.sock)
            connection.request("POST", "/v2/models/a/infer", "0")
            answer = connection.getresponse()
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert len(answer.headers["x-request-id"]) == 36
            assert isinstance(json.loads(answer.read())["error"], str)
            for path in ("/v2/health/ready", "/metrics", "/info", "/"):  # they may look at it
                connection.request("GET", path)
                answer = connection.getresponse()
                expected = b"503=4 504=0" if path == "/metrics" else b"success"
                assert (answer.status, answer.read()) == (200, expected)
            assert answers == []  # they were not waited for
            for client in threads:
                client.join()
            assert sorted(answers) == sorted([(200, str(first_replica)), (200, str(second_replica))])
            connection.request("POST", "/predict", "0")
            assert connection.getresponse().status == 200
            assert refused == {connection.sock}


class Full(Replica):
    """Has a full queue, and says when it will have room. A request that asks for it is answered once it may be."""

    request_started: threading.Event
    may: threading.Event

    def do_POST(self) -> None:
        is_held = float(self.rfile.read(int(self.headers["content-length"]))) > 0
        if is_held:
            self.request_started.set()
            self.may.wait(20)
        self.send_response(200 if is_held else 503)
        self.send_header("retry-after", "7")
        self.send_header("content-length", "0")
        self.end_headers()


def test_what_a_replica_has_said_of_when_to_come_again_is_said_for_it() -> None:
    def read_retry_after(connection: http.client.HTTPConnection) -> tuple[str | None, bool]:
        """The seconds after which to come again, and whether HAProxy says so itself."""
        connection.request("POST", "/predict", "0")
        answer = connection.getresponse()
        return answer.headers["retry-after"], bool(answer.read())

    with serving(Full) as full_replica, proxy([full_replica], max_requests=1) as (port, _, _):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        with contextlib.closing(connection):
            for before, later in ((False, "1"), (True, "7")):
                # By the replica itself, once HAProxy has seen that the last request is over: its client may be told so
                # a moment before.
                assert not before or wait_until(lambda: read_retry_after(connection) == ("7", False))
                Full.request_started, Full.may = threading.Event(), threading.Event()
                client = threading.Thread(target=ask, args=(port, 1.0))
                client.start()
                assert Full.request_started.wait(20)
                assert read_retry_after(connection) == (later, True)
                Full.may.set()
                client.join()
