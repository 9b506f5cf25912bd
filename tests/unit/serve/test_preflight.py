"""An address that others can reach is refused before anything starts, unless it was asked for in so many words."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import rtrain.inference.artifact
from rtrain import config
from rtrain.cli import app as cli
from rtrain.config import ServeConfig
from rtrain.core.errors import ConfigError
from serve.auth import api_keys, preflight
from tests.support.certificates import make_certificate
from tests.support.refusals import refused_with
from tests.support.tiny import make_artifact
from tests.unit.cli.test_cli import Cli, run

OPEN = ("0.0.0.0", "::", "192.0.2.7", "example.org", "")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "localhost", "::1"])
def test_loopback_needs_no_word(host: str) -> None:
    messages: list[str] = []
    preflight.check_access(ServeConfig(host=host), messages.append)
    assert messages == []


@pytest.mark.parametrize("host", OPEN)
def test_an_open_address_is_refused_or_told(host: str) -> None:
    with refused_with("open_to_others"):
        preflight.check_access(ServeConfig(host=host))
    messages: list[str] = []
    preflight.check_access(ServeConfig(host=host, insecure=True), messages.append)
    assert len(messages) == 2, "without a key, and unencrypted"


@pytest.mark.parametrize("host", OPEN)
def test_an_open_address_with_keys_is_served_and_one_without_encryption_is_told(host: str, tmp_path: Path) -> None:
    path, messages = tmp_path / "keys.json", list[str]()
    api_keys.add_key(path, "shop")
    preflight.check_access(ServeConfig(host=host, keys=str(path)), messages.append)
    assert len(messages) == 1, "unencrypted"
    certificate, key = make_certificate(tmp_path)
    preflight.check_access(ServeConfig(host=host, keys=str(path), tls_cert=certificate, tls_key=key), messages.append)
    assert len(messages) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_files_that_are_no_good_are_refused_together_with_the_reason(host: str, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    other = make_certificate(tmp_path / "other")[1]
    nothing = str(tmp_path / "nothing.json")
    locked = make_certificate(tmp_path / "locked", "pass")[1]
    for pair in ((certificate, other), (key, key), (certificate, nothing), (certificate, locked)):
        with pytest.raises(ConfigError) as caught:
            preflight.check_access(ServeConfig(host=host, keys=nothing, tls_cert=pair[0], tls_key=pair[1]))
        assert [problem.code for problem in caught.value.problems] == ["unreadable_keys", "unusable_certificate"]
    messages: list[str] = []
    preflight.check_access(ServeConfig(tls_cert=certificate, tls_key=key), messages.append)
    assert messages == []


@pytest.mark.parametrize("setting", ["tls_cert", "tls_key"])
def test_a_certificate_and_its_key_go_together(setting: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config.load_config("intent", {f"serve.{setting}": "x"})
    assert [problem.field for problem in refused.value.problems] == [f"serve.{setting}"]


def test_paths_stay_right_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = preflight.resolve_paths(
        ServeConfig(keys="keys.json", tls_cert="../cert.pem", tls_key="/key.pem", access_log="asked.log")
    )
    assert [settings.keys, settings.tls_cert, settings.tls_key, settings.access_log] == [
        f"{tmp_path}/keys.json",
        f"{tmp_path}/../cert.pem",
        "/key.pem",
        f"{tmp_path}/asked.log",
    ]
    for plain in (ServeConfig(), ServeConfig(access_log="-")):
        assert preflight.resolve_paths(plain) == plain


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere" / "asked.log", tmp_path):
        with refused_with("unwritable"):
            preflight.check_access(ServeConfig(access_log=str(path)))
    for good in (str(tmp_path / "asked.log"), "-"):
        preflight.check_access(ServeConfig(access_log=good))
    assert (tmp_path / "asked.log").read_bytes() == b""


def test_the_command_shown_asks_for_what_the_endpoint_asks_for() -> None:
    command = "curl -s http://a/predict -H 'content-type: application/json' -d '{\"inputs\": \"Where is my parcel?\"}'"
    assert preflight.curl_command("http://a", ServeConfig()) == command
    assert "-H 'authorization: Bearer KEY' -H 'content-type" in preflight.curl_command(
        "http://a", ServeConfig(keys="keys.json")
    )


def test_grpc_is_refused_where_its_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    preflight.check_access(ServeConfig(grpc_port=9000))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused_with("not_installed"):
        preflight.check_access(ServeConfig(grpc_port=9000))
    preflight.check_access(ServeConfig())


@pytest.mark.parametrize("arguments", [[], ["--insecure"], ["--keys", "keys.json"]])
def test_the_command_starts_ray_only_where_the_address_may_be_open(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make_artifact(tmp_path / "artifact")
    api_keys.add_key(Path("keys.json"), "shop")

    class SessionStarted(Exception):
        """The command reached the start of Ray."""

    def start_session(*arguments: object, **keywords: object) -> None:
        raise SessionStarted

    monkeypatch.setattr("serve.launcher.session", start_session)
    with pytest.raises(SessionStarted if arguments else SystemExit) as stopped:
        cli.main(["serve", str(folder), "--host", "0.0.0.0", *arguments])
    assert arguments or getattr(stopped.value, "code", None) == 2
    assert capfd.readouterr().err


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
    assert preflight.parse_model_specs([str(artifact)], Path) == {"tiny": artifact}
    folders = preflight.parse_model_specs([str(artifact), f"mood.v2={artifact}"], Path)
    assert folders == {"tiny": artifact, "mood.v2": artifact}
    address = "s3://bucket/a=b"  # no name, although it has the sign
    assert preflight.parse_model_specs([address], lambda word: artifact if word == address else Path("/nowhere")) == {
        "tiny": artifact
    }


def test_a_folder_with_the_sign_in_its_name_is_a_folder(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(artifact.parent)
    Path("a=b").symlink_to(artifact)
    assert preflight.parse_model_specs(["a=b"], Path) == {"tiny": Path("a=b")}


def test_all_that_is_wrong_with_the_names_is_told_at_once(artifact: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(artifact, tmp_path / "other"))
    with refused_with("already_exists") as refused:
        preflight.parse_model_specs([str(artifact), str(other), f"a b={artifact}", str(tmp_path / "nothing")], Path)
    assert len(str(refused.value).splitlines()) == 3


def test_an_artifact_s_own_name_that_no_path_can_have_needs_another(artifact: Path, tmp_path: Path) -> None:
    odd = Path(shutil.copytree(artifact, tmp_path / "odd"))
    model_artifact = rtrain.inference.artifact.read_artifact(odd)
    rtrain.inference.artifact.write_artifact(
        odd, replace(model_artifact, name="a/b"), lambda *_: [row["logits"] for row in model_artifact.golden]
    )
    assert preflight.parse_model_specs([str(odd)], Path) == {"a/b": odd}
    with refused_with("invalid_name"):
        preflight.parse_model_specs([str(odd), str(artifact)], Path)


def test_the_gate_refuses_each_that_it_has_not_let_through(artifact: Path, tmp_path: Path) -> None:
    folders = {name: student(artifact, tmp_path / name) for name in ("first", "second")}
    preflight.check_artifacts({"tiny": artifact}, ServeConfig())
    with refused_with("not_gated") as refused:
        preflight.check_artifacts({"tiny": artifact, **folders}, ServeConfig())
    lines = str(refused.value).splitlines()
    assert [str(folder) in line for folder, line in zip(folders.values(), lines, strict=True)] == [True, True]
    preflight.check_artifacts({"tiny": artifact, **folders}, ServeConfig(ungated=True))


def test_the_command_refuses_them_before_ray_starts(artifact: Path, tmp_path: Path, run: Cli) -> None:
    first = student(artifact, tmp_path / "first")
    for words in ((artifact,), (first,), ("--model", "tiny"), (first, "--update")):
        assert run("serve", str(artifact), *map(str, words))[0] == 1
    code, out, _ = run("serve", str(artifact), f"mood={artifact}", "--print-config")
    assert (code, f"mood: {artifact}" in out) == (0, True)
