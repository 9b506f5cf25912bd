"""The demo: what its check of the answers sees, and that Ctrl-C at any stage leaves nothing behind."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rtrain import config, demo
from rtrain.inference import artifact, predictor
from serve.app import build_app
from tests.serve.test_deployment import openvino_artifact
from tests.support.processes import end
from tests.support.root import ROOT
from tests.support.serving import listening
from tests.support.tiny import make_encoder

TEXTS = [f"where is parcel number {number}" for number in range(20)]
STAGES = ("ingest", "search", "distill", "quantize", "serve", "ask")
# The demo's path at a size of seconds: a tiny encoder, one epoch, two trials.
SMALL = (
    *("train.epochs=1", "tune.trials=2", "distill.layers=1", "distill.epochs=1", "quantize.calibration_rows=16"),
    *("train.micro_batch_size=32", "train.precision=fp32"),
)


def swap_labels(original: Path, copy: Path) -> Path:
    """A copy of an artefact with two labels swapped, golden answers and manifest made anew: consistent, and wrong."""
    best = predictor.Predictor.load(original)(TEXTS[:1])[0][0]["label"]
    shutil.copytree(original, copy)
    (copy / "MANIFEST.json").unlink()
    made = artifact.read_artifact(original)
    labels = list(made.labels)
    other = next(label for label in labels if label != best)
    one, two = labels.index(best), labels.index(other)
    labels[one], labels[two] = labels[two], labels[one]
    artifact.write_artifact(copy, dataclasses.replace(made, labels=tuple(labels)), predictor.compute_golden_logits)
    predictor.Predictor.load(copy)  # it passes every check that looks at the artefact alone
    return copy


def test_swapped_labels_of_the_served_copy_are_seen(tmp_path: Path) -> None:
    original = openvino_artifact(tmp_path / "original")  # `rtrain predict` does not load torch for it
    copy, found = swap_labels(original, tmp_path / "copy"), []
    for served in (original, copy):
        with listening(build_app(predictor.Predictor.load(served), config.ServeConfig())) as url:
            found.append(demo.query_endpoint(url, original, TEXTS))
    assert [answer.matches_predict for answer in found] == [True, False]
    assert len(found[0].labels) == len(TEXTS)


def start(folder: Path) -> subprocess.Popen[bytes]:
    settings = [part for setting in SMALL for part in ("--set", setting)]
    command = [sys.executable, "-m", "rtrain", "demo", "--out", str(folder / "demo"), *settings]
    model = make_encoder(folder / "encoder")
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [*command, "--model", str(model)], cwd=ROOT, stderr=log, stdout=log, start_new_session=True
        )


def interrupt_at(stage: str, folder: Path) -> tuple[int, str, list[str]]:
    """Start a demo, press Ctrl-C (SIGINT to its process group) in `stage`; (exit code, log, what is left running)."""
    process = start(folder)
    family: list[psutil.Process] = []
    try:
        give_up = time.monotonic() + 240
        while f"{stage} ..." not in (text := (folder / "log").read_text()):
            assert process.poll() is None, text
            assert time.monotonic() < give_up, text
            time.sleep(0.1)
        time.sleep(4 if stage in ("search", "distill") else 0.5)  # into the stage, past its first lines
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        code = process.wait(60)
        _, alive = psutil.wait_procs(family, timeout=20)
        return code, (folder / "log").read_text(), [" ".join(one.cmdline()[:3]) for one in alive if one.is_running()]
    finally:
        end(process, family)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_leaves_nothing_running_and_exits_130(tmp_path: Path, stage: str) -> None:
    code, log, left = interrupt_at(stage, tmp_path)
    assert (code, left) == (130, [])
    assert "rtrain: interrupted" in log
    assert "Traceback" not in log
