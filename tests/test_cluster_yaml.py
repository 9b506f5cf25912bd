"""cluster.yaml without a cloud: Ray's own checks of it, what its commands do in a shell, and what it must never say."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema  # comes with Ray, which checks cluster files by it
import pytest
import ray.autoscaler
import yaml

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "cluster.yaml"
TEXT = FILE.read_text(encoding="utf-8")
CLUSTER: dict[str, Any] = yaml.safe_load(TEXT)
HEAD, WORKER = CLUSTER["available_node_types"]["head"], CLUSTER["available_node_types"]["worker"]
STARTS = ("head_start_ray_commands", "worker_start_ray_commands")
COMMANDS = [command for name in CLUSTER if name.endswith("_commands") for command in CLUSTER[name]]


def start_command(name: str) -> tuple[str, list[str]]:
    """What one of the lists in `STARTS` ends in: (the shell text before it, the words of `ray start ...`)."""
    commands = [command for command in CLUSTER[name] if "ray start" in command]
    assert len(commands) == 1
    prelude, _, options = commands[0].partition("ray start ")
    return prelude, ["ray", "start", *shlex.split(options)]


def environment(name: str, home: Path, **given: str) -> dict[str, str]:
    """The environment that the start command gives Ray, for a user whose home is `home`, by running it in a shell."""
    prelude, _ = start_command(name)
    base = {"PATH": os.environ["PATH"], "HOME": str(home), **given}
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


def test_the_file_follows_ray_s_schema() -> None:
    schema = Path(ray.autoscaler.__file__).parent / "ray-schema.json"
    jsonschema.validate(CLUSTER, json.loads(schema.read_text()))


def test_ray_up_s_own_preparation_and_validation_pass() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(yaml.safe_load(TEXT))
    validate_config(prepared)
    types = prepared["available_node_types"]
    assert (types["head"]["max_workers"], types["worker"]["max_workers"]) == (0, 4)
    # Nothing is left to Ray's defaults, which install a nightly Ray and open the dashboard to all.
    assert prepared["setup_commands"] == CLUSTER["setup_commands"]
    assert prepared["head_setup_commands"] == CLUSTER["setup_commands"]
    for name in STARTS:
        assert prepared[name] == CLUSTER[name]


def test_no_key_is_misspelt_where_the_schema_takes_any() -> None:
    assert set(CLUSTER["provider"]) == {
        *("type", "region", "availability_zone", "use_internal_ips", "cache_stopped_nodes")
    }
    common = {
        *("InstanceType", "ImageId", "SubnetIds", "SecurityGroupIds", "IamInstanceProfile", "MetadataOptions"),
        "BlockDeviceMappings",
    }
    assert set(HEAD["node_config"]) == common
    assert set(WORKER["node_config"]) == common | {"InstanceMarketOptions"}


def test_what_the_user_must_fill_in_is_counted_at_the_top() -> None:
    head, _, body = TEXT.partition("cluster_name:")
    assert "Replace every FILL-IN below (six)" in head
    assert body.count("FILL-IN") == 6
    assert re.findall(r"\b(?:ami|subnet|sg|fs|i)-[0-9a-f]{8,}", TEXT) == []


def test_readers_find_the_four_commands_at_the_top() -> None:
    head = TEXT.partition("cluster_name:")[0]
    for command in ("ray up cluster.yaml", "ray dashboard cluster.yaml", "ray down cluster.yaml"):
        assert f"#   {command}" in head
    submitted = re.findall(
        r"ray job submit --address http://127\.0\.0\.1:8265 --working-dir \.[^\n]* \\\n# +(.+)", head
    )
    assert [line.split()[:4] for line in submitted] == [
        ["python", "-m", "rtrain", verb] for verb in ("train", "tune", "serve")
    ]


# ---------------------------------------------------------------------------------------------------------- nodes


def test_workers_are_spot_and_come_and_go_and_the_head_is_neither() -> None:
    assert WORKER["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert "InstanceMarketOptions" not in HEAD["node_config"]
    assert CLUSTER["head_node_type"] == "head"
    assert 0 == WORKER["min_workers"] < WORKER["max_workers"] <= CLUSTER["max_workers"]
    assert 0 < CLUSTER["idle_timeout_minutes"] <= 15


def test_no_task_is_placed_on_the_head_and_a_run_fits_the_workers() -> None:
    from rtrain import config
    from rtrain.cluster.supply import DATA_CPUS

    assert HEAD["resources"] == {"CPU": 0}
    assert config.load("intent").recipe.train.workers + DATA_CPUS <= WORKER["resources"]["CPU"]


def test_nodes_have_no_public_address_and_leave_nothing_behind() -> None:
    assert CLUSTER["provider"]["use_internal_ips"] is True
    assert CLUSTER["provider"]["cache_stopped_nodes"] is False
    for node in (HEAD, WORKER):
        settings = node["node_config"]
        assert settings["MetadataOptions"]["HttpTokens"] == "required"
        assert settings["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
        assert settings["SecurityGroupIds"]  # where it is missing, Ray makes one that admits SSH from anywhere
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
    found = environment(name, tmp_path)
    assert found["RAY_AUTH_MODE"] == "token"
    assert found["RAY_AUTH_TOKEN_PATH"] == f"{tmp_path}/.ray/auth_token"
    assert "RAY_AUTH_TOKEN" not in found
    assert found["PATH"].split(":")[0] == f"{tmp_path}/venv/bin"
    from rtrain import env

    assert set(found) & set(env.SETTINGS) == set()  # rtrain's own to set


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


def test_the_ray_client_s_port_stays_closed(tmp_path: Path) -> None:
    from ray._common.utils import load_class
    from ray._private.parameter import RayParams

    hook = load_class(environment("head_start_ray_commands", tmp_path)["RAY_START_HOOK"])
    parameters = RayParams(ray_client_server_port=10001)
    hook(parameters, True)
    assert parameters.ray_client_server_port is None


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

    known = {option for parameter in start.params for option in parameter.opts}
    assert set(options(STARTS[0])) | set(options(STARTS[1])) <= known


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_shell(command: str) -> None:
    done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


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
    packages = {name.split(".")[0] for name in re.findall(r'^    "((?:rtrain|serve|tune)[\w.]*)",$', project, re.M)}
    assert packages == {"rtrain", "serve", "tune"}
    assert CLUSTER["file_mounts"] == {
        f"{folder}/{name}": name for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE", *packages)
    }
    assert 'readme = "README.md"' in project
    assert 'license-files = ["LICENSE"]' in project
