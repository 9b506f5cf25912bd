"""Reproduction of the run: command, settings, digests and versions."""

import shlex
from typing import Any

from rtrain import config as configuration
from rtrain.config import Config, DeployConfig, Recipe
from rtrain.core.errors import redact
from rtrain.report.collect import RunData
from rtrain.report.drawing.blocks import Block, Code, Section, Table
from rtrain.report.drawing.svg import truncate

MAX_CHARS = 120


def build_section(run: RunData) -> Section:
    blocks: list[Block] = [_build_rerun_command(run), _build_settings_table(run.config), _build_digest_table(run)]
    if versions := run.created_event.get("versions"):
        rows = [(str(name), str(value)) for name, value in versions.items()]
        blocks.append(Table("Versions", ("package", "version"), rows, "At the creation of the run."))
    return Section("settings", "How it was run", "", blocks)


def _build_rerun_command(run: RunData) -> Code:
    """Build the command that repeats the run. A student needs its teacher's run, which the gate document names."""
    if run.config.recipe.distill.teacher is not None:
        reason = (
            "rtrain distill repeats a student: rtrain inspect prints the command with its settings under “commands”."
        )
        return Code("Run it again", f"rtrain inspect {shlex.quote(str(run.folder))}", reason)
    config = run.folder / "config.yaml"
    return Code(
        "Run it again",
        f"rtrain train {shlex.quote(str(config))} --out NEW_FOLDER",
        "config.yaml holds every setting, with train.global_batch_size resolved and paths absolute. The same rows, "
        "seed "
        "and number of workers give the same weights, bit for bit; another number of workers the same to rounding.",
    )


def _build_settings_table(config: Config) -> Table:
    recipe = config.recipe
    default_settings = configuration.flatten_config(Config(Recipe(name=recipe.name, task=recipe.task), DeployConfig()))
    run_settings = configuration.flatten_config(config)
    rows = [
        (name, truncate(_format_value(value), MAX_CHARS), truncate(_format_value(default_settings[name]), MAX_CHARS))
        for name, value in run_settings.items()
        if default_settings[name] != value
    ]
    note = "All other settings have their defaults; rtrain recipes show RECIPE --all prints them with comments."
    return Table("Settings that differ from the defaults", ("setting", "this run", "default"), rows, note, wide=True)


def _format_value(value: Any) -> str:
    """Format a setting without rounding: a rounded learning rate could look like the default."""
    return "none" if value is None else redact(str(value))


def _build_digest_table(run: RunData) -> Table:
    rows = [
        ("run folder", str(run.folder)),
        ("identity of the recipe", run.created_event.get("recipe_digest") or run.config.recipe.recipe_digest()),
        ("digest of the rows", run.summary["data_digest"] or "unknown"),
        ("digest of the order", run.summary["order_digest"] or "unknown until the end"),
    ]
    if run.artifact:
        rows.append(("version of the artifact", run.artifact["version"]))
    for role, files in (run.created_event.get("origin") or {}).items():
        file_digests = [(truncate(redact(name), MAX_CHARS), sha256) for name, sha256 in list(files.items())[:20]]
        rows += [(f"SHA-256, {role}: {name}", sha256) for name, sha256 in file_digests]
    note = (
        "Two runs with the same digests trained on the same rows in the same order; "
        "rtrain verify --ledger recomputes the order's digest from the token store."
    )
    return Table("Digests", ("of", "digest"), rows, note, wide=True)
