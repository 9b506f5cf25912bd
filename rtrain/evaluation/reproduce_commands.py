"""Commands that reproduce an artifact, from the files of its run."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rtrain import config
from rtrain.config import Recipe
from rtrain.config.recipe import STUDENT_SETTINGS
from rtrain.core import engines
from rtrain.core.errors import ConfigError
from rtrain.core.run_folder import Run
from rtrain.inference import artifact
from rtrain.inference.artifact import Artifact
from rtrain.runs import run_folders


def list_commands(folder: Path, metadata: Artifact) -> list[str]:
    """List the commands that reproduce the artifact.

    The list is empty outside of a run, or if the run's settings are of a later version.
    """
    run = Run(folder.absolute().parent)
    if not run.exists:
        return []
    try:
        return _build_commands(run, folder, metadata)
    except ConfigError:
        return []


def _build_commands(run: Run, folder: Path, metadata: Artifact) -> list[str]:
    commands = []
    if version := metadata.lineage.get("teacher"):
        commands.append(make_distill_command(run, version))
    else:
        commands.append(shlex.join(["rtrain", "train", str(run.config), "--out", f"{run}-again"]))
    if not engines.get_engine(metadata.engine).has_gradients:
        options, out = _set_options(_quantize_overrides(run, metadata)), f"{run}-again/{folder.absolute().name}"
        commands.append(shlex.join(["rtrain", "quantize", f"{run}-again", *options, "--out", out]))
    return commands


def make_distill_command(run: Run, version: str) -> str:
    """Build the command that reproduces a student's run; `version`: version of the teacher's artifact."""
    teacher = _find_teacher(run, version)
    name = "TEACHER" if teacher is None else str(teacher.folder)
    command = shlex.join(
        ["rtrain", "distill", name, *_set_options(_distill_overrides(run, teacher)), "--out", f"{run}-again"]
    )
    return command if teacher else f"{command}  # TEACHER: the run of artifact {version}"


def _find_teacher(run: Run, version: str) -> Run | None:
    """Find the run of a student's teacher by the gate document; None if unknown or missing."""
    baseline = (_read_float_artifact(run).gate or {}).get("baseline", {}) if _has_float_artifact(run) else {}
    if baseline.get("version") != version:
        return None
    teacher_run = Run(Path(baseline["folder"]).parent)
    return teacher_run if teacher_run.exists else None


def _distill_overrides(run: Run, teacher: Run | None) -> dict[str, Any]:
    """Settings of a student that differ from the defaults of `rtrain distill`: the teacher's settings, or the
    recipe's."""
    settings = _flatten_settings(config.load_config(str(run.config)).recipe)
    defaults = (
        _default_settings(settings)
        if teacher is None
        else _flatten_settings(run_folders.load_config(teacher.folder).recipe)
    )
    excluded_names = ("name", *STUDENT_SETTINGS)
    return {
        name: value for name, value in settings.items() if name not in excluded_names and defaults.get(name) != value
    }


def _default_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the built-in recipe; defaults of all settings for a recipe of the user."""
    try:
        return _flatten_settings(config.load_config(settings["name"]).recipe)
    except ConfigError:
        return _flatten_settings(Recipe(name=settings["name"], task=settings["task"]))


def _flatten_settings(recipe: Recipe) -> dict[str, Any]:
    return config.flatten_document(recipe.model_dump(mode="json"))


def _quantize_overrides(run: Run, metadata: Artifact) -> dict[str, Any]:
    """Quantization settings in the lineage that differ from the run's settings."""
    settings, lineage = _flatten_settings(config.load_config(str(run.config)).recipe), metadata.lineage
    quantize_settings = {
        "quantize.kind": lineage.get("kind", "static"),
        "quantize.embedding_dtype": lineage.get("embedding_dtype", "int8"),
    }
    quantize_settings |= {
        "quantize.max_changed_predictions": lineage.get("max_changed_predictions"),
        "quantize.compressed": lineage.get("compressed", False),
    }
    quantize_settings |= {f"quantize.{name}": lineage[name] for name in ("calibration_rows",) if name in lineage}
    quantize_settings["quantize.engine"] = metadata.engine
    return {name: value for name, value in quantize_settings.items() if settings[name] != value}


def _has_float_artifact(run: Run) -> bool:
    return (run.artifact / artifact.FILE_NAME).is_file()


def _read_float_artifact(run: Run) -> Artifact:
    return artifact.read_artifact(run.artifact, verify=False)


def _set_options(settings: Mapping[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in ("--set", _format_assignment(name, value))]


def _format_assignment(name: str, value: Any) -> str:
    """Format an assignment for `config.parse_assignment`."""
    return config.format_assignment(name, value) if isinstance(value, str | list) else f"{name}={json.dumps(value)}"
