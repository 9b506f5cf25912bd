"""An address that others can reach is refused before anything starts, unless it was asked for in so many words."""

from pathlib import Path

import pytest

from rtrain import config
from rtrain.cli import app as cli
from rtrain.config import ServeConfig
from rtrain.core.errors import ConfigError
from serve.auth import api_keys, preflight
from tests.support.certificates import make_certificate
from tests.support.refusals import refused_with
from tests.support.tiny import make_artifact

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
