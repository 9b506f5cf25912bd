"""`rtrain inspect`: its counts beside those of the model itself, of both kinds of artefact, and of damaged ones."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from rtrain import config
from rtrain.cli import app as cli
from rtrain.compress import distill
from rtrain.config import with_overrides
from rtrain.core.run_folder import Run
from rtrain.evaluation import inspect_artifact, reproduce_commands
from rtrain.inference import artifact
from rtrain.inference.artifact import ArtifactError
from rtrain.runs import run_folders
from tests import gating, reports
from tests.conftest import labelled_rows
from tests.gating import Gated
from tests.refusing import refused
from tests.test_serve_deployment import openvino_artifact
from tests.tiny import make_artifact
from tests.trained import Trained


@pytest.fixture(scope="module")
def float_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("inspected") / "artifact")


def test_numbers_are_the_model_s_parameters_by_part(float_one: Path) -> None:
    found = inspect_artifact.inspect(float_one)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(float_one)
    assert found["numbers"] == model.num_parameters()
    assert found["parts"]["word table"]["numbers"] == model.bert.embeddings.word_embeddings.weight.numel()
    assert found["parts"]["layers"]["numbers"] == sum(one.numel() for one in model.bert.encoder.parameters())
    head = [*model.classifier.parameters(), *model.bert.pooler.parameters()]
    assert found["parts"]["head"]["numbers"] == sum(one.numel() for one in head)
    assert found["parts"]["layers"]["precisions"] == {"f32": found["parts"]["layers"]["numbers"]}


def test_bytes_by_part_are_those_of_the_files(float_one: Path, tmp_path: Path) -> None:
    for folder in (float_one, openvino_artifact(tmp_path / "int8")):
        found = inspect_artifact.inspect(folder)
        files = {path.name: path.stat().st_size for path in folder.iterdir()}
        assert found["files"] == files
        assert sum(found["bytes"].values()) == sum(files.values())
        assert found["bytes"]["tokenizer"] == files["tokenizer.json"]
        assert all(size > 0 for size in found["bytes"].values())


def test_a_graph_of_floats_has_the_float_model_s_matrices(tmp_path: Path) -> None:
    """Its vectors, which are zeros and ones before a training, are left out of the graph; it has a few constants beside
    its weights, such as the one that divides by."""
    folder = openvino_artifact(tmp_path / "graph")
    found = inspect_artifact.inspect(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    matrices = sum(one.numel() for one in model.bert.encoder.parameters() if one.dim() > 1)
    assert 0 <= found["parts"]["layers"]["numbers"] - matrices <= 8
    assert found["parts"]["word table"]["numbers"] == model.bert.embeddings.word_embeddings.weight.numel()
    assert set(found["operators"]["MatMul"]) == {"float"}


def test_what_is_damaged_or_no_artefact_is_refused(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "artifact")
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * 8)
    with refused("damaged_artifact"):
        inspect_artifact.inspect(folder)
    with refused("not_an_artifact"):
        inspect_artifact.inspect(tmp_path)
    odd = gating.damaged(make_artifact(tmp_path / "whole"), tmp_path / "odd", overwrite_header)
    with pytest.raises(ArtifactError):
        inspect_artifact.inspect(odd)


def overwrite_header(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * 8)


def test_the_verdict_is_told_with_date_and_host(tmp_path: Path) -> None:
    folder = openvino_artifact(tmp_path / "int8")
    assert inspect_artifact.inspect(folder)["needs_gate"]
    verdict: dict[str, Any] = {
        "verdict": "hold",
        "reasons": ["a", "b"],
        "made": "2026-01-02T03:04:05Z",
        "host": {"name": "wren"},
    }
    verdict |= {"headline": None, "rivals": []}
    made = artifact.judged(folder, {**verdict, "version": artifact.read(folder).version})
    found = inspect_artifact.inspect(folder)
    assert (found["gate"], found["gated"]) == (verdict, True)
    assert all(word in inspect_artifact.text(found) for word in ("hold", "a; b", "2026-01-02T03:04:05Z", "wren"))
    artifact.judged(folder, {**verdict, "version": made.version[::-1]})
    assert not inspect_artifact.inspect(folder)["gated"]


# --------------------------------------------------------------------------------------------------- of a run, and int8


@pytest.fixture(scope="module")
def gated(trained: Trained) -> Gated:
    return gating.quantized(trained, "inspected")


@pytest.mark.ray
def test_an_int8_graph_s_weights_are_whole_numbers(gated: Gated) -> None:
    found = inspect_artifact.inspect(gated.int8)
    for part in ("word table", "layers"):
        precisions = found["parts"][part]["precisions"]
        assert precisions["i8"] >= 0.9 * found["parts"][part]["numbers"]
    assert found["operators"]["MatMul"].get("i8 x i8", 0) >= 2 * 6  # of 2 layers, 6 weights each
    assert (
        found["parts"]["word table"]["bytes"]
        < inspect_artifact.inspect(gated.float_one)["parts"]["word table"]["bytes"]
    )


@pytest.mark.ray
def test_lineage_leads_to_data_and_run_and_to_the_commands(gated: Gated) -> None:
    found, made = inspect_artifact.inspect(gated.int8), artifact.read(gated.float_one)
    assert found["lineage"]["parent"] == made.version
    assert found["lineage"]["data_digest"] == made.lineage["data_digest"]
    assert found["lineage"]["run"] == "run"
    assert found["gate"]["verdict"] == "promote"
    run = str(gated.run.folder)
    assert found["reproduce"] == [
        f"rtrain train {run}/config.yaml --out {run}-again",
        f"rtrain quantize {run}-again --out {run}-again/artifact-int8",
    ]
    student = replace(made, lineage={**made.lineage, "teacher": "0123456789ab"})
    assert reproduce_commands.reproduce(gated.float_one, student)[0].endswith(
        f" --out {run}-again  # TEACHER: the run of artefact 0123456789ab"
    )


def test_the_commands_have_the_settings_that_made_it(tmp_path: Path) -> None:
    distilled = {"distill.teacher": "0123456789ab", "distill.layers": 1, "distill.hidden": 0.5, "quantize.flips": 0.01}
    run = Run(tmp_path / "run")
    run_folders.freeze(run, with_overrides(reports.settings(tmp_path, labelled_rows(60)), distilled))
    made = artifact.read(make_artifact(run.artifact))
    student = {"teacher": "0123456789ab", "calibration_rows": 64, "flips": 0.01}
    first, second = reproduce_commands.reproduce(run.int8, replace(made, engine="onnxruntime", lineage=student))
    assert first.endswith("  # TEACHER: the run of artefact 0123456789ab")
    assert "rtrain distill TEACHER --set data.path=" in first
    assert "--set distill.layers=1 --set distill.hidden=0.5" in first
    assert second == (
        f"rtrain quantize {run}-again --set quantize.calibration_rows=64 --set quantize.engine=onnxruntime"
        f" --out {run}-again/artifact-int8"
    )
    weights = reproduce_commands.reproduce(run.int8, replace(made, engine="openvino", lineage={"kind": "weights"}))
    assert weights[-1] == (
        f"rtrain quantize {run}-again --set quantize.kind=weights --set quantize.flips=null"
        f" --out {run}-again/artifact-int8"
    )
    with run.config.open("a", encoding="utf-8") as file:
        file.write("of_a_later_version: 7\n")
    assert reproduce_commands.reproduce(run.int8, replace(made, engine="openvino", lineage=student)) == []


ASKED = {
    **{"train.seed": 3, "optim.warmup": 0.25, "train.label_smoothing": 0.1, "data.max_tokens": 48},
    **{"compress.vocabulary": "trim", "compress.vocabulary_pieces": 120, "distill.layers": 1, "distill.epochs": 2},
    "data.label": "null",
}
"""Settings of a student of every section; the label's column has a name that YAML would read as nothing."""


@pytest.mark.parametrize("known", [True, False])
def test_the_settings_of_the_command_make_the_same_run(tmp_path: Path, known: bool) -> None:
    """`known`: the verdict names the teacher's run. It was trained otherwise than the recipe says; what the student has
    as the recipe again is then in the command too."""
    taught, student, again = (Run(tmp_path / name) for name in ("taught", "student", "again"))
    run_folders.freeze(
        taught, with_overrides(reports.settings(tmp_path, labelled_rows(60)), {"optim.weight_decay": 0.3})
    )
    make_artifact(taught.artifact)
    teacher = distill.Teacher.read(taught.artifact)
    asked = {**ASKED, **({"optim.weight_decay": 0.01} if known else {})}
    run_folders.freeze(student, distill.started(run_folders.stored(taught.folder, asked), teacher, tmp_path))
    make_artifact(student.artifact)
    against = {"version": teacher.made.version, "folder": str(taught.artifact)}
    made = artifact.judged(student.artifact, {"verdict": "promote", "against": against} if known else {})
    made = replace(made, lineage={"teacher": teacher.made.version})
    [command] = reproduce_commands.reproduce(student.artifact, made)
    words = shlex.split(command, comments=True)
    assert words[:3] == ["rtrain", "distill", str(taught.folder) if known else "TEACHER"]
    sets = dict(config.parse_assignment(words[place + 1]) for place, word in enumerate(words) if word == "--set")
    run_folders.freeze(again, distill.started(run_folders.stored(taught.folder, sets), teacher, tmp_path))
    one, other = (run_folders.stored(run.folder).recipe for run in (student, again))
    assert one == other
    assert one.identity() == other.identity() != run_folders.stored(taught.folder).recipe.identity()


@pytest.mark.ray
def test_the_verb_takes_a_run_and_tells_it_both_ways(gated: Gated, capfd: pytest.CaptureFixture[str]) -> None:
    cli.main(["inspect", str(gated.run.folder), "--json"])
    document = json.loads(capfd.readouterr().out)
    assert document == json.loads(json.dumps(inspect_artifact.inspect(gated.float_one)))
    cli.main(["inspect", str(gated.int8)])
    text = capfd.readouterr().out
    assert "answered by openvino" in text
    assert f"all {document['numbers']:>14,}" not in text
    assert "i8 x i8" in text
    assert "gate: promote: accuracy " in text
