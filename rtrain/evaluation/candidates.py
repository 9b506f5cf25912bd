"""What is compared: a run, the winner of a search, or another artefact of a run, each found from a folder's name."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.core.run_folder import Run, chosen
from rtrain.inference import artifact
from rtrain.inference.artifact import Artifact
from rtrain.report import summary
from rtrain.tasks import base

LETTERS = "ABCDEFGH"
"""One for each side, as many as the charts have colours."""


@dataclass(frozen=True)
class Side:
    """One of the models that are compared."""

    letter: str
    name: str
    """Folders that tell it from the other sides."""
    run: Run
    folder: Path
    """The artefact that answers; it is there only once the run has ended."""
    config: Config

    def __str__(self) -> str:
        return f"{self.letter} ({self.name})"

    @property
    def own(self) -> bool:
        """Whether the run itself is meant, and not an artefact that was made of it later."""
        return self.folder == self.run.artifact

    @cached_property
    def made(self) -> Artifact | None:
        """artifact.json, where the artefact is there."""
        return artifact.read(self.folder, verify=False) if (self.folder / artifact.NAME).is_file() else None

    @property
    def output(self) -> str:
        """Kind of the answers."""
        return base.get(self.config.recipe.task).output

    @cached_property
    def summary(self) -> dict[str, Any]:
        return summary.summarise(self.run)


def find(folders: Sequence[Path]) -> list[Side]:
    """The sides, in the order in which they were named. Raises `UserError` for a folder that holds no run, for one that
    is named twice, and for runs of different tasks."""
    if not 2 <= len(folders) <= len(LETTERS):
        fix = "name the one that the others are compared with, then the others"
        raise ConfigError(
            [Problem("runs", len(folders), f"a comparison is of two to {len(LETTERS)} runs", fix, code="out_of_range")]
        )
    found = [_found(folder.absolute()) for folder in folders]
    made = [one.resolve() for _, one in found]  # a link, or a path with .., may lead to a folder once more
    for place, one in enumerate(made):
        if one in made[:place]:
            raise UserError(
                f"{folders[place]} and {folders[made.index(one)]} are the same model; name another run",
                code="named_twice",
            )
    names = _names(found)
    sides = [
        Side(letter, name, run, folder, configuration.load(str(run.config)))
        for letter, name, (run, folder) in zip(LETTERS, names, found, strict=False)
    ]
    first = sides[0]
    for side in sides[1:]:
        task, other = first.config.recipe.task, side.config.recipe.task
        if task != other:
            raise UserError(
                f"{first.run} answers by the task {task}, {side.run} by {other}: their scores measure different "
                f"things; name runs of one task",
                code="other_task",
            )
    return sides


def _found(folder: Path) -> tuple[Run, Path]:
    """(the run, the artefact that answers)."""
    if (folder / artifact.NAME).is_file():
        if Run(folder.parent).exists:
            return Run(folder.parent), folder
        reason = "is an artefact outside of its run, where neither its rows nor its training are known"
        raise UserError(f"{folder} {reason}; name the folder of its run, or an artefact inside one", code="not_a_run")
    run = chosen(folder)
    return run, run.artifact


def _names(found: Sequence[tuple[Run, Path]]) -> list[str]:
    """The name of each run's folder, with its search's before it and that of another artefact behind it; more folders
    where names are equal."""
    names: list[str] = []
    for more in range(max(len(made.parts) for _, made in found)):
        names = [
            "/".join(
                run.folder.parts[-1 - more - Run(run.folder.parent).is_search :]
                + (() if made == run.artifact else (made.name,))
            )
            for run, made in found
        ]
        if len(set(names)) == len(names):
            break
    return names
