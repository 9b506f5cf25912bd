"""`rtrain serve keys`: a key is made, shown once, listed, revoked. `rtrain serve ARTIFACT` is the verb that it was."""

import json
from pathlib import Path

import pytest

from rtrain.cli import app as cli
from serve.auth import api_keys
from tests.support.tiny import make_artifact
from tests.unit.cli import test_cli
from tests.unit.cli.test_cli import Begun, Cli, error_of, fields_of

run, no_endpoint = test_cli.run, test_cli.no_endpoint  # fixtures


def test_a_key_is_printed_once_listed_without_its_hash_and_revoked(run: Cli, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    code, out, err = run("serve", "keys", "add", path, "shop", "--rate", "100/minute")
    plain = out.strip()
    assert (code, out) == (0, f"{plain}\n")
    assert err == "requests of shop need the header Authorization: Bearer KEY; the key is shown only once\n"
    [key] = api_keys.read_keys(path)
    limited = ("--model", "intent", "--model", "mood")
    assert api_keys.find_key({key.id: key}, [f"Bearer {plain}".encode()]) == key
    assert run("serve", "keys", "add", path, "watch", "--scope", "metrics", "--scope", "predict", *limited)[0] == 0
    code, out, err = run("serve", "keys", "list", path)
    lines = [line.split() for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert lines[0] == ["name", "id", "scopes", "models", "rate", "created"]
    assert lines[1][4] == "100/minute"
    assert lines[1][:4] == ["shop", key.id, "predict", "all"]
    assert [lines[2][0], *lines[2][2:5]] == ["watch", "predict,metrics", "intent,mood", "-"]
    code, out, _ = run("serve", "keys", "list", path, "--json")
    assert [sorted(one) for one in json.loads(out)] == [["created", "id", "models", "name", "rate", "scopes"]] * 2
    code, out, err = run("serve", "keys", "revoke", path, "shop")
    assert (code, out, err) == (0, "", "shop is revoked; an endpoint that runs refuses it within 1 s\n")
    assert [key.name for key in api_keys.read_keys(path)] == ["watch"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["add", "FILE", "a b"], 1),
        (["add", "FILE", "shop", "--scope", "admin"], 2),
        (["add", "FILE", "shop", "--rate", "often"], 1),
        (["add", "no/such/folder/FILE", "shop"], 1),
        (["list", "FILE"], 1),
        (["revoke", "FILE", "shop"], 1),
        (["forge", "FILE"], 2),
        (["add"], 2),
        ([], 2),
    ],
)
def test_bad_words_are_refused_without_a_traceback(run: Cli, arguments: list[str], code: int) -> None:
    found, out, err = run("serve", "keys", *arguments)
    assert (found, out, bool(err), "Traceback" in err) == (code, "", True, False), err


def test_the_demo_has_no_key_to_ask_with(run: Cli, tmp_path: Path) -> None:
    settings = ("serve.keys=a", "serve.tls_cert=b", "serve.tls_key=c")
    code, error = error_of(run, "demo", *(word for one in settings for word in ("--set", one)))
    assert (code, fields_of(error)) == (2, ["serve.keys", "serve.tls_cert"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_endpoint")
@pytest.mark.parametrize("words", [["./keys"], ["--port", "0", "keys"], ["keys/"], ["other"]])
def test_an_artefact_of_any_name_is_served(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_artifact(tmp_path / words[-1])

    with pytest.raises(Begun):
        cli.main(["serve", *words])
