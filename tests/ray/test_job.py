"""Jobs on a head started as cluster.yaml starts it. The demo as one job, every stage of it read back, is slow."""

import json
import re
from pathlib import Path

import httpx
import psutil
import pytest

from rtrain.core import env, manifest
from rtrain.core.run_folder import Run
from tests.support.heads import Head, related
from tests.support.root import ROOT
from tests.support.tiny import make_encoder
from tune.history import read_journal, replay_journal

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1200)]

STAGES = ["ingest", "search", "distill", "quantize", "serve", "ask"]
# The demo's path at a size of seconds. The encoder is too small to learn: the scores are those of chance.
SMALL = (
    *("train.epochs=1", "train.workers=1", "train.micro_batch_size=32", "train.precision=fp32", "optim.lr=3e-3"),
    *("tune.trials=1", "distill.layers=1", "distill.epochs=1", "quantize.calibration_rows=32"),
)


# --------------------------------------------------------------------------------------------------- before the job


def test_only_who_has_the_token_may_submit(head: Head) -> None:
    assert [head.ask(token).status_code for token in (None, "0" * 64, head.token)] == [401, 403, 200]
    refused = httpx.post(f"{head.api}/api/jobs/", json={"entrypoint": "true"}, trust_env=False)
    assert refused.status_code == 401
    assert all(head.token not in text for text in related(head.folder).values())  # nor may it be in a process list


def test_the_dashboard_is_on_loopback_and_the_ray_client_s_port_is_closed(head: Head) -> None:
    processes = related(head.folder)
    assert len(processes) > 5
    assert [text for text in processes.values() if "ray.util.client" in text] == []
    port = int(head.api.rpartition(":")[2])
    listening = {
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }
    assert listening == {"127.0.0.1"}


# ---------------------------------------------------------------------------------------------------------- the job


@pytest.mark.slow
def test_every_stage_ran_there_and_the_endpoint_answered(head: Head) -> None:
    from rtrain.inference.predictor import Predictor

    run = head.folder / "runs" / "demo"
    model = make_encoder(head.folder / "encoder")
    settings = [word for setting in SMALL for word in ("--set", setting)]
    command = ["python", "-m", "rtrain", "demo", "--json", "--out", str(run), "--model", str(model), *settings]
    ended = head.submit(ROOT, *command)
    assert ended.returncode == 0, ended.stdout
    job = next(job for job in head.jobs() if " demo " in job["entrypoint"])
    assert (job["status"], job["driver_exit_code"], "Traceback" in ended.stdout) == ("SUCCEEDED", 0, False)

    document = json.loads(next(line for line in ended.stdout.splitlines() if line.startswith('{"stages"')))
    assert [stage["name"] for stage in document["stages"]] == STAGES
    assert document["answer_matches"] is True
    assert document == json.loads((run / "demo.json").read_text())
    assert document["baseline_score"] > 0.5  # the embedded data, not an empty file

    search = Run(run / "search")
    history = replay_journal(read_journal(search.trials))
    assert [(trial.number, trial.status, dict(trial.settings)) for trial in history.trials] == [(0, "finished", {})]
    assert history.winner == 0
    assert search.winner is not None
    assert search.winner.is_finished

    artifacts = sorted(path.parent for path in run.rglob("artifact.json"))
    names = {str(path.relative_to(run)) for path in artifacts}
    assert {"search/trial-000/artifact", "student/artifact", "student/artifact-int8"} <= names
    assert [manifest.find_damage(path) for path in artifacts] == [None] * len(artifacts)
    answers = Predictor.load(run / "student" / "artifact-int8")(["where is my parcel"])
    assert 0 < answers[0][0]["score"] <= 1

    assert head.token not in ended.stdout
    files = [path for path in run.parent.rglob("*") if path.is_file()]
    assert [path for path in files if head.token.encode() in path.read_bytes()] == []


# ---------------------------------------------------------------------------------------------------- whose modules


LOOK = """
import json, os, pathlib, sys, ray
from rtrain import config
from rtrain.core import env
from rtrain.cluster.connection import session

def look():
    import rtrain, serve, tune
    return [one.__file__ for one in (rtrain, serve, tune)], {name: os.environ.get(name) for name in names}

env.set_env_defaults()
names = list(env.ENV_DEFAULTS)
with session(config.load_config("intent"), pathlib.Path(sys.argv[1])):
    print("found", json.dumps([look(), ray.get(ray.remote(look).remote())]))
"""


def test_driver_and_workers_have_the_uploaded_project_and_rtrain_s_settings(head: Head) -> None:
    said = head.submit(ROOT, "python", "-c", LOOK, str(head.folder / "look")).stdout
    found = re.search("^found (.*)$", said, re.M)
    assert found, said
    driver, worker = json.loads(found[1])
    assert driver == worker
    files, settings = worker
    assert len(files) == 3
    assert all(path.startswith(str(head.folder / "ray")) for path in files)
    assert settings == {name: head.environ.get(name, value) for name, value in env.ENV_DEFAULTS.items()}


def test_a_module_that_hides_ours_on_the_workers_is_refused_by_name(head: Head, tmp_path: Path) -> None:
    (tmp_path / "tune.py").write_text("raise SystemExit('decoy')")
    refused = head.submit(tmp_path, "python", "-m", "rtrain", "recipes", "list")
    assert refused.returncode == 1
    assert "decoy" not in refused.stdout
