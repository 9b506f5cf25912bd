"""Errors that a user reads: one line a problem, hostile text escaped, and the way back from another process."""

import ast
import pickle

import pytest

from rtrain.core import hub
from rtrain.core.errors import ConfigError, Problem, UserError, quote_value
from tests.support.root import ROOT


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "data.path: gone; write another"),
        (7, "data.path=7: gone; write another"),
        ("rows.csv", "data.path=rows.csv: gone; write another"),
        ("données/文件.csv", "data.path=données/文件.csv: gone; write another"),
        ("\udcff\x00", r"data.path=\udcff\x00: gone; write another"),
        (["a", 1], "data.path=['a', 1]: gone; write another"),
        ("a\nb\x1b[31m\u202e", r"data.path=a\nb\x1b[31m\u202e: gone; write another"),
        ("x" * 40 + "y" * 41, f"data.path={'x' * 38}...{'y' * 39}: gone; write another"),
        (
            "/data/" * 20 + "rows.csv",
            f"data.path={('/data/' * 7)[:38]}...{('/data/' * 6 + 'rows.csv')[-39:]}: gone; write another",
        ),
        ("x" * 80, f"data.path={'x' * 80}: gone; write another"),
    ],
)
def test_a_problem_is_one_line(value: object, shown: str) -> None:
    assert str(Problem("data.path", value, "gone", "write another", code="not_found")) == shown


def test_a_value_of_a_row_is_shown_in_its_own_script() -> None:
    assert quote_value("退款 مرحبا\x1b[2J\u202e\ud83d") == "'退款 مرحبا\\x1b[2J\\u202e\\ud83d'"


def test_a_configuration_error_holds_all_problems_and_survives_pickling() -> None:
    problems = [
        Problem("a", 1, "no", "yes", code="out_of_range"),
        Problem("b", None, "never", "always", code="missing"),
    ]
    error = ConfigError(problems)
    assert str(error) == "a=1: no; yes\nb: never; always"
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is ConfigError
    assert back.problems == tuple(problems)
    assert str(back) == str(error)
    for each in (UserError("no", code="not_found"), hub.HubError("no", "yes", is_unreachable=True, code="not_found")):
        again = pickle.loads(pickle.dumps(each))
        assert (type(again), str(again), again.code) == (type(each), str(each), "not_found")


def test_a_document_of_an_error_has_its_code_and_those_of_its_problems() -> None:
    error = ConfigError([Problem("a", 1, "no", "yes", code="out_of_range")])
    [problem] = error.to_document()["error"]["problems"]
    assert (problem["field"], problem["code"]) == ("a", "out_of_range")
    assert UserError("gone", code="not_found").to_document() == {
        "error": {"code": "not_found", "message": "gone", "problems": []}
    }


def test_exit_codes() -> None:
    assert (UserError.exit_code, ConfigError.exit_code) == (1, 2)


def calls_without_code(tree: ast.AST, with_code: set[str], errors: set[str]) -> list[int]:
    """Lines of a module that make an error or a problem without saying its cause."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            is_error = name == "Problem" or (name in errors and name not in with_code)
            if is_error and not any(keyword.arg == "code" for keyword in node.keywords):
                found.append(node.lineno)
    return found


def test_every_error_says_its_cause_by_a_code() -> None:
    """By `code=` where it is made, or by the `code` of its class."""
    modules = {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for folder in ("rtrain", "serve", "tune")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    classes = [node for tree in modules.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    errors, with_code = {"UserError"}, {"ConfigError", "CommandInterruptedError", "TemporaryFailureError"}
    for _ in range(4):  # subclasses of subclasses
        for each in classes:
            bases = {base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in each.bases}
            names = {getattr(target, "id", "") for line in each.body for target in getattr(line, "targets", ())}
            if bases & (errors | with_code):
                errors.add(each.name)
            if each.name in errors and ("code" in names or bases & (with_code - {"ConfigError"})):
                with_code.add(each.name)
    lacking = {
        f"{path.relative_to(ROOT)}:{line}"
        for path, tree in modules.items()
        for line in calls_without_code(tree, with_code, errors)
    }
    assert lacking == set()
