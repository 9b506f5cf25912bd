"""The program that Ray Serve starts as HAProxy: it starts HAProxy by a file that it has closed, and starts it again
where it dies.

Ray itself looks every second whether its HAProxy answers and, after three misses, starts the process that manages it
anew, which takes many seconds in which nobody listens. To Ray this program is HAProxy: it has the process id that Ray
knows, hands signals on, ends with HAProxy where that was told to end, and answers on the admin socket, since Ray asks
there which process answers. HAProxy that dies too often is left to Ray.

Where the process that manages it dies, HAProxy goes on until the one that Ray starts in its place takes over, or until
the node's Ray has ended too. The first file of a successor names no replica yet, and would answer 404; and while a
replica is told of another model, Ray takes it out, though it answers, and has a file without replicas where it is the
only one. In place of such a file the one before is taken: a replica that has really gone refuses connections, and is
answered for at once.

The standard library alone is imported, since each change of replicas waits for it.
"""

import collections
import contextlib
import ctypes
import functools
import os
import re
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import astuple
from pathlib import Path

from serve.ingress import tls as ingress_tls
from serve.ingress.haproxy import Front, UnknownFile, admin_socket, key_of, names_servers, rewrite

MOST_DEATHS, WITHIN_S = 5, 10.0
"""HAProxy that dies for this time in so many seconds is not started again."""
LOOK_S = 1.0
"""Seconds between two looks whether HAProxy's files have changed, and whether somebody can still manage it."""
READY_S = 0.01
"""Seconds between two looks whether a HAProxy that was started answers."""
ANSWER_S = 4.0
"""Seconds in which HAProxy answers a command; Ray waits for 5."""
MOST_BYTES = 1 << 16
"""Largest size of a command, and of a part of an answer."""
ENDING = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
"""HAProxy ends by them, by the first one softly: it takes no more connections, and ends with the last answer."""
PAUSING = (signal.SIGTTOU, signal.SIGTTIN)
"""By them a HAProxy that takes over has the one before let go of its ports, and take them again."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def script(python: str, binary: str, front: Front) -> str:
    """A shell script that Ray takes for HAProxy: `main` of this module for that binary."""
    # Last on the path: there may be anything beside this package.
    code = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); from {__spec__.name} import main; main()"
    command = [python, "-I", "-S", "-c", code, binary, *map(str, astuple(front))]
    return f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n'


def main() -> None:
    """Be HAProxy, for the arguments that follow those of `script`."""
    binary, host, header_s, body_s, pages, most, tls, *given = sys.argv[1:]
    os.umask(0o177)
    try:
        front = Front(host, int(header_s), int(body_s), pages, int(most), tls)
        supervisor = Supervisor(binary, front, given)
        sys.exit(supervisor.run())
    except (UnknownFile, OSError) as error:  # Ray shows what stands on stderr
        sys.exit(str(error))


class Supervisor:
    def __init__(self, binary: str, front: Front, given: list[str]):
        """`given`: HAProxy's own arguments. Raises `UnknownFile` as `rewrite` does."""
        self._parent = os.getppid()
        self._certificate: ingress_tls.CertificateFiles | None = None
        if front.certificate:
            self._certificate = ingress_tls.CertificateFiles(front.certificate, key_of(Path(front.certificate)))
            self._certificate.settle()
        given = list(given)
        place = given.index("-f") + 1
        path = Path(given[place])
        self._socket = _own_socket(path, os.getpid())
        text = path.read_text(encoding="utf-8")
        closed = rewrite(text, front, self._socket)
        self._ray_socket = admin_socket(text)
        # The first one of a process that manages it.
        if "-sf" not in given and (before := _process(_ask(self._ray_socket))):
            given += ["-sf", str(before), "-x", str(self._ray_socket)]
        last = _last(path)
        if names_servers(last) and not names_servers(closed):
            closed = last.replace(str(admin_socket(last)), str(self._socket))
        # A copy: Ray writes its own anew before each change, and that one opens what it should not.
        self._file = _own_file(path, os.getpid())
        self._file.write_text(closed, encoding="utf-8")
        given[place] = str(self._file)
        if "-x" in given:
            given[given.index("-x") + 1] = str(_own_socket(path, int(given[given.index("-sf") + 1])))
        self._command, self._successor = [binary, *given], [binary, *_alone(given)]
        self._haproxy: subprocess.Popen[bytes] | None = None
        self._answers = self._told = False
        self._node = int((_stat(self._parent) or ["", "0"])[1])
        self._listener: socket.socket | None = None
        self._deaths: collections.deque[float] = collections.deque(maxlen=MOST_DEATHS)

    def run(self) -> int:
        """HAProxy's exit code, once it has ended by itself, or was told to, or dies too often."""
        woken, wakes = socket.socketpair()
        for end in (woken, wakes):
            end.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno())
        for number in (*ENDING, *PAUSING):
            signal.signal(number, self._hand_on)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        os.setpgid(0, 0)  # Ray kills the group of a process that has died
        selector = selectors.DefaultSelector()
        selector.register(woken, selectors.EVENT_READ)
        try:
            self._haproxy = self._started(self._command)
            while (code := self._haproxy.poll()) is None or self._starts_again(code):
                ready = selector.select(LOOK_S if self._answers else READY_S)
                with contextlib.suppress(BlockingIOError):
                    woken.recv(MOST_BYTES)
                if not self._answers:
                    self._greet(selector)
                for key, _ in ready:
                    if key.fileobj is self._listener:
                        self._relay()
                if self._is_abandoned() and not self._told:
                    self._hand_on(signal.SIGUSR1)
                if self._answers:
                    self._renew()
            return code if code >= 0 else 128 - code
        finally:
            for made in (self._file, self._socket):
                made.unlink(missing_ok=True)

    def _renew(self) -> None:
        """Have HAProxy take a renewed certificate for connections that come from now on."""
        if self._certificate is None or (pair := self._certificate.renewed()) is None:
            return
        # An empty line ends what is sent.
        lines = [line for line in b"\n".join(pair).splitlines() if line.strip()]
        name = str(self._certificate.certificate).encode()
        _ask(self._socket, b"set ssl cert " + name + b" <<\n" + b"\n".join(lines) + b"\n\n")
        answer = _ask(self._socket, b"commit ssl cert " + name + b"\n")
        if b"Success!" not in answer:
            sys.stderr.write(f"HAProxy does not take the renewed certificate: {answer.decode(errors='replace')}\n")
            sys.stderr.flush()

    def _is_abandoned(self) -> bool:
        """Whether the process that has started this one has ended, and the node's Ray, which would start another."""
        return (os.getppid() != self._parent or self._parent == 1) and not _stat(self._node)

    @staticmethod
    def _started(command: list[str]) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(command, preexec_fn=functools.partial(_end_with_parent, os.getpid()))

    def _hand_on(self, number: int, frame: object = None) -> None:
        self._told |= number in ENDING
        # One that has just begun would be stopped by what it does not know yet.
        if self._haproxy is not None and (self._answers or number in ENDING):
            self._haproxy.send_signal(number)

    def _starts_again(self, code: int) -> bool:
        """Start a successor to a HAProxy that has died, and say so."""
        self._deaths.append(time.monotonic())
        told = self._told or code == 0 or -code in ENDING
        often = len(self._deaths) == MOST_DEATHS and self._deaths[-1] - self._deaths[0] < WITHIN_S
        if told or often or self._listener is None:
            return False
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        sys.stderr.write(f"HAProxy has ended {how}, and is started again\n")
        sys.stderr.flush()
        self._answers = False
        self._haproxy = self._started(self._successor)
        return True

    def _greet(self, selector: selectors.BaseSelector) -> None:
        """Where HAProxy answers by now, have Ray ask this process from here on, in place of the one before."""
        assert self._haproxy is not None
        if _process(_ask(self._socket)) != self._haproxy.pid:
            return
        self._answers = True
        if self._told:  # while it did not listen yet, maybe
            self._haproxy.send_signal(signal.SIGUSR1)
        if self._listener is None:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.setblocking(False)
            made = f"{self._ray_socket}.{os.getpid()}"
            self._listener.bind(made)
            self._listener.listen()
            os.rename(made, self._ray_socket)  # as HAProxy takes over: at no moment there is none
            selector.register(self._listener, selectors.EVENT_READ)

    def _relay(self) -> None:
        """Have HAProxy answer a command of Ray's."""
        assert self._listener is not None
        assert self._haproxy is not None
        with contextlib.suppress(OSError), self._listener.accept()[0] as client:
            client.settimeout(ANSWER_S)
            # Left in the socket: where there is no answer, Ray's read fails, as it would without a HAProxy.
            if answer := _ask(self._socket, client.recv(MOST_BYTES, socket.MSG_PEEK)):
                client.recv(MOST_BYTES)
                own = f"Pid: {self._haproxy.pid}\n".encode()
                client.sendall(re.sub(rb"^" + own, f"Pid: {os.getpid()}\n".encode(), answer, flags=re.MULTILINE))


def _ask(at: Path, command: bytes = b"show info\n") -> bytes:
    """What HAProxy answers to a command on a socket; nothing, where it gives no answer in time."""
    answer = b""
    try:
        with socket.socket(socket.AF_UNIX) as asked:
            asked.settimeout(ANSWER_S)
            asked.connect(str(at))
            asked.sendall(command)
            while part := asked.recv(MOST_BYTES):
                answer += part
    except OSError:
        return b""
    return answer


def _process(answer: bytes) -> int | None:
    """Who answers, by the answer to `show info`."""
    found = re.search(rb"^Pid: (\d+)$", answer, re.MULTILINE)
    return int(found[1]) if found else None


def _own_file(file: Path, process: int) -> Path:
    """By which the supervisor with that process id has started HAProxy, beside Ray's file."""
    return file.with_name(f"{file.name}.{process}")


def _last(file: Path) -> str:
    """By what the last supervisor that goes on, or was killed, has started HAProxy; others have removed it."""
    found = [(0.0, "")]
    for one in file.parent.glob(f"{file.name}.[0-9]*"):
        with contextlib.suppress(OSError):  # its supervisor ends just now
            found.append((one.stat().st_mtime, one.read_text(encoding="utf-8")))
    return max(found)[1]


def _own_socket(file: Path, process: int) -> Path:
    """On which the HAProxy of that supervisor answers. A socket's path has at most 107 bytes."""
    return file.with_name(f"{process}.sock")


def _alone(given: list[str]) -> list[str]:
    """HAProxy's arguments without those by which it takes over from others: they have ended, or have been told to."""
    kept, left_out = [], False
    for word in given:
        if word.startswith("-"):
            left_out = word in ("-sf", "-x")
        if not left_out:
            kept.append(word)
    return kept


def _stat(process: int) -> list[str]:
    """What Linux tells of a process, from its state on (proc_pid_stat(5)): the second is its parent. Nothing where it
    has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] == "Z" else fields


def _end_with_parent(parent: int) -> None:
    """HAProxy would go on with servers that are gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() != parent:  # it has died before
        os._exit(1)
