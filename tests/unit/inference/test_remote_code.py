"""No model and no data set may bring code of its own: every loader is told so, in so many words.

Where a loader is not told, transformers asks on the terminal whether to run the code of a folder or of a hub name, and
waits for an answer that a job cannot give.
"""

import ast
from collections.abc import Iterator

from tests.support.root import ROOT

PACKAGES = ("rtrain", "serve", "tune", "benchmarks")
LOADERS = frozenset({"from_pretrained", "from_config", "load_dataset", "load_dataset_builder", "pipeline"})
KNOWN = 12
"""Calls that there were when this test was written; a scan that finds fewer has lost its subject."""


def is_own_constructor(function: ast.expr | None) -> bool:
    """Whether the function is `from_config` of a class of this project; Transformers has `Auto...`."""
    owner = function.value if isinstance(function, ast.Attribute) and function.attr == "from_config" else None
    return isinstance(owner, ast.Name) and owner.id[0].isupper() and not owner.id.startswith("Auto")


def calls() -> Iterator[tuple[str, ast.Call]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                named = node.func if isinstance(node, ast.Call) else None
                name = (
                    named.attr if isinstance(named, ast.Attribute) else named.id if isinstance(named, ast.Name) else ""
                )
                if isinstance(node, ast.Call) and name in LOADERS and not is_own_constructor(named):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def refuses(call: ast.Call) -> bool:
    """With the literal False: a variable could be anything."""
    given = [keyword.value for keyword in call.keywords if keyword.arg == "trust_remote_code"]
    return [value.value for value in given if isinstance(value, ast.Constant)] == [False]


def test_every_loader_refuses_code_that_comes_with_a_model_or_a_data_set() -> None:
    found = list(calls())
    assert len(found) >= KNOWN
    assert [place for place, call in found if not refuses(call)] == []


def test_the_scan_sees_a_loader_that_is_not_told() -> None:
    [untold, variable, told] = [
        ast.parse(text, mode="eval").body
        for text in ("a.from_pretrained(x)", "f(trust_remote_code=chosen)", "f(trust_remote_code=False)")
    ]
    assert isinstance(untold, ast.Call)
    assert isinstance(variable, ast.Call)
    assert isinstance(told, ast.Call)
    assert [refuses(call) for call in (untold, variable, told)] == [False, False, True]
