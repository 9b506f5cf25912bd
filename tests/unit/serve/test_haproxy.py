"""HAProxy in front of servers, by the file that Ray Serve writes and `haproxy` changes; no Ray is started."""

import contextlib
import http.client
import json
import os
import re
import resource
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.serve._private import haproxy as theirs
from ray.serve.config import HTTPOptions

from rtrain.config import ServeConfig
from serve.ingress import haproxy, ingress_choice, supervisor
from serve.ingress.address import find_free_address
from serve.ingress.haproxy import HAProxyOptions, UnknownHAProxyConfig, harden_config
from serve.ingress.tls import CertificateFiles
from tests.support.certificates import make_certificate

FRONT = HAProxyOptions("127.0.0.1", 5, 10, "/pages", 64)
SOCKET = Path("/own.sock")
HOST = ingress_choice.HAProxyHost(Path("/nowhere"), 2, 1024)


def ray_file(folder: Path, port: int, servers: list[int], fallback: int = 0, max_connections: int = 350) -> str:
    """The file that Ray Serve writes for an application with these servers, and its own proxy at the port `fallback`,
    with our settings and so many connections; it lies in `folder`."""
    ray_api(folder, port, servers, fallback, max_connections)._generate_config_file_internal()
    return (folder / "haproxy.cfg").read_text()


def ray_api(
    folder: Path, port: int, servers: list[int], fallback: int = 0, max_connections: int = 350
) -> theirs.HAProxyApi:
    """What writes that file, and starts HAProxy with it."""
    environment = {
        name.removeprefix("RAY_SERVE_HAPROXY_").lower(): value
        for name, value in ingress_choice.haproxy_environment(
            HOST._replace(folder=folder), ServeConfig(), max_connections
        ).items()
    }
    names = ("retry_on", "health_check_inter", "socket_path", "server_state_base", "server_state_file")
    numbers = (
        *("retries", "nbthread", "maxconn", "hard_stop_after_s", "observe_error_limit"),
        *("timeout_connect_s", "timeout_client_s", "timeout_server_s"),
    )
    settings: dict[str, Any] = {name: environment[name] for name in names} | {
        name: int(environment[name]) for name in numbers
    }
    options = HTTPOptions(host="127.0.0.1", port=port)
    config = theirs.HAProxyConfig(http_options=options, metrics_enabled=False, **settings)
    backend = theirs.BackendConfig(
        "http-app",
        "/",
        app_name="app",
        servers=[theirs.ServerConfig(f"replica-{server}", "127.0.0.1", server) for server in servers],
        fallback_server=theirs.ServerConfig("fallback", "127.0.0.1", fallback) if fallback else None,
    )
    api = theirs.HAProxyApi(config, config_file_path=str(folder / "haproxy.cfg"))
    api.set_backend_configs({backend.name: backend} if servers else {})
    return api


# ---------------------------------------------------------------------------------------------------------- the change


def test_the_file_opens_the_endpoint_and_nothing_else(tmp_path: Path) -> None:
    theirs_text = ray_file(tmp_path, 8000, [30000, 30001])
    text = harden_config(theirs_text, FRONT, SOCKET)
    before, after = ([line.strip() for line in config_text.splitlines()] for config_text in (theirs_text, text))
    assert [line for line in before if line.startswith("bind")] == ["bind :9101", "bind 127.0.0.1:8000", "bind *:8404"]
    assert [line for line in after if line.startswith("bind")] == ["bind 127.0.0.1:8000"]
    [admin] = [line for line in after if line.startswith("stats socket")]
    assert admin == "stats socket /own.sock mode 600 level admin expose-fd listeners"
    assert [line for line in after if line.startswith("log ")] == ["log global"] * len(re.findall("log global", text))


def test_a_server_that_would_stand_in_for_replicas_is_refused(tmp_path: Path) -> None:
    """Such as Ray's own proxy: it would hold a request until its deadline, where 503 says at once to come again."""
    theirs_text = ray_file(tmp_path, 8000, [30000], fallback=8500)
    assert "server fallback 127.0.0.1:8500 check backup\n" in theirs_text
    for text in (theirs_text, theirs_text.replace("check backup", "backup check")):
        with pytest.raises(UnknownHAProxyConfig):
            harden_config(text, FRONT, SOCKET)


def test_a_certificate_is_on_the_one_line_that_listens(tmp_path: Path) -> None:
    text = harden_config(ray_file(tmp_path, 443, [30000]), replace(FRONT, certificate="/its/tls.pem"), SOCKET)
    assert re.findall(r"^ +(bind .*)$", text, re.M) == [
        "bind 127.0.0.1:443 ssl crt /its/tls.pem alpn http/1.1 ssl-min-ver TLSv1.2"
    ]


@pytest.mark.parametrize(
    "line",
    ["stats socket", "timeout client", "errorfile 503", "bind :9101", "listen stats", "log 127", "frontend http_front"],
)
def test_a_file_without_a_line_that_is_changed_is_refused(tmp_path: Path, line: str) -> None:
    text = ray_file(tmp_path, 8000, [30000])
    lines = [config_line for config_line in text.splitlines(keepends=True) if not config_line.strip().startswith(line)]
    assert len(lines) < len(text.splitlines())
    with pytest.raises(UnknownHAProxyConfig):
        harden_config("".join(lines), FRONT, SOCKET)


@pytest.mark.parametrize("line", ["bind *:9999", "bind :9999 ssl", "bind 127.0.0.10:9999"])
def test_a_file_that_opens_something_new_is_refused(tmp_path: Path, line: str) -> None:
    text = ray_file(tmp_path, 8000, [30000]) + f"frontend new\n    {line}\n"
    with pytest.raises(UnknownHAProxyConfig):
        harden_config(text, FRONT, SOCKET)


def test_an_unknown_file_is_told_on_stderr_and_nothing_starts(tmp_path: Path) -> None:
    (tmp_path / "haproxy.cfg").write_text("global\n")
    executable = tmp_path / "haproxy"
    executable.write_text(supervisor.build_script(sys.executable, "/bin/true", FRONT))
    executable.chmod(0o700)
    done = subprocess.run(
        [executable, "-db", "-f", tmp_path / "haproxy.cfg"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, bool(done.stderr)) == (1, True)


@pytest.mark.parametrize(
    ("requests", "files", "expected", "has_message"),
    [
        (1088, 20_000, 4096, False),
        (4 * 1088, 22_000, 8704, False),
        (4 * 1088, 20_000, 7948, True),
        (1088, 1024, 358, True),
        (64, 100, 1, True),
    ],
)
def test_connections_follow_what_the_replicas_take_as_far_as_files_allow(
    requests: int, files: int, expected: int, has_message: bool
) -> None:
    max_connections, line = ingress_choice.choose_max_connections(requests, files)
    assert (max_connections, bool(line)) == (expected, has_message)


# ------------------------------------------------------------------------------------------------------------- running


class Replica(BaseHTTPRequestHandler):
    """Answers by its server's port; a body says how many seconds that takes."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(self.headers.get(haproxy.PROXY_ERRORS_HEADER, "success").encode())

    def do_POST(self) -> None:
        time.sleep(float(self.rfile.read(int(self.headers["content-length"]))))
        assert isinstance(self.server, ThreadingHTTPServer)
        self.answer(str(self.server.server_port).encode())

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


class Dying(Replica):
    """Healthy, and closes the connection on each request."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.connection.shutdown(socket.SHUT_RDWR)


class Slow(Replica):
    """Ray's own proxy: it waits for a replica."""

    def do_GET(self) -> None:
        if self.path != "/-/healthz":
            time.sleep(5)
        self.answer(b"success")


class Stalled(Replica):
    """Answers requests, and HAProxy's questions late once it is `busy`."""

    busy = threading.Event()

    def do_GET(self) -> None:
        if self.busy.is_set():
            time.sleep(ingress_choice.HEALTH_CHECK_INTERVAL_S + 0.5)
            self.close_connection = True  # HAProxy may have gone
        with contextlib.suppress(ConnectionError):
            self.answer(b"success")


@contextlib.contextmanager
def serving(handler: type[Replica]) -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


@contextlib.contextmanager
def proxy(
    servers: list[int], pair: Sequence[str] = (), max_requests: int = 64, max_connections: int = 350, files: int = 0
) -> Iterator[tuple[int, Path, subprocess.Popen[bytes]]]:
    """Port, folder and process of HAProxy as Ray starts it, with one second for a header; `files`: how many it may
    open, where that is not what this process may."""
    haproxy_ingress = ingress_choice.prepare_haproxy("127.0.0.1", 2, max_requests, *pair)
    assert isinstance(haproxy_ingress, ingress_choice.HAProxyHost), haproxy_ingress
    folder = haproxy_ingress.folder
    executable = folder / "haproxy"
    executable.write_text(
        executable.read_text().replace(f" {ingress_choice.HEADER_TIMEOUT_S} 2 {folder}", f" 1 2 {folder}")
    )
    port = find_free_address("127.0.0.1", 0).port
    ray_file(folder, port, servers, max_connections=max_connections)
    limit = ["prlimit", f"--nofile={files}"] if files else []
    with subprocess.Popen([*limit, executable, "-db", "-f", folder / "haproxy.cfg", "-dR"]) as process:
        try:
            wait_until(lambda: listens(port))
            yield port, folder, process
        finally:
            ingress_choice.drain(folder, 0.0)
            ingress_choice.remove(folder)


def wait_until(condition: Callable[[], object], timeout_s: float = 10.0) -> bool:
    give_up = time.monotonic() + timeout_s
    while not (met := condition()) and time.monotonic() < give_up:
        time.sleep(0.01)
    return bool(met)


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def ask(port: int, seconds: float = 0.0) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", "/predict", str(seconds))
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_it_encrypts_where_there_is_a_certificate_and_copies_no_key(tmp_path: Path) -> None:
    """Files that remain after everything is killed contain no key."""
    certificate, key = make_certificate(tmp_path)
    with serving(Replica) as server, proxy([server], (certificate, key)) as (port, folder, _):
        files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
        assert files
        assert not [path for path in files if b"PRIVATE KEY" in path.read_bytes()]
        trusted = ssl.create_default_context(cafile=certificate)
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=trusted)
        connection.request("POST", "/predict", "0")
        assert connection.getresponse().read() == str(server).encode()
        connection.close()
        with pytest.raises((OSError, http.client.HTTPException)):
            ask(port)  # without TLS


def get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_it_names_no_application_and_says_503_where_there_is_none() -> None:
    with serving(Replica) as server, proxy([server]) as (port, folder, _):
        for path in ("/-/routes", "/-/ROUTES"):
            assert get(port, path) == (200, "success"), "answered by the replica, which asks for a key"
        text = ray_file(folder, port, [server])
    closed = harden_config(text, FRONT, SOCKET)
    assert "app\\" not in closed
    assert '"{' not in closed
    with proxy([]) as (port, _, _):
        for path in ("/predict", "/-/routes"):
            status, body = get(port, path)
            assert (status, set(json.loads(body))) == (503, {"error"})


def test_a_renewed_certificate_is_that_of_new_connections_and_no_request_is_lost(tmp_path: Path) -> None:
    """An old HAProxy would show the old one for months."""
    pair = make_certificate(tmp_path)
    old = Path(pair[0]).read_text()
    with serving(Replica) as server, proxy([server], pair) as (port, _, _):
        done, statuses = threading.Event(), Counter[int]()

        def load() -> None:
            context = ssl._create_unverified_context()
            while not done.is_set():
                connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)
                for _ in range(5):
                    connection.request("POST", "/predict", "0")
                    answer = connection.getresponse()
                    answer.read()
                    statuses[answer.status] += 1
                connection.close()

        threads = [threading.Thread(target=load) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            assert ssl.get_server_certificate(("127.0.0.1", port)) == old
            make_certificate(tmp_path)
            new = Path(pair[0]).read_text()
            assert wait_until(lambda: ssl.get_server_certificate(("127.0.0.1", port)) == new, 60.0)
        finally:
            done.set()
            for thread in threads:
                thread.join(10)
        assert set(statuses) == {200}


def test_files_of_a_certificate_that_do_not_belong_together_are_looked_at_again(tmp_path: Path) -> None:
    pair = make_certificate(tmp_path / "served")
    files = CertificateFiles(*pair)
    assert files.read_renewed() is None
    renewed = make_certificate(tmp_path / "renewed")
    os.replace(renewed[0], pair[0])
    assert files.read_renewed() is None  # the key is still the old one
    os.replace(renewed[1], pair[1])
    assert files.read_renewed() == (Path(pair[0]).read_bytes(), Path(pair[1]).read_bytes())
    assert files.read_renewed() is None
    Path(pair[1]).unlink()
    assert files.read_renewed() is None


def test_nothing_is_open_but_the_endpoint_and_a_socket_of_the_owner_s() -> None:
    with serving(Replica) as server, proxy([server]) as (port, folder, process):
        assert ask(port) == (200, str(server))
        haproxy_process = psutil.Process(process.pid)
        connections = [
            connection
            for process in (haproxy_process, *haproxy_process.children())
            for connection in process.net_connections()
        ]
        assert [connection.laddr for connection in connections if connection.status == psutil.CONN_LISTEN] == [
            ("127.0.0.1", port)
        ]
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert wait_until((folder / "admin.sock").exists)
        sockets = [path for path in folder.iterdir() if path.is_socket()]
        assert [stat.S_IMODE(path.stat().st_mode) for path in sockets] == [0o600] * 2
        assert str(folder / "haproxy.cfg") in haproxy_process.cmdline()  # by this Ray tells its own
    assert not folder.exists()


@pytest.mark.parametrize("files", [500, 1024, 20_000])
def test_it_starts_with_the_connections_that_files_allow(files: int) -> None:
    files = min(files, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    max_connections, _ = ingress_choice.choose_max_connections(8 * 1088, files)
    with serving(Replica) as server, proxy([server], max_connections=max_connections, files=files) as (port, folder, _):
        assert ask(port) == (200, str(server))
        assert wait_until((folder / "admin.sock").exists)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(folder / "admin.sock"))
            client.sendall(b"show info\n")
            assert f"\nMaxconn: {max_connections}\n".encode() in b"".join(iter(lambda: client.recv(1 << 12), b""))


def test_half_a_header_is_cut_off() -> None:
    with serving(Replica) as server, proxy([server]) as (port, _, _):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(b"POST /predict HTTP/1.1\r\nhost: a\r\nx-slow: ")
            received = b"".join(iter(lambda: client.recv(1 << 12), b""))
        assert received.startswith(b"HTTP/1.1 408 ")
        assert ask(port) == (200, str(server))


def test_a_request_whose_replica_ends_is_answered_by_another() -> None:
    with serving(Replica) as good, serving(Dying) as bad, proxy([bad, good]) as (port, _, _):
        assert [ask(port) for _ in range(6)] == [(200, str(good))] * 6


def test_the_only_replica_is_known_to_be_gone_before_anybody_asks() -> None:
    with contextlib.ExitStack() as alive:
        server = alive.enter_context(serving(Replica))
        with proxy([server]) as (port, _, _):
            assert health(port) == 200
            alive.close()
            assert wait_until(lambda: health(port) == 503)


def health(port: int) -> int:
    """HAProxy's status of a replica."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", "/-/healthz")
        return connection.getresponse().status


def test_a_replica_without_time_for_questions_is_passed_by_where_there_is_another_one() -> None:
    """It is busy, or hangs; where it is the only one, whoever asks is better served late than not at all."""
    Stalled.busy.clear()
    with (
        serving(Stalled) as slow,
        serving(Replica) as good,
        proxy([slow]) as (lone, _, _),
        proxy([slow, good]) as (proxy_port, _, _),
    ):
        assert wait_until(lambda: {ask(proxy_port) for _ in range(4)} == {(200, str(slow)), (200, str(good))})
        Stalled.busy.set()
        assert wait_until(lambda: {ask(proxy_port) for _ in range(4)} == {(200, str(good))}, 30.0)
        assert not wait_until(lambda: ask(lone) != (200, str(slow)), 2.0 * ingress_choice.HEALTH_CHECK_INTERVAL_S)


@pytest.mark.parametrize("has_replica", [True, False])
def test_without_a_replica_the_answer_is_ours_and_says_at_once_when_to_come_again(has_replica: bool) -> None:
    """`has_replica`: whether Ray still lists the dead replica."""
    gone = [find_free_address("127.0.0.1", 0).port] if has_replica else []
    with proxy(gone) as (port, _, _):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        with contextlib.closing(connection):
            for path in ("/predict", "/v2", "/v2/models/tiny/infer") if has_replica else ("/predict",):
                assert wait_until(lambda: health(port) == 503)
                connection.request("GET", path)
                answer = connection.getresponse()
                assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                error = json.loads(answer.read())["error"]
                assert isinstance(error, str) if path[:3] == "/v2" else error["type"] == "overloaded"
                assert haproxy.security_headers(tls=False).items() <= dict(answer.headers.items()).items()


class RecordingReplica(Replica):
    """Answers for which protocol it was asked."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.answer(body + self.headers.get("upgrade", " none").encode())


@pytest.mark.parametrize("name", ["foo", "websocket", "h2c"])
def test_no_client_takes_a_replica_to_another_protocol(name: str) -> None:
    """What follows the head would be read as requests there, on a connection that other clients get."""
    headers = {"connection": "upgrade", "upgrade": name, "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA=="}
    with serving(RecordingReplica) as server, proxy([server]) as (port, _, _):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        with contextlib.closing(connection):
            connection.request("POST", "/predict", b"hello", headers)
            assert connection.getresponse().read() == b"hello none"


class HeldReplica(Replica):
    """Answers a request once it is let go."""

    entered, left = threading.Event(), threading.Event()

    def do_POST(self) -> None:
        self.entered.set()
        self.left.wait(10)
        super().do_POST()


class Refusing(Replica):
    """Answers 503 itself."""

    def do_POST(self) -> None:
        self.send_error(503)


def read_error_header(port: int, path: str = "/metrics") -> str:
    """HAProxy's own error counts as a replica receives them; the client claims others."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={haproxy.PROXY_ERRORS_HEADER: "503=7 504=7"})
        return connection.getresponse().read().decode()


def test_what_it_answers_itself_is_told_to_who_is_asked_for_metrics() -> None:
    HeldReplica.entered.clear()
    HeldReplica.left.clear()
    with serving(HeldReplica) as server, proxy([server], max_requests=1) as (port, _, _):
        request_thread = threading.Thread(target=ask, args=(port,))
        request_thread.start()
        assert HeldReplica.entered.wait(10)
        assert [ask(port)[0] for _ in range(3)] == [503] * 3
        HeldReplica.left.set()
        request_thread.join()
        headers = [read_error_header(port)]
        while not headers[-1].startswith("503=") and len(headers) < 100:  # the answered one may still count
            headers.append(read_error_header(port))
        assert headers[-1] == f"503={2 + len(headers)} 504=0"
        assert [read_error_header(port, path) for path in ("/models/tiny/metrics", "/%6detrics")] == ["success"] * 2
    with serving(Refusing) as server, proxy([server]) as (port, _, _):
        assert [ask(port)[0] for _ in range(3)] == [503] * 3
        assert read_error_header(port) == "503=0 504=0"
    with serving(Dying) as server, proxy([server]) as (port, _, _):
        assert ask(port)[0] == 503
        assert wait_until(lambda: read_error_header(port).endswith("504=0"))  # it is passed by for a moment
        assert read_error_header(port) != "503=0 504=0"


def test_what_was_accepted_is_answered_at_the_end() -> None:
    with serving(Replica) as server, proxy([server]) as (port, folder, process):
        answers: list[tuple[int, str]] = []
        client = threading.Thread(target=lambda: answers.append(ask(port, 0.5)))
        client.start()
        time.sleep(0.2)
        ingress_choice.drain(folder, 5.0)
        assert process.wait(timeout=5) == 0
        assert not listens(port)
        client.join()
        assert answers == [(200, str(server))]


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
