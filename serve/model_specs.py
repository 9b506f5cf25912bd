"""Names of the served artifacts, checked before anything starts. No Ray, no torch."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import rtrain.inference.artifact
from rtrain.config import ServeConfig
from rtrain.core import engines
from rtrain.core.errors import ConfigError, Problem, UserError, quote_value
from rtrain.core.run_folder import quote_path
from serve.auth import preflight

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""The name of one of several models: it stands in paths."""
_NAMED_ARTIFACT = re.compile(r"([^/=:]+)=(.+)")


def parse_model_specs(specs: Sequence[str], resolve_folder: Callable[[str], Path]) -> dict[str, Path]:
    """Folders of artifacts by model name: the name in `NAME=ARTIFACT`, else the artifact's own name. A spec that exists
    as a path is a folder. `resolve_folder` resolves an artifact argument to a folder.

    Raises `UserError` with all errors, one per line.
    """
    errors: list[UserError] = []
    folders: dict[str, Path] = {}
    for spec in specs:
        match = None if Path(spec).exists() else _NAMED_ARTIFACT.fullmatch(spec)
        try:
            folder = resolve_folder(match[2] if match else spec)
            name = match[1] if match else rtrain.inference.artifact.read_artifact(folder, verify=False).name
        except UserError as error:
            errors.append(error)
            continue
        if (match or len(specs) > 1) and not MODEL_NAME.fullmatch(name):
            fix = f"write NAME={spec}" if match is None else "take another"
            message = f"{quote_value(name)} is no name for a model: up to 64 letters, digits and . _ -; {fix}"
            errors.append(UserError(message, code="invalid_name"))
        elif name in folders:
            both_folders = f"{quote_path(folders[name])} and {quote_path(folder)}"
            message = f"two models are called {name}, {both_folders}; name one of them otherwise: NAME={spec}"
            errors.append(UserError(message, code="already_exists"))
        else:
            folders[name] = folder
    if errors:
        raise UserError("\n".join(map(str, errors)), code=errors[0].code)
    return folders


def check_artifacts(
    artifacts: Mapping[str, Path], settings: ServeConfig, notify: Callable[[str], None] = lambda line: None
) -> None:
    """Refuse artifacts that are damaged, that the gate has not let through (`preflight.require_servable`), or that are
    to answer on GPUs and cannot, all at once."""
    errors: list[UserError] = []
    if settings.precision == "fp16" and not settings.gpus:
        fix = "write serve.gpus=1 too, or serve.precision=fp32"
        errors.append(
            ConfigError([Problem("serve.precision", "fp16", "CPUs answer in fp32", fix, code="conflicting_settings")])
        )
    for folder in artifacts.values():
        try:
            artifact = rtrain.inference.artifact.read_artifact(folder)
            if settings.gpus and not engines.get_engine(artifact.engine).supports_gpu:
                reason = f"{quote_path(folder)} answers by {artifact.engine}, on CPUs alone"
                fix = "serve the float artifact of its run, or write 0"
                raise ConfigError([Problem("serve.gpus", settings.gpus, reason, fix, code="conflicting_settings")])
            preflight.require_servable(artifact, folder, settings, notify)
        except UserError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise rtrain.inference.artifact.ArtifactError("\n".join(map(str, errors)), code=errors[0].code)
