"""Errors that a user reads: one line a problem, hostile text escaped, and the way back from another process."""

import pickle

import pytest

from rtrain.errors import ConfigError, Problem, UserError, quoted


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
    assert str(Problem("data.path", value, "gone", "write another")) == shown


def test_a_value_of_a_row_is_shown_in_its_own_script() -> None:
    assert quoted("退款 مرحبا\x1b[2J\u202e\ud83d") == "'退款 مرحبا\\x1b[2J\\u202e\\ud83d'"


def test_a_configuration_error_holds_all_problems_and_survives_pickling() -> None:
    problems = [Problem("a", 1, "no", "yes"), Problem("b", None, "never", "always")]
    error = ConfigError(problems)
    assert str(error) == "a=1: no; yes\nb: never; always"
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is ConfigError
    assert back.problems == tuple(problems)
    assert str(back) == str(error)


def test_exit_codes() -> None:
    assert (UserError.exit_code, ConfigError.exit_code) == (1, 2)
