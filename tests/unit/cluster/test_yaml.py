"""cluster.yaml without a cloud: Ray's own checks, its commands in a shell, and forbidden content."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.root import ROOT

TEXT = (ROOT / "cluster.yaml").read_text(encoding="utf-8")
CLUSTER: dict[str, Any] = yaml.safe_load(TEXT)
HEAD, WORKER = CLUSTER["available_node_types"]["head"], CLUSTER["available_node_types"]["worker"]
STARTS = ("head_start_ray_commands", "worker_start_ray_commands")


def start_command(name: str) -> tuple[str, list[str]]:
    """What one of the lists in `STARTS` ends in: (the shell text before it, the words of `ray start ...`)."""
    commands = [command for command in CLUSTER[name] if "ray start" in command]
    assert len(commands) == 1
    prelude, _, options = commands[0].partition("ray start ")
    return prelude, ["ray", "start", *shlex.split(options)]


def environment(name: str, home: Path, **arguments: str) -> dict[str, str]:
    """The environment that the start command gives Ray, for a user whose home is `home`, by running it in a shell."""
    prelude, _ = start_command(name)
    base = {"PATH": os.environ["PATH"], "HOME": str(home), **arguments}
    done = subprocess.run(["bash", "-c", f"{prelude} env -0"], env=base, capture_output=True, text=True, check=True)
    return dict(line.split("=", 1) for line in done.stdout.split("\0") if line)


def make_token(home: Path) -> None:
    """Run the first of the head's start commands, which makes the token."""
    command = CLUSTER["head_start_ray_commands"][0]
    subprocess.run(["bash", "-c", command], env={"PATH": os.environ["PATH"], "HOME": str(home)}, check=True)


def options(name: str) -> dict[str, str]:
    """The options of the start command; a flag has an empty value."""
    _, words = start_command(name)
    return {option: value for option, _, value in (word.partition("=") for word in words[2:])}


# -------------------------------------------------------------------------------------------------- the whole file


def test_nodes_have_no_public_address_and_leave_nothing_behind() -> None:
    assert CLUSTER["provider"]["use_internal_ips"] is True
    assert CLUSTER["provider"]["cache_stopped_nodes"] is False
    for node in (HEAD, WORKER):
        settings = node["node_config"]
        assert settings["MetadataOptions"]["HttpTokens"] == "required"
        assert settings["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
        assert settings["SecurityGroupIds"]  # Ray's default admits SSH from anywhere
        assert settings["SubnetIds"]
        disk = settings["BlockDeviceMappings"][0]["Ebs"]
        assert disk["Encrypted"] is True
        assert disk["DeleteOnTermination"] is True
    # The head may start instances; a worker must not have its rights.
    assert HEAD["node_config"]["IamInstanceProfile"] != WORKER["node_config"]["IamInstanceProfile"]


# -------------------------------------------------------------------------------------------------------- security


def test_nothing_listens_to_the_world_and_no_secret_is_written_down() -> None:
    assert "0.0.0.0" not in TEXT
    assert "RAY_AUTH_TOKEN=" not in TEXT
    assert re.findall(r"\b[0-9a-fA-F]{32,}\b|\bAKIA\w+|BEGIN [A-Z ]*PRIVATE KEY", TEXT) == []
    assert options("head_start_ray_commands")["--dashboard-host"] == "127.0.0.1"


@pytest.mark.parametrize("name", STARTS)
def test_ray_starts_in_token_mode_with_our_python_first(name: str, tmp_path: Path) -> None:
    result = environment(name, tmp_path)
    assert result["RAY_AUTH_MODE"] == "token"
    assert result["RAY_AUTH_TOKEN_PATH"] == f"{tmp_path}/.ray/auth_token"
    assert "RAY_AUTH_TOKEN" not in result
    assert result["PATH"].split(":")[0] == f"{tmp_path}/venv/bin"
    from rtrain.core import env

    assert set(result) & set(env.ENV_DEFAULTS) == set()  # rtrain's own to set


def test_the_token_is_made_once_for_its_owner_alone_and_reaches_the_workers(tmp_path: Path) -> None:
    make_token(tmp_path)
    path = Path(environment("head_start_ray_commands", tmp_path)["RAY_AUTH_TOKEN_PATH"])
    token = path.read_text()
    assert re.fullmatch("[0-9a-f]{64}", token)
    assert path.stat().st_mode & 0o777 == 0o600
    make_token(tmp_path)  # `ray up` again
    assert path.read_text() == token
    # `ray up` runs set-up commands only where the file has changed, and start commands each time.
    path.unlink()
    make_token(tmp_path)
    assert re.fullmatch("[0-9a-f]{64}", path.read_text())
    assert path.read_text() != token
    home = f"/home/{CLUSTER['auth']['ssh_user']}"
    assert CLUSTER["cluster_synced_files"] == [str(path).replace(str(tmp_path), home)]


# -------------------------------------------------------------------------------------------------------- commands


def test_head_and_workers_start_alike() -> None:
    (head_prelude, _), (worker_prelude, _) = (start_command(name) for name in STARTS)
    assert head_prelude == worker_prelude
    head, worker = (options(name) for name in STARTS)
    only_head = {
        *("--head", "--port", "--dashboard-host", "--dashboard-port", "--disable-usage-stats", "--autoscaling-config")
    }
    assert set(head) - set(worker) == only_head
    assert set(worker) - set(head) == {"--address"}
    assert worker["--address"] == f"$RAY_HEAD_IP:{head['--port']}"
    assert {name: head[name] for name in head if name in worker} == {
        name: worker[name] for name in worker if name in head
    }
    assert [CLUSTER[STARTS[0]][1], CLUSTER[STARTS[1]][0]] == ["~/venv/bin/ray stop"] * 2


def test_ports_are_fixed_distinct_and_those_of_the_comment() -> None:
    ports = {name: int(value) for name, value in options(STARTS[0]).items() if name.endswith("port")}
    assert len(set(ports.values())) == len(ports) == 10
    single = sorted(port for name, port in ports.items() if name not in ("--min-worker-port", "--max-worker-port"))
    assert single == [*range(6379, 6386), 8265]
    assert (ports["--min-worker-port"], ports["--max-worker-port"]) == (20000, 29999)
    assert "6379-6385, 8265, 20000-29999" in TEXT


def test_ray_knows_every_option() -> None:
    from ray.scripts.scripts import start

    known_values = {option for parameter in start.params for option in parameter.opts}
    assert set(options(STARTS[0])) | set(options(STARTS[1])) <= known_values


def test_packages_come_at_the_versions_of_constraints_txt() -> None:
    constraints = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    installs = [command for command in CLUSTER["setup_commands"] if "pip install" in command]
    assert len(installs) == 2
    assert all("-c constraints.txt " in command for command in installs)
    assert "'.[train,demo]'" in installs[1]
    assert constraints["python-dateutil"].startswith("2.")  # AWS's libraries want it below 3
    assert f"s3fs=={constraints['fsspec']} " in installs[1]  # each s3fs wants the fsspec of its own version
    assert f"the Ray version that the nodes get ({constraints['ray']})" in TEXT


def test_the_nodes_get_all_that_the_installation_reads() -> None:
    folder = f"/home/{CLUSTER['auth']['ssh_user']}/rtrain"
    project = (ROOT / "pyproject.toml").read_text()
    packages = set(re.findall(r'"(rtrain|serve|tune)\*"', project))
    assert packages == {"rtrain", "serve", "tune"}
    assert CLUSTER["file_mounts"] == {
        f"{folder}/{name}": name for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE", *packages)
    }
    assert 'readme = "README.md"' in project
    assert 'license-files = ["LICENSE"]' in project
