"""HAProxy that dies is started again, and one that was told to end is not; for Ray Serve, whose own code starts, asks
and ends it here, without a Ray, nothing has happened."""

import asyncio
import contextlib
import http.client
import os
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from ray.serve._private import haproxy as theirs

from serve.ingress import ingress_choice, supervisor
from serve.ingress.address import find_free_address
from tests.unit.serve.test_haproxy import Replica, ask, listens, proxy, ray_api, ray_file, serving, wait_until


def haproxy_of(process: int) -> psutil.Process:
    """HAProxy process of the supervisor with that process id."""
    [child] = psutil.Process(process).children()
    assert child.name() == "haproxy"
    return child


def kill_haproxy_of(process: int) -> None:
    """Returns once its successor listens."""
    dead = haproxy_of(process)
    dead.kill()

    def is_back() -> bool:
        children = psutil.Process(process).children()
        return any(child.pid != dead.pid and child.net_connections() for child in children)

    assert wait_until(is_back)


@pytest.fixture
def start_ours(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Has Ray start our program in a folder as HAProxy."""
    return lambda folder: monkeypatch.setattr(theirs, "get_haproxy_binary", lambda: str(folder / "haproxy"))


def test_haproxy_that_is_killed_is_started_again_until_it_is_told_to_end() -> None:
    with serving(Replica) as server, proxy([server]) as (port, folder, process):
        assert wait_until((folder / "admin.sock").exists)
        for _ in range(3):
            kill_haproxy_of(process.pid)
            assert ask(port) == (200, str(server))
        ingress_choice.drain(folder, 5.0)
        process.wait(timeout=5)
        assert not listens(port)
        assert {path.name for path in folder.iterdir() if str(process.pid) in path.name} == set()


def test_what_dies_again_and_again_is_left_to_ray() -> None:
    with serving(Replica) as server, proxy([server]) as (port, folder, process):
        assert wait_until((folder / "admin.sock").exists)
        for _ in range(supervisor.MAX_DEATHS - 1):
            kill_haproxy_of(process.pid)
        haproxy_of(process.pid).kill()
        assert process.wait(timeout=5) == 128 + signal.SIGKILL
        assert not listens(port)


@pytest.mark.parametrize("number", supervisor.STOP_SIGNALS)
@pytest.mark.parametrize("to_haproxy", [False, True])
def test_haproxy_that_was_told_to_end_is_not_started_again(number: signal.Signals, to_haproxy: bool) -> None:
    with serving(Replica) as server, proxy([server]) as (_, folder, process):
        assert wait_until((folder / "admin.sock").exists)
        os.kill(haproxy_of(process.pid).pid if to_haproxy else process.pid, number)
        process.wait(timeout=5)
        assert list(ingress_choice.iter_haproxy_pids(folder)) == []


def test_haproxy_that_is_killed_while_it_ends_is_not_started_again() -> None:
    with serving(Replica) as server, proxy([server]) as (port, folder, process):
        assert wait_until((folder / "admin.sock").exists)
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"POST /predict HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n\r\n1")  # one second
            time.sleep(0.2)
            process.send_signal(signal.SIGUSR1)
            assert wait_until(lambda: not listens(port))
            haproxy_of(process.pid).kill()
            assert process.wait(timeout=5) == 128 + signal.SIGKILL
            assert list(ingress_choice.iter_haproxy_pids(folder)) == []


def test_haproxy_ends_with_its_supervisor() -> None:
    with serving(Replica) as server, proxy([server]) as (_, folder, process):
        assert wait_until((folder / "admin.sock").exists)
        process.kill()
        assert wait_until(lambda: not list(ingress_choice.iter_haproxy_pids(folder)))


def is_running(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def managed(servers: list[int]) -> Iterator[tuple[int, Path, subprocess.Popen[bytes], int]]:
    """Port and folder of a HAProxy, and a process in the place of the node's Ray; below that one there is another in
    the place of Ray's manager, whose process id is the last."""
    haproxy_ingress = ingress_choice.prepare_haproxy("127.0.0.1", 2, 64)
    assert isinstance(haproxy_ingress, ingress_choice.HAProxyHost), haproxy_ingress
    folder, port = haproxy_ingress.folder, find_free_address("127.0.0.1", 0).port
    ray_file(folder, port, servers)
    haproxy = shlex.join([str(folder / "haproxy"), "-db", "-f", str(folder / "haproxy.cfg"), "-dR"])
    with subprocess.Popen(["/bin/sh", "-c", f"/bin/sh -c {shlex.quote(f'{haproxy} & wait')} & exec sleep 60"]) as node:
        try:
            assert wait_until((folder / "admin.sock").exists)
            [manager] = psutil.Process(node.pid).children()
            yield port, folder, node, manager.pid
        finally:
            node.kill()
            ingress_choice.drain(folder, 0.0)
            ingress_choice.remove(folder)


async def begin(api: theirs.HAProxyApi) -> None:
    """As Ray does: its HAProxy starts before it knows the replicas."""
    backends = api.backend_configs
    api.set_backend_configs({})
    await api.start()
    await asyncio.sleep(0.1)
    api.set_backend_configs(backends)
    await api.reload()


def test_haproxy_goes_on_without_its_manager_until_that_one_s_successor_knows_the_replicas(
    start_ours: Callable[[Path], None],
) -> None:
    async def drive(folder: Path, port: int, server: int, manager: int) -> list[tuple[int, str]]:
        api = ray_api(folder, port, [server])
        with asking(port) as answers:
            os.kill(manager, signal.SIGKILL)
            await asyncio.sleep(0.5)
            assert len(list(ingress_choice.iter_haproxy_pids(folder))) == 2
            await begin(api)
            assert await asyncio.to_thread(wait_until, lambda: len(list(ingress_choice.iter_haproxy_pids(folder))) == 2)
        await api.stop()
        return answers

    with serving(Replica) as server, managed([server]) as (port, folder, _, manager):
        start_ours(folder)
        answers = asyncio.run(drive(folder, port, server, manager))
        assert len(answers) > 20
        assert answers == [(200, str(server))] * len(answers)


def test_after_a_supervisor_that_was_killed_the_next_one_begins_with_its_replicas(
    start_ours: Callable[[Path], None],
) -> None:
    async def drive(folder: Path, port: int, server: int) -> list[tuple[int, str]]:
        api = ray_api(folder, port, [server])
        api.set_backend_configs({})
        await api.start()
        answers = [await asyncio.to_thread(ask, port) for _ in range(3)]
        await api.stop()
        return answers

    with serving(Replica) as server, managed([server]) as (port, folder, _, manager):
        start_ours(folder)
        [killed] = psutil.Process(manager).children()
        killed.kill()
        assert wait_until(lambda: not listens(port))
        assert asyncio.run(drive(folder, port, server)) == [(200, str(server))] * 3


def test_the_last_replica_is_asked_on_until_there_is_another_one(start_ours: Callable[[Path], None]) -> None:
    """Ray lists none while it reconfigures the only one; requests to a dead replica are answered at once."""
    haproxy_ingress = ingress_choice.prepare_haproxy("127.0.0.1", 2, 64)
    assert isinstance(haproxy_ingress, ingress_choice.HAProxyHost), haproxy_ingress
    folder, port = haproxy_ingress.folder, find_free_address("127.0.0.1", 0).port
    start_ours(folder)

    async def drive(first: int, second: int) -> list[list[tuple[int, str]]]:
        api, answers_by_change = ray_api(folder, port, [first]), []
        await begin(api)
        for servers in ([first], [], [second], []):
            api.set_backend_configs(ray_api(folder, port, servers).backend_configs)
            await api.reload()
            with asking(port) as answers:
                await asyncio.sleep(0.5)
            answers_by_change.append(answers)
        await api.stop()
        return answers_by_change

    try:
        with serving(Replica) as first, serving(Replica) as second:
            first_answers, none, other, none_again = asyncio.run(drive(first, second))
            assert {*first_answers, *none} == {(200, str(first))}
            assert {*other, *none_again} == {(200, str(second))}
    finally:
        ingress_choice.drain(folder, 0.0)
        ingress_choice.remove(folder)


def test_haproxy_ends_with_the_node_s_ray() -> None:
    with serving(Replica) as server, managed([server]) as (port, folder, node, manager):
        node.kill()
        time.sleep(0.5)
        assert ask(port) == (200, str(server))
        os.kill(manager, signal.SIGKILL)
        assert wait_until(lambda: not list(ingress_choice.iter_haproxy_pids(folder)))


def test_a_supervisor_whose_parent_has_died_before_it_began_ends() -> None:
    with serving(Replica) as server:
        haproxy_ingress = ingress_choice.prepare_haproxy("127.0.0.1", 2, 64)
        assert isinstance(haproxy_ingress, ingress_choice.HAProxyHost), haproxy_ingress
        folder, port = haproxy_ingress.folder, find_free_address("127.0.0.1", 0).port
        ray_file(folder, port, [server])
        later = '(sleep 0.5; exec "$0" "$@" 2>/dev/null >&2) & echo $!'
        command = ["sh", "-c", later, str(folder / "haproxy"), "-db", "-f", str(folder / "haproxy.cfg"), "-dR"]
        orphan = int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        try:
            assert wait_until(lambda: not is_running(orphan))
            assert list(ingress_choice.iter_haproxy_pids(folder)) == []
        finally:
            ingress_choice.remove(folder)


@contextlib.contextmanager
def asking(port: int) -> Iterator[list[tuple[int, str]]]:
    """Answers to a client that asks repeatedly during the block."""
    over, answers = threading.Event(), list[tuple[int, str]]()

    def ask_on() -> None:
        while not over.wait(0.01):
            try:
                answers.append(ask(port))
            except (OSError, http.client.HTTPException) as error:
                answers.append((0, repr(error)))

    client = threading.Thread(target=ask_on)
    client.start()
    try:
        yield answers
    finally:
        over.set()
        client.join()


def test_to_ray_a_haproxy_that_was_started_again_is_the_one_that_it_has_started(
    start_ours: Callable[[Path], None],
) -> None:
    """The supervisor replaces it without losing a request."""
    haproxy_ingress = ingress_choice.prepare_haproxy("127.0.0.1", 2, 64)
    assert isinstance(haproxy_ingress, ingress_choice.HAProxyHost), haproxy_ingress
    folder, port = haproxy_ingress.folder, find_free_address("127.0.0.1", 0).port
    start_ours(folder)

    async def drive(server: int) -> list[tuple[int, str]]:
        api = ray_api(folder, port, [server])
        await begin(api)
        assert api._proc is not None
        started = [api._proc.pid]
        await asyncio.to_thread(kill_haproxy_of, started[0])
        assert await api._get_running_pid() == started[0]
        assert await api.is_running()
        [stats] = (await api.get_all_stats()).values()
        assert [server_stats.is_up for server_stats in stats.values()] == [True]
        with asking(port) as answers:
            for _ in range(2):
                await api.reload()
                started.append(api._proc.pid)
                assert await asyncio.to_thread(wait_until, lambda: not psutil.pid_exists(started[-2]))
        assert api.count_haproxy_processes() == 1
        await api.stop()
        return answers

    try:
        with serving(Replica) as server:
            answers = asyncio.run(drive(server))
            assert answers == [(200, str(server))] * len(answers)
            assert len(answers) > 10
        assert wait_until(lambda: not list(ingress_choice.iter_haproxy_pids(folder)))
    finally:
        ingress_choice.drain(folder, 0.0)
        ingress_choice.remove(folder)
