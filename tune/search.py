"""The search: creates trials, promotes them, runs the finals, and ends. Ray Tune runs the assignments
(`tune.trial_pool`).

All state is in the journal. A resumed search replays it, resumes the trials in flight, and makes the same decisions.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.cluster import preflight
from rtrain.compress import distill
from rtrain.config import Config, Range
from rtrain.core import atomic_write, env
from rtrain.core.errors import ConfigError, Problem
from rtrain.core.run_folder import Run
from rtrain.data import row_reader
from rtrain.inference import artifact
from rtrain.models import builder
from rtrain.planning import throughput
from rtrain.runs import controller, prepare, run_folders
from tune import finals, holdout_scores, sampler, space, students, successive_halving, trial_pool
from tune.history import SEED_REPEAT, History, Trial, find_trial
from tune.report import optuna_export, page
from tune.sampler import SearchPolicy
from tune.search_log import SearchLog
from tune.successive_halving import Objective, RungSchedule, TrainTo
from tune.trainable import LOG_EVERY_SETTING, Assignment, SearchTask, headline_metric, open_search, strategy_problems

FINAL_RUNS = 4
"""Default of `tune.final_budget_rows`, in full runs."""

USAGE_INTERVAL_S = 10.0
"""Seconds between two `usage` events; a kill loses at most so many."""


@dataclass(frozen=True)
class SearchResult:
    search: Run
    history: History

    @property
    def best_trial(self) -> Trial:
        assert self.history.winner is not None  # the search has ended
        return find_trial(self.history.trials, self.history.winner)

    @property
    def winner(self) -> Run:
        return self.search.trial(self.best_trial.number)

    @property
    def gate_verdict(self) -> dict[str, Any] | None:
        """The gate's verdict on the winner's artifact; None if trial 0 has won."""
        stored_gate = artifact.read_artifact(self.winner.artifact, verify=False).gate
        return None if stored_gate is None else dict(stored_gate)

    @property
    def trained_rows(self) -> int:
        last_results = (trial.final_result or next(reversed(trial.rung_results), None) for trial in self.history.trials)
        return sum(result.rows for result in last_results if result is not None)

    def to_document(self) -> dict[str, Any]:
        trials = [{**asdict(trial), "status": trial.status} for trial in self.history.trials]
        verdict = dict(self.history.verdict)
        return {"trials": trials, "winning_trial": self.history.winner, "verdict": verdict, "gate": self.gate_verdict}


def run_search(
    config: Config,
    folder: Path,
    reuse: run_folders.Reuse = "refuse",
    on_event: controller.OnEvent | None = None,
    tokens_root: Path | None = None,
    teacher: Path | None = None,
) -> SearchResult:
    """Run a search with its finals. Every trial has a run folder; `trials.jsonl` is the journal.

    Args:
        tokens_root: see `trainable.open_search`.
        teacher: an artifact; the trials are its students, and `config` is that of the first one
            (`distill.derive_student_config`).

    Raises:
        ConfigError: a resumed search has other settings.
        UserError: no trial has a score.
    """
    check_search(config, students=teacher is not None)
    # Counted before a folder is created or a row is read. A search that has ended needs no slots.
    has_ended = reuse == "resume" and Run(folder).winner is not None
    device = None if has_ended else prepare.choose_device(config, Run(folder).trial(0)).device
    slot_count = 0 if device is None else trial_pool.count_slots(config, device)
    with open_search(config, folder, reuse, tokens_root, teacher) as (resolved_config, task):
        return SearchAttempt(resolved_config, task, slot_count, on_event).run()


NextAssignments = Callable[[set[TrainTo], bool], list[TrainTo] | None]
"""(current assignments, whether a slot is idle) -> next assignments, with the current ones; None: the phase is done."""


class SearchAttempt:
    def __init__(self, config: Config, task: SearchTask, slot_count: int, on_event: controller.OnEvent | None):
        """`slot_count`: number of slots to start."""
        self._config, self._task, self._planned_slots, self._tune = config, task, slot_count, config.deploy.tune
        self._search = Run(task.search)
        self.search_log = SearchLog(self._search, on_event, config.deploy.cluster)
        self._objective, self._seed = Objective.from_settings(self._tune), config.recipe.train.seed
        self._costs = None if self._tune.cost == "training" else students.StudentCosts(task.search, self._tune.cost)
        self._usage_counted_at, self.slot_count = time.monotonic(), 0
        """Time of the last `usage` event, and number of running slots."""

    @property
    def history(self) -> History:
        return self.search_log.history

    def run(self) -> SearchResult:
        try:
            if self.history.winner is None:
                try:
                    self.execute()
                finally:
                    with suppress(OSError):  # e.g. a full disk, which was reported
                        self.log_usage()
            self._write_results()
        finally:  # also after an interruption
            with suppress(OSError):
                self._export_study()
        return SearchResult(self._search, self.history)

    def execute(self) -> None:
        if not self.history.trials:
            self.create_trial({}, "recipe")
        self.reopen_if_affordable()
        self.measure_costs()
        # The rows are tokenized before the slots start, which would all do it.
        prepared_run = self._task.prepare_trial(0, {})
        self.schedule = RungSchedule.from_first_rung(
            self._tune.min_resource_fraction, prepared_run.order.rows_until(prepared_run.num_steps)
        )
        self.policy = SearchPolicy.from_config(self._config, self.schedule)
        source = row_reader.inspect_source(prepared_run.config.recipe.data, self._task.tokens_root)
        self.folds = holdout_scores.count_folds(prepared_run.config, source, prepared_run.store)
        with (
            self.search_log.follow_trials(),
            trial_pool.open_slots(self._config, self._task, self._planned_slots) as slot_pool,
        ):
            self.log_usage()
            self.slot_count = self._planned_slots
            self.run_phases(slot_pool)

    # --------------------------------------------------------------------------------------------------------- phases

    def run_phases(self, slot_pool: trial_pool.SlotPool) -> None:
        """Run the halving and the finals. Finals that have started are resumed: their trials are past the rungs of a
        halving with more trials, or with a trial that has failed since."""
        if not self.history.is_in_finals:
            self.assign_until_done(slot_pool, self.next_halving)
            self.search_log.write("finals_started")
        self.assign_until_done(slot_pool, self.next_finals)

    def assign_until_done(self, slot_pool: trial_pool.SlotPool, next_assignments: NextAssignments) -> None:
        """Assign work to idle slots until `next_assignments` returns None."""
        while True:
            for slot in slot_pool.idle_slots:
                assigned = {TrainTo(assignment.trial, assignment.rung) for assignment in slot_pool.assignments.values()}
                new_work = [work for work in next_assignments(assigned, True) or [] if work not in assigned]
                if not new_work:
                    break
                self.search_log.dispatch(slot_pool, slot, self._make_assignment(new_work[0]))
            if not slot_pool.assignments and next_assignments(set(), False) is None:
                return
            self.search_log.receive(slot_pool, self._log_usage_periodically)
            self.log_usage()

    def log_usage(self) -> None:
        """Log the seconds since the last `usage` event."""
        now = time.monotonic()
        seconds, self._usage_counted_at = now - self._usage_counted_at, now
        self.search_log.write("usage", seconds=round(seconds, 3), slot_seconds=round(seconds * self.slot_count, 3))

    def _log_usage_periodically(self) -> None:
        """Log the usage while trials train, which may take hours."""
        if time.monotonic() - self._usage_counted_at >= USAGE_INTERVAL_S:
            self.log_usage()

    def _make_assignment(self, target: TrainTo) -> Assignment:
        rows = self.schedule.full_rows if target.rung is None else self.schedule.rungs[target.rung]
        trial = find_trial(self.history.trials, target.trial)
        return Assignment(target.trial, trial.settings, target.rung, rows, trial.repeat_of)

    def next_halving(self, assigned: set[TrainTo], has_idle_slot: bool) -> list[TrainTo] | None:
        """Return the next promotions, and a new trial for an idle slot."""
        accepts_trials = self.history.stop_reason is None
        promotions = successive_halving.next_promotions(self.history, self.schedule, self._objective, accepts_trials)
        if not (accepts_trials and has_idle_slot and promotions is not None and assigned.issuperset(promotions)):
            return promotions
        self.log_noise_scale()
        new_trials = [] if self._stop_if_exhausted() else self._start_trial(promotions)
        if self.history.stop_reason is not None:
            return successive_halving.next_promotions(
                self.history, self.schedule, self._objective, accepts_trials=False
            )
        return [*promotions, *new_trials]

    def _start_trial(self, pending: list[TrainTo]) -> list[TrainTo]:
        """Return a new or repeated trial; empty if pending trials must reach their rung first, or if the search stops
        creating trials, which is logged."""
        is_check_point = self.policy.is_check_point(self.history)
        if is_check_point and pending:
            return []
        if is_check_point and (probed_trial := self.policy.noise_probe(self.history)) is not None:
            return [TrainTo(self._trial_for_run(finals.FinalRun(probed_trial.number, self._seed + 1), folds=1), 0)]
        reason = self.policy.stop_reason(self.history) if is_check_point else None
        proposal = None if reason else self.policy.propose(self.history)
        if proposal is None:
            self.search_log.write("stopped", reason=reason or "every point of the space was tried")
            return []
        return [TrainTo(self.create_trial(*proposal), 0)]

    def next_finals(self, assigned: set[TrainTo], has_idle_slot: bool) -> list[TrainTo] | None:
        """Return the next final runs: the two best trials and trial 0, then with other seeds, until the winner is
        decided."""
        if self.history.winner is not None:
            return None
        holdout_fraction, budget_rows = self._tune.holdout_fraction, self._tune.final_budget_rows
        settings = finals.FinalsSettings(
            self.schedule.full_rows,
            FINAL_RUNS * self.schedule.full_rows if budget_rows is None else budget_rows,
            self._seed,
            self.folds,
            self._objective,
            used_steering_rows=not holdout_fraction,
        )
        scores = holdout_scores.collect_holdout_scores(self._search, self.history, holdout_fraction, self.folds)
        final_runs = finals.next_runs(self.history, scores, settings, allow_new_round=self.exhausted_budget() is None)
        if isinstance(final_runs, finals.SearchVerdict):
            self.search_log.write("winner", winner=final_runs.winner, verdict=asdict(final_runs))
            return None
        return [TrainTo(self._trial_for_run(run, self.folds), None) for run in final_runs]

    # -------------------------------------------------------------------------------------------------------- decisions

    def _stop_if_exhausted(self) -> bool:
        """Return whether trials, time or money are exhausted, and log it."""
        num_trials, planned_trials = len(self.history.original_trials), self.policy.planned_trials
        if num_trials >= planned_trials:
            is_trial_limit = planned_trials == self._tune.trials
            reason = f"tune.trials={planned_trials}" if is_trial_limit else f"the budget allows {planned_trials} trials"
            self.search_log.write("stopped", reason=reason)
            return True
        if num_trials > 1 and (exhausted := self.exhausted_budget()):
            self.search_log.write("stopped", reason=exhausted, budget=self._budget)
            return True
        return False

    def reopen_if_affordable(self) -> None:
        """Create trials again if time or money was exhausted, this attempt has a larger budget, and the finals have not
        started."""
        history = self.history
        if history.is_in_finals or history.stop_budget in (None, self._budget) or self.exhausted_budget() is not None:
            return
        self.search_log.write("reopened", budget=self._budget)

    @property
    def _budget(self) -> dict[str, float | None]:
        return {name: getattr(self._tune, name) for name in ("max_minutes", "max_cost", "worker_cost_per_hour")}

    def exhausted_budget(self) -> str | None:
        tune, elapsed = self._tune, time.monotonic() - self._usage_counted_at
        usage = {"kind": "usage", "seconds": elapsed, "slot_seconds": elapsed * self.slot_count}
        projected = self.history.with_event(usage)
        if tune.max_minutes is not None and projected.seconds > 60 * tune.max_minutes:
            return f"{tune.max_minutes:g} minutes are over"
        if tune.max_cost is not None and tune.worker_cost_per_hour is not None:
            billed = projected.billed_cost(self._config.recipe.train.workers, tune.worker_cost_per_hour)
            if billed > tune.max_cost:
                return f"{billed:.2f} of {tune.max_cost:g} are spent"
        return None

    def log_noise_scale(self) -> None:
        """Log the maximum useful and the fastest batch size, once trial 0's log has them, so that a resumed search has
        the same space."""
        if self.history.max_useful_batch_size is not None:
            return
        recipe = self._task.config_for({}).recipe
        weights = throughput.model_weight_bytes(builder.resolve_folder(recipe.model.name, self._task.tokens_root))
        prior = throughput.batch_size_prior(self._search.trial(0).events(), recipe, weights)
        if prior is not None:
            batch_sizes = {"max_useful_batch_size": prior.max_batch_size, "fastest_batch_size": prior.best_batch_size}
            self.search_log.write("noise", **batch_sizes)

    def create_trial(self, settings: Mapping[str, Any], proposed_by: str, **fields: Any) -> int:
        number = len(self.history.trials)
        if self._costs is not None:
            fields["cost"] = self._measure_cost(self._costs, settings)
        self.search_log.write("created", trial=number, settings=dict(settings), proposed_by=proposed_by, **fields)
        return number

    def measure_costs(self) -> None:
        """Measure the costs of students before the slots start: concurrent training would slow the measurement, which
        is stored."""
        if self._costs is not None:
            for size in space.list_student_sizes(self._config):
                self._measure_cost(self._costs, size)

    def _measure_cost(self, cost_table: students.StudentCosts, settings: Mapping[str, Any]) -> float:
        model_name = self._task.config_for(settings).recipe.model.name
        return cost_table.get(builder.resolve_folder(model_name, self._task.tokens_root))

    def _trial_for_run(self, final_run: finals.FinalRun, folds: int) -> int:
        """Return the number of the trial of a final run; it is created if it does not exist. With `folds` > 1 each seed
        has another validation fold."""
        if final_run.seed is None:
            return final_run.trial
        repeated_trial = find_trial(self.history.trials, final_run.trial)
        settings = {**repeated_trial.settings, **finals.run_overrides(final_run, seed=self._seed, folds=folds)}
        for trial in self.history.trials:
            if trial.repeat_of == final_run.trial and trial.settings == settings:
                return trial.number
        return self.create_trial(settings, SEED_REPEAT, repeat_of=final_run.trial, seed=final_run.seed)

    # --------------------------------------------------------------------------------------------------------- results

    def _write_results(self) -> None:
        number, notify = self.history.winner, self.search_log.notify
        assert number is not None
        winner = self._search.trial(number)
        config = configuration.load_config(str(winner.config))
        atomic_write.write_text(
            self._search.best_config, configuration.to_yaml(make_replay_config(config, self._config))
        )
        if self._search.winner is None:
            self._search.append_event("searched", winner=number, trials=len(self.history.trials))

        def gate(search: Run) -> None:
            holdout_scores.gate_winner(search, number, self._config, notify, self._task.teacher)

        controller.run_optional_step(self._search, "gate", gate, notify)
        if not winner.report.is_file():
            controller.write_report(winner, lambda event: notify({**event, "trial": number}))
        controller.run_optional_step(self._search, "page", page.write_search_page, notify)
        # The storage may have been unreachable when the trial finished.
        controller.complete_remote_copy(winner, config.deploy.cluster)
        self.search_log.complete_copy()

    def _export_study(self) -> None:
        if sampler.is_installed():

            def export(search: Run) -> None:
                optuna_export.export_study(search.folder, self._config, self.history)

            controller.run_optional_step(self._search, "study", export, self.search_log.notify)


def make_replay_config(config: Config, search: Config) -> Config:
    """Return a trial's configuration for another run, with the search's storage and logging."""
    search_settings = {
        "cluster.storage": search.deploy.cluster.storage,
        LOG_EVERY_SETTING: search.recipe.train.log_every,
    }
    return replace(configuration.with_overrides(config, search_settings), explicit_settings=config.explicit_settings)


# --------------------------------------------------------------------------------------------------------------- checks


def check_search(config: Config, students: bool = False) -> None:
    """Check a search over `students` or runs before anything starts. Raises `ConfigError` with all problems."""
    data, tune, name = config.recipe.data, config.deploy.tune, headline_metric(config)
    problems = [*strategy_problems(config), *preflight.check_oversubscription(config, env.available_cores())]
    if tune.cost != "training" and not students:
        reason = "all trials have the same model; only students differ (rtrain distill --search)"
        problems.append(Problem("tune.cost", tune.cost, reason, "leave it out", code="not_students"))
    if data.valid_share == 0 and not (data.valid or data.split_column):
        reason = "trials are compared on validation rows, which are missing"
        fix = "give a share, e.g. 0.1; train the winner's settings on all rows afterwards"
        problems.append(Problem("data.valid_share", 0, reason, fix, code="no_rows"))
    if (patience := config.recipe.train.patience) is not None:
        reason = "trials are compared after equally many rows; the search ends bad ones itself"
        problems.append(Problem("train.patience", patience, reason, "leave it out", code="unsupported"))
    if data.validation_fold:
        fold, reason = data.validation_fold, "the finals of a search set the fold of each seed"
        problems.append(Problem("data.validation_fold", fold, reason, "leave it out", code="unsupported"))
    if tune.objective == "time_to_target" and name.startswith("neg_") and tune.target is not None and tune.target > 0:
        reason = f"the score is {name}, a negative error, which cannot reach a target above 0"
        problems.append(Problem("tune.target", tune.target, reason, f"write {-tune.target:g}", code="out_of_range"))
    try:
        space.build_dimensions(config)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    sampler.check_sampler(tune.sampler)


def check_model(config: Config, folder: Path) -> None:
    """Raise `ConfigError` if the space or a point has a value that the model in `folder` does not support."""
    problems = list[Problem]()
    tried_points = [
        (f"tune.space.{dimension.name}", {dimension.name: value})
        for dimension in space.build_dimensions(config)
        for value in dimension.extreme_values
    ]
    points = enumerate(config.deploy.tune.points_to_evaluate)
    tried_points += [(f"tune.points_to_evaluate.{place}", dict(point)) for place, point in points]
    for field, point in tried_points:
        if any(name.startswith(("data.", "model.")) for name in point):
            recipe = configuration.with_overrides(config, space.trial_overrides(config, point)).recipe
            architecture_problems = builder.check_architecture(
                folder, recipe.data.window_tokens, model_config=recipe.model
            )
            problems += [
                replace(problem, field=field, reason=f"{problem.field}: {problem.reason}")
                for problem in architecture_problems
            ]
    if problems:
        raise ConfigError(problems)


def check_students(config: Config, teacher: distill.Teacher, root: Path) -> None:
    """Check a search over students (`derive_search_config`) before anything starts. Raises `ConfigError` with all
    problems."""
    if isinstance(config.deploy.tune.space.get(space.WIDTH_SETTING), Range):
        reason = "most widths of a range are not multiples of the teacher's attention head size"
        fix = "write a list of widths, such as [128, 192, 256]"
        raise ConfigError([Problem(f"tune.space.{space.WIDTH_SETTING}", "a range", reason, fix, code="not_a_list")])
    check_search(config, students=True)
    if problems := distill.check_text_length(config, [teacher, *distill.load_co_teachers(config, teacher)]):
        raise ConfigError(problems)
    for point in space.list_student_sizes(config):
        try:
            distill.derive_student_config(configuration.with_overrides(config, point), teacher, root)
        except ConfigError as error:
            problems = [
                replace(problem, field=f"tune.space.{problem.field}") if problem.field in point else problem
                for problem in error.problems
            ]
            raise ConfigError(problems) from None
