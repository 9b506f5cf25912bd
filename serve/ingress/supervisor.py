"""The program that Ray Serve starts as HAProxy: it starts HAProxy with a hardened configuration, and restarts it.

Ray checks its HAProxy every second. After three misses it restarts the managing process, which takes many seconds
without a listener. To Ray this program is HAProxy: it has the process id that Ray knows, forwards signals, ends when
HAProxy is stopped, and answers on the admin socket, since Ray asks there which process answers. If HAProxy dies too
often, Ray takes over.

If the managing process dies, HAProxy keeps running until its successor takes over, or until Ray
ends on this node. The first configuration of a successor lists no replica, and would answer 404. While a replica loads
another model, Ray removes it although it answers; the configuration is then empty if the replica is the only one. An
empty configuration is replaced by the previous one: a replica that has ended refuses connections, and HAProxy answers
at once.

The module imports the standard library alone, since each change of replicas waits for it.
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
from serve.ingress.haproxy import (
    HAProxyOptions,
    UnknownHAProxyConfig,
    harden_config,
    has_servers,
    key_path,
    parse_admin_socket,
)

MAX_DEATHS, DEATH_WINDOW_S = 5, 10.0
"""HAProxy that dies for this time in so many seconds is not started again."""
POLL_INTERVAL_S = 1.0
"""Seconds between two looks whether HAProxy's files have changed, and whether somebody can still manage it."""
STARTUP_POLL_S = 0.01
"""Seconds between two looks whether a HAProxy that was started answers."""
COMMAND_TIMEOUT_S = 4.0
"""Seconds in which HAProxy answers a command; Ray waits for 5."""
MAX_COMMAND_BYTES = 1 << 16
"""Largest size of a command, and of a part of an answer."""
STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
"""HAProxy ends by them, by the first one softly: it takes no more connections, and ends with the last answer."""
PAUSE_SIGNALS = (signal.SIGTTOU, signal.SIGTTIN)
"""A new HAProxy pauses its predecessor with these signals while it takes over the ports."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def build_script(python: str, binary: str, options: HAProxyOptions) -> str:
    """A shell script that Ray takes for HAProxy: `main` of this module for that binary."""
    # Last on the path: there may be anything beside this package.
    code = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); from {__spec__.name} import main; main()"
    command = [python, "-I", "-S", "-c", code, binary, *map(str, astuple(options))]
    return f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n'


def main() -> None:
    """Be HAProxy, for the arguments that follow those of `build_script`."""
    binary, host, header_timeout_s, body_timeout_s, error_pages_folder, max_requests, tls, *arguments = sys.argv[1:]
    os.umask(0o177)
    try:
        options = HAProxyOptions(
            host, int(header_timeout_s), int(body_timeout_s), error_pages_folder, int(max_requests), tls
        )
        supervisor = Supervisor(binary, options, arguments)
        sys.exit(supervisor.run())
    except (UnknownHAProxyConfig, OSError) as error:  # Ray shows what stands on stderr
        sys.exit(str(error))


class Supervisor:
    def __init__(self, binary: str, options: HAProxyOptions, arguments: list[str]):
        """`arguments`: HAProxy's own arguments. Raises `UnknownHAProxyConfig` as `harden_config` does."""
        self._parent_pid = os.getppid()
        self._certificate_files: ingress_tls.CertificateFiles | None = None
        if options.certificate:
            self._certificate_files = ingress_tls.CertificateFiles(
                options.certificate, key_path(Path(options.certificate))
            )
            self._certificate_files.wait_until_consistent()
        arguments = list(arguments)
        config_index = arguments.index("-f") + 1
        path = Path(arguments[config_index])
        self._haproxy_socket = _socket_path(path, os.getpid())
        config = path.read_text(encoding="utf-8")
        hardened_config = harden_config(config, options, self._haproxy_socket)
        self._ray_socket = parse_admin_socket(config)
        # The first one of a process that manages it.
        if "-sf" not in arguments and (previous_pid := _parse_pid(_send_command(self._ray_socket))):
            arguments += ["-sf", str(previous_pid), "-x", str(self._ray_socket)]
        last_config = _read_last_config(path)
        if has_servers(last_config) and not has_servers(hardened_config):
            hardened_config = last_config.replace(str(parse_admin_socket(last_config)), str(self._haproxy_socket))
        # A copy: Ray rewrites its own file before each change, and that file opens ports that must stay closed.
        self._config_file = _config_path(path, os.getpid())
        self._config_file.write_text(hardened_config, encoding="utf-8")
        arguments[config_index] = str(self._config_file)
        if "-x" in arguments:
            arguments[arguments.index("-x") + 1] = str(_socket_path(path, int(arguments[arguments.index("-sf") + 1])))
        self._command, self._restart_command = [binary, *arguments], [binary, *_drop_takeover_options(arguments)]
        self._haproxy: subprocess.Popen[bytes] | None = None
        self._is_responding = self._is_stopping = False
        self._node_pid = int((_read_process_stat(self._parent_pid) or ["", "0"])[1])
        self._listener: socket.socket | None = None
        self._deaths: collections.deque[float] = collections.deque(maxlen=MAX_DEATHS)

    def run(self) -> int:
        """Run until HAProxy ends by itself, is stopped, or dies too often; returns its exit code."""
        wakeup_reader, wakeup_writer = socket.socketpair()
        for end in (wakeup_reader, wakeup_writer):
            end.setblocking(False)
        signal.set_wakeup_fd(wakeup_writer.fileno())
        for number in (*STOP_SIGNALS, *PAUSE_SIGNALS):
            signal.signal(number, self._forward_signal)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        os.setpgid(0, 0)  # Ray kills the group of a process that has died
        selector = selectors.DefaultSelector()
        selector.register(wakeup_reader, selectors.EVENT_READ)
        try:
            self._haproxy = self._spawn(self._command)
            while (code := self._haproxy.poll()) is None or self._restart_unless_stopping(code):
                ready = selector.select(POLL_INTERVAL_S if self._is_responding else STARTUP_POLL_S)
                with contextlib.suppress(BlockingIOError):
                    wakeup_reader.recv(MAX_COMMAND_BYTES)
                if not self._is_responding:
                    self._take_over_admin_socket(selector)
                for key, _ in ready:
                    if key.fileobj is self._listener:
                        self._proxy_admin_command()
                if self._is_orphaned() and not self._is_stopping:
                    self._forward_signal(signal.SIGUSR1)
                if self._is_responding:
                    self._update_certificate()
            return code if code >= 0 else 128 - code
        finally:
            for path in (self._config_file, self._haproxy_socket):
                path.unlink(missing_ok=True)

    def _update_certificate(self) -> None:
        """Have HAProxy take a renewed certificate for connections that come from now on."""
        if self._certificate_files is None or (pair := self._certificate_files.read_renewed()) is None:
            return
        # An empty line ends the payload, so empty lines are removed.
        lines = [line for line in b"\n".join(pair).splitlines() if line.strip()]
        name = str(self._certificate_files.certificate).encode()
        _send_command(self._haproxy_socket, b"set ssl cert " + name + b" <<\n" + b"\n".join(lines) + b"\n\n")
        answer = _send_command(self._haproxy_socket, b"commit ssl cert " + name + b"\n")
        if b"Success!" not in answer:
            sys.stderr.write(f"HAProxy does not take the renewed certificate: {answer.decode(errors='replace')}\n")
            sys.stderr.flush()

    def _is_orphaned(self) -> bool:
        """Whether the process that has started this one has ended, and the node's Ray, which would start another."""
        return (os.getppid() != self._parent_pid or self._parent_pid == 1) and not _read_process_stat(self._node_pid)

    @staticmethod
    def _spawn(command: list[str]) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(command, preexec_fn=functools.partial(_end_on_parent_death, os.getpid()))

    def _forward_signal(self, signal_number: int, frame: object = None) -> None:
        self._is_stopping |= signal_number in STOP_SIGNALS
        # A starting HAProxy would be killed by a signal without a handler.
        if self._haproxy is not None and (self._is_responding or signal_number in STOP_SIGNALS):
            self._haproxy.send_signal(signal_number)

    def _restart_unless_stopping(self, code: int) -> bool:
        """Start a successor to a HAProxy that has died, and say so."""
        self._deaths.append(time.monotonic())
        is_stopping = self._is_stopping or code == 0 or -code in STOP_SIGNALS
        has_died_too_often = len(self._deaths) == MAX_DEATHS and self._deaths[-1] - self._deaths[0] < DEATH_WINDOW_S
        if is_stopping or has_died_too_often or self._listener is None:
            return False
        cause = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        sys.stderr.write(f"HAProxy has ended {cause}, and is started again\n")
        sys.stderr.flush()
        self._is_responding = False
        self._haproxy = self._spawn(self._restart_command)
        return True

    def _take_over_admin_socket(self, selector: selectors.BaseSelector) -> None:
        """Where HAProxy answers by now, have Ray ask this process from here on, in place of the one before."""
        assert self._haproxy is not None
        if _parse_pid(_send_command(self._haproxy_socket)) != self._haproxy.pid:
            return
        self._is_responding = True
        if self._is_stopping:  # while it did not listen yet, maybe
            self._haproxy.send_signal(signal.SIGUSR1)
        if self._listener is None:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.setblocking(False)
            bound_path = f"{self._ray_socket}.{os.getpid()}"
            self._listener.bind(bound_path)
            self._listener.listen()
            os.rename(bound_path, self._ray_socket)  # atomic, like HAProxy's own takeover: the socket is never missing
            selector.register(self._listener, selectors.EVENT_READ)

    def _proxy_admin_command(self) -> None:
        """Have HAProxy answer a command of Ray's."""
        assert self._listener is not None
        assert self._haproxy is not None
        with contextlib.suppress(OSError), self._listener.accept()[0] as client:
            client.settimeout(COMMAND_TIMEOUT_S)
            # Left in the socket: where there is no answer, Ray's read fails, as it would without a HAProxy.
            if answer := _send_command(self._haproxy_socket, client.recv(MAX_COMMAND_BYTES, socket.MSG_PEEK)):
                client.recv(MAX_COMMAND_BYTES)
                pid_line = f"Pid: {self._haproxy.pid}\n".encode()
                client.sendall(re.sub(rb"^" + pid_line, f"Pid: {os.getpid()}\n".encode(), answer, flags=re.MULTILINE))


def _send_command(socket_path: Path, command: bytes = b"show info\n") -> bytes:
    """What HAProxy answers to a command on a socket; nothing, where it gives no answer in time."""
    answer = b""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(COMMAND_TIMEOUT_S)
            connection.connect(str(socket_path))
            connection.sendall(command)
            while chunk := connection.recv(MAX_COMMAND_BYTES):
                answer += chunk
    except OSError:
        return b""
    return answer


def _parse_pid(answer: bytes) -> int | None:
    """Who answers, by the answer to `show info`."""
    match = re.search(rb"^Pid: (\d+)$", answer, re.MULTILINE)
    return int(match[1]) if match else None


def _config_path(config_file: Path, pid: int) -> Path:
    """Path of the configuration of that supervisor's HAProxy."""
    return config_file.with_name(f"{config_file.name}.{pid}")


def _read_last_config(config_file: Path) -> str:
    """Configuration of the last supervisor that still runs or was killed; other supervisors have removed theirs."""
    configs = [(0.0, "")]
    for path in config_file.parent.glob(f"{config_file.name}.[0-9]*"):
        with contextlib.suppress(OSError):  # its supervisor ends just now
            configs.append((path.stat().st_mtime, path.read_text(encoding="utf-8")))
    return max(configs)[1]


def _socket_path(config_file: Path, pid: int) -> Path:
    """Socket of that supervisor's HAProxy. A socket path has at most 107 bytes."""
    return config_file.with_name(f"{pid}.sock")


def _drop_takeover_options(arguments: list[str]) -> list[str]:
    """HAProxy's arguments without the options for a takeover: the predecessors have ended, or are stopping."""
    remaining, is_dropping = [], False
    for argument in arguments:
        if argument.startswith("-"):
            is_dropping = argument in ("-sf", "-x")
        if not is_dropping:
            remaining.append(argument)
    return remaining


def _read_process_stat(pid: int) -> list[str]:
    """What Linux tells of a process, from its state on (proc_pid_stat(5)): the second is its parent. Nothing where it
    has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] == "Z" else fields


def _end_on_parent_death(parent_pid: int) -> None:
    """End HAProxy with its parent; otherwise it would route to servers that no longer exist."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() != parent_pid:  # it has died before
        os._exit(1)
