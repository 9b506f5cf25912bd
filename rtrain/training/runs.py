"""Run folders: where a run lives, and what happens when its name is in use."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.errors import ConfigError, Problem, UserError

Reuse = Literal["refuse", "resume", "new"]
CONFIG = "config.yaml"
LOCK = "lock"


def folder_for(recipe: str, out: str | None, now: float | None = None) -> Path:
    """`--out` as it stands, else `runs/<recipe>-<time>`; absolute, since rtrain leaves the current folder."""
    if out is not None:
        return Path(out).expanduser().absolute()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return Path("runs").absolute() / f"{recipe}-{stamp}"


def choose(folder: Path, config: Config, reuse: Reuse) -> tuple[Path, Config]:
    """The folder to use and the configuration to run. A used name is refused unless it is resumed or numbered.

    Writes nothing: the folder is made by `freeze`, once nothing is wrong.
    """
    used = (folder / CONFIG).is_file()
    if not used and folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"--out: {folder} is not empty and holds no run; name a new folder")
    if not used and reuse == "resume":
        raise UserError(f"--resume: {folder} holds no run to resume; leave --resume out to start one")
    if used and reuse == "refuse":
        raise UserError(
            f"--out: {folder} holds a run already; write --resume to continue it, or --new for {_numbered(folder).name}"
        )
    if used and reuse == "resume":
        return folder, _resumed(configuration.load(str(folder / CONFIG)), config)
    return _numbered(folder) if used else folder, config


def absolute(config: Config) -> Config:
    """Paths of the configuration made absolute: rtrain leaves the current folder before it starts Ray."""
    recipe = config.recipe
    paths = {
        f"data.{name}": _absolute(value)
        for name, value in (("path", recipe.data.path), ("valid", recipe.data.valid), ("test", recipe.data.test))
        # An address first: a presigned one is longer than the name of any file may be, and asking for it would fail.
        if value is not None
        and "://" not in value
        and (Path(value).expanduser().exists() or any(sign in value for sign in "/*?["))
    }
    if config.deploy.report.tensorboard_dir is not None:
        paths["report.tensorboard_dir"] = _absolute(config.deploy.report.tensorboard_dir)
    if Path(recipe.model.name).expanduser().is_dir():
        paths["model.name"] = _absolute(recipe.model.name)
    return configuration.with_overrides(config, paths)


def freeze(folder: Path, config: Config) -> Config:
    """Make the run folder and write config.yaml, complete and replayable: rows_per_update resolved, paths absolute."""
    resolved = {"train.rows_per_update": config.recipe.rows_per_update, "train.aggregation_frequency": None}
    frozen = configuration.with_overrides(absolute(config), resolved)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(configuration.to_yaml(frozen), encoding="utf-8")
    return frozen


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """The run is this process's own: a second one that trains it, by any name of its folder, is refused.

    A lock (flock) that the kernel takes back however the process ends; shared storage must know locks between machines
    (NFS version 4 does) for it to count there.
    """
    with (folder / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"--out: {folder} is being trained by {file.read() or 'another process'}; wait until it has ended, "
                "or write --new for another run"
            ) from None
        except OSError:
            pass  # storage without locks
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _absolute(path: str) -> str:
    return path if "://" in path else str(Path(path).expanduser().absolute())


def _numbered(folder: Path) -> Path:
    number = 2
    while (candidate := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    return candidate


def _resumed(old: Config, new: Config) -> Config:
    """The stored run with the new speed settings; a difference that would change its weights is refused by name."""
    if new.recipe.train.rows_per_update is None and new.recipe.train.aggregation_frequency is None:
        # Not asked for: the run's own, which was resolved once; another number of workers must not change it.
        new = configuration.with_overrides(new, {"train.rows_per_update": old.recipe.rows_per_update})
    before, after = (_weight_fields(config) for config in (old, new))
    changed = [name for name in before if before[name] != after[name]]
    problems = [
        Problem(
            name, after[name], f"the run was started with {before[name]!r}", "leave it, or start another run with --new"
        )
        for name in changed
    ]
    if problems:
        raise ConfigError(problems)
    asked = [
        name for name in configuration.SPEED if name not in ("aggregation_frequency", "evaluate_every", "save_every")
    ]
    changes: dict[str, object] = {f"train.{name}": getattr(new.recipe.train, name) for name in asked}
    # Where and how it runs is no part of what a run is: what is asked for now counts, the rest stays the run's own.
    changes |= {
        f"{section}.{name}": value
        for section, settings in new.deploy
        for name, value in settings.model_dump().items()
        if value != type(settings).model_fields[name].default
    }
    return configuration.with_overrides(old, changes)


def _weight_fields(config: Config) -> dict[str, object]:
    recipe = config.recipe
    fields: dict[str, object] = {"recipe": recipe.name, "task": recipe.task, "model.name": recipe.model.name}
    for section in ("data", "optim", "train"):
        fields |= {f"{section}.{name}": value for name, value in getattr(recipe, section).model_dump().items()}
    for name in configuration.SPEED:
        del fields[f"train.{name}"]
    fields["train.rows_per_update"] = recipe.rows_per_update
    return fields
