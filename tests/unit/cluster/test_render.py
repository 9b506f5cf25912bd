"""`rtrain cluster init`: a file for each cloud, from one source; ours is the one for AWS."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rtrain.cluster import capacity, cluster_file, render
from rtrain.cluster.checks import LintContext, check_file
from rtrain.cluster.cluster_file import INSTANCES
from tests.support.refusals import refused_with
from tests.support.root import ROOT
from tests.unit.cli.test_cli import Cli, run  # noqa: F401

CLOUDS = ("aws", "gcp", "azure", "onprem")
ALL = [*((cloud, gpu) for cloud in CLOUDS for gpu in (None, *cluster_file.list_gpus(cloud))), ("onprem", "A100")]


@pytest.mark.parametrize(
    ("cloud", "name", "cpus", "gpus"),
    [
        *(("aws", "c7i.8xlarge", 32, 0), ("aws", "g6e.2xlarge", 8, 1), ("aws", "p4d.24xlarge", 96, 8)),
        ("gcp", "a2-highgpu-1g", 12, 1),
    ],
)
def test_the_workers_type_may_be_named(cloud: str, name: str, cpus: int, gpus: int) -> None:
    text = render.render_cluster_file(cloud, instance=name)
    assert check_file.check_text(text, LintContext(ROOT)) == []
    worker = yaml.safe_load(text)["available_node_types"]["worker"]
    assert worker["resources"]["CPU"] == cpus
    assert worker["resources"].get("GPU", 0) == gpus
    assert name in worker["node_config"].values()


def test_our_own_file_is_the_one_for_aws() -> None:
    assert render.render_cluster_file("aws") == (ROOT / "cluster.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(("cloud", "gpu"), ALL)
def test_every_variant_passes_the_check_ray_s_preparation_and_the_shell(cloud: str, gpu: str | None) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    text = render.render_cluster_file(cloud, gpu)
    assert check_file.check_text(text, LintContext(ROOT, verbs=("train", "tune", "serve"))) == []
    document, prepared = yaml.safe_load(text), prepare_config(yaml.safe_load(text))
    validate_config(prepared)
    for name in ("setup_commands", "head_start_ray_commands"):
        assert prepared[name] == document[name]  # nothing of Ray's nightly defaults
    commands = [command for name in document if name.endswith("_commands") for command in document[name]]
    assert len(commands) >= 8
    check_each = ["bash", "-c", 'for command; do bash -n -c "$command" || exit; done', "-"]
    done = subprocess.run([*check_each, *commands], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert check_file.fill_in_lines(text)
    count = render.NUMBER_WORDS[text.partition("cluster_name:")[2].count("FILL-IN")]
    assert f"Replace every FILL-IN below ({count})" in text
    if cloud != "onprem":
        worker = document["available_node_types"]["worker"]
        assert worker["labels"] == ({"ray.io/accelerator-type": gpu} if gpu else {}) | dict(capacity.SPOT_LABELS)
        assert bool(gpu) == (worker["resources"].get("GPU", 0) >= 1)
    assert ("download.pytorch.org/whl/cpu" in text) == (gpu is None)


@pytest.mark.parametrize("cloud", CLOUDS)
def test_apt_waits_for_the_machine_s_own_updates(cloud: str, tmp_path: Path) -> None:
    """`update` fails at once where another process holds the lists, whatever time limit it is given."""
    commands = yaml.safe_load(render.render_cluster_file(cloud))["setup_commands"]
    [install] = [command for command in commands if "apt-get" in command]
    log = tmp_path / "log"
    apt = f'echo "$*" >> {log}; case "$*" in *update*) test $(grep -c update {log}) -ge 3 ;; esac'
    for name, text in (("apt-get", apt), ("sudo", 'env "$@"'), ("sleep", "true")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", install], env=environ, check=True)
    *updates, last = log.read_text().splitlines()
    assert ["update" in update for update in updates] == [True] * 3
    assert "install" in last
    assert "DPkg::Lock::Timeout=" in last


def test_versions_are_those_of_constraints_txt() -> None:
    pins = LintContext(ROOT).load_constraints()
    assert (pins["ray"], pins["fsspec"]) == (render.RAY_VERSION, render.FSSPEC_VERSION)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        *(((cloud,), "unknown_name") for cloud in ("asw", "kubernetes")),
        (("aws", None, "x9.large"), "unknown_name"),
        (("gcp", None, "c7i.xlarge"), "unknown_name"),
        (("onprem", None, "c7i.xlarge"), "unknown_name"),
        (("aws", "L4", "c7i.xlarge"), "conflicting_settings"),
        (("gcp", "H900"), "unknown_name"),
    ],
)
def test_what_there_is_not_is_refused(arguments: tuple[Any, ...], code: str) -> None:
    with refused_with(code):
        render.render_cluster_file(*arguments)


def test_sky_s_file_goes_on_where_a_run_is(tmp_path: Path) -> None:
    for gpu in (None, "L4"):
        text = render.render_cluster_file("sky", gpu)
        assert len(text.splitlines()) <= 25
        document = yaml.safe_load(text)
        assert document["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
        assert ("accelerators" in document["resources"]) == (gpu is not None)
    script = document["run"].replace("/shared", str(tmp_path)).replace("~/venv/bin/python", sys.executable)
    # The entry point of jobs with a stand-in for the verb: it is resumed where its run is, and its end says so.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfrom rtrain.cluster import supervisor\n"
        "supervisor.run_child = lambda words: print(*words) or (-15 if '--resume' in words else 0)\n"
    )
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    for code in (0, 75):
        if code:
            (tmp_path / "runs" / "intent").mkdir(parents=True, exist_ok=True)
            (tmp_path / "runs" / "intent" / "config.yaml").touch()
        done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=False, env=environ)
        assert done.returncode == code, done.stderr
        assert f"train intent --data {tmp_path}/messages.csv --out {tmp_path}/runs/intent" in done.stdout
        assert ("--resume" in done.stdout) == (code == 75)


def test_instances_are_told_apart() -> None:
    assert len({instance.name for instance in INSTANCES}) == len(INSTANCES)
    assert all(
        (instance.gpus > 0) == (instance.gpu is not None) and instance.dollars_per_hour > 0 for instance in INSTANCES
    )


def test_the_verb_writes_a_file_once(run: Cli, tmp_path: Path) -> None:  # noqa: F811
    assert run("cluster", "init", "--cloud", "gcp", "--gpu", "L4")[0] == 0
    assert (tmp_path / "cluster.yaml").read_text() == render.render_cluster_file("gcp", "L4")
    assert run("cluster", "init", "--cloud", "aws")[0] == 2
    assert run("cluster", "init", "--cloud", "aws", "--out", "own/aws.yaml")[0] == 0
    assert "ray up aws.yaml" in (tmp_path / "own" / "aws.yaml").read_text()
    assert run("cluster", "init", "--cloud", "aws", "--out", "-")[:2] == (0, render.render_cluster_file("aws"))
    assert run("cluster", "init", "--cloud", "sky")[0] == 0
    assert (tmp_path / "sky.yaml").is_file()
