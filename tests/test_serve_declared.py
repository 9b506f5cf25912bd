"""The file for `serve deploy`: what Ray's own schema makes of it, and one real deployment."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from rtrain.config import Serve
from serve import declared
from tests.test_cli import Cli, run
from tests.tiny import make_artifact

ROOT = Path(__file__).resolve().parents[1]
assert run  # a fixture


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("declared"))


def test_ray_s_schema_takes_it_and_only_what_differs_is_written(artifact: Path) -> None:
    plain = declared.document(artifact, Serve())
    assert plain["applications"][0]["args"] == {"artifact": str(artifact)}
    settings = Serve(
        port=9001,
        replicas=2,
        max_replicas=4,
        threads=3,
        deadline_s=5,
        ungated=True,
        tls_cert="/c.pem",
        tls_key="/k.pem",
    )
    text = declared.text(artifact, settings)
    found = ServeDeploySchema.model_validate(yaml.safe_load(text))
    assert found.http_options.port == 9001
    assert (found.http_options.ssl_certfile, found.http_options.ssl_keyfile) == ("/c.pem", "/k.pem")
    [application] = found.applications
    assert application.args == {"artifact": str(artifact), "threads": 3, "deadline_s": 5.0, "ungated": True}
    [deployment] = application.deployments
    assert deployment.user_config == {"artifact": str(artifact)}
    assert deployment.ray_actor_options.num_cpus == 3
    scaled = deployment.autoscaling_config
    assert isinstance(scaled, dict)
    assert (scaled["min_replicas"], scaled["max_replicas"]) == (2, 4)


def test_the_command_prints_it_without_starting_anything(artifact: Path, run: Cli) -> None:
    code, out, _ = run("serve", str(artifact), "--print-config", "--set", "serve.replicas=2")
    assert code == 0
    assert yaml.safe_load(out) == declared.document(artifact, Serve(replicas=2))


SCRIPT = """
import json, os, sys, time, urllib.request, yaml
os.environ["RAY_AUTH_MODE"] = "disabled"
from pathlib import Path
from rtrain import env
env.prepare()
import ray, ray.serve
from ray.serve.schema import ServeDeploySchema
from rtrain.config import Serve
from serve import declared
from serve.front.address import free_address
first, second = map(Path, sys.argv[1:])
port = free_address("127.0.0.1", 0).port
document = declared.document(first, Serve(port=port, ungated=True))
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
ray.serve.start(proxy_location="HeadOnly", http_options=document["http_options"])
client = ray.serve.context._get_global_client()
def version():
    request = urllib.request.Request(f"http://127.0.0.1:{port}/predict", data=b'{"inputs": "hello"}',
                                     headers={"content-type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
        return answer.headers["x-model-version"]
def wait(condition):
    give_up = time.monotonic() + 60
    while not condition() and time.monotonic() < give_up:
        time.sleep(0.1)
def running():
    return all(one.status == "RUNNING" for one in ray.serve.status().applications.values())
client.deploy_apps(ServeDeploySchema.model_validate(document), _blocking=True)
wait(running)
found = [version()]
process = lambda: {one["process"] for one in ray.serve.get_app_handle("tiny").broadcast("status").results()}
before = process()
document["applications"][0]["deployments"][0]["user_config"]["artifact"] = str(second)
client.deploy_apps(ServeDeploySchema.model_validate(document), _blocking=True)
wait(lambda: version() != found[0])
print(json.dumps([*found, version(), process() == before]))
ray.serve.shutdown()
ray.shutdown()
"""


@pytest.mark.slow
@pytest.mark.serve
def test_what_it_declares_is_served_and_another_model_takes_its_place_in_the_same_process(tmp_path: Path) -> None:
    import rtrain.artifact

    folders = [make_artifact(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, folders)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    assert found == [*(rtrain.artifact.read(folder).version for folder in folders), True]
