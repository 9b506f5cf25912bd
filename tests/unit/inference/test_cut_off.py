"""Files that are cut off, as a full disk or a broken copy leaves them: each verb names the file, with no traceback."""

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from rtrain.cluster import capacity
from rtrain.core import manifest
from rtrain.core.errors import UserError
from tests.conftest import labelled_rows, write_rows
from tests.support import stock
from tests.support.tiny import make_artifact, make_encoder
from tests.unit.cli import test_cli

run = test_cli.run  # a fixture: the command line, in an empty folder
Cli = test_cli.Cli

MODEL = ("config.json", "model.safetensors", "modules.json", "1_Pooling/config.json")
STOPPED = {"report": "artifact is of schema None", "train": "data.path=/data/rows.csv: no such file"}
"""What stops a verb on a run of `tests.support.stock` as it is: its artefact is none, and its rows are nowhere."""
ARTIFACT = ("artifact.json", "config.json", "tokenizer.json", "model.safetensors", manifest.FILE_NAME)


def pairs(verbs: Iterable[str], names: Sequence[str]) -> list[Any]:
    """Every verb and every name once, then the rest of the product as slow tests."""
    product = [(place, index, verb, name) for place, verb in enumerate(verbs) for index, name in enumerate(names)]
    count = len({verb for _, _, verb, _ in product})
    return [
        pytest.param(
            verb, name, marks=[] if index % count == place or place % len(names) == index else [pytest.mark.slow]
        )
        for place, index, verb, name in product
    ]


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence encoder, two artefacts, rows, a file of keys, one of prices, a recipe and a cluster's file."""
    folder = tmp_path_factory.mktemp("made")
    make_encoder(folder / "model")
    pooled = {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 32}
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (path, kind) in enumerate(kinds)
    ]
    (folder / "model" / "1_Pooling").mkdir()
    (folder / "model" / "1_Pooling" / "config.json").write_text(json.dumps(pooled))
    (folder / "model" / "modules.json").write_text(json.dumps(modules))
    for name in ("artefact", "other"):
        make_artifact(folder / name)
    write_rows(folder / "rows.csv", labelled_rows(20))
    (folder / "recipe.yaml").write_text("name: own\ntask: classification\ndata: {path: rows.csv, text: text}\n")
    (folder / "prices.yaml").write_text("worker: {on_demand: 0.04, spot: 0.01}\nother: {on_demand: 1.0}\n")
    (folder / "cluster.yaml").write_text("cluster_name: own\navailable_node_types: {head: {resources: {CPU: 2}}}\n")
    return folder


@pytest.fixture
def ground(made: Path, tmp_path: Path, run: Cli) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize(("verb", "name"), pairs(["train", "tune", "verify"], MODEL))
def test_of_a_model(ground: Path, run: Cli, verb: str, name: str) -> None:
    """Before Ray starts, and with nothing written."""
    cut(ground / "model" / name)
    code, _, err = run(verb, "intent", "--data", "rows.csv", "--model", "model", "--out", "runs/one")
    assert (code in (1, 2), Path(name).name in err) == (True, True), err
    assert not (ground / "runs").exists()


ARTIFACT_VERBS: dict[str, tuple[str, ...]] = {
    "predict": ("artefact", "a text"),
    "explain": ("artefact", "a text"),
    "inspect": ("artefact",),
    "evaluate": ("artefact", "--data", "rows.csv"),
    "gate": ("artefact", "--baseline", "other", "--data", "rows.csv"),
    "serve": ("artefact",),
}


@pytest.mark.parametrize(("verb", "name"), pairs(ARTIFACT_VERBS, ARTIFACT))
def test_of_an_artefact(ground: Path, run: Cli, verb: str, name: str) -> None:
    cut(ground / "artefact" / name)
    code, _, err = run(verb, *ARTIFACT_VERBS[verb])
    assert (code, name in err) == (1, True), err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("recipe.yaml", ("train", "recipe.yaml", "--data", "rows.csv")),
        ("prices.yaml", ("train", "intent", "--data", "rows.csv", "--set", "cluster.prices=prices.yaml")),
        ("prices.yaml", ("plan", "intent", "--rows", "9", "--cluster", "cluster.yaml", "--prices", "prices.yaml")),
        ("cluster.yaml", ("plan", "intent", "--rows", "9", "--cluster", "cluster.yaml")),
        ("cluster.yaml", ("cluster", "lint", "cluster.yaml")),
        ("cluster.yaml", ("cluster", "rehearse", "--file", "cluster.yaml", "train", "intent")),
    ],
)
def test_of_what_is_written_by_hand(ground: Path, run: Cli, name: str, words: tuple[str, ...]) -> None:
    cut(ground / name)
    with pytest.raises(yaml.YAMLError):  # else it would be another file, and not one that is cut off
        yaml.safe_load((ground / name).read_text())
    code, out, err = run(*words)
    rehearsed = "rehearse" in words and "--file: line 2" in err  # the option's own name stands for the file
    assert (code in (1, 2), name in out + err or rehearsed) == (True, True), err


def test_of_what_an_autoscaler_may_start(ground: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(ground / "cluster.yaml")
    monkeypatch.setenv(capacity.AUTOSCALER_FILE_VARIABLE, str(ground / "cluster.yaml"))
    with pytest.raises(UserError):
        capacity.load_autoscaler_config()


def test_of_keys(tmp_path: Path, run: Cli) -> None:
    assert run("serve", "keys", "add", "keys.json", "me")[0] == 0
    cut(tmp_path / "keys.json")
    code, _, err = run("serve", "keys", "list", "keys.json")
    assert (code, "keys.json" in err) == (1, True)


@pytest.mark.parametrize(
    ("verb", "name"),
    pairs(
        ["runs", "clean", "report", "export", "train"],
        ["config.yaml", "events.jsonl", "decisions.json", "artifact/artifact.json"],
    ),
)
def test_of_a_run(tmp_path: Path, run: Cli, verb: str, name: str) -> None:
    one = stock.make(tmp_path / "runs" / "one")
    one.decide_once("precision", "bf16")
    cut(one.folder / name)
    words = {"runs": ["runs"], "clean": ["runs"], "report": ["runs/one"], "export": ["runs/one", "--out", "one.tar"]}
    code, out, err = run(verb, *words.get(verb, ["--resume", "--out", "runs/one"]))
    assert code in (0, 1, 2), err
    assert code == 0 or Path(name).name in out + err or STOPPED.get(verb, name) in err, err
