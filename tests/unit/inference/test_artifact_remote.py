"""Artefacts by address: from an HTTP server and an S3 server on this machine, into a cache of whole ones."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from rtrain.cli import app as cli
from rtrain.core import manifest
from rtrain.core.errors import UserError
from rtrain.inference import artifact
from rtrain.inference.artifact import ArtifactError
from tests.conftest import write_rows
from tests.serve.test_deployment import openvino_artifact
from tests.support.tiny import CORPUS, make_artifact
from tests.unit.checkpoint.test_remote_copy import s3  # noqa: F401
from tests.unit.cli.test_cli import Begun, no_endpoint  # noqa: F401


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("made") / "artifact")


def left(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir()) if root.is_dir() else []


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("s3://bucket/a#sha256=12", "invalid_digest"),
        ("https://example.com/a?signature=abc", "unknown_scheme"),
        ("nothing://me:abc@bucket/artifact?key=abc", "unreachable"),
    ],
)
def test_an_address_that_gives_nothing_is_refused_without_its_secrets(tmp_path: Path, address: str, code: str) -> None:
    with pytest.raises(UserError) as refused:
        artifact.fetch_artifact(address, tmp_path)
    assert (refused.value.code, "abc" in str(refused.value)) == (code, False)
    assert left(tmp_path) == []


# ------------------------------------------------------------------------------------------------------------- folders


@pytest.fixture(params=["s3", "file"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return (tmp_path / "mounted").as_uri()
    return f"{request.getfixturevalue('s3')}/{tmp_path.name}"


def put(folder: Path, url: str) -> None:
    import fsspec

    files, place = fsspec.core.url_to_fs(url)
    for path in folder.rglob("*"):
        if path.is_file():
            target = f"{place}/{path.relative_to(folder).as_posix()}"
            files.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
            files.put_file(str(path), target)


def test_a_folder_is_fetched_anew_where_its_manifest_has_changed(made: Path, storage: str, tmp_path: Path) -> None:
    root, said = tmp_path / "cache", list[str]()
    put(made, f"{storage}/run/artifact")
    first = artifact.fetch_artifact(f"{storage}/run/artifact", root, said.append)
    assert artifact.fetch_artifact(f"{storage}/run", root, said.append) == first  # the run that holds it
    assert artifact.read_artifact(first) == artifact.read_artifact(made)
    assert len(said) == 1
    digest = hashlib.sha256((made / manifest.FILE_NAME).read_bytes()).hexdigest()
    assert artifact.fetch_artifact(f"{storage}/run#sha256={digest}", root) == first

    other = make_artifact(tmp_path / "other", seed=1)
    put(other, f"{storage}/run/artifact")
    with pytest.raises(ArtifactError) as refused:
        artifact.fetch_artifact(f"{storage}/run#sha256={digest}", root)
    assert refused.value.code == "other_digest"
    assert artifact.read_artifact(artifact.fetch_artifact(f"{storage}/run", root)) == artifact.read_artifact(other)
    assert len(left(root)) == 2


def test_a_damaged_copy_is_fetched_anew(made: Path, storage: str, tmp_path: Path) -> None:
    put(made, f"{storage}/artifact")
    found = artifact.fetch_artifact(f"{storage}/artifact", tmp_path / "cache")
    weights = found / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert artifact.fetch_artifact(f"{storage}/artifact", tmp_path / "cache") == found
    assert manifest.find_damage(found) is None


def test_a_folder_that_is_none_or_torn_leaves_nothing(made: Path, storage: str, tmp_path: Path) -> None:
    root, torn = tmp_path / "cache", shutil.copytree(made, tmp_path / "torn")
    (torn / "tokenizer.json").write_text("{}")
    put(torn, f"{storage}/torn")
    document = json.loads((torn / manifest.FILE_NAME).read_text())
    document["files"]["../up"] = document["files"]["config.json"]
    for name, text in (("evil", json.dumps(document)), ("deep", "[" * 200_000), ("list", '{"files": [1, 2]}')):
        (torn / manifest.FILE_NAME).write_text(text)
        put(torn, f"{storage}/{name}")
    codes = {"nothing": "not_an_artifact", "torn": "damaged_artifact", "evil": "unsafe_path"}
    for name, code in (codes | dict.fromkeys(("deep", "list"), "unreadable")).items():
        with pytest.raises(ArtifactError) as refused:
            artifact.fetch_artifact(f"{storage}/{name}", root)
        assert refused.value.code == code
    assert left(root) == []


# ----------------------------------------------------------------------------------------------------------- the verbs


def test_verbs_take_an_address(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cli.main(["predict", str(made), "where is my parcel"])
    expected = capsys.readouterr().out
    cli.main(["predict", made.as_uri(), "where is my parcel"])
    assert capsys.readouterr().out == expected
    cli.main(["inspect", made.as_uri(), "--json"])
    assert json.loads(capsys.readouterr().out)["version"] == artifact.read_artifact(made).version


@pytest.mark.usefixtures("no_endpoint")
def test_what_was_fetched_is_served_and_its_verdict_stays_as_it_was_made(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    address = make_artifact(tmp_path / "other", seed=1).as_uri()

    with pytest.raises(Begun):
        cli.main(["serve", address])
    rows = write_rows(tmp_path / "rows.csv", [(text, "abc"[at % 3]) for at, text in enumerate(CORPUS)])
    words = ["--baseline", str(made), "--data", str(rows), "--set", "gate.latency_seconds=0.5"]
    with pytest.raises(SystemExit) as held:  # on so few rows
        cli.main(["gate", address, *words])
    assert held.value.code == 1
    assert "the verdict is not written" in capsys.readouterr().out
    folder = artifact.fetch_artifact(address)
    assert artifact.read_artifact(folder).gate is None


@pytest.mark.usefixtures("no_endpoint")
def test_a_smaller_one_in_storage_is_served_by_its_verdict_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"{request.getfixturevalue('s3')}/{tmp_path.name}/int8"
    folder = openvino_artifact(tmp_path / "int8")
    put(folder, url)
    with pytest.raises(SystemExit) as refused:
        cli.main(["serve", url])
    assert refused.value.code == 1
    said = "no gate has looked at it; it is a copy: gate it where it is made, and publish it with its verdict"
    assert said in capsys.readouterr().err
    with pytest.raises(Begun):
        cli.main(["serve", url, "--ungated"])
    cli.main(["inspect", url])
    assert "gate: not gated; serve requires a verdict" in capsys.readouterr().out
    cli.main(["predict", url, "where is my parcel"])  # answers, as any artefact does: nobody depends on it yet

    artifact.write_gate_verdict(
        folder, {"version": artifact.read_artifact(folder).version, "verdict": "refuse", "reasons": ["too slow"]}
    )
    put(folder, url)
    with pytest.raises(SystemExit):
        cli.main(["serve", url])
    assert "was refused by the gate: too slow" in capsys.readouterr().err


def test_a_cache_that_cannot_be_made_is_told_with_its_setting(made: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as refused:
        artifact.fetch_artifact(made.as_uri(), tmp_path / "file" / "artifacts")
    assert refused.value.code == "not_writable"
