"""Which artefact answers by which name, before anything starts. No Ray, no torch."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import rtrain.inference.artifact
from rtrain.config import Serve
from rtrain.core import engines
from rtrain.core.errors import ConfigError, Problem, UserError, quoted
from rtrain.core.run_folder import shown
from serve.auth import preflight

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""The name of one of several models: it stands in paths."""
_GIVEN = re.compile(r"([^/=:]+)=(.+)")


def artifacts(given: Sequence[str], find: Callable[[str], Path]) -> dict[str, Path]:
    """The folders of artefacts by the names by which they are asked for: of `NAME=ARTIFACT` that one, else the
    artefact's own. What exists by its whole word is a folder. `find` makes a folder of what names an artefact.

    Raises `UserError` with all that is wrong, a line for each.
    """
    wrong: list[UserError] = []
    found: dict[str, Path] = {}
    for word in given:
        parts = None if Path(word).exists() else _GIVEN.fullmatch(word)
        try:
            folder = find(parts[2] if parts else word)
            name = parts[1] if parts else rtrain.inference.artifact.read(folder, verify=False).name
        except UserError as error:
            wrong.append(error)
            continue
        if (parts or len(given) > 1) and not NAME.fullmatch(name):
            fix = f"write NAME={word}" if parts is None else "take another"
            said = f"{quoted(name)} is no name for a model: up to 64 letters, digits and . _ -; {fix}"
            wrong.append(UserError(said, code="invalid_name"))
        elif name in found:
            both = f"{shown(found[name])} and {shown(folder)}"
            said = f"two models are called {name}, {both}; name one of them otherwise: NAME={word}"
            wrong.append(UserError(said, code="already_exists"))
        else:
            found[name] = folder
    if wrong:
        raise UserError("\n".join(map(str, wrong)), code=wrong[0].code)
    return found


def admit(artifacts: Mapping[str, Path], settings: Serve, say: Callable[[str], None] = lambda line: None) -> None:
    """Refuse artefacts that are damaged, that the gate has not let through (`access.admit`), or that are to answer on
    GPUs and cannot, all at once."""
    errors: list[UserError] = []
    if settings.precision == "fp16" and not settings.gpus:
        fix = "write serve.gpus=1 too, or serve.precision=fp32"
        errors.append(
            ConfigError([Problem("serve.precision", "fp16", "CPUs answer in fp32", fix, code="conflicting_settings")])
        )
    for folder in artifacts.values():
        try:
            artifact = rtrain.inference.artifact.read(folder)
            if settings.gpus and not engines.get(artifact.engine).on_gpu:
                reason = f"{shown(folder)} answers by {artifact.engine}, on CPUs alone"
                fix = "serve the float artefact of its run, or write 0"
                raise ConfigError([Problem("serve.gpus", settings.gpus, reason, fix, code="conflicting_settings")])
            preflight.admit(artifact, folder, settings, say)
        except UserError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise rtrain.inference.artifact.ArtifactError("\n".join(map(str, errors)), code=errors[0].code)
