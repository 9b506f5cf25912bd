"""The floors of the house: a module imports from its own room and from lower floors. And where Ray, torch and
transformers may appear at all."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.root import ROOT as ROOT

PACKAGES = ("rtrain", "serve", "tune")
# A room is a package or a module; the ground floor comes first.
FLOORS: tuple[tuple[str, ...], ...] = (
    (
        "rtrain.errors",
        "rtrain.limits",
        "rtrain.signals",
        "rtrain.events",
        "rtrain.ray_internals",
        "rtrain.torch_internals",
        "rtrain.drafts",
        "rtrain.batch",
        "rtrain.words",
    ),
    ("rtrain.documents", "rtrain.engines", "rtrain.manifest", "rtrain.env"),
    (
        "rtrain.config",
        "rtrain.recipes",
        "rtrain.artifact",
        "rtrain.metrics",
        "rtrain.exchange",
        "rtrain.hub",
        "rtrain.run",
    ),
    ("rtrain.tasks", "rtrain.cluster", "rtrain.checkpoints", "rtrain.remote"),
    ("rtrain.data", "rtrain.network"),
    ("rtrain.training", "rtrain.predict"),
    ("rtrain.explain", "rtrain.score", "rtrain.reference", "rtrain.strategies"),
    ("rtrain.answers", "rtrain.report", "rtrain.doctor.forecast", "serve"),
    ("rtrain.runs",),
    ("rtrain.comparison",),
    ("rtrain.gate",),
    ("rtrain.compress",),
    ("tune.known",),
    ("tune.asking", "tune.ending"),
    ("tune.results",),
    ("rtrain.proof", "rtrain.inventory", "rtrain.doctor", "tune"),
    ("rtrain.demo", "rtrain.cluster.rehearsal"),
    ("rtrain.cli",),
    ("rtrain.__main__",),
)
RAY_ALLOWED = (
    "rtrain.ray_internals.",
    *(
        "rtrain.data.tokens",
        "rtrain.data.augment.rewriting",
        "rtrain.data.ingest",
        "rtrain.answers.job",
        "rtrain.runs.worker",
        "rtrain.runs.driver",
        "rtrain.runs.group",
        "rtrain.runs.kept",
    ),
    *(
        "rtrain.compress.teacher",
        "rtrain.cluster.",
        "rtrain.proof.cases",
        "rtrain.demo",
    ),
    *("rtrain.cluster.preflight", "rtrain.proof.faults", "rtrain.runs.notice", "rtrain.runs.placement"),
    *(
        "serve.change.application",
        "serve.change.rollout",
        "serve.deployment",
        "serve.front.ingress",
        "serve.replica",
        "serve.service",
    ),
    "tune.slots",
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


def room_of(module: str) -> str:
    """The longest name in the table that the module is, or is in."""
    rooms = [room for floor in FLOORS for room in floor if module == room or module.startswith(f"{room}.")]
    assert rooms, f"{module} is in no room: FLOORS names the rooms, from the ground up"
    return max(rooms, key=len)


def floor_of(room: str) -> int:
    return next(number for number, floor in enumerate(FLOORS) if room in floor)


def test_a_module_imports_only_from_its_own_room_and_lower_floors() -> None:
    found = modules()
    names = frozenset(found)
    assert len(found) >= 40, "the walk lost its subject"
    wrong = []
    for module, path in found.items():
        if module in ("rtrain",):
            continue
        for imported in imports(ast.parse(path.read_text()), names):
            if imported.split(".")[0] in PACKAGES and imported not in ("rtrain",):
                room, other = room_of(module), room_of(imported)
                if room != other and floor_of(room) <= floor_of(other):
                    wrong.append(f"{module} imports {imported}")
    assert wrong == []


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
    assert {room for floor in FLOORS for room in floor} - names == set()
    assert [pattern for pattern in RAY_ALLOWED if not any(matches(name, pattern) for name in names)] == []


@pytest.mark.parametrize(
    "module", ["rtrain.cli.app", "rtrain.predict", "rtrain.tasks.classification", "rtrain.training.loop", "serve.app"]
)
def test_importing_is_light(module: str) -> None:
    """In a fresh interpreter: no heavy library is loaded by the import alone."""
    script = f"import sys, {module}; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
