"""Artifacts as models of MLflow: the tables of several tasks, and MLflow's own server."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from rtrain.core.ragged import Head
from rtrain.inference import mlflow_model
from rtrain.inference.predictor import Predictor
from tests.serve.test_deployment import openvino_artifact
from tests.support.heads import free_ports
from tests.support.root import ROOT
from tests.support.tiny import make_artifact, make_task_artifact

TEXTS = ["where is my parcel", "der brief kam gestern"]


def load(folder: Path, artifact: Path) -> Any:
    import mlflow.pyfunc

    mlflow_model.save_model(artifact, folder)
    return mlflow.pyfunc.load_model(str(folder))


def test_questions_have_two_columns(tmp_path: Path) -> None:
    import mlflow
    import pandas as pd

    head = Head(("start", "end"), {"no_answer": True})
    artifact = make_task_artifact(tmp_path / "artifact", "span_qa", head)
    model = load(tmp_path / "model", artifact)
    rows = [{"question": "what was late?", "context": text} for text in TEXTS]
    answers = Predictor.load(artifact)(rows)
    table = model.predict(pd.DataFrame(rows))
    assert table["answer"].tolist() == [answer["answer"] for answer in answers]
    with pytest.raises(mlflow.exceptions.MlflowException):
        model.predict(pd.DataFrame({"question": TEXTS}))


def test_lists_and_answers_without_columns_are_json(tmp_path: Path) -> None:
    import pandas as pd

    tags = make_task_artifact(tmp_path / "tags", "token_tags", Head(("O", "B-X", "I-X"), {}))
    table = load(tmp_path / "model", tags).predict(pd.DataFrame({"text": TEXTS}))
    entities = [[entity["entity_group"] for entity in answer] for answer in Predictor.load(tags)(TEXTS)]
    columns = {column.name for column in mlflow_model.list_answer_columns(Predictor.load(tags).task, Head(("O",)))}
    assert set(table.columns) == columns
    (objects,) = [name for name in columns if name == "entities"]
    assert [[entity["entity_group"] for entity in json.loads(row)] for row in table[objects]] == entities


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_mlflow_serves_the_model_over_http(tmp_path: Path, engine: str) -> None:
    make = make_artifact if engine == "torch" else openvino_artifact
    artifact, (port,) = make(tmp_path / "artifact"), free_ports(1)
    mlflow_model.save_model(artifact, tmp_path / "model")
    command = [sys.executable, "-m", "mlflow", "models", "serve", "--model-uri", str(tmp_path / "model")]
    command += ["--env-manager", "local", "--host", "127.0.0.1", "--port", str(port)]
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    body = json.dumps({"dataframe_records": [{"text": text} for text in TEXTS]}).encode()
    headers = {"Content-Type": "application/json"}
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True) as server,
    ):
        try:
            request = urllib.request.Request(f"http://127.0.0.1:{port}/invocations", body, headers)
            reply = json.loads(_wait_for_reply(request, server))
        finally:
            os.killpg(server.pid, 15)
    answers = [answer[0] for answer in Predictor.load(artifact)(TEXTS)]
    assert [row["label"] for row in reply["predictions"]] == [answer["label"] for answer in answers]
    assert [row["score"] for row in reply["predictions"]] == pytest.approx([row["score"] for row in answers], abs=1e-5)


def _wait_for_reply(request: urllib.request.Request, server: "subprocess.Popen[bytes]") -> bytes:
    deadline = time.monotonic() + 180
    while True:
        assert server.poll() is None
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                body: bytes = reply.read()
                return body
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.5)
