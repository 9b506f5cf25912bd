"""An address that others can reach is refused before anything starts, unless it was asked for in so many words."""

from pathlib import Path

import pytest

from rtrain.cli import app as cli
from rtrain.config import Serve
from rtrain.errors import ConfigError
from serve import access
from tests.tiny import make_artifact

OPEN = ("0.0.0.0", "::", "192.0.2.7", "example.org", "")
REFUSED = (
    "serve.host={}: whoever reaches this address may ask the model, without a key; "
    "listen on 127.0.0.1, behind a proxy that asks for one, or write --insecure"
)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "localhost", "::1"])
def test_loopback_needs_no_word(host: str) -> None:
    said: list[str] = []
    access.check(Serve(host=host), said.append)
    assert said == []


@pytest.mark.parametrize("host", OPEN)
def test_an_open_address_is_refused_or_told(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        access.check(Serve(host=host))
    assert str(caught.value) == REFUSED.format(host)
    said: list[str] = []
    access.check(Serve(host=host, insecure=True), said.append)
    expected = f"insecure: whoever reaches {host} may ask the model, unencrypted and without a key; keys come later"
    assert said == [expected]


def test_grpc_is_refused_where_others_could_ask_and_where_its_library_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    access.check(Serve(grpc_port=9000))
    access.check(Serve(grpc_port=9000, host="0.0.0.0", insecure=True))
    refused = "serve.grpc_port=9000: gRPC asks nobody for a key, and others can reach this address; listen on 127.0.0.1"
    with pytest.raises(ConfigError, match=refused):
        access.check(Serve(grpc_port=9000, host="0.0.0.0"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs tritonclient, which is not installed; pip install 'rtrain\[grpc\]'"):
        access.check(Serve(grpc_port=9000))
    access.check(Serve())


@pytest.mark.parametrize("arguments", [["--host", "0.0.0.0"], ["--set", "serve.host=192.0.2.7"]])
def test_the_command_is_refused_before_ray_starts(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make_artifact(tmp_path / "artifact")
    monkeypatch.setattr("rtrain.cluster.session.session", lambda *given: pytest.fail("Ray was started"))
    with pytest.raises(SystemExit) as stopped:
        cli.main(["serve", str(folder), *arguments])
    assert stopped.value.code == 2
    assert capfd.readouterr().err == f"rtrain: {REFUSED.format(arguments[-1].removeprefix('serve.host='))}\n"


class Begun(Exception):
    """The command went on to start Ray."""


@pytest.mark.parametrize("arguments", [["--insecure"], ["--set", "serve.insecure=true"]])
def test_insecure_goes_on_and_says_what_it_does(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make_artifact(tmp_path / "artifact")

    def begun(*given: object) -> None:
        raise Begun

    monkeypatch.setattr("rtrain.cluster.session.session", begun)
    with pytest.raises(Begun):
        cli.main(["serve", str(folder), "--host", "0.0.0.0", *arguments])
    assert capfd.readouterr().err.startswith("insecure: whoever reaches 0.0.0.0 may ask the model, unencrypted")
