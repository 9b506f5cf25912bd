"""Run folders: names, locks, stored configurations, and the rules of a resume."""

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
from rtrain.config.recipe import STUDENTS_FOLDER as STUDENTS_FOLDER
from rtrain.core import atomic_write, hub, plugins
from rtrain.core.errors import ConfigError, Problem, UserError, suggest_path
from rtrain.core.run_folder import Run
from rtrain.data import sources

Reuse = Literal["refuse", "resume", "new"]
SETTINGS_KEY = "settings"
"""Key in decisions.json of the initial settings that change the weights."""
BATCH_SIZE_SETTING, FREQUENCY_SETTING = "train.global_batch_size", "train.aggregation_frequency"
DATASET_SETTINGS = (
    *("data.path", "data.valid", "data.test"),
    *("compress.unlabeled_rows_path", "distill.unlabeled_rows_path"),
)
MODEL_SETTINGS = ("model.name", "augment.paraphrase", "augment.back_translation_model")
"""Settings that may name a repository of the hub."""
AUTO_SETTINGS = ("model.pooling", "train.precision", "distill.teacher_layers")
"""Settings whose `auto` is resolved once for a run. `auto` in a resume changes nothing."""


def default_run_folder(recipe: str, out: str | None, now: float | None = None) -> Path:
    """Return `--out`, or `runs/<recipe>-<time>`, as an absolute path, since rtrain changes the current folder."""
    if out is not None:
        return Path(out).expanduser().absolute()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return Path("runs").absolute() / f"{recipe}-{stamp}"


def choose_folder(folder: Path, config: Config, reuse: Reuse) -> tuple[Path, Config]:
    """Return the folder and the configuration of a run. A used name is refused unless it is resumed or numbered.

    Nothing is written: `lock_new_run` creates the folder after all checks.
    """
    run = Run(folder)
    run_exists = run.exists
    claim_files = {
        run.lock,
        *folder.glob(f".{run.config.name}.*"),
    }  # left by a command that was killed in `lock_new_run`
    if not run_exists and folder.is_dir() and set(folder.iterdir()) - claim_files:
        raise UserError(f"--out: {folder} is not empty and holds no run; name a new folder", code="not_empty")
    if not run_exists and reuse == "resume":
        fix = suggest_path(folder) or "leave --resume out to start one"
        raise UserError(f"--resume: {folder} holds no run to resume; {fix}", code="not_a_run")
    if run_exists and reuse == "refuse":
        raise UserError(
            f"--out: {folder} holds a run already; write --resume to continue it, or --new for "
            f"{_next_free_folder(folder).name}",
            code="already_exists",
        )
    if run_exists and reuse == "resume":
        resumed_config = _resume_config(folder, config)
        _refuse_without_checkpoints(Run(folder), resumed_config)
        return folder, resumed_config
    return _next_free_folder(folder) if run_exists else folder, config


def resolve_paths(config: Config, resumed_run: Path | None = None) -> Config:
    """Make paths absolute, since rtrain changes the current folder before it starts Ray, and pin hub names to commits.

    A resumed run keeps the commits of its stored configuration.
    """
    values, data_format = configuration.flatten_config(config), config.recipe.data.format
    paths: dict[str, object] = {}
    for field in ("data.path", "data.valid", "data.test"):
        value = values[field]
        # URLs are skipped first: a presigned one is longer than a file name may be, and `exists` would fail.
        if value is None or "://" in value or sources.is_hub_name(value, data_format):
            continue
        if Path(sources.split_sheet(value)[0]).expanduser().exists() or any(sign in value for sign in "/*?["):
            paths[field] = _absolute_path(value)
    for field in ("compress.unlabeled_rows_path", "distill.unlabeled_rows_path"):
        if values[field] and not sources.is_hub_name(values[field], data_format):
            paths[field] = _absolute_path(values[field])
    for field in ("report.tensorboard_dir", "cluster.storage"):
        if values[field] is not None:
            paths[field] = _absolute_path(values[field])
    for field in (*MODEL_SETTINGS, "distill.student"):
        if values[field] and Path(values[field]).expanduser().is_dir():
            paths[field] = _absolute_path(values[field])
    if config.recipe.distill.teachers:
        paths["distill.teachers"] = [_absolute_path(run) for run in config.recipe.distill.teachers]
    if config.deploy.cluster.prices is not None:
        paths |= _price_settings(config, _absolute_path(config.deploy.cluster.prices))
    if resumed_run is None:
        paths |= {field: _pin_commit(kind, name) for field, (kind, name) in hub_names(config).items()}
    elif Run(resumed_run).exists:
        paths |= _keep_hub_commits(configuration.load_config(str(Run(resumed_run).config)), config)
    return replace(configuration.with_overrides(config, paths), explicit_settings=config.explicit_settings)


def _price_settings(config: Config, file: str) -> dict[str, object]:
    """Return the price file, and its price of a worker's hour unless a setting has one."""
    worker, tune = pricing.read_price_file(Path(file)).get(pricing.WORKER_KEY), config.deploy.tune
    if tune.max_cost is not None and tune.worker_cost_per_hour is None and worker is None:
        fix = f"add a line to it: {pricing.WORKER_KEY}: {{on_demand: 0.04}}"
        reason = f"{file} has no price of a worker's hour"
        raise ConfigError([Problem("tune.max_cost", tune.max_cost, reason, fix, code="no_price")])
    price_per_hour = worker.on_demand if worker and tune.worker_cost_per_hour is None else tune.worker_cost_per_hour
    return {"cluster.prices": file, "tune.worker_cost_per_hour": price_per_hour or None}


def load_config(folder: Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """Load a run's stored configuration with `overrides`. Only these count as set by the user."""
    if not Run(folder).exists:
        fix = suggest_path(folder) or "name the folder that --out named"
        raise UserError(f"{folder} holds no run; {fix}", code="not_a_run")
    config = configuration.load_config(str(Run(folder).config))
    # A run resolves it at its creation, so an unresolved one is older than the setting. A search leaves it to its
    # trials.
    if Run(folder).first_event("created") is not None:
        former_defaults = {"model.pooling": "own"} if config.recipe.model.pooling == "auto" else {}
        if config.recipe.distill.teacher is not None and config.recipe.distill.teacher_layers == "auto":
            former_defaults["distill.teacher_layers"] = "all"
        config = configuration.with_overrides(config, former_defaults)
    return configuration.with_overrides(replace(config, explicit_settings=frozenset()), overrides or {})


def write_frozen_config(run: Run, config: Config) -> Config:
    """Create the run folder and write config.yaml, complete and replayable: global_batch_size resolved, paths
    absolute."""
    resolved_settings = {BATCH_SIZE_SETTING: config.recipe.global_batch_size, FREQUENCY_SETTING: None}
    existing_run = run.folder if run.exists else None
    frozen_config = configuration.with_overrides(resolve_paths(config, existing_run), resolved_settings)
    run.folder.mkdir(parents=True, exist_ok=True)
    atomic_write.write_text(run.config, configuration.to_yaml(frozen_config))  # atomic: the file marks a run
    run.decide_once(SETTINGS_KEY, frozen_config.recipe.weight_settings())
    return frozen_config


@contextmanager
def lock_new_run(run: Run, reuse: Reuse) -> Iterator[Run]:
    """Lock the run before anything in its folder is changed.

    Hours may have passed since `choose_folder`, while the rows were read. If another command has created the run
    meanwhile, it is refused; with reuse `new` the next free number is used.
    """
    while True:
        run.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as lock_stack:
            try:
                lock_stack.enter_context(lock(run))
                is_free = reuse == "resume" or not run.exists
            except UserError:
                if reuse != "new":
                    raise
                is_free = False
            if is_free:
                yield run
                return
            if reuse == "refuse":
                raise UserError(
                    f"--out: {run} was created by another command meanwhile; write --new for another run",
                    code="already_exists",
                )
        run = Run(_next_free_folder(run.folder))


@contextmanager
def lock(run: Run) -> Iterator[None]:
    """Lock the run: a second process that trains it, by any path, is refused.

    The kernel releases the lock (flock) however the process ends. Between machines it needs shared storage with locks
    (NFS version 4).
    """
    with run.lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"--out: {run} is being trained by {file.read() or 'another process'}; wait until it "
                "ends, "
                "or write --new for another run",
                code="in_use",
            ) from None
        except OSError:
            pass  # storage without locks
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def hub_names(config: Config) -> dict[str, tuple[hub.RepoType, str]]:
    """Return (kind, name) of the settings that name a hub repository, by setting."""
    values, names = configuration.flatten_config(config), dict[str, tuple[hub.RepoType, str]]()
    for field in DATASET_SETTINGS:
        if values[field] and sources.is_hub_name(values[field], config.recipe.data.format):
            names[field] = "dataset", values[field]
    for field in MODEL_SETTINGS:
        if values[field] and values[field] != hub.PACKAGED_MODEL and hub.is_hub_name(values[field]):
            names[field] = "model", values[field]
    return names


def _pin_commit(kind: hub.RepoType, name: str) -> str:
    try:
        return hub.pin_revision(kind, name)
    except hub.HubError:
        return name  # reported with all problems when the files are opened


def _keep_hub_commits(stored_config: Config, new_config: Config) -> dict[str, object]:
    """Return the hub names of a resume that match stored ones, at the stored commits."""
    stored_names = hub_names(stored_config)
    return {
        field: stored_names[field][1]
        for field, (_, name) in hub_names(new_config).items()
        if field in stored_names and hub.matches_pinned(name, stored_names[field][1])
    }


def _absolute_path(path: str) -> str:
    return path if "://" in path else str(Path(path).expanduser().absolute())


def _next_free_folder(folder: Path) -> Path:
    number = 2
    while (candidate := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    return candidate


def resume_overrides(run: Run, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a resume without `auto` values that the run has resolved."""
    decided_settings = (*AUTO_SETTINGS, *(["train.strategy"] if run.first_event("strategy") else []))
    return {name: value for name, value in settings.items() if not (name in decided_settings and value == "auto")}


def _resume_config(folder: Path, new_config: Config) -> Config:
    """Return the stored configuration with the settings of `new_config`. Raises `ConfigError` for changes of weight
    settings."""
    run, old_config, explicit_settings = Run(folder), load_config(folder), new_config.explicit_settings
    _refuse_edited_config(run, configuration.load_config(str(run.config)).recipe)
    new_config = configuration.with_overrides(new_config, _keep_hub_commits(old_config, new_config))
    new_settings = configuration.flatten_config(new_config)
    overrides = resume_overrides(run, {name: new_settings[name] for name in new_settings if name in explicit_settings})
    # If neither is set, the stored values stay: another number of workers must not change the rows of a step.
    size_settings = {BATCH_SIZE_SETTING: overrides.pop(BATCH_SIZE_SETTING, None)}
    size_settings[FREQUENCY_SETTING] = overrides.pop(FREQUENCY_SETTING, None)
    if any(value is not None for value in size_settings.values()):
        overrides |= size_settings
    _refuse_changed_weights(folder, old_config, overrides)
    overrides |= {BATCH_SIZE_SETTING: old_config.recipe.global_batch_size, FREQUENCY_SETTING: None}
    return replace(configuration.with_overrides(old_config, overrides), explicit_settings=explicit_settings)


def _refuse_changed_weights(folder: Path, old_config: Config, overrides: Mapping[str, Any]) -> None:
    document = configuration.to_document(old_config)
    for name, value in overrides.items():
        configuration.set_setting(document, name, value)
    recipe = Recipe.model_validate({name: document[name] for name in configuration.RECIPE_FIELDS})
    old_weights = configuration.flatten_document(old_config.recipe.weight_settings())
    new_weights = configuration.flatten_document(recipe.weight_settings())
    old_values = {**configuration.flatten_config(old_config), **old_weights}
    new_values = {**configuration.flatten_document(document), **new_weights}
    changed_settings = [
        name
        for name in old_values
        if old_values[name] != new_values[name] and old_weights.get(name) != new_weights.get(name)
    ]
    if recipe.name != old_config.recipe.name:  # it changes no weight, but another run was meant
        changed_settings.insert(0, "name")
    if changed_settings:
        size_fix = f"set {BATCH_SIZE_SETTING}={old_values.get(BATCH_SIZE_SETTING)} and {FREQUENCY_SETTING}=null"
        fixes = {BATCH_SIZE_SETTING: f"{size_fix}, or start another run"}
        problems = [
            _changed_problem(
                name, new_values[name], old_values[name], fixes.get(name, "leave it out, or start another run")
            )
            for name in changed_settings
        ]
        hint = f"The same command with --new in place of --resume starts another run, {_next_free_folder(folder).name}."
        raise ConfigError(problems, hint)


def _refuse_edited_config(run: Run, recipe: Recipe) -> None:
    """Raise `ConfigError` if weight settings in config.yaml were edited after the start of the run."""
    stored_weights = configuration.flatten_document(run.decisions.get(SETTINGS_KEY, {}))
    current_weights = configuration.flatten_document(recipe.weight_settings())
    fix = f"put it back in {run.config}, or start another run from that file with --new"
    plugin_fix = "restore the files of the plug-in, or start another run with --new"
    problems = [
        _changed_problem(
            *(name, current_weights.get(name), stored_weights.get(name)),
            plugin_fix if name == plugins.SETTING else fix,
        )
        for name in sorted(stored_weights.keys() | current_weights.keys() if stored_weights else ())
        if stored_weights.get(name) != current_weights.get(name)
    ]
    if problems:
        raise ConfigError(problems)


def _changed_problem(name: str, value: Any, first_value: Any, fix: str) -> Problem:
    return Problem(name, value, f"the run was started with {first_value!r}", fix, code="changed_setting")


def _refuse_without_checkpoints(run: Run, config: Config) -> None:
    """Raise `UserError` if `rtrain clean` has removed the checkpoints, or an import came without them: the run would
    start at step 0. A finished run needs none, and a run with a remote copy resumes from it."""
    removal_events = [event for event in run.events("cleaned", "imported") if _removes_checkpoints(event)]
    if (
        not removal_events
        or run.is_finished
        or config.deploy.cluster.storage
        or checkpoint_format.list_steps(run.checkpoints)
    ):
        return
    event = removal_events[-1]
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(event["time"]))
    reason = (
        f"removed by rtrain clean on {day}" if event["kind"] == "cleaned" else f"not carried by rtrain import on {day}"
    )
    raise UserError(
        f"--resume: the checkpoints of {run} were {reason}, so it cannot be resumed; "
        f"write --new in place of --resume to train {_next_free_folder(run.folder).name} from the start",
        code="no_checkpoints",
    )


def _removes_checkpoints(event: Mapping[str, Any]) -> bool:
    """Return whether the event removed checkpoints. A removal of leftovers does not; a removal of a whole run lists
    `.`"""
    removed_paths = event.get("removed", [])
    return event["kind"] == "imported" or any(name == "." or name.startswith("checkpoints") for name in removed_paths)
