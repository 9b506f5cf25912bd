"""The deployable folder: complete or refused by name, and one version for what answers alike."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rtrain.core import manifest
from rtrain.inference import artifact
from rtrain.inference.artifact import GOLDEN_INPUTS, Artifact
from tests.support.refusing import refused
from tests.support.tiny import MAX_TOKENS, NAME, make_artifact


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("made") / "artifact")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to do harm to."""
    return Path(shutil.copytree(whole, tmp_path / "artifact"))


def change(folder: Path, **fields: Any) -> None:
    """Edit artifact.json, with a manifest that fits."""
    path = folder / artifact.FILE_NAME
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8")
    manifest.write_manifest(folder)


def answer(folder: Path, made: Artifact) -> list[list[float]]:
    """As though a model had answered."""
    assert made.version
    return [[float(number), 0.5] for number in range(len(GOLDEN_INPUTS))]


def model_files(folder: Path, weights: bytes = b"weights", tokenizer: str = "{}") -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "tokenizer.json").write_text(tokenizer)
    return folder


def described(**fields: Any) -> Artifact:
    plain = Artifact(name="n", task="classification", labels=("a", "b"), max_tokens=8, engine="torch")
    return replace(plain, **fields)


# ------------------------------------------------------------------------------------------------------ write and read


def test_an_artefact_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = model_files(tmp_path / "a")
    made = artifact.write_artifact(
        folder, described(metrics={"test": {"accuracy": 0.5}}, lineage={"run": "größe"}), answer
    )
    assert artifact.read_artifact(folder) == made
    assert made.golden == tuple(
        {"inputs": text, "logits": [float(number), 0.5]} for number, text in enumerate(GOLDEN_INPUTS)
    )
    document = json.loads((folder / "artifact.json").read_text(encoding="utf-8"))
    assert list(document) == [
        "name", "task", "labels", "max_tokens", "engine", "facts", "data", "metrics", "lineage", "gate",
        "drift_baseline", "golden", "version", "schema_version",
    ]  # fmt: skip
    recorded = json.loads((folder / manifest.FILE_NAME).read_text())["files"]
    assert set(recorded) == {"artifact.json", "model.safetensors", "tokenizer.json"}


def test_a_made_artefact_is_a_transformers_folder(whole: Path) -> None:
    import transformers

    made = artifact.read_artifact(whole)
    assert (made.name, made.labels, made.max_tokens, made.engine) == (NAME, ("a", "b", "c"), MAX_TOKENS, "torch")
    assert [row["inputs"] for row in made.golden] == list(GOLDEN_INPUTS)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(whole)
    assert model.config.num_labels == 3


def test_whoever_may_read_one_file_may_read_all(whole: Path) -> None:
    """An endpoint in a container often has another user than the training had."""
    modes = {path.name: path.stat().st_mode & 0o777 for path in whole.iterdir()}
    assert "model.safetensors" in modes
    assert set(modes.values()) == {modes["artifact.json"]}, modes


def test_the_version_is_over_what_answers(tmp_path: Path) -> None:
    def version(name: str, made: Artifact, **files: Any) -> str:
        return artifact.write_artifact(model_files(tmp_path / name, **files), made, answer).version

    first = version("first", described())
    assert len(first) == 12
    assert version("copy", described(name="other", metrics={"x": 1}, lineage={"y": 2})) == first
    others = {
        version("labels", described(labels=("a", "c"))),
        version("turned", described(labels=("b", "a"))),
        version("weights", described(), weights=b"other"),
        version("tokenizer", described(), tokenizer="{ }"),
    }
    assert len(others | {first}) == 5


# ------------------------------------------------------------------------------------------------------------- refusal


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def leave_out(folder: Path, name: str) -> None:
    """Remove a file from the manifest."""
    document = json.loads((folder / manifest.FILE_NAME).read_text())
    del document["files"][name]
    (folder / manifest.FILE_NAME).write_text(json.dumps(document))


def add_file(folder: Path, name: str) -> None:
    (folder / name).touch()


def write_manifest_text(folder: Path, text: str) -> None:
    (folder / manifest.FILE_NAME).write_text(text)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": lambda folder: (folder / "tokenizer.json").unlink(),
    "truncated": lambda folder: (folder / "config.json").write_text("{}"),
    "weights": lambda folder: flip(folder / "model.safetensors"),
    "answers": lambda folder: flip(folder / "artifact.json"),
    "no manifest": lambda folder: (folder / manifest.FILE_NAME).unlink(),
    # An engine would take it in place of a recorded one that is compressed.
    **{
        f"unrecorded {name}": partial(add_file, name=name)
        for name in ("model.int8.bin", "model.int8.onnx.gz", "model.int8.xml")
    },
    **{
        f"manifest without {name}": partial(leave_out, name=name)
        for name in ("artifact.json", "config.json", "tokenizer.json", "model.safetensors")
    },
    **{
        f"manifest {text[:6]}": partial(write_manifest_text, text=text)
        for text in ("[" * 200_000, '{"files": ["a"]}', "[]")
    },
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_artefact_is_refused(folder: Path, name: str) -> None:
    DAMAGE[name](folder)
    with refused("damaged_artifact"):
        artifact.read_artifact(folder)


def test_a_file_that_no_engine_takes_is_no_damage(folder: Path) -> None:
    (folder / "notes.txt").touch()
    assert artifact.read_artifact(folder).name == NAME


@pytest.mark.parametrize("fields", [{"schema_version": 1}, {"kind": "of a later rtrain"}, {"labels": 3}])
def test_an_artefact_of_another_version_is_refused(folder: Path, fields: dict[str, Any]) -> None:
    change(folder, **fields)
    with refused("other_version"):
        artifact.read_artifact(folder)


def test_any_other_folder_is_no_artefact(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with refused("not_an_artifact"):
            artifact.read_artifact(path)


# ------------------------------------------------------------------------------------------------------------- the rest


def test_an_artefact_is_published_whole_and_replaces_the_older(tmp_path: Path) -> None:
    first, second = model_files(tmp_path / ".one"), model_files(tmp_path / ".two", weights=b"newer")
    (first / "stray").touch()
    final = tmp_path / "artifact"
    assert artifact.publish_artifact(first, final) == final
    assert artifact.publish_artifact(second, final) == final
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]
    assert sorted(path.name for path in final.iterdir()) == ["model.safetensors", "tokenizer.json"]
    assert (final / "model.safetensors").read_bytes() == b"newer"


def test_what_a_link_names_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model_files(tmp_path / "v7", weights=b"old"))
    for weights in (b"new", b"newer"):
        artifact.publish_artifact(model_files(tmp_path / ".draft", weights=weights), tmp_path / "link")
        assert (tmp_path / "v7" / "model.safetensors").read_bytes() == weights
        assert (tmp_path / "link").readlink() == tmp_path / "v7"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "v7"]


def test_publishing_after_a_crash_in_between(tmp_path: Path) -> None:
    model_files(tmp_path / ".artifact.old", weights=b"left over")
    model_files(tmp_path / "artifact", weights=b"old")
    artifact.publish_artifact(model_files(tmp_path / ".new", weights=b"new"), tmp_path / "artifact")
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]
    assert (tmp_path / "artifact" / "model.safetensors").read_bytes() == b"new"
