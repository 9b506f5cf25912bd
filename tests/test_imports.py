"""Who may import whom: the arrows of the design, and where Ray, torch and transformers may appear at all."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rtrain", "serve", "tune")
ANYTHING = frozenset({"*"})

# Module (or package, ending in a dot) -> what of ours it may import. `rtrain.errors` and the version are open to all.
ALLOWED: dict[str, frozenset[str]] = {
    "rtrain.__main__": frozenset({"rtrain.cli"}),
    "rtrain.cli": ANYTHING,
    "rtrain.demo": ANYTHING,
    "rtrain.errors": frozenset(),
    "rtrain.env": frozenset(),
    "rtrain.manifest": frozenset(),
    "rtrain.hub": frozenset({"rtrain.data.drafts", "rtrain.manifest"}),
    "rtrain.config": frozenset({"rtrain.sections", "rtrain.sections_data"}),
    "rtrain.sections": frozenset({"rtrain.sections_data"}),
    "rtrain.sections_data": frozenset(),
    "rtrain.options": frozenset(
        {"rtrain.config", "rtrain.cluster.supervise", "rtrain.training.runs", "rtrain.training.driver"}
    ),
    "rtrain.artifact": frozenset({"rtrain.manifest"}),
    "rtrain.inputs": frozenset(),
    "rtrain.pooling": frozenset({"rtrain.inputs"}),
    "rtrain.sentence": frozenset({"rtrain.artifact", "rtrain.pooling"}),
    "rtrain.predict": frozenset({"rtrain.artifact", "rtrain.inputs", "rtrain.pooling", "rtrain.tasks."}),
    "rtrain.explain.": frozenset({"rtrain.explain.", "rtrain.predict", "rtrain.tasks."}),
    "rtrain.scores": frozenset({"rtrain.metrics.", "rtrain.tasks."}),
    "rtrain.tasks.batch": frozenset(),
    "rtrain.tasks.sentences": frozenset(),
    "rtrain.tasks.base": frozenset({"rtrain.config", "rtrain.tasks.batch"}),
    "rtrain.tasks.": frozenset(
        {
            f"rtrain.tasks.{name}"
            for name in (
                *(
                    "base",
                    "batch",
                    "defaults",
                    "labels",
                    "pooled",
                    "classification",
                    "tables",
                    "sentences",
                    "summary_rows",
                    "words",
                ),
            )
        }
        | {"rtrain.metrics."}
    ),
    "rtrain.data.synthetic": frozenset(),
    "rtrain.data.values": frozenset({"rtrain.config"}),
    "rtrain.data.records": frozenset(
        {"rtrain.config", "rtrain.hub"}
        | {f"rtrain.data.{name}" for name in ("addresses", "digests", "formats", "parts", "values")}
    ),
    "rtrain.data.addresses": frozenset(),
    "rtrain.data.digests": frozenset(),
    "rtrain.data.parts": frozenset({"rtrain.data.addresses"}),
    "rtrain.data.pieces": frozenset({"rtrain.config", "rtrain.data.parts", "rtrain.data.records", "rtrain.tasks.base"}),
    "rtrain.data.columns": frozenset({"rtrain.tasks.batch"}),
    "rtrain.data.refusals": frozenset({"rtrain.config", "rtrain.data.digests", "rtrain.data.records"}),
    "rtrain.data.packing": frozenset({"rtrain.data.records"}),
    "rtrain.data.splits": frozenset({"rtrain.config", "rtrain.data.records"}),
    "rtrain.data.quarantine": frozenset({"rtrain.config", "rtrain.data.records"}),
    "rtrain.data.formats": frozenset({"rtrain.data.conll", "rtrain.data.parts", "rtrain.data.squad"}),
    "rtrain.data.squad": frozenset(),
    "rtrain.data.conll": frozenset(),
    "rtrain.data.augment": frozenset(),
    "rtrain.data.paraphrase": frozenset(),
    "rtrain.data.rewriting": frozenset({"rtrain.config", "rtrain.data.paraphrase", "rtrain.data.store"}),
    "rtrain.data.variants": frozenset(
        {"rtrain.config", "rtrain.data.augment", "rtrain.data.records", "rtrain.tasks.base"}
    ),
    "rtrain.metrics.": frozenset({"rtrain.metrics."}),
    "rtrain.data.order": frozenset({"rtrain.tasks.batch"}),
    "rtrain.data.drafts": frozenset(),
    "rtrain.data.store": frozenset(
        {"rtrain.data.drafts", "rtrain.manifest", "rtrain.tasks.base", "rtrain.tasks.batch"}
    ),
    "rtrain.data.tokens": frozenset(
        {"rtrain.config", "rtrain.manifest", "rtrain.tasks."}
        | {
            f"rtrain.data.{name}"
            for name in ("digests", "drafts", "packing", "paraphrase", "quarantine", "records", "rewriting", "values")
        }
        | {f"rtrain.data.{name}" for name in ("columns", "parts", "pieces", "refusals", "splits", "store", "variants")}
    ),
    "rtrain.data.ingest": frozenset({"rtrain.data.order", "rtrain.data.store", "rtrain.tasks.batch"}),
    "rtrain.report.": frozenset({"rtrain.report."}),
    "rtrain.report.trackers": frozenset({"rtrain.report.events", "rtrain.config"}),
    "rtrain.report.collect": frozenset(
        {"rtrain.report.", "rtrain.config", "rtrain.data.store", "rtrain.scores", "rtrain.tasks."}
    ),
    "rtrain.report.attributions": frozenset(
        {"rtrain.report.", "rtrain.config", "rtrain.data.store", "rtrain.explain.", "rtrain.predict", "rtrain.tasks."}
    ),
    "rtrain.report.sections.": frozenset({"rtrain.report.", "rtrain.config", "rtrain.data.store", "rtrain.metrics."}),
    "rtrain.report.sections.summaries": frozenset(
        {"rtrain.report.", "rtrain.data.store", "rtrain.metrics.text", "rtrain.tasks.summary_rows"}
    ),
    "rtrain.plan.preflight": frozenset({"rtrain.config"}),
    "rtrain.cluster.supply": frozenset(),
    "rtrain.cluster.session": frozenset({"rtrain.cluster.supply", "rtrain.config", "rtrain.env"}),
    "rtrain.cluster.supervise": frozenset({"rtrain.cluster.session"}),
    "rtrain.training.frozen": frozenset(),
    "rtrain.training.model": frozenset(
        {"rtrain.config", "rtrain.hub", "rtrain.pooling", "rtrain.sentence", "rtrain.tasks.base"}
        | {f"rtrain.training.{name}" for name in ("frozen", "packed")}
    ),
    "rtrain.training.dropout": frozenset(),
    "rtrain.training.device": frozenset(),
    "rtrain.training.layout": frozenset({"rtrain.tasks.batch", "rtrain.training.device"}),
    "rtrain.training.attention": frozenset(f"rtrain.training.{name}" for name in ("dropout", "layout", "precision")),
    "rtrain.training.packed": frozenset(
        {"rtrain.inputs", "rtrain.tasks.batch"}
        | {f"rtrain.training.{name}" for name in ("attention", "device", "dropout", "layout")}
    ),
    "rtrain.training.optim": frozenset({"rtrain.config", "rtrain.training.layerwise", "rtrain.training.radam"}),
    "rtrain.training.radam": frozenset(),
    "rtrain.training.layerwise": frozenset(),
    "rtrain.training.memory": frozenset({"rtrain.data.store", "rtrain.tasks.", "rtrain.training.step"}),
    "rtrain.training.precision": frozenset({"rtrain.training.decisions"}),
    "rtrain.training.decisions": frozenset(),
    "rtrain.training.scaling": frozenset(),
    "rtrain.training.cadence": frozenset(),
    "rtrain.training.totals": frozenset({"rtrain.training.exchange", "rtrain.training.step"}),
    "rtrain.training.alive": frozenset(),
    "rtrain.training.ranks": frozenset({"rtrain.training.alive"}),
    "rtrain.training.exchange": frozenset(
        f"rtrain.training.{name}" for name in ("alive", "compression", "rows", "transport")
    ),
    "rtrain.training.transport": frozenset(),
    "rtrain.training.sharded": frozenset({"rtrain.config", "rtrain.training.exchange", "rtrain.training.optim"}),
    "rtrain.training.compression": frozenset({"rtrain.training.transport"}),
    "rtrain.training.rows": frozenset({"rtrain.training.exchange"}),
    "rtrain.training.step": frozenset(
        {"rtrain.tasks.batch", "rtrain.inputs"}
        | {f"rtrain.training.{name}" for name in ("device", "exchange", "packed")}
    ),
    "rtrain.training.losses": frozenset({"rtrain.config", "rtrain.tasks."}),
    "rtrain.training.evaluate": frozenset(
        {"rtrain.data.store", "rtrain.tasks."}
        | {f"rtrain.training.{name}" for name in ("exchange", "model", "ranks", "step")}
    ),
    "rtrain.training.checkpoint": frozenset({"rtrain.manifest", "rtrain.training.scaling"}),
    "rtrain.training.replica": frozenset({"rtrain.config", "rtrain.manifest"}),
    "rtrain.training.saver": frozenset(f"rtrain.training.{name}" for name in ("alive", "checkpoint", "replica")),
    "rtrain.training.loop": frozenset(
        {"rtrain.training.device"}
        | {
            "rtrain.config",
            "rtrain.data.ingest",
            "rtrain.data.order",
            "rtrain.data.store",
            "rtrain.tasks.",
            "rtrain.training.cadence",
            "rtrain.training.checkpoint",
            "rtrain.training.evaluate",
            "rtrain.training.exchange",
            "rtrain.training.optim",
            "rtrain.training.ranks",
            "rtrain.training.replica",
            "rtrain.training.saver",
            "rtrain.training.scaling",
            "rtrain.training.sharded",
            "rtrain.training.step",
            "rtrain.training.totals",
        }
    ),
    "rtrain.training.predictions": frozenset({"rtrain.data.store", "rtrain.scores", "rtrain.tasks."}),
    "rtrain.training.runs": frozenset({"rtrain.config", "rtrain.data.records", "rtrain.hub"}),
    "rtrain.training.nodes": frozenset(
        {"rtrain.config", "rtrain.data.records", "rtrain.data.tokens", "rtrain.hub", "rtrain.plan.preflight"}
        | {"rtrain.training.model", "rtrain.training.runs"}
    ),
    "rtrain.proof.planted": frozenset({"rtrain.tasks.batch", "rtrain.training.step", "rtrain.training.exchange"}),
    "rtrain.proof.cases": frozenset(
        {"rtrain.config", "rtrain.env", "rtrain.data.", "rtrain.proof.planted", "rtrain.report.events", "rtrain.tasks."}
        | {
            f"rtrain.training.{name}"
            for name in ("checkpoint", "exchange", "loop", "losses", "model", "optim", "ranks")
        }
        | {"rtrain.training.step"}
    ),
    "rtrain.proof.verify": frozenset(
        {"rtrain.config", "rtrain.data.tokens", "rtrain.plan.preflight", "rtrain.proof.", "rtrain.report.events"}
        | {f"rtrain.training.{name}" for name in ("driver", "failures", "group", "model", "nodes")}
    ),
    "rtrain.proof.faults": frozenset({"rtrain.report.memory", "rtrain.training.checkpoint"}),
    "rtrain.proof.drill": frozenset(
        {"rtrain.config", "rtrain.data.tokens", "rtrain.proof.", "rtrain.report."}
        | {f"rtrain.training.{name}" for name in ("checkpoint", "driver", "nodes")}
    ),
    "rtrain.proof.ledger": frozenset(
        {"rtrain.config", "rtrain.data.order", "rtrain.data.store", "rtrain.report.events"}
        | {f"rtrain.training.{name}" for name in ("checkpoint", "loop", "runs")}
    ),
    "rtrain.training.failures": frozenset({"rtrain.training.ranks", "rtrain.training.recovery"}),
    "rtrain.training.recovery": frozenset(),
    "rtrain.training.placement": frozenset(),
    "rtrain.training.notice": frozenset(
        {"rtrain.cluster.supply", "rtrain.training.placement", "rtrain.training.recovery"}
    ),
    "rtrain.training.worker": frozenset(
        {"rtrain.artifact", "rtrain.predict", "rtrain.config", "rtrain.data.", "rtrain.report.events", "rtrain.tasks."}
        | {
            f"rtrain.training.{name}"
            for name in (
                *("evaluate", "exchange", "loop", "losses", "model", "notice", "packed", "precision", "recovery"),
                *("alive", "decisions", "memory", "ranks", "replica"),
            )
        }
        | {"rtrain.training.predictions", "rtrain.scores", "rtrain.env", "rtrain.pooling", "rtrain.sentence"}
    ),
    "rtrain.training.group": frozenset({"rtrain.env", "rtrain.training.device"}),
    "rtrain.training.driver": frozenset(
        {"rtrain.cluster.supply"}
        | {f"rtrain.training.{name}" for name in ("decisions", "device", "failures")}
        | {
            "rtrain.config",
            "rtrain.cluster.session",
            "rtrain.data.",
            "rtrain.plan.preflight",
            "rtrain.report.",
        }
        | {
            f"rtrain.training.{name}"
            for name in (
                "checkpoint",
                "group",
                "losses",
                "model",
                "nodes",
                "notice",
                "placement",
                "precision",
                "ranks",
                "recovery",
                "replica",
                "runs",
                "worker",
            )
        }
    ),
    "rtrain.compress.": frozenset(
        {"rtrain.artifact", "rtrain.predict", "rtrain.config", "rtrain.env", "rtrain.compress.", "rtrain.training."}
        | {"rtrain.inputs", "rtrain.pooling"}
        | {"rtrain.data.", "rtrain.report.events", "rtrain.scores", "rtrain.tasks."}
    ),
    "serve.": frozenset(
        {"serve.", "rtrain.explain.", "rtrain.predict", "rtrain.artifact", "rtrain.config", "rtrain.tasks."}
    ),
    "tune.": frozenset(
        {"tune.", "rtrain.training.driver", "rtrain.training.runs", "rtrain.config", "rtrain.report."}
        | {"rtrain.training.placement", "rtrain.tasks."}
    ),
}

RAY_ALLOWED = (
    *(
        "rtrain.data.tokens",
        "rtrain.data.rewriting",
        "rtrain.data.ingest",
        "rtrain.training.worker",
        "rtrain.training.driver",
        "rtrain.training.group",
    ),
    *("rtrain.compress.distill", "rtrain.cluster.", "rtrain.report.memory", "rtrain.proof.cases", "rtrain.demo"),
    *("rtrain.plan.preflight", "rtrain.proof.faults", "rtrain.training.notice", "rtrain.training.placement"),
    *("serve.deployment", "tune."),
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


def allowed_for(module: str) -> frozenset[str]:
    if module in ALLOWED:
        return ALLOWED[module]
    groups = [pattern for pattern in ALLOWED if pattern.endswith(".") and matches(module, pattern)]
    assert groups, f"{module} has no line in the table of allowed imports"
    return ALLOWED[max(groups, key=len)]


def test_every_import_follows_the_arrows() -> None:
    found = modules()
    names = frozenset(found)
    assert len(found) >= 40, "the walk lost its subject"
    wrong = []
    for module, path in found.items():
        if path.name == "__init__.py":
            continue
        allowed = allowed_for(module)
        for imported in imports(ast.parse(path.read_text()), names):
            ours = imported.split(".")[0] in PACKAGES and imported not in ("rtrain", "rtrain.errors")
            if ours and allowed != ANYTHING and not any(matches(imported, pattern) for pattern in allowed):
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
    patterns = {*ALLOWED, *RAY_ALLOWED, *(entry for entries in ALLOWED.values() for entry in entries)} - {"*"}
    assert [pattern for pattern in patterns if not any(matches(name, pattern) for name in names)] == []


@pytest.mark.parametrize(
    "module", ["rtrain.cli", "rtrain.predict", "rtrain.tasks.classification", "rtrain.training.loop", "serve.app"]
)
def test_importing_is_light(module: str) -> None:
    """In a fresh interpreter: no heavy library is loaded by the import alone."""
    script = f"import sys, {module}; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
