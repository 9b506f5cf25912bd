"""What the gate has not promoted is not served, unless somebody asks for that in so many words."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rtrain.cli import app as cli
from rtrain.config import ServeConfig
from rtrain.core import manifest
from rtrain.inference import artifact
from rtrain.inference.artifact import Artifact, ArtifactError
from serve.auth import preflight
from tests.serve.test_deployment import openvino_artifact
from tests.support.tiny import make_artifact

PROMOTED = {"verdict": "promote", "reasons": ["accuracy 0.9 against 0.9"]}
REFUSED = {"verdict": "refuse", "reasons": ["accuracy 0.7 against 0.9", "0.50 times as fast"]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return openvino_artifact(tmp_path_factory.mktemp("made") / "int8")


@pytest.fixture
def int8(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "int8")


def judged(folder: Path, verdict: dict[str, Any]) -> Path:
    """The same artefact with a verdict, by the function that writes them."""
    artifact.write_gate_verdict(folder, {"version": artifact.read_artifact(folder).version, **verdict})
    return folder


def admit(folder: Path, **settings: Any) -> None:
    preflight.require_servable(artifact.read_artifact(folder), folder, ServeConfig(**settings))


@pytest.mark.parametrize("verdict", ["promote", "hold"])
def test_a_promoted_one_is_served_and_what_the_gate_could_not_tell_is_served_and_said(verdict: str, int8: Path) -> None:
    """On a busy machine, or of few rows, it cannot tell: quantize and then serve must work there too."""
    folder, messages = judged(int8, {**PROMOTED, "verdict": verdict}), list[str]()
    preflight.require_servable(artifact.read_artifact(folder), folder, ServeConfig(), messages.append)
    assert len(messages) == (verdict == "hold")


@pytest.mark.parametrize("student", [False, True])
@pytest.mark.parametrize("other", [False, True], ids=["own", "another one's"])
@pytest.mark.parametrize("verdict", [None, "promote", "hold", "refuse"])
def test_what_to_do_next_is_to_serve_just_where_an_endpoint_takes_it(
    tmp_path: Path, verdict: str | None, other: bool, student: bool
) -> None:
    lineage = {"teacher": "0123456789ab"} if student else {}
    created = Artifact("m", "classification", ("a", "b"), 16, "torch", lineage=lineage, version="one")
    gate = {"verdict": verdict, "reasons": ["it is slower"], "version": "another" if other else "one"}
    created = replace(created, gate=gate if verdict else None)
    try:
        preflight.require_servable(created, tmp_path, ServeConfig())
        admitted = True
    except ArtifactError:
        admitted = False
    verb, *options = artifact.next_command(created)
    assert (verb == "serve") == admitted
    assert options == (["--baseline", "BASE"] if verb == "gate" else [])
    assert (verb == "inspect") == (verdict == "refuse" and not other)


def test_a_run_s_own_float_model_needs_no_gate_and_a_student_does(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "float")
    admit(folder)
    created = artifact.read_artifact(folder)
    student = replace(created, lineage={**created.lineage, "teacher": "0123456789ab"})
    with pytest.raises(ArtifactError):
        preflight.require_servable(student, folder, ServeConfig())


def test_a_float_model_that_was_set_beside_another_one_and_refused_is_refused(tmp_path: Path) -> None:
    folder = judged(make_artifact(tmp_path / "float"), REFUSED)
    with pytest.raises(ArtifactError):
        admit(folder)
    admit(folder, ungated=True)
    admit(judged(folder, {"version": "0123456789ab", **REFUSED}))  # the verdict on another one


@pytest.mark.parametrize(
    "verdict", [None, REFUSED, {"verdict": "Promote", "reasons": []}, {"version": "0123456789ab", **PROMOTED}]
)
def test_any_other_verdict_is_refused(int8: Path, verdict: dict[str, Any] | None) -> None:
    folder = judged(int8, verdict) if verdict else int8
    with pytest.raises(ArtifactError):
        admit(folder)
    admit(folder, ungated=True)


@pytest.mark.parametrize(("flags", "slower"), [({"avx2"}, True), ({"avx512_vnni"}, False), (set(), False)])
def test_a_latency_of_another_processor_is_said(
    int8: Path, monkeypatch: pytest.MonkeyPatch, flags: set[str], slower: bool
) -> None:
    monkeypatch.setattr("rtrain.models.precision.read_cpu_flags", lambda cpuinfo: flags)
    folder, messages = judged(int8, {**PROMOTED, "host": {"name": "builder", "int8": ["VNNI"]}}), list[str]()
    preflight.require_servable(artifact.read_artifact(folder), folder, ServeConfig(), messages.append)
    assert len(messages) == slower


def test_a_verdict_that_was_edited_is_refused_whatever_is_allowed(int8: Path) -> None:
    """The manifest holds the digest of artifact.json too."""
    path = judged(int8, REFUSED) / artifact.FILE_NAME
    path.write_text(path.read_text(encoding="utf-8").replace('"refuse"', '"promote"'), encoding="utf-8")
    with pytest.raises(ArtifactError):
        admit(int8, ungated=True)


def test_weights_that_were_exchanged_behind_a_verdict_are_refused(int8: Path, tmp_path: Path) -> None:
    """Made anew by its maker's function, with the old verdict left in: the version is another one."""
    folder = judged(int8, PROMOTED)
    document = json.loads((folder / artifact.FILE_NAME).read_text(encoding="utf-8"))
    (folder / manifest.FILE_NAME).unlink()
    labels = tuple(reversed(document["labels"]))
    created = replace(artifact.read_artifact(folder, verify=False), labels=labels, golden=())
    artifact.write_artifact(folder, created, lambda where, what: [[0.0]], ["text"])
    with pytest.raises(ArtifactError):
        admit(folder)


class Begun(Exception):
    """The command went on to start Ray."""


@pytest.fixture
def ray_is_near(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def begun(*given: object, **named: object) -> None:
        raise Begun

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("serve.launcher.session", begun)


@pytest.mark.usefixtures("ray_is_near")
def test_the_command_refuses_before_ray_starts(int8: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["serve", str(judged(int8, REFUSED))])
    assert stopped.value.code == 1
    assert "refused" in capfd.readouterr().err


@pytest.mark.usefixtures("ray_is_near")
@pytest.mark.parametrize("arguments", [["--ungated"], ["--set", "serve.ungated=true"]])
def test_the_command_serves_what_it_is_told_to(int8: Path, arguments: list[str]) -> None:
    with pytest.raises(Begun):
        cli.main(["serve", str(judged(int8, REFUSED)), *arguments])
    with pytest.raises(Begun):
        cli.main(["serve", str(judged(int8, PROMOTED))])
