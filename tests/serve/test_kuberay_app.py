"""The endpoint as an application that others deploy: by Ray's own description of a service, as KubeRay does it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray.serve
import yaml

from rtrain.cluster import kubernetes_manifests
from rtrain.core.errors import ConfigError
from rtrain.inference.artifact import ArtifactError
from serve import kuberay_app, ray_config
from serve.auth import api_keys
from tests.support.refusals import refused_with
from tests.support.root import ROOT
from tests.support.tiny import make_artifact


def test_an_application_has_the_name_that_manifests_give_it(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "artifact", ("lost", "found"))
    app = kuberay_app.application({"artifact": str(folder), "threads": 2})
    assert isinstance(app, ray.serve.Application)
    *_, document = yaml.safe_load_all(kubernetes_manifests.render_manifests(kubernetes_manifests.ManifestOptions()))
    [described] = yaml.safe_load(document["spec"]["serveConfigV2"])["applications"]
    assert [deployment_config["name"] for deployment_config in described["deployments"]] == [ray_config.DEPLOYMENT_NAME]


def test_what_cannot_be_served_is_refused_before_a_replica_starts(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "artifact", ("lost", "found"))
    with refused_with("conflicting_settings"):
        kuberay_app.application({"threads": 2})
    with pytest.raises(ConfigError) as unknown:
        kuberay_app.application({"artifact": str(folder), "thraeds": 2})
    assert [problem.field for problem in unknown.value.problems] == ["serve.thraeds"]
    with pytest.raises(ArtifactError):
        kuberay_app.application({"artifact": str(tmp_path / "nothing")})
    for wrong in ({"models": [str(folder)]}, {"artifact": None}):
        with refused_with("wrong_type"):
            kuberay_app.application(wrong)


def test_an_address_that_others_can_reach_needs_keys_or_a_word(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "artifact", ("lost", "found"))
    api_keys.add_key(tmp_path / "keys.json", "shop")
    with refused_with("open_to_others"):
        kuberay_app.application({"artifact": str(folder), "host": "0.0.0.0"})
    with refused_with("unreadable_keys"):
        kuberay_app.application({"artifact": str(folder), "keys": str(tmp_path / "none.json")})
    for arguments in ({"insecure": True}, {"keys": str(tmp_path / "keys.json")}):
        kuberay_app.application({"artifact": str(folder), "host": "0.0.0.0", **arguments})


OPEN = """
import json, os, sys
os.environ["RAY_AUTH_MODE"] = "disabled"
from rtrain.core import env
env.set_env_defaults()
import ray, ray.serve
from rtrain.core.errors import ConfigError
from tests.support.heads import free_ports
from serve import kuberay_app
(port,) = free_ports(1)
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
ray.serve.start(http_options={"host": "0.0.0.0", "port": port})
given = {"artifact": sys.argv[1], "host": "127.0.0.1"}
try:
    kuberay_app.application(given)
except ConfigError as error:
    refused = error.problems[0].field
else:
    refused = None
allowed = kuberay_app.application({**given, "insecure": True})._bound_deployment.init_args[0].host
print(json.dumps([refused, allowed]))
ray.serve.shutdown()
ray.shutdown()
"""


@pytest.mark.ray
@pytest.mark.serve
def test_the_address_of_ray_s_proxies_counts_whatever_the_arguments_say(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "artifact", ("lost", "found"))
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert json.loads(line) == ["serve.host", "0.0.0.0"]


def test_the_counts_of_all_replicas_are_told_however_many_the_file_names(tmp_path: Path) -> None:
    """Their number is Ray's alone to know, and may be another one tomorrow."""
    folder = make_artifact(tmp_path / "artifact", ("lost", "found"))
    bound: Any = kuberay_app.application({"artifact": str(folder)})._bound_deployment
    assert bound.init_kwargs == {"has_peers": True}


SCRIPT = """
import json, os, sys, urllib.request, yaml
os.environ["RAY_AUTH_MODE"] = "disabled"
from rtrain.core import env
env.set_env_defaults()
import ray, ray.serve
from ray.serve.schema import ServeDeploySchema
from rtrain.cluster import kubernetes_manifests as manifests
from tests.support.heads import free_ports
from serve import kuberay_app
*_, document = yaml.safe_load_all(manifests.render_manifests(manifests.ManifestOptions(artifact=sys.argv[1])))
config = yaml.safe_load(document["spec"]["serveConfigV2"])
ServeDeploySchema.model_validate(config)
(port,) = free_ports(1)
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
ray.serve.start(http_options={"host": "127.0.0.1", "port": port})
[application] = config["applications"]
assert application["args"]["keys"] == "/keys/keys.json"
application["args"]["keys"], key = sys.argv[2:]
ray.serve.run(kuberay_app.application(application["args"]), name=application["name"], route_prefix="/")
def ask(path, body=None):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=body and json.dumps(body).encode(),
                                     headers={"content-type": "application/json", "authorization": f"Bearer {key}"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
        return answer.status, answer.read().decode()
print(json.dumps([ask("/v2/health/ready")[0], json.loads(ask("/predict", {"inputs": "lost parcel"})[1])]))
ray.serve.shutdown()
ray.shutdown()
"""


@pytest.mark.ray
@pytest.mark.serve
@pytest.mark.slow
def test_the_manifest_s_service_answers(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "artifact", ("lost", "found"))
    path = tmp_path / "keys.json"
    command = [sys.executable, "-c", SCRIPT, str(folder), str(path), api_keys.add_key(path, "shop")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    # Ray may write lines of its own behind the answer.
    ready, [answers] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    assert ready == 200
    assert answers[0]["label"] in ("lost", "found")
