"""A run of a recipe as a trial of a user's own `ray.tune.Tuner` (docs/search.md)."""

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import psutil
import ray.tune
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rtrain import config as configuration, ray_internals
from rtrain.cluster import connection
from rtrain.core import env
from rtrain.core.errors import ConfigError, TemporaryFailureError, UserError
from rtrain.core.run_folder import Run
from rtrain.runs import prepare, run_folders, worker_pool
from tune import search, space, trainable, trial_pool
from tune.successive_halving import RungSchedule
from tune.trainable import Assignment, SearchTask

RECIPE_RUN, POINTER_FILE = "recipe", "run.json"
"""Folder of the run with the recipe's own settings, which is prepared and not trained; file of a Tune checkpoint."""


class RecipeTrainable(ray.tune.Trainable):
    """A run of a recipe as a class Trainable; `for_recipe` returns it for a recipe.

    The config of a trial is settings by dotted name that `tune.space` may have. A step is the training to the next
    rung: to `tune.min_resource_fraction` of a run's rows, then to twice the rows, and so on, then to the end. The page
    docs/search.md lists the results. A paused or killed trial resumes from the run's own checkpoints and ends with the
    same weights, to the last bit. Limits, which are those of Tune:

    - Without `reuse_actors=True` each trial starts new workers; with it, Tune keeps those of one waiting trial only.
    - A trial process reserves no CPU, as its workers reserve theirs, but the share of the head node that lets
      `tune.max_concurrent_trials` run at a time. `ray.tune.with_resources` replaces it, and with it that limit.
    - If an idle process dies, Tune ends the paused trial that it assigns to it, whatever `max_failures` is.
    - There are no journal and no finals: `Tuner.restore` continues as far as searcher and scheduler can.
    - A run keeps its settings: a scheduler that changes them (`PopulationBasedTraining`) is refused.
    """

    task: ClassVar[SearchTask | None] = None
    targets: ClassVar[Sequence[tuple[int | None, int]]] = ()
    """Rung and rows of each step; the last one has no rung."""
    slots: ClassVar[int] = 1

    @classmethod
    def for_recipe(cls, recipe: str, folder: str | Path, settings: Mapping[str, Any] | None = None) -> type[Self]:
        """Return the trainable of a recipe (a name, or a YAML file) with other `settings` by dotted name: check them,
        connect to Ray if it is not connected, tokenize the rows. `folder` gets the run folders of the trials.

        Raises `ConfigError` with all problems; `UserError` if a user's file hides the package `tune` or `serve`.
        """
        connection.refuse_shadowed_names(Path.cwd(), Path(sys.argv[0]).resolve().parent)
        config = run_folders.resolve_paths(configuration.load_config(recipe, settings))
        root = Path(folder).expanduser().absolute()
        search.check_search(config)
        prepare.check_run(config, root.parent)
        if not ray.is_initialized():
            connection.connect(config)
        slots = trial_pool.count_slots(config, prepare.choose_device(config, Run(root / RECIPE_RUN)).device)
        root.mkdir(parents=True, exist_ok=True)
        task = SearchTask(configuration.to_document(config), config.explicit_settings, root, root.parent)
        run = replace(task, run_name=RECIPE_RUN).prepare_trial(0, {})
        full_rows = run.order.rows_until(run.num_steps)
        schedule = RungSchedule.from_first_rung(config.deploy.tune.min_resource_fraction, full_rows)
        targets = [*enumerate(rows for rows in schedule.rungs if rows < full_rows), (None, full_rows)]
        fields = {"task": task, "targets": targets, "slots": slots, "__module__": cls.__module__}
        return type(cls.__name__, (cls,), fields)

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> ray.tune.PlacementGroupFactory:
        """Return the share of the head node that lets `slots` trials run at a time. Tune calls it in the user's program
        before a trial starts: `ConfigError` for the trial's settings is raised there."""
        cls._resolve_settings(config)
        share = int(9_950 / cls.slots) / 10_000  # Ray counts in units of 0.0001; the rest is for other processes
        return ray.tune.PlacementGroupFactory([{"CPU": 0, ray_internals.HEAD_RESOURCE: share}])

    @classmethod
    def _resolve_settings(cls, point: Mapping[str, Any]) -> tuple[SearchTask, dict[str, Any]]:
        """Return the common data of the trials, and the settings of a trial. Raises `ConfigError` with all problems."""
        if cls.task is None:
            raise UserError("RecipeTrainable has no recipe; write RecipeTrainable.for_recipe(...)", code="no_recipe")
        config = cls.task.config
        if problems := [problem for name in point for problem in space.searchable_problems(config, name)]:
            raise ConfigError(problems)
        return cls.task, space.trial_overrides(config, point)

    def setup(self, config: dict[str, Any]) -> None:
        """Check the trial's settings. Nothing is started: Tune creates processes that never get a step."""
        self._workers: worker_pool.ReusableWorkerGroup | None = None
        env.set_env_defaults()
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take another trial. The workers stay."""
        task, self._settings = self._resolve_settings(new_config)
        self._task = replace(task, run_name=self.trial_id)
        self._run = self._task.trial_run(1)
        return True

    def step(self) -> dict[str, Any]:
        """Train to the next rung or, after the last one, to the end; return the result. Raises `UserError` if the trial
        failed or diverged; `TemporaryFailureError` after a failure of the machine, e.g. a full disk."""
        assignment = Assignment(1, self._settings, *self.targets[self.training_iteration])
        outcomes = trainable.run_assignment(assignment, self._task, self._worker_group())
        result = outcomes[-1] if outcomes else {"kind": trainable.RETRY, "error": "its stop was requested"}
        kind, is_finished = result.pop("kind"), self._run.is_finished
        if kind not in ("rung_result", "finished"):
            error = TemporaryFailureError if kind == trainable.RETRY else UserError
            raise error(f"trial {self.trial_id} has no score: {result.get('error') or result['reason']}", code=kind)
        return {
            **{name: value for name, value in result.items() if value is not None},
            trainable.headline_metric(self._task.config): result["score"],
            "rung": len(self.targets) - 1 if is_finished else assignment.rung,
            "rungs": len(self.targets) - 1,
            "run": str(self._run),
            "done": is_finished,
            **({"artifact": str(self._run.artifact)} if is_finished else {}),
        }

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write a pointer to the run, whose own checkpoints count."""
        Path(checkpoint_dir, POINTER_FILE).write_text(json.dumps({"run": str(self._run)}), encoding="utf-8")

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Check that a checkpoint is the trial's own; the next step reads the run's checkpoints."""
        run = json.loads(Path(checkpoint, POINTER_FILE).read_text(encoding="utf-8"))["run"]
        if run != str(self._run):
            message = f"trial {self.trial_id} cannot start from the weights of {run}: a run keeps its settings"
            raise UserError(f"{message}; write another scheduler, such as ASHAScheduler", code="unsupported")

    def cleanup(self) -> None:
        """Shut down the workers. Their mailbox server ends with this process."""
        if self._workers is not None:
            self._workers.shut_down()

    def _worker_group(self) -> worker_pool.ReusableWorkerGroup:
        """Return the worker group of this process. The first call releases the CPUs of groups whose process on this
        node was killed: this process may wait for them."""
        if self._workers is None:
            groups, prefix = Run(self._task.search).ray_storage, f"workers-{socket.gethostname()}-"
            for folder in groups.glob(f"{prefix}*"):
                if not psutil.pid_exists(int(folder.name.removeprefix(prefix))):
                    worker_pool.release_group(Run(folder))
            # With Ray's default strategy it would be in the trial's placement group, which has no free resources.
            node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 1000, "scheduling_strategy": node}
            server = ray.remote(**options)(worker_pool.MailboxServer).remote()
            self._workers = worker_pool.ReusableWorkerGroup(Run(groups / f"{prefix}{os.getpid()}"), server)
        return self._workers
