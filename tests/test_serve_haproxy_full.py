"""HAProxy in front of replicas that have all that they take: who is told to come again, and when."""

import contextlib
import http.client
import json
import socket
import threading
import time

from serve.ingress import haproxy
from tests.test_serve_haproxy import Replica, ask, proxy, serving, wait_until


def test_more_than_the_replicas_take_is_refused_at_once_on_a_connection_that_stays() -> None:
    with serving(Replica) as one, serving(Replica) as two, proxy([one, two], most=1) as (port, _, _):
        answers: list[tuple[int, str]] = []
        taken = [threading.Thread(target=lambda: answers.append(ask(port, 2.0))) for _ in range(2)]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        with contextlib.closing(connection):
            refused = set[socket.socket]()
            for client in taken:
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
                told = b"503=4 504=0" if path == "/metrics" else b"success"
                assert (answer.status, answer.read()) == (200, told)
            assert answers == []  # they were not waited for
            for client in taken:
                client.join()
            assert sorted(answers) == sorted([(200, str(one)), (200, str(two))])
            connection.request("POST", "/predict", "0")
            assert connection.getresponse().status == 200
            assert refused == {connection.sock}


class Full(Replica):
    """Has a full queue, and says when it will have room. A request that asks for it is answered once it may be."""

    taken: threading.Event
    may: threading.Event

    def do_POST(self) -> None:
        held = float(self.rfile.read(int(self.headers["content-length"]))) > 0
        if held:
            self.taken.set()
            self.may.wait(20)
        self.send_response(200 if held else 503)
        self.send_header("retry-after", "7")
        self.send_header("content-length", "0")
        self.end_headers()


def test_what_a_replica_has_said_of_when_to_come_again_is_said_for_it() -> None:
    def told(connection: http.client.HTTPConnection) -> tuple[str | None, bool]:
        """The seconds after which to come again, and whether HAProxy says so itself."""
        connection.request("POST", "/predict", "0")
        answer = connection.getresponse()
        return answer.headers["retry-after"], bool(answer.read())

    with serving(Full) as one, proxy([one], most=1) as (port, _, _):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        with contextlib.closing(connection):
            for before, later in ((False, "1"), (True, "7")):
                # By the replica itself, once HAProxy has seen that the last request is over: its client may be told so
                # a moment before.
                assert not before or wait_until(lambda: told(connection) == ("7", False))
                Full.taken, Full.may = threading.Event(), threading.Event()
                client = threading.Thread(target=ask, args=(port, 1.0))
                client.start()
                assert Full.taken.wait(20)
                assert told(connection) == (later, True)
                Full.may.set()
                client.join()
