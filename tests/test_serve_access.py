"""An address that others can reach is refused before anything starts, unless it was asked for in so many words."""

from pathlib import Path

import pytest

from rtrain import config
from rtrain.cli import app as cli
from rtrain.config import Serve
from rtrain.core.errors import ConfigError
from serve.auth import api_keys, preflight
from tests.certificates import make_certificate
from tests.refusals import refused_with
from tests.tiny import make_artifact

OPEN = ("0.0.0.0", "::", "192.0.2.7", "example.org", "")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "localhost", "::1"])
def test_loopback_needs_no_word(host: str) -> None:
    said: list[str] = []
    preflight.check(Serve(host=host), said.append)
    assert said == []


@pytest.mark.parametrize("host", OPEN)
def test_an_open_address_is_refused_or_told(host: str) -> None:
    with refused_with("open_to_others"):
        preflight.check(Serve(host=host))
    said: list[str] = []
    preflight.check(Serve(host=host, insecure=True), said.append)
    assert len(said) == 2, "without a key, and unencrypted"


@pytest.mark.parametrize("host", OPEN)
def test_an_open_address_with_keys_is_served_and_one_without_encryption_is_told(host: str, tmp_path: Path) -> None:
    path, said = tmp_path / "keys.json", list[str]()
    api_keys.add(path, "shop")
    preflight.check(Serve(host=host, keys=str(path)), said.append)
    assert len(said) == 1, "unencrypted"
    certificate, key = make_certificate(tmp_path)
    preflight.check(Serve(host=host, keys=str(path), tls_cert=certificate, tls_key=key), said.append)
    assert len(said) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_files_that_are_no_good_are_refused_together_with_the_reason(host: str, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    other = make_certificate(tmp_path / "other")[1]
    nothing = str(tmp_path / "nothing.json")
    locked = make_certificate(tmp_path / "locked", "pass")[1]
    for pair in ((certificate, other), (key, key), (certificate, nothing), (certificate, locked)):
        with pytest.raises(ConfigError) as caught:
            preflight.check(Serve(host=host, keys=nothing, tls_cert=pair[0], tls_key=pair[1]))
        assert [one.code for one in caught.value.problems] == ["unreadable_keys", "unusable_certificate"]
    said: list[str] = []
    preflight.check(Serve(tls_cert=certificate, tls_key=key), said.append)
    assert said == []


@pytest.mark.parametrize("given", ["tls_cert", "tls_key"])
def test_a_certificate_and_its_key_go_together(given: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config.load("intent", {f"serve.{given}": "x"})
    assert [one.field for one in refused.value.problems] == [f"serve.{given}"]


def test_paths_stay_right_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = preflight.absolute(
        Serve(keys="keys.json", tls_cert="../cert.pem", tls_key="/key.pem", access_log="asked.log")
    )
    assert [found.keys, found.tls_cert, found.tls_key, found.access_log] == [
        f"{tmp_path}/keys.json",
        f"{tmp_path}/../cert.pem",
        "/key.pem",
        f"{tmp_path}/asked.log",
    ]
    for plain in (Serve(), Serve(access_log="-")):
        assert preflight.absolute(plain) == plain


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere" / "asked.log", tmp_path):
        with refused_with("unwritable"):
            preflight.check(Serve(access_log=str(path)))
    for good in (str(tmp_path / "asked.log"), "-"):
        preflight.check(Serve(access_log=good))
    assert (tmp_path / "asked.log").read_bytes() == b""


def test_the_command_shown_asks_for_what_the_endpoint_asks_for() -> None:
    command = "curl -s http://a/predict -H 'content-type: application/json' -d '{\"inputs\": \"Where is my parcel?\"}'"
    assert preflight.curl("http://a", Serve()) == command
    assert "-H 'authorization: Bearer KEY' -H 'content-type" in preflight.curl("http://a", Serve(keys="keys.json"))


def test_grpc_is_refused_where_its_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    preflight.check(Serve(grpc_port=9000))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused_with("not_installed"):
        preflight.check(Serve(grpc_port=9000))
    preflight.check(Serve())


@pytest.mark.parametrize("arguments", [[], ["--insecure"], ["--keys", "keys.json"]])
def test_the_command_starts_ray_only_where_the_address_may_be_open(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make_artifact(tmp_path / "artifact")
    api_keys.add(Path("keys.json"), "shop")

    class Begun(Exception):
        """The command went on to start Ray."""

    def begun(*given: object, **named: object) -> None:
        raise Begun

    monkeypatch.setattr("serve.launcher.session", begun)
    with pytest.raises(Begun if arguments else SystemExit) as stopped:
        cli.main(["serve", str(folder), "--host", "0.0.0.0", *arguments])
    assert arguments or getattr(stopped.value, "code", None) == 2
    assert capfd.readouterr().err
