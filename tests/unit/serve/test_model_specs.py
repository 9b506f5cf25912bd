"""Names of artifacts: all errors are reported at once, before anything starts."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import rtrain.inference.artifact
from rtrain.config import ServeConfig
from serve import model_specs
from tests.support.refusals import refused_with
from tests.support.tiny import make_artifact
from tests.unit.cli.test_cli import Cli, run

assert run  # a fixture


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("artifact"))


def student(artifact: Path, folder: Path) -> Path:
    """A compressed artifact without a gate verdict."""
    shutil.copytree(artifact, folder)
    model_artifact = rtrain.inference.artifact.read_artifact(folder)
    smaller = replace(model_artifact, lineage={"teacher": "another"}, name=folder.name)
    rtrain.inference.artifact.write_artifact(
        folder, smaller, lambda *_: [row["logits"] for row in model_artifact.golden]
    )
    return folder


def test_a_model_has_its_artifact_s_name_or_the_one_that_is_given(artifact: Path) -> None:
    assert model_specs.parse_model_specs([str(artifact)], Path) == {"tiny": artifact}
    folders = model_specs.parse_model_specs([str(artifact), f"mood.v2={artifact}"], Path)
    assert folders == {"tiny": artifact, "mood.v2": artifact}
    address = "s3://bucket/a=b"  # no name, although it has the sign
    assert model_specs.parse_model_specs([address], lambda word: artifact if word == address else Path("/nowhere")) == {
        "tiny": artifact
    }


def test_a_folder_with_the_sign_in_its_name_is_a_folder(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(artifact.parent)
    Path("a=b").symlink_to(artifact)
    assert model_specs.parse_model_specs(["a=b"], Path) == {"tiny": Path("a=b")}


def test_all_that_is_wrong_with_the_names_is_told_at_once(artifact: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(artifact, tmp_path / "other"))
    with refused_with("already_exists") as refused:
        model_specs.parse_model_specs([str(artifact), str(other), f"a b={artifact}", str(tmp_path / "nothing")], Path)
    assert len(str(refused.value).splitlines()) == 3


def test_an_artifact_s_own_name_that_no_path_can_have_needs_another(artifact: Path, tmp_path: Path) -> None:
    odd = Path(shutil.copytree(artifact, tmp_path / "odd"))
    model_artifact = rtrain.inference.artifact.read_artifact(odd)
    rtrain.inference.artifact.write_artifact(
        odd, replace(model_artifact, name="a/b"), lambda *_: [row["logits"] for row in model_artifact.golden]
    )
    assert model_specs.parse_model_specs([str(odd)], Path) == {"a/b": odd}
    with refused_with("invalid_name"):
        model_specs.parse_model_specs([str(odd), str(artifact)], Path)


def test_the_gate_refuses_each_that_it_has_not_let_through(artifact: Path, tmp_path: Path) -> None:
    folders = {name: student(artifact, tmp_path / name) for name in ("first", "second")}
    model_specs.check_artifacts({"tiny": artifact}, ServeConfig())
    with refused_with("not_gated") as refused:
        model_specs.check_artifacts({"tiny": artifact, **folders}, ServeConfig())
    lines = str(refused.value).splitlines()
    assert [str(folder) in line for folder, line in zip(folders.values(), lines, strict=True)] == [True, True]
    model_specs.check_artifacts({"tiny": artifact, **folders}, ServeConfig(ungated=True))


def test_the_command_refuses_them_before_ray_starts(artifact: Path, tmp_path: Path, run: Cli) -> None:
    first = student(artifact, tmp_path / "first")
    for words in ((artifact,), (first,), ("--model", "tiny"), (first, "--update")):
        assert run("serve", str(artifact), *map(str, words))[0] == 1
    code, out, _ = run("serve", str(artifact), f"mood={artifact}", "--print-config")
    assert (code, f"mood: {artifact}" in out) == (0, True)
