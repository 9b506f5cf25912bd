"""Candidates of a comparison: a run, the winner of a search, or another artifact of a run, found by folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.core.run_folder import Run, resolve_run
from rtrain.inference import artifact
from rtrain.inference.artifact import Artifact
from rtrain.report import summary
from rtrain.tasks import base

LETTERS = "ABCDEFGH"
"""One letter per candidate, as many as the charts have colors."""


@dataclass(frozen=True)
class Candidate:
    """One model of a comparison."""

    letter: str
    name: str
    """The folders that distinguish it from other candidates."""
    run: Run
    folder: Path
    """Folder of the artifact; missing before the run ends."""
    config: Config

    def __str__(self) -> str:
        return f"{self.letter} ({self.name})"

    @property
    def is_run_artifact(self) -> bool:
        """Whether this is the run's own artifact and not a derived artifact."""
        return self.folder == self.run.artifact

    @cached_property
    def metadata(self) -> Artifact | None:
        """artifact.json; None without an artifact."""
        return (
            artifact.read_artifact(self.folder, verify=False) if (self.folder / artifact.FILE_NAME).is_file() else None
        )

    @property
    def output(self) -> str:
        """Kind of the task's output."""
        return base.get_task(self.config.recipe.task).output

    @cached_property
    def summary(self) -> dict[str, Any]:
        return summary.summarize(self.run)


def find_candidates(folders: Sequence[Path]) -> list[Candidate]:
    """Find the candidates in the given order.

    Raises `UserError` for a folder without a run, a duplicate, and runs of different tasks.
    """
    if not 2 <= len(folders) <= len(LETTERS):
        fix = "name the reference run first, then the others"
        raise ConfigError(
            [Problem("runs", len(folders), f"a comparison needs two to {len(LETTERS)} runs", fix, code="out_of_range")]
        )
    models = [_find_model(folder.absolute()) for folder in folders]
    resolved_folders = [
        model_folder.resolve() for _, model_folder in models
    ]  # links and .. may lead to the same folder
    for place, resolved_folder in enumerate(resolved_folders):
        if resolved_folder in resolved_folders[:place]:
            raise UserError(
                f"{folders[place]} and {folders[resolved_folders.index(resolved_folder)]} are the same model; name "
                "another run",
                code="duplicate_name",
            )
    names = _unique_names(models)
    candidates = [
        Candidate(letter, name, run, folder, configuration.load_config(str(run.config)))
        for letter, name, (run, folder) in zip(LETTERS, names, models, strict=False)
    ]
    first = candidates[0]
    for candidate in candidates[1:]:
        task, other = first.config.recipe.task, candidate.config.recipe.task
        if task != other:
            raise UserError(
                f"the task of {first.run} is {task}, the task of {candidate.run} is {other}, and their scores are not "
                f"comparable; name runs of one task",
                code="task_mismatch",
            )
    return candidates


def _find_model(folder: Path) -> tuple[Run, Path]:
    """Return (run, folder of the artifact)."""
    if (folder / artifact.FILE_NAME).is_file():
        if Run(folder.parent).exists:
            return Run(folder.parent), folder
        reason = "is an artifact outside of its run, so its rows and training are unknown"
        raise UserError(f"{folder} {reason}; name the folder of its run, or an artifact inside one", code="not_a_run")
    run = resolve_run(folder)
    return run, run.artifact


def _unique_names(models: Sequence[tuple[Run, Path]]) -> list[str]:
    """Name each model by its run's folder, prefixed by its search and suffixed by a derived artifact.

    Equal names get more parent folders.
    """
    names: list[str] = []
    for depth in range(max(len(model_folder.parts) for _, model_folder in models)):
        names = [
            "/".join(
                run.folder.parts[-1 - depth - Run(run.folder.parent).is_search :]
                + (() if model_folder == run.artifact else (model_folder.name,))
            )
            for run, model_folder in models
        ]
        if len(set(names)) == len(names):
            break
    return names
