"""Parts of a GPU: counted, asked for and given. The GPUs are declared to Ray and not there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rtrain import config
from rtrain.cluster import capacity
from rtrain.cluster.capacity import ResourceRequest
from rtrain.core import env
from rtrain.core.errors import ConfigError
from rtrain.core.run_folder import Run
from rtrain.runs import prepare
from tests.conftest import STARTUP
from tests.support.root import ROOT

NOTHING = capacity.parse_autoscaler_limits({})


@pytest.mark.parametrize(
    ("share", "gpus", "places"),
    [(1, 2, 2), (0.5, 1, 2), (0.5, 2, 4), (0.4, 2, 4), (0.25, 0.5, 2), (0.5, 0.25, 0), (1 / 3, 1, 3), (0.1, 1, 10)],
)
def test_no_worker_takes_parts_of_two_gpus(share: float, gpus: float, places: int) -> None:
    assert ResourceRequest("gpu", gpu_share=share).worker_slots({"CPU": 8.0, "GPU": gpus}) == places


SCRIPT = """
import json, sys
from pathlib import Path
from rtrain.core import env
env.set_env_defaults()
import ray
from ray.util.placement_group import placement_group
from tests.support.trained import settings
from rtrain.runs import controller, prepare
folder = Path(sys.argv[1])
ray.init(address="local", num_cpus=4, num_gpus=1, include_dashboard=False, log_to_driver=False)
others = placement_group([{"GPU": 0.5}])
ray.get(others.ready())
chosen = settings(folder, **{"train.workers": 1, "train.device": "gpu", "train.gpus_per_worker": 0.5,
                            "train.precision": "fp32", "train.epochs": 1})
found = controller.fit(prepare.prepare_run(chosen, folder / "run"))
print(json.dumps({"status": found["status"], "workers": found["workers"]}))
ray.shutdown()
"""


@pytest.mark.ray
def test_a_run_that_began_on_a_gpu_goes_on_by_none_elsewhere(tmp_path: Path, ray_session: Path) -> None:
    """The device is decided once; the error names the fix."""
    selection, run = config.load_config("intent", {"train.workers": 2}), Run(tmp_path)
    assert prepare.choose_device(selection, run).device == "cpu"  # this cluster's
    run.decide_once(prepare.DEVICE_KEY, "gpu")
    with pytest.raises(
        ConfigError, check=lambda error: [problem.code for problem in error.problems] == ["too_few_gpus"]
    ):
        prepare.choose_device(selection, run)


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_trains_on_the_half_of_a_gpu_that_is_free(tmp_path: Path) -> None:
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": f"{ROOT}:{STARTUP}", env.FAKE_GPUS_ENV: "1"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"status": "finished", "workers": 1}
