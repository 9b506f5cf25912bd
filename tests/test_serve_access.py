"""An address that others can reach is refused before anything starts, unless it was asked for in so many words."""

from pathlib import Path

import pytest

from rtrain import config
from rtrain.cli import app as cli
from rtrain.config import Serve
from rtrain.errors import ConfigError
from serve.door import access, keys
from tests.certificates import make_certificate
from tests.tiny import make_artifact

OPEN = ("0.0.0.0", "::", "192.0.2.7", "example.org", "")
REFUSED = (
    "serve.host={}: whoever reaches this address may ask the model, without a key; "
    "make keys (rtrain serve keys add FILE NAME) and write --keys FILE, or listen on 127.0.0.1, or write --insecure"
)
UNENCRYPTED = "{} go over the network unencrypted; set serve.tls_cert and serve.tls_key, or let a proxy encrypt them"


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
    expected = f"insecure: whoever reaches {host} may ask the model without a key"
    assert said == [expected, UNENCRYPTED.format("texts")]


@pytest.mark.parametrize("host", OPEN)
def test_an_open_address_with_keys_is_served_and_one_without_encryption_is_told(host: str, tmp_path: Path) -> None:
    path, said = tmp_path / "keys.json", list[str]()
    keys.add(path, "shop")
    access.check(Serve(host=host, keys=str(path)), said.append)
    assert said == [UNENCRYPTED.format("keys and texts")]
    certificate, key = make_certificate(tmp_path)
    access.check(Serve(host=host, keys=str(path), tls_cert=certificate, tls_key=key), said.append)
    assert len(said) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_files_that_are_no_good_are_refused_together_with_the_reason(host: str, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    other = make_certificate(tmp_path / "other")[1]
    nothing = str(tmp_path / "nothing.json")
    for pair, reason in (
        ((certificate, other), "it cannot be used: [X509: KEY_VALUES_MISMATCH]"),
        ((key, key), "it cannot be used: "),
        ((certificate, nothing), "it cannot be used: No such file or directory; both are files in PEM"),
        ((certificate, make_certificate(tmp_path / "locked", "pass")[1]), "it cannot be used: "),
    ):
        with pytest.raises(ConfigError) as caught:
            access.check(Serve(host=host, keys=nothing, tls_cert=pair[0], tls_key=pair[1]))
        wrong_keys, wrong_pair = map(str, caught.value.problems)
        assert f"there is no file of keys {nothing}; make one: rtrain serve keys add" in wrong_keys
        assert reason in wrong_pair
    said: list[str] = []
    access.check(Serve(tls_cert=certificate, tls_key=key), said.append)
    assert said == []


@pytest.mark.parametrize(("given", "lacking"), [("tls_cert", "tls_key"), ("tls_key", "tls_cert")])
def test_a_certificate_and_its_key_go_together(given: str, lacking: str) -> None:
    with pytest.raises(ConfigError, match=rf"serve\.{given}=x: TLS needs .*; write serve\.{lacking} too"):
        config.load("intent", {f"serve.{given}": "x"})


def test_paths_stay_right_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = access.absolute(Serve(keys="keys.json", tls_cert="../cert.pem", tls_key="/key.pem", access_log="asked.log"))
    assert [found.keys, found.tls_cert, found.tls_key, found.access_log] == [
        f"{tmp_path}/keys.json",
        f"{tmp_path}/../cert.pem",
        "/key.pem",
        f"{tmp_path}/asked.log",
    ]
    for plain in (Serve(), Serve(access_log="-")):
        assert access.absolute(plain) == plain


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere" / "asked.log", tmp_path):
        with pytest.raises(
            ConfigError, match=r"serve\.access_log=.*: no line can be written to it: .*; name a file in"
        ):
            access.check(Serve(access_log=str(path)))
    for good in (str(tmp_path / "asked.log"), "-"):
        access.check(Serve(access_log=good))
    assert (tmp_path / "asked.log").read_bytes() == b""


def test_the_command_shown_asks_for_what_the_endpoint_asks_for() -> None:
    command = "curl -s http://a/predict -H 'content-type: application/json' -d '{\"inputs\": \"Where is my parcel?\"}'"
    assert access.curl("http://a", Serve()) == command
    assert "-H 'authorization: Bearer KEY' -H 'content-type" in access.curl("http://a", Serve(keys="keys.json"))


def test_grpc_is_refused_where_its_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    access.check(Serve(grpc_port=9000))
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

    def begun(*given: object, **named: object) -> None:
        raise Begun

    monkeypatch.setattr("serve.starting.session", begun)
    with pytest.raises(Begun):
        cli.main(["serve", str(folder), "--host", "0.0.0.0", *arguments])
    assert capfd.readouterr().err.startswith("insecure: whoever reaches 0.0.0.0 may ask the model without a key\n")


def test_keys_go_on_without_the_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make_artifact(tmp_path / "artifact")
    keys.add(Path("keys.json"), "shop")

    def begun(*given: object, **named: object) -> None:
        raise Begun

    monkeypatch.setattr("serve.starting.session", begun)
    with pytest.raises(Begun):
        cli.main(["serve", str(folder), "--host", "0.0.0.0", "--keys", "keys.json"])
    assert capfd.readouterr().err == UNENCRYPTED.format("keys and texts") + "\n"
