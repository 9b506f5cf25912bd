"""The commands that make an artefact again, from the files of the run that it lies in."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rtrain import config
from rtrain.config import Recipe
from rtrain.config.recipe import OF_STUDENTS
from rtrain.core import engines
from rtrain.core.errors import ConfigError
from rtrain.core.run_folder import Run
from rtrain.inference import artifact
from rtrain.inference.artifact import Artifact
from rtrain.runs import run_folders


def reproduce(folder: Path, made: Artifact) -> list[str]:
    """The commands that make the artefact again, from the files beside it; empty where it lies outside of its run, or
    where a later version wrote settings there that this one does not know."""
    run = Run(folder.absolute().parent)
    if not run.exists:
        return []
    try:
        return _commands(run, folder, made)
    except ConfigError:
        return []


def _commands(run: Run, folder: Path, made: Artifact) -> list[str]:
    found = []
    if version := made.lineage.get("teacher"):
        found.append(distilled(run, version))
    else:
        found.append(shlex.join(["rtrain", "train", str(run.config), "--out", f"{run}-again"]))
    if not engines.get(made.engine).gradients:
        sets, into = _sets(_quantized(run, made)), f"{run}-again/{folder.absolute().name}"
        found.append(shlex.join(["rtrain", "quantize", f"{run}-again", *sets, "--out", into]))
    return found


def distilled(run: Run, version: str) -> str:
    """The command that makes a student's run again; `version`: of its teacher's artefact."""
    teacher = _teacher(run, version)
    name = "TEACHER" if teacher is None else str(teacher.folder)
    words = shlex.join(["rtrain", "distill", name, *_sets(_distilled(run, teacher)), "--out", f"{run}-again"])
    return words if teacher else f"{words}  # TEACHER: the run of artefact {version}"


def _teacher(run: Run, version: str) -> Run | None:
    """The run of a student's teacher, where the gate names it and it is still there."""
    against = (_float(run).gate or {}).get("against", {}) if _has_float(run) else {}
    if against.get("version") != version:
        return None
    found = Run(Path(against["folder"]).parent)
    return found if found.exists else None


def _distilled(run: Run, teacher: Run | None) -> dict[str, Any]:
    """All settings of a student that are others than those that `rtrain distill` begins with: its teacher's or, where
    that is not known, those of the recipe that it names."""
    own = _settings(config.load(str(run.config)).recipe)
    usual = _usual(own) if teacher is None else _settings(run_folders.stored(teacher.folder).recipe)
    left_out = ("name", *OF_STUDENTS)
    return {name: value for name, value in own.items() if name not in left_out and usual.get(name) != value}


def _usual(own: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the recipe that is named; of one that is the user's own, the defaults of all settings."""
    try:
        return _settings(config.load(own["name"]).recipe)
    except ConfigError:
        return _settings(Recipe(name=own["name"], task=own["task"]))


def _settings(recipe: Recipe) -> dict[str, Any]:
    return config.dotted(recipe.model_dump(mode="json"))


def _quantized(run: Run, made: Artifact) -> dict[str, Any]:
    """What an int8 artefact was made by otherwise than its run's own settings say, as far as its lineage knows."""
    own, lineage = _settings(config.load(str(run.config)).recipe), made.lineage
    wanted = {"quantize.kind": lineage.get("kind", "static"), "quantize.table": lineage.get("table", "int8")}
    wanted |= {"quantize.flips": lineage.get("flips"), "quantize.compressed": lineage.get("compressed", False)}
    wanted |= {f"quantize.{name}": lineage[name] for name in ("calibration_rows",) if name in lineage}
    wanted["quantize.engine"] = made.engine
    return {name: value for name, value in wanted.items() if own[name] != value}


def _has_float(run: Run) -> bool:
    return (run.artifact / artifact.NAME).is_file()


def _float(run: Run) -> Artifact:
    return artifact.read(run.artifact, verify=False)


def _sets(settings: Mapping[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in ("--set", _assigned(name, value))]


def _assigned(name: str, value: Any) -> str:
    """As `config.parse_assignment` reads it."""
    return config.assignment(name, value) if isinstance(value, str | list) else f"{name}={json.dumps(value)}"
