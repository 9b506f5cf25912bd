"""Where Ray, torch and Transformers may be imported. import-linter checks the layers (`make check`)."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.root import ROOT as ROOT

PACKAGES = ("rtrain", "serve", "tune")
RAY_ALLOWED = (
    "rtrain.ray_internals.",
    *(
        "rtrain.data.store.builder",
        "rtrain.data.paraphrase",
        "rtrain.data.stream",
        "rtrain.inference.batch.pipeline",
        "rtrain.runs.worker",
        "rtrain.runs.controller",
        "rtrain.runs.worker_pool",
    ),
    *(
        "rtrain.compress.teacher",
        "rtrain.cluster.",
        "rtrain.rehearsal.",
        "rtrain.verification.layout_runs",
        "rtrain.demo",
    ),
    *("rtrain.cluster.preflight", "rtrain.verification.drill", "rtrain.runs.stop_request", "rtrain.runs.worker_pool"),
    *(
        "serve.rollout.controller",
        "serve.rollout.controller",
        "serve.deployment",
        "serve.ingress.ingress_choice",
        "serve.replica",
        "serve.kuberay_app",
    ),
    *("tune.trial_pool", "tune.recipe_trainable", "tune.ask_search", "tune.freeze_thaw"),
)
# At module level: serving and the command line must start without them.
HEAVY = ("torch", "transformers", "openvino", "nncf", "sklearn", "scipy", "datasets", "ray")


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path
    return found


def imports(tree: ast.AST, names: frozenset[str]) -> Iterator[str]:
    """Dotted names that a module imports; `from package import module` counts as the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in names else node.module


def matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern) or name == pattern.rstrip(".") if pattern.endswith(".") else name == pattern


def test_ray_appears_only_where_the_design_has_it() -> None:
    users = {
        module
        for module, path in modules().items()
        if any(name.split(".")[0] == "ray" for name in imports(ast.parse(path.read_text()), frozenset()))
    }
    assert len(users) >= 8
    assert [module for module in users if not any(matches(module, pattern) for pattern in RAY_ALLOWED)] == []


def test_tables_name_only_modules_that_exist() -> None:
    names = set(modules())
    assert [pattern for pattern in RAY_ALLOWED if not any(matches(name, pattern) for name in names)] == []


@pytest.mark.parametrize(
    "module",
    [
        "rtrain.cli.app",
        "rtrain.inference.predictor",
        "rtrain.tasks.classification",
        "rtrain.trainer.trainer",
        "serve.app",
        "tune",
    ],
)
def test_importing_is_light(module: str) -> None:
    """In a fresh interpreter: no heavy library is loaded by the import alone."""
    script = f"import sys, {module}; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
