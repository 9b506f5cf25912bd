"""How the run was made: the command that repeats it, its settings, digests and versions."""

import shlex
from typing import Any

from rtrain import config as configuration
from rtrain.config import Config, Deploy, Recipe
from rtrain.core.errors import hide
from rtrain.report.collect import Collected
from rtrain.report.drawing.blocks import Block, Code, Section, Table
from rtrain.report.drawing.svg import short

LONGEST = 120


def section(run: Collected) -> Section:
    blocks: list[Block] = [_again(run), _settings(run.config), _identity(run)]
    if versions := run.created.get("versions"):
        rows = [(str(name), str(value)) for name, value in versions.items()]
        blocks.append(Table("Versions", ("package", "version"), rows, "As they were when the run was created."))
    return Section("settings", "How it was run", "", blocks)


def _again(run: Collected) -> Code:
    """How to repeat the run; of a student, that needs its teacher's run, which the gate's verdict names."""
    if run.config.recipe.distill.teacher is not None:
        why = "A student is made again by rtrain distill: the lines under “made by” have the command with its settings."
        return Code("Run it again", f"rtrain inspect {shlex.quote(str(run.folder))}", why)
    config = run.folder / "config.yaml"
    return Code(
        "Run it again",
        f"rtrain train {shlex.quote(str(config))} --out NEW_FOLDER",
        "config.yaml holds every setting, with rows_per_update resolved and paths absolute. The same rows, seed "
        "and number of workers give the same weights, bit for bit; another number of workers the same to rounding.",
    )


def _settings(config: Config) -> Table:
    recipe = config.recipe
    before = configuration.flat(Config(Recipe(name=recipe.name, task=recipe.task), Deploy()))
    after = configuration.flat(config)
    rows = [
        (name, short(_text(value), LONGEST), short(_text(before[name]), LONGEST))
        for name, value in after.items()
        if before[name] != value
    ]
    note = "All other settings have their defaults; rtrain recipes show RECIPE --all prints them with comments."
    return Table("Settings that differ from the defaults", ("setting", "this run", "default"), rows, note, wide=True)


def _text(value: Any) -> str:
    """A setting as a recipe would have it: rounded, a learning rate of 0.00024 would be told as its default."""
    return "none" if value is None else hide(str(value))


def _identity(run: Collected) -> Table:
    rows = [
        ("run folder", str(run.folder)),
        ("identity of the recipe", run.created.get("identity") or run.config.recipe.identity()),
        ("digest of the rows", run.summary["data_digest"] or "unknown"),
        ("digest of the order", run.summary["order_digest"] or "unknown until the end"),
    ]
    if run.artifact:
        rows.append(("version of the artefact", run.artifact["version"]))
    for role, files in (run.created.get("origin") or {}).items():
        named = [(short(hide(name), LONGEST), sha256) for name, sha256 in list(files.items())[:20]]
        rows += [(f"SHA-256, {role}: {name}", sha256) for name, sha256 in named]
    note = (
        "Two runs with the same digests trained on the same rows in the same order; "
        "rtrain verify --ledger recomputes the order's digest from the token store."
    )
    return Table("Digests", ("of", "digest"), rows, note, wide=True)
