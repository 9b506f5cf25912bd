"""Run folders: where a run lives, and what happens when its name is in use."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rtrain import config as configuration
from rtrain.checkpoint import format as checkpoint_format
from rtrain.cluster import pricing
from rtrain.config import Config, Recipe
from rtrain.config.recipe import STUDENTS as STUDENTS
from rtrain.core import atomic_write, hub
from rtrain.core.errors import ConfigError, Problem, UserError, meant
from rtrain.core.run_folder import Run
from rtrain.data.sources import find

Reuse = Literal["refuse", "resume", "new"]
SETTINGS = "settings"
"""The name under which a run or a search keeps the settings that change its weights, as it was started with them."""
ROWS, FREQUENCY = "train.rows_per_update", "train.aggregation_frequency"
LEFT_OPEN = ("model.pooling", "train.precision", "distill.teacher_layers")
"""Settings whose `auto` is decided once for a run. A resume that names `auto` again asks for nothing new."""


def folder_for(recipe: str, out: str | None, now: float | None = None) -> Path:
    """`--out` as it stands, else `runs/<recipe>-<time>`; absolute, since rtrain leaves the current folder."""
    if out is not None:
        return Path(out).expanduser().absolute()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return Path("runs").absolute() / f"{recipe}-{stamp}"


def choose(folder: Path, config: Config, reuse: Reuse) -> tuple[Path, Config]:
    """The folder to use and the configuration to run. A used name is refused unless it is resumed or numbered.

    Writes nothing: the folder is made by `claimed`, once nothing is wrong.
    """
    run = Run(folder)
    used = run.exists
    begun = {run.lock, *folder.glob(f".{run.config.name}.*")}  # what a command that was killed in `claimed` leaves
    if not used and folder.is_dir() and set(folder.iterdir()) - begun:
        raise UserError(f"--out: {folder} is not empty and holds no run; name a new folder", code="not_empty")
    if not used and reuse == "resume":
        fix = meant(folder) or "leave --resume out to start one"
        raise UserError(f"--resume: {folder} holds no run to resume; {fix}", code="not_a_run")
    if used and reuse == "refuse":
        raise UserError(
            f"--out: {folder} holds a run already; write --resume to continue it, or --new for "
            f"{_numbered(folder).name}",
            code="already_exists",
        )
    if used and reuse == "resume":
        resumed = _resumed(folder, config)
        _refuse_cleaned(Run(folder), resumed)
        return folder, resumed
    return _numbered(folder) if used else folder, config


def absolute(config: Config, resumed: Path | None = None) -> Config:
    """Paths of the configuration made absolute, since rtrain leaves the current folder before it starts Ray, and hub
    names given their commit, since tomorrow they may mean another. A run that is `resumed` has commits, and asks none.
    """
    recipe = config.recipe
    paths: dict[str, object] = {
        f"data.{name}": _absolute(value)
        for name, value in (("path", recipe.data.path), ("valid", recipe.data.valid), ("test", recipe.data.test))
        # Addresses are told first: a presigned one is longer than a file name may be, and looking for it would fail.
        if value is not None
        and "://" not in value
        and not find.is_hub_name(value, recipe.data.format)
        and (Path(value).expanduser().exists() or any(sign in value for sign in "/*?["))
    }
    for section in ("compress", "distill"):
        unlabelled = getattr(recipe, section).unlabelled
        if unlabelled and not find.is_hub_name(unlabelled, recipe.data.format):
            paths[f"{section}.unlabelled"] = _absolute(unlabelled)
    if recipe.distill.teachers:
        paths["distill.teachers"] = [_absolute(run) for run in recipe.distill.teachers]
    if resumed is None:
        paths |= {field: _pinned(kind, name) for field, (kind, name) in hub_names(config).items()}
    elif Run(resumed).exists:
        paths |= _taken_over(configuration.load(str(Run(resumed).config)), config)
    if config.deploy.report.tensorboard_dir is not None:
        paths["report.tensorboard_dir"] = _absolute(config.deploy.report.tensorboard_dir)
    if config.deploy.cluster.prices is not None:
        paths |= _priced(config, _absolute(config.deploy.cluster.prices))
    if config.deploy.cluster.storage is not None:
        paths["cluster.storage"] = _absolute(config.deploy.cluster.storage)
    models = {
        "model.name": recipe.model.name,
        "distill.student": recipe.distill.student,
        "augment.paraphrase": recipe.augment.paraphrase,
        "augment.pivot": recipe.augment.pivot,
    }
    paths |= {field: _absolute(name) for field, name in models.items() if name and Path(name).expanduser().is_dir()}
    return replace(configuration.with_overrides(config, paths), named=config.named)


def _priced(config: Config, file: str) -> dict[str, object]:
    """The file of prices, and of a worker's hour the price in it, where no setting says it."""
    worker, tune = pricing.read(Path(file)).get(pricing.WORKER), config.deploy.tune
    if tune.money is not None and tune.price is None and worker is None:
        fix = f"add a line to it: {pricing.WORKER}: {{on_demand: 0.04}}"
        reason = f"{file} has no price of a worker's hour"
        raise ConfigError([Problem("tune.money", tune.money, reason, fix, code="no_price")])
    own = worker.on_demand if worker and tune.price is None else tune.price
    return {"cluster.prices": file, "tune.price": own or None}


def stored(folder: Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """The configuration that a run was started with, changed by `overrides`. Only these count as named by the user."""
    if not Run(folder).exists:
        fix = meant(folder) or "name the folder that --out named"
        raise UserError(f"{folder} holds no run; {fix}", code="not_a_run")
    found = configuration.load(str(Run(folder).config))
    # A run decides it when it is created, so one that has not is older than the setting. A search leaves it to trials.
    if Run(folder).first("created") is not None:
        older = {"model.pooling": "own"} if found.recipe.model.pooling == "auto" else {}
        if found.recipe.distill.teacher is not None and found.recipe.distill.teacher_layers == "auto":
            older["distill.teacher_layers"] = "all"
        found = configuration.with_overrides(found, older)
    return configuration.with_overrides(replace(found, named=frozenset()), overrides or {})


def freeze(run: Run, config: Config) -> Config:
    """Make the run folder and write config.yaml, complete and replayable: rows_per_update resolved, paths absolute."""
    resolved = {ROWS: config.recipe.rows_per_update, FREQUENCY: None}
    known = run.folder if run.exists else None
    frozen = configuration.with_overrides(absolute(config, known), resolved)
    run.folder.mkdir(parents=True, exist_ok=True)
    atomic_write.write_text(run.config, configuration.to_yaml(frozen))  # whole: where it is, there is a run
    run.decide(SETTINGS, frozen.recipe.weights())
    return frozen


@contextmanager
def claimed(run: Run, reuse: Reuse) -> Iterator[Run]:
    """The run that this command may write now, held: before the first byte of it is changed, for whoever is refused
    must leave it as it was.

    Since `choose` has looked, the rows were read, for hours maybe. A name that another command has taken meanwhile is
    refused; with `new` the next free number is the run's.
    """
    while True:
        run.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            try:
                held.enter_context(hold(run))
                free = reuse == "resume" or not run.exists
            except UserError:
                if reuse != "new":
                    raise
                free = False
            if free:
                yield run
                return
            if reuse == "refuse":
                raise UserError(
                    f"--out: {run} was begun by another command meanwhile; write --new for another run",
                    code="already_exists",
                )
        run = Run(_numbered(run.folder))


@contextmanager
def hold(run: Run) -> Iterator[None]:
    """The run is this process's own: a second one that trains it, by any name of its folder, is refused.

    A lock (flock) that the kernel takes back however the process ends; shared storage must know locks between machines
    (NFS version 4 does) for it to count there.
    """
    with run.lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"--out: {run} is being trained by {file.read() or 'another process'}; wait until it has ended, "
                "or write --new for another run",
                code="in_use",
            ) from None
        except OSError:
            pass  # storage without locks
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def hub_names(config: Config) -> dict[str, tuple[hub.Kind, str]]:
    """(kind, name) by setting, of the settings that name something on the hub."""
    recipe, data = config.recipe, config.recipe.data
    rows = {
        "data.path": data.path,
        "data.valid": data.valid,
        "data.test": data.test,
        "compress.unlabelled": recipe.compress.unlabelled,
        "distill.unlabelled": recipe.distill.unlabelled,
    }
    models = {
        "model.name": recipe.model.name,
        "augment.paraphrase": recipe.augment.paraphrase,
        "augment.pivot": recipe.augment.pivot,
    }
    return {
        **{field: ("dataset", name) for field, name in rows.items() if name and find.is_hub_name(name, data.format)},
        **{
            field: ("model", name)
            for field, name in models.items()
            if name and name != hub.PACKAGED and hub.is_name(name)
        },
    }


def _pinned(kind: hub.Kind, name: str) -> str:
    try:
        return hub.pinned(kind, name)
    except hub.Refused:
        return name  # told with all that is wrong, when the files are looked for


def _taken_over(old: Config, new: Config) -> dict[str, object]:
    """Settings of a resume that name the same things on the hub, at the commits that the run was started with."""
    known = hub_names(old)
    return {
        field: known[field][1]
        for field, (_, name) in hub_names(new).items()
        if field in known and hub.takes_over(name, known[field][1])
    }


def _absolute(path: str) -> str:
    return path if "://" in path else str(Path(path).expanduser().absolute())


def _numbered(folder: Path) -> Path:
    number = 2
    while (candidate := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    return candidate


def asked_of(run: Run, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a resume names, without those that leave open what the run has decided: that stays."""
    decided = (*LEFT_OPEN, *(["train.strategy"] if run.first("strategy") else []))
    return {name: value for name, value in settings.items() if not (name in decided and value == "auto")}


def _resumed(folder: Path, new: Config) -> Config:
    """The stored run with what `new` names; what would change its weights is refused by name."""
    old = stored(folder)
    _refuse_edited(Run(folder), configuration.load(str(Run(folder).config)).recipe)
    new = replace(configuration.with_overrides(new, _taken_over(old, new)), named=new.named)
    named = {name: value for name, value in configuration.flat(new).items() if name in new.named}
    asked = asked_of(Run(folder), named)
    # Where neither is asked for, they are the run's own: another number of workers must not change its rows.
    if any(asked.get(name) is not None for name in (ROWS, FREQUENCY)):
        asked = {ROWS: None, FREQUENCY: None, **asked}
    else:
        asked = {name: value for name, value in asked.items() if name not in (ROWS, FREQUENCY)}
    document = configuration.to_document(old)
    for name, value in asked.items():
        configuration.put(document, name, value)
    recipe = Recipe.model_validate({name: document[name] for name in configuration.RECIPE_FIELDS})
    before, after = (configuration.dotted(found.weights()) for found in (old.recipe, recipe))
    was, wanted = {**configuration.flat(old), **before}, {**configuration.dotted(document), **after}
    changed = [name for name in was if was[name] != wanted[name] and before.get(name) != after.get(name)]
    if recipe.name != old.recipe.name:  # it changes no weight, and shows that another run was meant
        changed.insert(0, "name")
    if changed:
        fixes = {ROWS: f"set {ROWS}={was.get(ROWS)} and {FREQUENCY}=null, or start another run"}
        problems = [
            Problem(
                name,
                wanted[name],
                f"the run was started with {was[name]!r}",
                fixes.get(name, "leave it out, or start another run"),
                code="changed_setting",
            )
            for name in changed
        ]
        way_on = f"The same command with --new in place of --resume starts another run, {_numbered(folder).name}."
        raise ConfigError(problems, way_on)
    asked |= {ROWS: old.recipe.rows_per_update, FREQUENCY: None}
    return replace(configuration.with_overrides(old, asked), named=new.named)


def _refuse_edited(run: Run, recipe: Recipe) -> None:
    """Raise `ConfigError` if config.yaml has other settings than the run was started with, and they change weights."""
    before = configuration.dotted(run.decisions.get(SETTINGS, {}))
    after = configuration.dotted(recipe.weights())
    fix = f"put it back in {run.config}, or start another run from that file with --new"
    problems = [
        Problem(name, after.get(name), f"the run was started with {before.get(name)!r}", fix, code="changed_setting")
        for name in sorted(before.keys() | after.keys() if before else ())
        if before.get(name) != after.get(name)
    ]
    if problems:
        raise ConfigError(problems)


def _refuse_cleaned(run: Run, config: Config) -> None:
    """Raise `UserError` for a run whose checkpoints `rtrain clean` has removed, or that came without them: it would
    begin again with its first update. One with an artefact has nothing left to train, and one with a copy in storage
    goes on from there."""
    told = [event for event in run.events("cleaned", "imported") if _lost_checkpoints(event)]
    if not told or run.finished or config.deploy.cluster.storage or checkpoint_format.updates(run.checkpoints):
        return
    event = told[-1]
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(event["time"]))
    why = (
        f"removed by rtrain clean on {day}" if event["kind"] == "cleaned" else f"not carried by rtrain import on {day}"
    )
    raise UserError(
        f"--resume: the checkpoints of {run} were {why}, so there is nothing to go on from; "
        f"write --new in place of --resume to train {_numbered(run.folder).name} from the start",
        code="no_checkpoints",
    )


def _lost_checkpoints(event: Mapping[str, Any]) -> bool:
    """Whether checkpoints went with it: a removal may have been of leftovers alone, and one of a whole run names `.`"""
    removed = event.get("removed", [])
    return event["kind"] == "imported" or any(name == "." or name.startswith("checkpoints") for name in removed)
