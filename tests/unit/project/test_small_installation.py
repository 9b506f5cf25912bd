"""The small installation: `rtrain predict` and `rtrain inspect` need the core's dependencies alone, and a verb that
needs more says which extra has it."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rtrain
from rtrain.inference import mlflow_model
from rtrain.inference.predictor import Predictor
from tests.conftest import labelled_rows, write_rows
from tests.serve.test_deployment import openvino_artifact
from tests.support.root import ROOT
from tests.support.tiny import make_artifact
from tests.unit.runs.test_bundle import RESTRICTED, SERVING, modules_of
from tests.unit.serve.test_standalone import answering, predict_scores

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HEAVY = {"torch", "transformers", "ray", "nncf", "datasets", "pyarrow", "sklearn", "scipy", "pandas"}
EVERY_TASK = """
import importlib, pkgutil, rtrain.tasks
from rtrain.evaluation import inspect_artifact
from rtrain.inference import artifact, predictor
names = [f"rtrain.tasks.{one.name}" for one in pkgutil.iter_modules(rtrain.tasks.__path__)]
print(*(importlib.import_module(name).__name__ for name in names))
"""
MLFLOW_ANSWERS = """
import json, mlflow.pyfunc, pandas
rows = pandas.DataFrame({"text": ["where is my parcel"]})
print(json.dumps(mlflow.pyfunc.load_model(sys.argv[2]).predict(rows).to_dict("list")))
"""


def only(names: list[str], *words: str, script: str = RESTRICTED) -> subprocess.CompletedProcess[str]:
    """A command in a process that can import these packages, and what they need, alone."""
    allowed = ",".join(sorted(modules_of(names)))
    command = [sys.executable, "-c", script, allowed, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return openvino_artifact(tmp_path_factory.mktemp("int8") / "artifact")


def test_the_core_has_nothing_heavy() -> None:
    tops = modules_of(PROJECT["dependencies"])
    assert {"openvino", "tokenizers", "typer", "yaml"} <= tops
    assert tops & HEAVY == set()


def test_an_int8_artefact_is_answered_and_inspected_by_the_core_alone(int8: Path) -> None:
    done = only(PROJECT["dependencies"], "predict", str(int8), "where is my parcel")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\t") == 1
    done = only(PROJECT["dependencies"], "inspect", str(int8), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["engine"] == "openvino"


def test_an_int8_artifact_in_mlflow_needs_the_core_and_mlflow_alone(int8: Path, tmp_path: Path) -> None:
    mlflow_model.save_model(int8, tmp_path / "model")
    requirements = (tmp_path / "model" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert requirements[0] == f"rtrain=={rtrain.__version__}"
    names = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["mlflow"]]
    assert modules_of(names) & (HEAVY - {"pandas"}) == set()
    done = only(names, str(tmp_path / "model"), script=RESTRICTED.partition("from rtrain.cli")[0] + MLFLOW_ANSWERS)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["label"] == [Predictor.load(int8)(["where is my parcel"])[0][0]["label"]]


def test_python_loads_an_int8_artefact_with_the_core_alone(int8: Path) -> None:
    script = f"""
import rtrain
model = rtrain.load({str(int8)!r})
texts = ["where is my parcel", "money back"]
print(sorted(model.predict(texts)[0]), [len(entries) for entries in model.predict(texts, top=2)])
print(model.logits(texts)[0].ndim)
"""
    done = only(PROJECT["dependencies"], script=RESTRICTED.partition("from rtrain.cli")[0] + script)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == "['label', 'score'] [2, 2]\n1"


def test_every_task_is_answered_by_the_core_alone() -> None:
    done = only(PROJECT["dependencies"], script=RESTRICTED.partition("from rtrain.cli")[0] + EVERY_TASK)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.split()) >= 8


def test_rows_of_files_need_the_extra_rows(int8: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.csv", labelled_rows(5))
    words = ["predict", str(int8), "--data", str(rows), "--out", str(tmp_path / "answers.csv")]
    done = only(PROJECT["dependencies"], *words)
    assert (done.returncode, "pip install 'rtrain[rows]'" in done.stderr) == (1, True)
    done = only([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["rows"]], *words)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "answers.csv").read_text().splitlines()) == 6


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["train", "intent", "--data", "{rows}", "--out", "{out}"], "train"),
        (["gate", "{int8}", "--baseline", "{float}", "--data", "{rows}"], "train"),
        (["quantize", "{run}"], "train"),
        (["serve", "{int8}", "--ungated"], "serve"),
        (["serve", "{int8}", "--ungated", "--standalone"], "standalone"),
        (["predict", "{float}", "where is my parcel"], "train"),
        (["demo"], "train"),
    ],
)
def test_a_verb_says_which_extra_has_what_it_lacks(int8: Path, tmp_path: Path, words: list[str], extra: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("name: intent\ntask: classification\n")
    places = {
        "rows": write_rows(tmp_path / "rows.csv", labelled_rows(5)),
        "float": make_artifact(tmp_path / "float"),
        "out": tmp_path / "out",
        "int8": int8,
        "run": run,
    }
    done = only(PROJECT["dependencies"], *(word.format(**places) for word in words))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"pip install 'rtrain[{extra}]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_the_extra_standalone_has_nothing_heavy() -> None:
    tops = modules_of([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["standalone"]])
    assert {"starlette", "uvicorn"} <= tops
    assert tops & HEAVY == set()


def test_what_serving_imports_is_in_the_extra_serve() -> None:
    found = importlib.util.find_spec("ray")
    assert found is not None
    assert found.origin is not None
    bundled = {path.name for path in (Path(found.origin).parent / "thirdparty_files").iterdir()}  # in Ray's own wheel
    names = modules_of([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["serve"]])
    script = RESTRICTED.partition("from rtrain.cli")[0] + SERVING
    command = [sys.executable, "-c", script, ",".join(sorted(names | bundled))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("room", "extras"),
    [("serve", ("serve", "grpc")), ("rtrain/inference/batch", ("rows", "train")), ("tune", ("train", "tune"))],
)
def test_what_a_room_imports_anywhere_is_in_its_extras(room: str, extras: tuple[str, ...]) -> None:
    """Also inside of functions, which a start does not reach."""
    names = [*PROJECT["dependencies"], *(name for extra in extras for name in PROJECT["optional-dependencies"][extra])]
    known = {*modules_of(names), *sys.stdlib_module_names, "rtrain", "serve", "tune"}
    lacking = set()
    for path in sorted((ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            lacking |= {(path.name, name) for name in modules if name.partition(".")[0] not in known}
    assert lacking == set()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("extra", ["", "[standalone]"])
def test_an_installation_of_the_core_answers(int8: Path, tmp_path: Path, extra: str) -> None:
    """Downloads the core's dependencies, and those of the smallest endpoint, from the package index."""
    environment = tmp_path / "environment"
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True, env=own)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt")]
    done = subprocess.run([*pip, f"{ROOT}{extra}"], capture_output=True, text=True, env=own)
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    command = [str(environment / "bin" / "rtrain"), "predict", str(int8), "where is my parcel"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=own)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\t") == 1
    (packages,) = environment.glob("lib/python*/site-packages")
    assert {path.name for path in packages.iterdir()} & HEAVY == set()
    if extra:
        with answering([str(environment / "bin" / "rtrain")], int8, own) as (url, _):
            assert predict_scores(url, "where is my parcel")
