"""The functions of `rtrain` on real Ray: a training from rows in memory, the page about them, and the notebook."""

import hashlib
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file

import rtrain
from rtrain import config
from rtrain.api import process, rows
from rtrain.core.run_folder import ROWS_FOLDER, Run
from rtrain.data.store.store import Store
from rtrain.models import used_vocabulary
from rtrain.trainer import optimizers
from tests.conftest import labelled_rows
from tests.support.heads import free_ports
from tests.support.root import ROOT
from tests.support.tiny import make_encoder

pytestmark = pytest.mark.ray

PAGE, NOTEBOOK = ROOT / "docs" / "python.md", ROOT / "docs" / "notebooks" / "first-run.ipynb"
FRAME = pd.DataFrame(labelled_rows(240), columns=["text", "category"])
LENIENT = {
    **{f"gate.{name}": 1 for name in ("max_score_drop", "max_slice_drop", "max_negative_flips", "latency_seconds")},
    **{f"gate.student_{name}": 1 for name in ("max_score_drop", "max_slice_drop", "max_negative_flips")},
    "gate.min_speedup": 0,
}


def weights_of(run: Any) -> str:
    return hashlib.sha256((run.artifact.folder / "model.safetensors").read_bytes()).hexdigest()


def test_rows_in_memory_train_a_model_that_the_same_rows_of_a_file_train_too(
    ray_session: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the user's own Ray, which stays; the second call finds the rows and the token store of the first."""
    import ray
    import ray.data

    monkeypatch.chdir(tmp_path)
    settings = {"train.precision": "fp32", "train.log_every": 1, "train.embedding_rows": "used"}
    small = partial(
        rtrain.train, "intent", label="category", lr=5e-3, epochs=1, workers=1, model=make_encoder(tmp_path / "encoder")
    )
    environment, seen = dict(os.environ), list[str]()
    first = small(data=FRAME, out="runs/a", settings=settings, on_event=lambda event: seen.append(event["kind"]))
    assert first.metrics["test"]["rows"] > 0
    assert {"progress", "tokenized"} <= {*seen}
    check_unused_rows(Run(first.folder))
    [file] = (tmp_path / "runs" / ROWS_FOLDER).rglob("rows.parquet")
    blocks = ray.data.from_pandas([FRAME.head(100), FRAME.tail(140)])
    assert rows.write_rows("data.path", blocks, tmp_path / "runs") == file
    assert not blocks.context.execution_options.preserve_order  # as before
    second = small(data=file, out="runs/b", settings=settings, on_event=lambda event: seen.append(event["kind"]))
    assert "tokens_reused" in seen
    assert weights_of(second) == weights_of(first)
    resumed = rtrain.train(data=FRAME.copy(), out=first, resume=True, on_event=lambda event: None)
    assert weights_of(resumed) == weights_of(first)
    assert first.artifact.load().predict(["please help"])[0]["label"] in {*FRAME["category"]}
    assert (Path.cwd(), dict(os.environ)) == (tmp_path, environment)
    assert ray.is_initialized()


def check_unused_rows(run: Run) -> None:
    """The artifact has the complete word embedding: a row that no text uses has only decayed."""
    recipe = config.load_config(str(run.config)).recipe
    [event] = run.events("embedding_rows")
    [table], [initial] = (
        [weight for name, weight in load_file(folder / "model.safetensors").items() if "word_embeddings" in name]
        for folder in (run.artifact, Path(recipe.model.name))
    )
    assert event["used"] < event["total"] == len(table) == len(initial)
    assert run.token_store is not None
    used_ids = {*Store(run.token_store).used_ids().tolist(), *used_vocabulary.special_ids(run.artifact)}
    unused_ids = sorted({*range(len(table))} - used_ids)
    assert len(unused_ids) == event["total"] - event["used"]
    summary = json.loads((run.folder / "summary.json").read_text())
    decay = optimizers.decay_product(recipe, summary["best_step"], summary["steps"])
    assert 0.9 < decay < 1.0
    np.testing.assert_allclose(table[unused_ids], initial[unused_ids] * decay, rtol=1e-6)


INTERRUPTED = """
import os, signal, sys
from hashlib import sha256
import psutil
import rtrain

settings = {"train.precision": "fp32", "train.log_every": 1, "model.name": "encoder"}
arguments = {"epochs": 60, "lr": 3e-3, "workers": 1, "label": "category", "settings": settings}
rows = [{"text": f"{word} number {number}", "category": word} for number in range(100) for word in ("refund", "parcel")]

def interrupt(event):
    if event["kind"] == "progress" and event["step"] == 4:
        os.kill(os.getpid(), signal.SIGINT)

try:
    rtrain.train("intent", data=rows, out="runs/a", on_event=interrupt, **arguments)
except KeyboardInterrupt as error:
    print(error.folder.name, len(psutil.Process().children(recursive=True)))
resumed = rtrain.train(data=rows, out="runs/a", resume=True, on_event=lambda event: None)
whole = rtrain.train("intent", data=rows, out="runs/b", on_event=lambda event: None, **arguments)
digests = [sha256((run.artifact.folder / "model.safetensors").read_bytes()).hexdigest() for run in (resumed, whole)]
print(resumed.run.events("started")[-1]["step"] > 0, digests[0] == digests[1])
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_interrupted_call_ends_ray_and_another_one_in_the_same_process_resumes_it(tmp_path: Path) -> None:
    make_encoder(tmp_path / "encoder")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["a 0", "True True"]


# ------------------------------------------------------------------------------------------------- page and notebook


@pytest.mark.slow
@pytest.mark.serve
@pytest.mark.timeout(900)
def test_the_examples_of_the_page_work_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"train.precision": "fp32", "optim.lr": 5e-3, "train.workers": 1}
    encoder = make_encoder(tmp_path / "encoder")
    for verb in ("train", "tune"):
        function = partial(getattr(rtrain, verb), model=encoder, settings=settings)
        monkeypatch.setattr(rtrain, verb, function, raising=False)
    monkeypatch.setattr(rtrain, "distill", partial(rtrain.distill, layers=1, settings=LENIENT), raising=False)
    quick = partial(rtrain.quantize, settings={**LENIENT, "quantize.calibration_rows": 16})
    monkeypatch.setattr(rtrain, "quantize", quick, raising=False)
    monkeypatch.setattr(rtrain, "gate", partial(rtrain.gate, settings=LENIENT), raising=False)
    (port,) = free_ports(1)
    monkeypatch.setattr(
        rtrain, "serve", lambda artifact, port, serve=rtrain.serve, free=port: serve(artifact, port=free), raising=False
    )
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) >= 7
    names: dict[str, Any] = {"frame": FRAME}
    try:
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), names)
    finally:
        process.close_ray()
    printed = capsys.readouterr().out
    assert "http://127.0.0.1:" in printed
    assert all(name in printed for name in ("epocs", "optim.lr"))
    assert set(names["search"].dataframe["trial_id"]) >= {"000", "001"}
    assert all(np.isfinite(loss) for loss in names["losses"])
    assert names["losses"]


@pytest.mark.slow
@pytest.mark.serve
@pytest.mark.timeout(900)
def test_the_notebook_answers_a_request_and_shows_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbclient
    import nbformat

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    kernel_command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (tmp_path / "kernels" / "python3").mkdir(parents=True)
    kernel = {"argv": kernel_command, "display_name": "Python 3", "language": "python"}
    (tmp_path / "kernels" / "python3" / "kernel.json").write_text(json.dumps(kernel))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    html = ["".join(output.get("data", {}).get("text/html", "") for output in cell) for cell in outputs]
    assert "<progress" in html[1]
    assert "<polyline" in html[1]
    assert "QuantizeResult" in html[3]
    assert "'label'" in outputs[-1][-1]["data"]["text/plain"]
    assert not [output for cell in outputs for output in cell if output.output_type == "error"]
