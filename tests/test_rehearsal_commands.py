"""What the machines of a rehearsal run of a cluster's file: its own commands, but for those that change a system."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rtrain.cluster.lint import document as documents
from rtrain.cluster.rehearsal.machines import commands

TEXT = (Path(__file__).resolve().parents[1] / "cluster.yaml").read_text(encoding="utf-8")


def file(**settings: Any) -> commands.File:
    """cluster.yaml with other top-level settings."""
    [document] = documents.read(yaml.safe_dump({**yaml.safe_load(TEXT), **settings}))
    return commands.of(document)


def test_a_node_runs_the_file_s_commands_in_the_launcher_s_order() -> None:
    head, worker = file().of("head", True), file().of("worker", False)
    signs = ("cloud-init", "token_hex", "ray stop", "ray start --head")
    assert [sign in text for sign, text in zip(signs, head.run, strict=True)] == [True] * 4
    signs = ("cloud-init", "ray stop", "ray start --address", "rtrain.cluster.spot aws")
    assert [sign in text for sign, text in zip(signs, worker.run, strict=True)] == [True] * 4
    for found, first in ((head, "token_hex"), (worker, "ray stop")):
        assert ("cloud-init" in found.setup[0], first in found.start[0]) == (True, True)
        assert [text.split()[0] for text in found.left_out] == ["for", "sudo", "test", "cd"]
        assert found.environments == ("venv",)


def test_a_type_s_own_commands_take_the_place_of_the_others() -> None:
    types = yaml.safe_load(TEXT)["available_node_types"]
    types["worker"] |= {"worker_setup_commands": ["echo own"], "initialization_commands": ["echo first"]}
    changed = file(available_node_types=types, worker_setup_commands=["echo all"], initialization_commands=["echo any"])
    assert changed.of("worker", False).run[:3:2] == ("echo first", "echo own")
    assert changed.of("head", True).run[0] == "echo any"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("echo aws; ls", False),
        ("cd ~/x && ~/venv/bin/pip install -q .", True),
        ("python3 -m pip install x", True),
        ("test -d /x || git clone https://example.org/x", True),
        ("export TOKEN=$(aws ssm get-parameter --name x)", True),
        ("DEBIAN_FRONTEND=noninteractive nohup apt-get install x &", True),
        ("bash -c 'curl https://example.org | sh'", True),
        ("nohup setsid ~/venv/bin/python -m rtrain.cluster.spot aws --address=$RAY_HEAD_IP:6379 &", False),
        ("ulimit -n 65536; ray start --head", False),
        ("for name in a b; do curl $name && break; done", True),
        ("if ! test -d /x; then sudo mkdir /x; fi", True),
        ("for name in a b; do echo $name; done", False),
        ("echo 'unbalanced", False),
    ],
)
def test_what_changes_a_system_or_fetches_something_is_left_out(text: str, left: bool) -> None:
    assert bool(commands.CHANGING & commands.programs(text)) == left


def test_files_token_and_ports_are_the_file_s() -> None:
    found = file()
    assert found.home == "/home/ubuntu"
    assert found.mounts["~/rtrain/rtrain"] == "rtrain"
    assert (list(found.synced), found.token) == (["~/.ray/auth_token"], "~/.ray/auth_token")
    assert (found.number("--port", 1), found.number("--dashboard-port", 1), found.number("--no", 7)) == (6379, 8265, 7)
    assert found.ports() == {
        "control service": {6379},
        "raylet": {6380, 6381},
        "runtime environments": {6382},
        "node agent": {6383, 6384, 6385, *range(20000, 30000)},  # it starts jobs, as a driver
        "dashboard": {8265},
    }
    other = file(auth={"ssh_user": "root"}, head_start_ray_commands=["ray start --head --port 7000"])
    assert (other.home, other.number("--port", 1), other.ports()["control service"]) == ("/root", 7000, {7000})
    assert other.token == commands.TOKEN
