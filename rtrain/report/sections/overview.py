"""What was run, with what, on what, and how to run it again."""

import shlex
from collections.abc import Mapping
from typing import Any

from rtrain import config as configuration
from rtrain.config import Config, Deploy, Recipe
from rtrain.report.collect import Run
from rtrain.report.drawing.blocks import Block, Code, Section, Table, Tile
from rtrain.report.drawing.svg import number, rate, score_name, short
from rtrain.report.live.trackers import hide

LONGEST = 120


def tiles(run: Run, intervals: Mapping[str, tuple[float, float]]) -> list[Tile]:
    """The figures that a reader looks for first."""
    found = run.summary
    scores = found["metrics"]["test"] or found["metrics"]["valid"] or {}
    split = "test" if found["metrics"]["test"] else "validation"
    shown = [Tile("status", found["status"], f"{len(run.starts)} start{'' if len(run.starts) == 1 else 's'}")]
    # Of an error and its negative, by which models are compared, the error.
    plain = [name for name, value in scores.items() if isinstance(value, int | float) and not name.startswith("neg_")]
    name = next((name for name in plain if name != "rows"), None)
    if name:
        within = intervals.get(name)
        note = "95 % interval {:.3f} to {:.3f}".format(*within) if within else f"{scores.get('rows', 0):,} rows"
        shown.append(Tile(f"{split} {score_name(name)}", f"{scores[name]:.4f}", note))
    shown += [
        Tile(
            "updates",
            f"{found['updates']:,}",
            f"best: {found['best_update'] if found['best_update'] is not None else '-'}",
        ),
        Tile("rows trained on", f"{found['rows_seen']:,}", f"{rate(found['rows_per_second'])} rows/s while training"),
        Tile(
            "total time", duration(found["seconds"]["total"]), f"{duration(found['seconds']['train'])} of it training"
        ),
        Tile("restarts", str(found["restarts"]), f"{len(run.of('crashed'))} after a crash"),
    ]
    return shown


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def section(run: Run) -> Section:
    recipe = run.config.recipe
    config = run.folder / "config.yaml"
    blocks: list[Block] = [
        Code(
            "Run it again",
            f"rtrain train {shlex.quote(str(config))} --out NEW_FOLDER",
            "config.yaml holds every setting, with rows_per_update resolved and paths absolute. The same rows, seed "
            "and number of workers give the same weights, bit for bit; another number of workers the same to rounding.",
        ),
        _settings(run.config),
        _identity(run),
    ]
    if versions := run.created.get("versions"):
        rows = [(str(name), str(value)) for name, value in versions.items()]
        blocks.append(Table("Versions", ("package", "version"), rows, "As they were when the run was created."))
    workers = run.summary["workers"] or recipe.train.workers
    on = f" on {run.summary['device']}" if run.summary["device"] else ""
    rows_text = f"{run.store.rows('train'):,} training rows" if run.store else "its training rows"
    intro = (
        f"The recipe {recipe.name} fine-tuned the encoder {short(recipe.model.name, 60)} for {recipe.train.epochs} "
        f"epoch{'s' if recipe.train.epochs > 1 else ''} of {rows_text}, {recipe.rows_per_update} rows per update, on "
        f"{workers} worker{'' if workers == 1 else 's'}{on} in "
        f"{run.summary['precision'] or recipe.train.precision}."
    )
    return Section("run", "What was run", intro, blocks)


def _settings(config: Config) -> Table:
    recipe = config.recipe
    before = configuration.flat(Config(Recipe(name=recipe.name, task=recipe.task), Deploy()))
    after = configuration.flat(config)
    rows = [
        (name, short(_text(value), LONGEST), short(_text(before[name]), LONGEST))
        for name, value in after.items()
        if before[name] != value
    ]
    note = "All other settings have their defaults; rtrain recipes show prints them with comments."
    return Table("Settings that differ from the defaults", ("setting", "this run", "default"), rows, note, wide=True)


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return number(value) if isinstance(value, float) else hide(str(value))


def _identity(run: Run) -> Table:
    rows = [
        ("run folder", str(run.folder)),
        ("identity of the recipe", run.created.get("identity") or run.config.recipe.identity()),
        ("digest of the rows", run.summary["data_digest"] or "unknown"),
        ("digest of the order", run.summary["order_digest"] or "unknown until the end"),
    ]
    if run.artifact:
        rows.append(("version of the artefact", run.artifact["version"]))
    for role, files in (run.created.get("origin") or {}).items():
        rows += [(f"SHA-256, {role}: {short(name, LONGEST)}", sha256) for name, sha256 in list(files.items())[:20]]
    note = (
        "Two runs with the same digests trained on the same rows in the same order; "
        "rtrain verify --ledger recomputes the order's digest from the token store."
    )
    return Table("Digests", ("of", "digest"), rows, note, wide=True)
