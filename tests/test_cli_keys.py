"""`rtrain serve keys`: a key is made, shown once, listed, revoked. `rtrain serve ARTIFACT` is the verb that it was."""

import json
from pathlib import Path

import pytest

from rtrain.cli import app as cli
from serve.door import keys
from tests import test_cli
from tests.test_cli import Cli
from tests.tiny import make_artifact

run = test_cli.run  # fixture


def test_a_key_is_printed_once_listed_without_its_hash_and_revoked(run: Cli, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    code, out, err = run("serve", "keys", "add", path, "shop", "--rate", "100/minute")
    plain = out.strip()
    assert (code, out) == (0, f"{plain}\n")
    assert err == "shop may ask by the header Authorization: Bearer KEY; the key is shown this once\n"
    [key] = keys.read(path)
    limited = ("--model", "intent", "--model", "mood")
    assert keys.find({key.id: key}, [f"Bearer {plain}".encode()]) == key
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
    assert [key.name for key in keys.read(path)] == ["watch"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["add", "FILE", "a b"], 1, "'a b' is no name"),
        (
            ["add", "FILE", "shop", "--scope", "admin"],
            2,
            "--scope=admin: there is no such scope; write predict or metrics",
        ),
        (["add", "FILE", "shop", "--rate", "often"], 1, "'often' is no rate; write e.g. 100/minute or 5/second"),
        (["add", "no/such/folder/FILE", "shop"], 1, "the folder of no/such/folder/FILE cannot be opened"),
        (["list", "FILE"], 1, "there is no file of keys FILE"),
        (["revoke", "FILE", "shop"], 1, "there is no file of keys"),
        (["forge", "FILE"], 2, "No such command 'forge'"),
        (["add"], 2, "Missing argument 'file'"),
        (["--port", "0"], 2, "No such option: --port"),
    ],
)
def test_bad_words_are_answered_by_what_to_write(run: Cli, arguments: list[str], code: int, said: str) -> None:
    found, out, err = run("serve", "keys", *arguments)
    assert (found, out, said in err) == (code, "", True), err


def test_bare_it_is_a_question_for_help_that_names_the_way_for_a_folder_of_that_name(run: Cli) -> None:
    code, out, err = run("serve", "keys")
    assert (code, out) == (2, "")
    assert "served as ./keys" in " ".join(err.split())


def test_the_demo_has_no_key_to_ask_with(run: Cli, tmp_path: Path) -> None:
    settings = ("serve.keys=a", "serve.tls_cert=b", "serve.tls_key=c")
    code, out, err = run("demo", *(word for one in settings for word in ("--set", one)))
    assert (code, out) == (2, "")
    assert [line.split(";")[0] for line in err.splitlines()] == [
        "rtrain: serve.keys=a: the demo asks its endpoint itself, as anybody would",
        "serve.tls_cert=b: the demo asks its endpoint itself, as anybody would",
    ]
    assert list(tmp_path.iterdir()) == []


class Begun(Exception):
    """The command went on to start Ray."""


@pytest.mark.parametrize("words", [["./keys"], ["--port", "0", "keys"], ["keys/"], ["other"]])
def test_an_artefact_of_any_name_is_served(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_artifact(tmp_path / words[-1])

    def begun(*given: object, **named: object) -> None:
        raise Begun

    monkeypatch.setattr("serve.starting.session", begun)
    with pytest.raises(Begun):
        cli.main(["serve", *words])
