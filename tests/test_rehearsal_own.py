"""Machines that are made by the file's own commands: real processes in namespaces, without Ray."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rtrain.cluster.lint import document as documents
from rtrain.cluster.rehearsal import plan as plans, ports
from rtrain.cluster.rehearsal.machines import commands, metadata, network
from rtrain.cluster.rehearsal.machines.book import Book
from rtrain.cluster.rehearsal.machines.cloud import Cloud
from rtrain.cluster.rehearsal.machines.own import Own
from rtrain.cluster.rehearsal.machines.provider import Rehearsed
from rtrain.cluster.rehearsal.plan import FOLDER

# Slow since they may be skipped: namespaces are root's alone.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(network.problem() is not None, reason=network.problem() or "")]
TEXT = (Path(__file__).resolve().parents[1] / "cluster.yaml").read_text(encoding="utf-8")
WITHIN_S = 20.0
LISTENS = "import socket, time; s = socket.create_server(('0.0.0.0', 6380)); time.sleep(600)"


def until(met: Callable[[], Any]) -> Any:
    give_up = time.monotonic() + WITHIN_S
    while not (found := met()):
        assert time.monotonic() < give_up
        time.sleep(0.05)
    return found


class Tried:
    """A cluster whose nodes run these commands in place of cluster.yaml's."""

    def __init__(self, folder: Path, **lists: Any):
        document = {**yaml.safe_load(TEXT), "setup_commands": [], **lists}
        text = yaml.safe_dump(document)
        self.plan, self.told = plans.of(text), metadata.Machines(metadata.Told)
        self.book, self.folder = Book(folder / "book"), folder
        [read] = documents.read(text)
        source = folder / "source"
        source.mkdir()
        (source / "pyproject.toml").write_text("[project]\n")
        self.own = Own(self.plan, commands.of(read), source, folder, "the token", self.told)

    def __enter__(self) -> "Tried":
        self.own.__enter__()
        self.cloud = Cloud(self.book, self.own, self.folder / "logs", self.own.network.unplug)
        self.cloud.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.cloud.__exit__()
        self.own.__exit__()

    def machine(self, kind: str) -> str:
        """Its name. A worker runs its commands when it is told to, as by the autoscaler of a head."""
        name = self.book.ask(kind, {"CPU": 1.0}, {"for": "training"}, {})
        provider = Rehearsed({FOLDER: str(self.book.folder)}, "tried")
        if kind != self.plan.head.name:
            until(lambda: provider.is_running(name))
            environ = {"RAY_HEAD_IP": self.own.address.partition(":")[0]}
            for text in self.own.file.of(kind, is_head=False).run:
                provider.get_command_runner("", name).run(text, environment_variables=environ)
        return name


@pytest.fixture
def tried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Tried]]:
    made: list[Tried] = []

    def enter(**lists: Any) -> Tried:
        made.append(Tried(tmp_path_factory.mktemp("c"), **lists).__enter__())
        return made[-1]

    yield enter
    for one in made:
        one.__exit__()
        assert one.own.network.left() == []
        assert one.cloud.killed_late == []


def test_a_machine_has_its_name_address_home_processes_and_shared_memory_for_itself(
    tried: Callable[..., Tried],
) -> None:
    """The same port on both, and what one kills stays its own: the file begins with `ray stop`."""
    looks = "; ".join(
        f"({one}) >> ~/said"
        for one in (
            *("hostname", "echo $$", "cat ~/.ray/auth_token; echo", "touch /dev/shm/mine; ls /dev/shm | wc -l"),
            *("ls ~/rtrain", "echo $RAY_HEAD_IP", "getent hosts head-1"),
        )
    )
    listens = f'nohup {sys.executable} -c "{LISTENS}" > /dev/null 2>&1 &'
    made = tried(
        head_start_ray_commands=[looks, listens],
        worker_start_ray_commands=["pkill -f '[6]380'; true", looks, listens],
    )
    head, said = made.machine("head"), {}
    until(lambda: "# up" in made.cloud.log_of(head))
    worker = made.machine("worker")
    until(lambda: "# up" in made.cloud.log_of(worker))
    for name in (head, worker):
        host, pid, token, shared, project, head_ip, known = (made.own.home(name) / "said").read_text().splitlines()[:7]
        assert (host, token, shared, project) == (name, "the token", "1", "pyproject.toml")
        assert int(pid) < 100
        assert known.split() == [head_ip, "head-1"]
        said[name] = head_ip
    assert said[head] == said[worker] == made.own.address.partition(":")[0]
    machines = [(name, one.pid) for name, one in made.book.up().items() if one.pid]
    open_ports = until(lambda: len(found := ports.listening(machines)) == 2 and found)
    assert {(one.machine, one.port, one.scope) for one in open_ports} == {
        (head, 6380, "network"),
        (worker, 6380, "network"),
    }
    with socket.create_connection((made.own.network.place(worker).address, 6380), timeout=2):
        pass
    bootstrap = yaml.safe_load((made.own.home(head) / "ray_bootstrap_config.yaml").read_text())
    assert bootstrap["provider"]["module"] == plans.PROVIDER
    assert list(made.own.commands) == ["head", "worker"]


def test_a_notice_comes_from_the_metadata_service_s_own_address(tried: Callable[..., Tried]) -> None:
    script = (
        "from rtrain.cluster.spot import Aws, Service; import json; "
        "told = Aws(Service())(); print(json.dumps([told.what, told.deadline]))"
    )
    told = f'{sys.executable} -c "{script}" > ~/told'
    made = tried(head_start_ray_commands=["true"], worker_start_ray_commands=[told])
    head, ends = made.machine("head"), float(int(time.time()) + 120)
    until(lambda: made.book.up()[head].pid)
    made.told["worker-1"].ends = ends
    worker = made.machine("worker")
    until(lambda: "# up" in made.cloud.log_of(worker))
    assert json.loads((made.own.home(worker) / "told").read_text()) == ["spot terminate", ends]


def test_a_machine_ends_when_it_is_told_to_and_not_when_its_commands_do(tried: Callable[..., Tried]) -> None:
    made = tried(head_start_ray_commands=["trap '' TERM; (setsid sleep 600 &) ; true"])
    head = made.machine("head")
    until(lambda: "# up" in made.cloud.log_of(head))
    time.sleep(0.3)
    assert head in made.book.up()
    made.book.unwant(head)
    until(lambda: head not in made.book.up())
    assert made.book.all()[head].why == "terminated"
    left = subprocess.run(["pgrep", "-f", str(made.folder)], capture_output=True, text=True, check=False).stdout
    assert [pid for pid in left.split() if int(pid) != os.getpid()] == []


def test_a_command_that_fails_ends_its_machine_and_is_told(tried: Callable[..., Tried]) -> None:
    made = tried(setup_commands=["true", "no-such-program --now"])
    head = made.machine("head")
    until(lambda: head not in made.book.up())
    assert made.book.all()[head].failed == "no-such-program --now (exit code 127)"
    assert "no-such-program" in made.cloud.log_of(head)


def test_what_the_launcher_leaves_to_its_user_is_asked_through_a_forwarded_port(tried: Callable[..., Tried]) -> None:
    serves = f"cd ~ && nohup {sys.executable} -m http.server --bind 127.0.0.1 8265 > /dev/null 2>&1 &"
    made = tried(head_start_ray_commands=["echo it is here > ~/page.txt", serves])
    made.machine("head")
    url = f"http://127.0.0.1:{made.own.api_port}/page.txt"

    def page() -> bytes:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                return bytes(answer.read())
        except OSError:
            return b""

    assert until(page) == b"it is here\n"
