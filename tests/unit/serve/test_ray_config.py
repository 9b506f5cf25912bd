"""The file for `serve deploy`: what Ray's own schema makes of it, and one real deployment."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

import rtrain.inference.artifact
from rtrain.config import ServeConfig
from rtrain.core import engines
from serve import deployment, kuberay_app, ray_config
from serve.auth import api_keys, preflight
from tests.support.certificates import make_certificate
from tests.support.refusals import refused_with
from tests.support.root import ROOT
from tests.support.tiny import make_artifact, refused
from tests.unit.cli.test_cli import Cli, run

assert run  # a fixture


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("declared"))


def test_ray_s_schema_takes_it_and_only_what_differs_is_written(artifact: Path) -> None:
    plain = ray_config.build_ray_config({"tiny": artifact}, ServeConfig())
    assert plain["applications"][0]["args"] == {"models": {"tiny": str(artifact)}}
    settings = ServeConfig(
        port=9001,
        replicas=2,
        max_replicas=4,
        threads=3,
        request_timeout_s=5,
        ungated=True,
        tls_cert="/c.pem",
        tls_key="/k.pem",
    )
    folders = {"tiny": artifact, "other": artifact}
    text = ray_config.format_ray_config(folders, settings)
    folder_names = {name: str(folder) for name, folder in folders.items()}
    schema = ServeDeploySchema.model_validate(yaml.safe_load(text))
    assert schema.http_options.port == 9001
    assert (schema.http_options.ssl_certfile, schema.http_options.ssl_keyfile) == ("/c.pem", "/k.pem")
    [application] = schema.applications
    assert application.name == ray_config.APPLICATION_NAME
    tls = {"tls_cert": "/c.pem", "tls_key": "/k.pem"}
    assert application.args == {"models": folder_names, **tls, "threads": 3, "request_timeout_s": 5.0, "ungated": True}
    [deployment] = application.deployments
    assert deployment.user_config == {"models": folder_names}
    assert deployment.ray_actor_options.num_cpus == 6
    assert deployment.ray_actor_options.runtime_env == {"env_vars": ray_config.RAY_SERVE_ENVIRONMENT}
    exported = [line.split()[2] for line in text.splitlines() if line.startswith("#   export ")]
    assert dict(line.split("=") for line in exported) == ray_config.RAY_SERVE_ENVIRONMENT
    scaled = deployment.autoscaling_config
    assert isinstance(scaled, dict)
    assert (scaled["min_replicas"], scaled["max_replicas"]) == (2, 4)


def test_what_a_replica_itself_opens_to_whom_is_as_it_was_asked_for(artifact: Path, tmp_path: Path) -> None:
    """gRPC listens at the address, with the certificate, and /docs is for loopback alone."""
    path = tmp_path / "keys.json"
    api_keys.add_key(path, "shop")
    certificate, key = make_certificate(tmp_path)
    settings = ServeConfig(host="0.0.0.0", keys=str(path), tls_cert=certificate, tls_key=key, grpc_port=9000)
    args = ray_config.build_ray_config({"tiny": artifact}, settings)["applications"][0]["args"]
    init_args: Any = kuberay_app.application(args)._bound_deployment.init_args
    assert init_args[0] == settings


def test_idle_connections_are_ray_s_to_close(artifact: Path) -> None:
    schema = ServeDeploySchema.model_validate(
        ray_config.build_ray_config({"tiny": artifact}, ServeConfig(keep_alive_s=620))
    )
    assert schema.http_options.keep_alive_timeout_s == 620


def test_the_file_says_that_nobody_is_asked_for_a_key_where_that_is_wanted(artifact: Path) -> None:
    settings = ServeConfig(host="0.0.0.0", insecure=True, allowed_hosts=("models.example",))
    args = ray_config.build_ray_config({"tiny": artifact}, settings)["applications"][0]["args"]
    init_args: Any = kuberay_app.application(args)._bound_deployment.init_args
    assert init_args[0] == settings


def test_a_replica_has_gpus_where_its_engine_knows_them(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ServeConfig(gpus=0.5, ungated=True)
    [application] = ServeDeploySchema.model_validate(
        ray_config.build_ray_config({"tiny": artifact}, settings)
    ).applications
    assert application.args["gpus"] == 0.5
    assert application.deployments[0].ray_actor_options.num_gpus == 0.5
    assert "num_gpus" not in ray_config.deployment_spec(ServeConfig(), 1, 1)["ray_actor_options"]
    preflight.check_artifacts({"tiny": artifact}, settings)
    of_cpus = engines.ENGINES[engines.FLOAT_ENGINE]._replace(supports_gpu=False)
    monkeypatch.setattr(engines, "ENGINES", {engines.FLOAT_ENGINE: of_cpus})
    with refused_with("conflicting_settings"):
        preflight.check_artifacts({"tiny": artifact}, settings)


def test_gpus_that_no_node_has_are_refused() -> None:
    assert deployment.check_gpus(ServeConfig(gpus=0.5), [{"CPU": 8.0}, {"GPU": 1.0}]) is None
    assert deployment.check_gpus(ServeConfig(), []) is None
    problem = deployment.check_gpus(ServeConfig(gpus=2), [{"GPU": 1.0}])
    assert problem is not None
    assert (problem.field, problem.code) == ("serve.gpus", "too_few_gpus")


def test_the_command_prints_it_without_starting_anything(artifact: Path, run: Cli) -> None:
    code, out, _ = run("serve", str(artifact), "--print-config", "--set", "serve.replicas=2")
    assert code == 0
    assert yaml.safe_load(out) == ray_config.build_ray_config({"tiny": artifact}, ServeConfig(replicas=2))


START = """
import json, os, sys, time, urllib.error, urllib.request, yaml
os.environ["RAY_AUTH_MODE"] = "disabled"
from pathlib import Path
from rtrain.core import env
env.set_env_defaults()
import ray, ray.serve
from ray.serve.schema import ServeDeploySchema
import rtrain.inference.artifact
from rtrain.config import ServeConfig
from serve import ray_config
from serve.ingress.address import find_free_address
port = find_free_address("127.0.0.1", 0).port
def start(document):
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    ray.serve.start(proxy_location="HeadOnly", http_options=document["http_options"])
    deploy(document)
    wait(lambda: [one.status for one in ray.serve.status().applications.values()] == ["RUNNING"])
def deploy(document):
    client = ray.serve.context._get_global_client()
    client.deploy_apps(ServeDeploySchema.model_validate(document), _blocking=False)
def ask(**headers):
    headers = {"content-type": "application/json", **headers}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/predict", data=b'{"inputs": "hello"}', headers=headers)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            return answer.status, answer.headers["x-model-version"]
    except urllib.error.HTTPError as error:
        return error.code, None
def wait(condition):
    give_up = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < give_up, ray.serve.status()
        time.sleep(0.1)
def broadcast(method):
    return ray.serve.get_app_handle(ray_config.APPLICATION_NAME).broadcast(method).results()
def processes():
    return {status["process"] for status in broadcast("status")}
def end(*found):
    print(json.dumps(found))
    ray.serve.shutdown()
    ray.shutdown()
"""
ANOTHER = """
first, second, refused = map(Path, sys.argv[1:])
document = ray_config.build_ray_config({"tiny": first}, ServeConfig(port=port, replicas=2))
models = document["applications"][0]["deployments"][0]["user_config"]["models"]
def served():
    return [versions["tiny"][0] for versions in broadcast("serving_versions")]
start(document)
wait(lambda: len(served()) == 2)
old, before = ask(), processes()
models["tiny"] = str(refused)
deploy(document)
time.sleep(5)
kept = served()
models["tiny"] = str(second)
deploy(document)
wait(lambda: served() == [str(second)] * 2)
end(old[1], kept == [str(first)] * 2, ask()[1], processes() == before)
"""


def run_script(script: str, *arguments: object) -> list[object]:
    words = [sys.executable, "-c", START + script, *map(str, arguments)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    output: list[object] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    return output


@pytest.mark.slow
@pytest.mark.serve
def test_what_it_declares_is_served_and_another_model_takes_its_place_in_the_same_processes(tmp_path: Path) -> None:
    """An artifact that the gate has rejected does not."""
    folders = [make_artifact(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    old, new = (rtrain.inference.artifact.read_artifact(folder).version for folder in folders)
    assert run_script(ANOTHER, *folders, refused(make_artifact(tmp_path / "2", seed=2))) == [old, True, new, True]
