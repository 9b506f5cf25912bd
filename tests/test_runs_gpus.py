"""Parts of a GPU: counted, asked for and given. The GPUs are declared to Ray and not there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rtrain import config, env, ray_internals
from rtrain.cluster import demand, feasible, supply
from rtrain.cluster.supply import Host, Needs
from rtrain.errors import ConfigError
from rtrain.run import Run
from rtrain.runs import group, preparing
from tests.conftest import STARTUP

ROOT = Path(__file__).resolve().parents[1]
NOTHING = supply.startable({})


@pytest.mark.parametrize(
    ("share", "gpus", "places"),
    [(1, 2, 2), (0.5, 1, 2), (0.5, 2, 4), (0.4, 2, 4), (0.25, 0.5, 2), (0.5, 0.25, 0), (1 / 3, 1, 3), (0.1, 1, 10)],
)
def test_no_worker_takes_parts_of_two_gpus(share: float, gpus: float, places: int) -> None:
    assert Needs("gpu", share=share).places({"CPU": 8.0, "GPU": gpus}) == places


def test_trials_share_a_gpu_and_their_data_tasks_share_its_node() -> None:
    half, hosts = Needs("gpu", share=0.5), [Host({"CPU": 8.0, "GPU": 2.0})]
    assert feasible.runs(hosts, NOTHING, half, 1) == 4
    assert feasible.runs([Host({"CPU": 5.0, "GPU": 2.0})], NOTHING, half, 1) == 2  # two CPUs each for data
    asked = demand.places(1, half, hosts, NOTHING)
    assert [(place.resource, place.amount) for place in asked] == [("GPU", 0.5), ("CPU", 1.0), ("CPU", 1.0)]
    kinds = {"gpu": {"resources": {"CPU": 8, "GPU": 1}}}
    may = supply.startable({"max_workers": 2, "available_node_types": kinds})
    assert demand.told(asked[:1], may, 5) == "the autoscaler is asked for 0.5 GPU on gpu nodes, for 5 s now"
    assert feasible.runs([], may, half, 1) == 4


def test_the_share_is_that_of_the_recipe_and_of_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = config.load("intent", {"train.workers": 1, "train.gpus_per_worker": 0.5})
    assert (supply.needs(chosen, "gpu").share, supply.needs(chosen, "cpu").share) == (0.5, 1.0)
    with pytest.raises(ConfigError, match=r"train\.gpus_per_worker=0\.5: NCCL takes no two of the 2 workers on"):
        config.load("intent", {"train.workers": 2, "train.gpus_per_worker": 0.5})
    assert chosen.recipe.identity() == config.load("intent", {"train.workers": 1}).recipe.identity()
    monkeypatch.setattr(supply, "up_by_id", lambda: {"n": Host({"GPU": 1.0})})
    monkeypatch.setattr(ray_internals, "available_by_node", lambda: {"n": {"GPU": 0.25}})
    [host] = supply.free({"n": 1}, supply.needs(chosen, "gpu"))
    assert host.has["GPU"] == 0.75


@pytest.mark.parametrize(("device", "share", "taken"), [("gpu", 0.5, {"GPU": 0.5}), ("gpu", 1, None), ("cpu", 1, None)])
def test_a_worker_group_is_given_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, share: float, taken: dict[str, float] | None
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        ray_internals, "torch_trainer", lambda asks: lambda function, **named: seen.append(SimpleNamespace(**named))
    )
    group.trainer(lambda: None, group.Layout(1, device, share=share), tmp_path)
    [made] = seen
    assert (made.scaling_config.use_gpu, made.scaling_config.resources_per_worker) == (device == "gpu", taken)


SCRIPT = """
import json, sys
from pathlib import Path
from rtrain import env
env.prepare()
import ray
from ray.util.placement_group import placement_group
from tests.trained import settings
from rtrain.runs import driver, preparing
folder = Path(sys.argv[1])
ray.init(address="local", num_cpus=4, num_gpus=1, include_dashboard=False, log_to_driver=False)
others = placement_group([{"GPU": 0.5}])
ray.get(others.ready())
chosen = settings(folder, **{"train.workers": 1, "train.device": "gpu", "train.gpus_per_worker": 0.5,
                            "train.precision": "fp32", "train.epochs": 1})
found = driver.fit(preparing.prepare(chosen, folder / "run"))
print(json.dumps({"status": found["status"], "workers": found["workers"]}))
ray.shutdown()
"""


@pytest.mark.ray
def test_a_run_that_began_on_a_gpu_goes_on_by_none_elsewhere(tmp_path: Path, ray_session: Path) -> None:
    """What it began on is a decision, which is made once; what to write is in the error."""
    chosen, run = config.load("intent", {"train.workers": 2}), Run(tmp_path)
    assert preparing.device_of(chosen, run).device == "cpu"  # this cluster's
    run.decide(preparing.DEVICE, "gpu")
    with pytest.raises(ConfigError, match="the cluster has 0 GPUs, and its autoscaler may start no more"):
        preparing.device_of(chosen, run)


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_trains_on_the_half_of_a_gpu_that_is_free(tmp_path: Path) -> None:
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": f"{ROOT}:{STARTUP}", env.COUNTED_GPUS: "1"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"status": "finished", "workers": 1}
