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
from rtrain.evaluation import inspect_artifact
from rtrain.inference import artifact
from rtrain.inference.artifact import ArtifactError
from rtrain.runs import run_folders
from tests.conftest import labelled_rows
from tests.serve.test_deployment import openvino_artifact
from tests.support import gating, reports
from tests.support.gating import Gated
from tests.support.refusing import refused
from tests.support.tiny import make_artifact
from tests.support.trained import Trained


@pytest.fixture(scope="module")
def float_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("inspected") / "artifact")


def test_numbers_are_the_model_s_parameters_by_part(float_one: Path) -> None:
    result = inspect_artifact.inspect_artifact(float_one)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(float_one)
    assert result["element_count"] == model.num_parameters()
    assert result["parts"]["word table"]["element_count"] == model.bert.embeddings.word_embeddings.weight.numel()
    assert result["parts"]["layers"]["element_count"] == sum(item.numel() for item in model.bert.encoder.parameters())
    head = [*model.classifier.parameters(), *model.bert.pooler.parameters()]
    assert result["parts"]["head"]["element_count"] == sum(item.numel() for item in head)
    assert result["parts"]["layers"]["precisions"] == {"f32": result["parts"]["layers"]["element_count"]}


def test_bytes_by_part_are_those_of_the_files(float_one: Path, tmp_path: Path) -> None:
    for folder in (float_one, openvino_artifact(tmp_path / "int8")):
        result = inspect_artifact.inspect_artifact(folder)
        files = {path.name: path.stat().st_size for path in folder.iterdir()}
        assert result["files"] == files
        assert sum(result["bytes"].values()) == sum(files.values())
        assert result["bytes"]["tokenizer"] == files["tokenizer.json"]
        assert all(size > 0 for size in result["bytes"].values())


def test_a_graph_of_floats_has_the_float_model_s_matrices(tmp_path: Path) -> None:
    """Its vectors, which are zeros and ones before a training, are left out of the graph; it has a few constants beside
    its weights, such as the one that divides by."""
    folder = openvino_artifact(tmp_path / "graph")
    result = inspect_artifact.inspect_artifact(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    matrices = sum(item.numel() for item in model.bert.encoder.parameters() if item.dim() > 1)
    assert 0 <= result["parts"]["layers"]["element_count"] - matrices <= 8
    assert result["parts"]["word table"]["element_count"] == model.bert.embeddings.word_embeddings.weight.numel()
    assert set(result["operators"]["MatMul"]) == {"float"}


def test_what_is_damaged_or_no_artefact_is_refused(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "artifact")
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * 8)
    with refused("damaged_artifact"):
        inspect_artifact.inspect_artifact(folder)
    with refused("not_an_artifact"):
        inspect_artifact.inspect_artifact(tmp_path)
    odd = gating.damaged(make_artifact(tmp_path / "whole"), tmp_path / "odd", overwrite_header)
    with pytest.raises(ArtifactError):
        inspect_artifact.inspect_artifact(odd)


def overwrite_header(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * 8)


def test_the_verdict_is_told_with_date_and_host(tmp_path: Path) -> None:
    folder = openvino_artifact(tmp_path / "int8")
    assert inspect_artifact.inspect_artifact(folder)["needs_gate"]
    verdict: dict[str, Any] = {
        "verdict": "hold",
        "reasons": ["a", "b"],
        "created_at": "2026-01-02T03:04:05Z",
        "host": {"name": "wren"},
    }
    verdict |= {"headline": None, "rivals": []}
    created = artifact.write_gate_verdict(folder, {**verdict, "version": artifact.read_artifact(folder).version})
    result = inspect_artifact.inspect_artifact(folder)
    assert (result["gate"], result["is_gated"]) == (verdict, True)
    assert all(
        word in inspect_artifact.format_inspection(result) for word in ("hold", "a; b", "2026-01-02T03:04:05Z", "wren")
    )
    artifact.write_gate_verdict(folder, {**verdict, "version": created.version[::-1]})
    assert not inspect_artifact.inspect_artifact(folder)["is_gated"]


# --------------------------------------------------------------------------------------------------- of a run, and int8


@pytest.fixture(scope="module")
def gated(trained: Trained) -> Gated:
    return gating.quantized(trained, "inspected")


@pytest.mark.ray
def test_an_int8_graph_s_weights_are_whole_numbers(gated: Gated) -> None:
    result = inspect_artifact.inspect_artifact(gated.int8)
    for part in ("word table", "layers"):
        precisions = result["parts"][part]["precisions"]
        assert precisions["i8"] >= 0.9 * result["parts"][part]["element_count"]
    assert result["operators"]["MatMul"].get("i8 x i8", 0) >= 2 * 6  # of 2 layers, 6 weights each
    assert (
        result["parts"]["word table"]["bytes"]
        < inspect_artifact.inspect_artifact(gated.float_one)["parts"]["word table"]["bytes"]
    )


@pytest.mark.ray
def test_lineage_leads_to_data_and_run_and_to_the_commands(gated: Gated) -> None:
    result, created = inspect_artifact.inspect_artifact(gated.int8), artifact.read_artifact(gated.float_one)
    assert result["lineage"]["parent"] == created.version
    assert result["lineage"]["data_digest"] == created.lineage["data_digest"]
    assert result["lineage"]["run"] == "run"
    assert result["gate"]["verdict"] == "promote"
    run = str(gated.run.folder)
    assert result["commands"] == [
        f"rtrain train {run}/config.yaml --out {run}-again",
        f"rtrain quantize {run}-again --out {run}-again/artifact-int8",
    ]
    student = replace(created, lineage={**created.lineage, "teacher": "0123456789ab"})
    assert inspect_artifact.list_commands(gated.float_one, student)[0].endswith(
        f" --out {run}-again  # TEACHER: the run of artifact 0123456789ab"
    )


def test_the_commands_have_the_settings_that_made_it(tmp_path: Path) -> None:
    distilled = {
        "distill.teacher": "0123456789ab",
        "distill.layers": 1,
        "distill.hidden_loss_weight": 0.5,
        "quantize.max_changed_predictions": 0.01,
    }
    run = Run(tmp_path / "run")
    run_folders.write_frozen_config(run, with_overrides(reports.settings(tmp_path, labelled_rows(60)), distilled))
    created = artifact.read_artifact(make_artifact(run.artifact))
    student = {"teacher": "0123456789ab", "calibration_rows": 64, "max_changed_predictions": 0.01}
    first, second = inspect_artifact.list_commands(
        run.int8_artifact, replace(created, engine="onnxruntime", lineage=student)
    )
    assert first.endswith("  # TEACHER: the run of artifact 0123456789ab")
    assert "rtrain distill TEACHER --set data.path=" in first
    assert "--set distill.layers=1 --set distill.hidden_loss_weight=0.5" in first
    assert second == (
        f"rtrain quantize {run}-again --set quantize.calibration_rows=64 --set quantize.engine=onnxruntime"
        f" --out {run}-again/artifact-int8"
    )
    weights = inspect_artifact.list_commands(
        run.int8_artifact, replace(created, engine="openvino", lineage={"kind": "weights"})
    )
    assert weights[-1] == (
        f"rtrain quantize {run}-again --set quantize.kind=weights --set quantize.max_changed_predictions=null"
        f" --out {run}-again/artifact-int8"
    )
    with run.config.open("a", encoding="utf-8") as file:
        file.write("of_a_later_version: 7\n")
    assert inspect_artifact.list_commands(run.int8_artifact, replace(created, engine="openvino", lineage=student)) == []


ASKED = {
    **{"train.seed": 3, "optim.warmup": 0.25, "train.label_smoothing": 0.1, "data.max_tokens": 48},
    **{"compress.vocabulary": "trim", "compress.min_vocab_size": 120, "distill.layers": 1, "distill.epochs": 2},
    "data.label": "null",
}
"""Settings of a student of every section; the label's column has a name that YAML would read as nothing."""


@pytest.mark.parametrize("known", [True, False])
def test_the_settings_of_the_command_make_the_same_run(tmp_path: Path, known: bool) -> None:
    """`known`: the verdict names the teacher's run. It was trained otherwise than the recipe says; what the student has
    as the recipe again is then in the command too."""
    taught, student, repeated = (Run(tmp_path / name) for name in ("taught", "student", "again"))
    run_folders.write_frozen_config(
        taught, with_overrides(reports.settings(tmp_path, labelled_rows(60)), {"optim.weight_decay": 0.3})
    )
    make_artifact(taught.artifact)
    teacher = distill.Teacher.load(taught.artifact)
    inputs = {**ASKED, **({"optim.weight_decay": 0.01} if known else {})}
    run_folders.write_frozen_config(
        student, distill.derive_student_config(run_folders.load_config(taught.folder, inputs), teacher, tmp_path)
    )
    make_artifact(student.artifact)
    against = {"version": teacher.metadata.version, "folder": str(taught.artifact)}
    created = artifact.write_gate_verdict(
        student.artifact, {"verdict": "promote", "baseline": against} if known else {}
    )
    created = replace(created, lineage={"teacher": teacher.metadata.version})
    [command] = inspect_artifact.list_commands(student.artifact, created)
    words = shlex.split(command, comments=True)
    assert words[:3] == ["rtrain", "distill", str(taught.folder) if known else "TEACHER"]
    sets = dict(config.parse_assignment(words[place + 1]) for place, word in enumerate(words) if word == "--set")
    run_folders.write_frozen_config(
        repeated, distill.derive_student_config(run_folders.load_config(taught.folder, sets), teacher, tmp_path)
    )
    item, other = (run_folders.load_config(run.folder).recipe for run in (student, repeated))
    assert item == other
    assert (
        item.recipe_digest() == other.recipe_digest() != run_folders.load_config(taught.folder).recipe.recipe_digest()
    )


@pytest.mark.ray
def test_the_verb_takes_a_run_and_tells_it_both_ways(gated: Gated, capfd: pytest.CaptureFixture[str]) -> None:
    cli.main(["inspect", str(gated.run.folder), "--json"])
    document = json.loads(capfd.readouterr().out)
    assert document == json.loads(json.dumps(inspect_artifact.inspect_artifact(gated.float_one)))
    cli.main(["inspect", str(gated.int8)])
    text = capfd.readouterr().out
    assert "answered by openvino" in text
    assert f"all {document['element_count']:>14,}" not in text
    assert "i8 x i8" in text
    assert "gate: promote: accuracy " in text
