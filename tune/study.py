"""Study of the aggregation frequency: the time and score of full trainings of one recipe at several frequencies, with
AdamW, AdamW with the linear scaling rule, and RAdam.


It follows the published study "Faster NLP with Deep Learning: Distributed Training" (Determined AI, 2020), on
BERT and SQuAD. The linear rule is Goyal et al. 2017 (arXiv:1706.02677); RAdam is Liu et al. 2020 (arXiv:1908.03265).

Its trainings use a search's folders, journal and slots. They run one at a time, since concurrent trainings would share
the processor, and the table has their times.

"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.config.deploy import DEFAULT_SPACE
from rtrain.core import json_files
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.core.run_folder import Run
from rtrain.data.order import RowOrder as Updates
from rtrain.runs import controller, run_folders
from tune import trial_pool
from tune.history import Journal, Trial
from tune.report import study_table
from tune.report.study_table import BASELINE_FREQUENCY, StudyCell, StudyTable
from tune.search_log import SearchLog
from tune.trainable import Assignment, SearchTask, headline_metric, open_search, strategy_problems

FREQUENCY_SETTING, BATCH_SIZE_SETTING = "train.aggregation_frequency", "train.global_batch_size"
FREQUENCIES = (1, 2, 10, 100)
"""Frequencies of the published study; `tune.space` can set others."""
MIN_STEPS = 20
"""Minimum steps: with fewer, the warm-up, a tenth of them, has one or two steps, which would affect the comparison."""
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "AdamW": {"optim.name": "adamw", "optim.lr_scaling": "none"},
    "AdamW, linear rule": {"optim.name": "adamw", "optim.lr_scaling": "linear"},
    "RAdam": {"optim.name": "radam", "optim.lr_scaling": "none"},
}
"""The rows of the table. The rule scales the recipe's learning rate from the first frequency."""
Overrides = Mapping[str, Any]
STUDY_PROPOSER = "study"
"""Proposer of the trials of a study."""


# ---------------------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True)
class StudyPlan:
    cells: tuple[StudyCell, ...]
    runs: Mapping[int, Overrides]
    """Overrides of the recipe by run number; run 0 is the first frequency with AdamW."""
    skipped_frequencies: Mapping[int, str]
    """Frequencies with too few rows, and the reason."""


def plan_study(config: Config, rows: int) -> StudyPlan:
    """Plan the runs for `rows` training rows.

    Raises `ConfigError` for settings that contradict the study, and `UserError` if the rows are too few.

    """
    check_study(config)
    requested, rows_per_micro_batch = list_frequencies(config), _rows_per_micro_batch(config)
    skipped = {
        k: reason
        for k in requested
        if (reason := too_few_rows(rows, rows_per_micro_batch * k, config.recipe.train.epochs))
    }
    compared = [k for k in requested if k not in skipped]
    if BASELINE_FREQUENCY not in compared or len(compared) < 2:
        reasons = "; ".join(f"k={k}: {reason}" for k, reason in skipped.items())
        raise UserError(
            f"{rows} training rows are too few to compare aggregation frequencies ({reasons}); give more rows, or more "
            "epochs with --set train.epochs",
            code="too_few_rows",
        )
    cells, runs, number_by_weights = list[StudyCell](), dict[int, Overrides](), dict[str, int]()
    for optimizer in OPTIMIZERS:
        for k in compared:
            cell_overrides = _cell_overrides(config, optimizer, k)
            # At the first frequency the rule has no effect: equal weights are trained once.
            weights = configuration.with_overrides(
                config, _without_neutral_rule(cell_overrides, k)
            ).recipe.recipe_digest()
            number = number_by_weights.setdefault(weights, len(number_by_weights))
            runs.setdefault(number, cell_overrides)
            cells.append(StudyCell(optimizer, k, number))
    return StudyPlan(tuple(cells), runs, skipped)


def list_frequencies(config: Config) -> tuple[int, ...]:
    """Return the frequencies in `tune.space`, or those of the published study."""
    space = config.deploy.tune.space
    given_frequencies = None if space == DEFAULT_SPACE else space.get(FREQUENCY_SETTING)
    return tuple(sorted(int(k) for k in given_frequencies)) if isinstance(given_frequencies, tuple) else FREQUENCIES


def too_few_rows(rows: int, global_batch_size: int, epochs: int) -> str | None:
    """Return why the rows are too few for this batch size; None if they suffice."""
    if global_batch_size > rows:
        return f"one step takes {global_batch_size} rows, and there are {rows}"
    num_steps = Updates("", rows, global_batch_size, epochs, 0).num_steps
    return f"{num_steps} steps, fewer than {MIN_STEPS}" if num_steps < MIN_STEPS else None


def check_study(config: Config) -> None:
    """Check a study before its rows are read. Raises `ConfigError` with all problems."""
    problems = strategy_problems(config)
    data = config.recipe.data
    if data.valid_share == 0 and not (data.valid or data.split_column):
        reason = "the best weights of a run need validation rows, which are missing"
        problems.append(Problem("data.valid_share", 0, reason, "give a share, e.g. 0.1", code="no_rows"))
    space_problems = _space_problems(config)
    problems += space_problems
    if not space_problems and BASELINE_FREQUENCY not in list_frequencies(config):
        reason = (
            f"times are relative to an all-reduce after every micro-batch, {FREQUENCY_SETTING}={BASELINE_FREQUENCY}"
        )
        problems.append(
            Problem("tune.space", list_frequencies(config), reason, f"add {BASELINE_FREQUENCY}", code="missing")
        )
    if problems:
        raise ConfigError(problems)


def _space_problems(config: Config) -> list[Problem]:
    """Return the problems of `tune.space`: other settings than the frequency, and invalid frequencies."""
    space = config.deploy.tune.space
    if space == DEFAULT_SPACE:
        return []
    reason, fix = (
        "a study compares aggregation frequencies alone",
        f"leave it out, or write {FREQUENCY_SETTING}: [1, 2, 10]",
    )
    other_settings = [name for name in space if name != FREQUENCY_SETTING]
    problems = [Problem(f"tune.space.{name}", None, reason, fix, code="not_searchable") for name in other_settings]
    values = space.get(FREQUENCY_SETTING, FREQUENCIES)
    frequency_values = values if isinstance(values, tuple) else ()
    are_positive_integers = frequency_values and all(type(value) is int and value > 0 for value in frequency_values)
    if not are_positive_integers or len(set(frequency_values)) < len(frequency_values):
        reason = "not a list of distinct positive integers"
        problems.append(
            Problem(
                f"tune.space.{FREQUENCY_SETTING}", values, reason, "write for example [1, 2, 10]", code="wrong_type"
            )
        )
    return problems


def first_overrides(config: Config) -> Overrides:
    """Return the overrides of run 0."""
    return _cell_overrides(config, next(iter(OPTIMIZERS)), BASELINE_FREQUENCY)


def _rows_per_micro_batch(config: Config) -> int:
    """Return the rows of one micro-batch on each worker."""
    return config.recipe.train.workers * config.recipe.train.micro_batch_size


def _cell_overrides(config: Config, optimizer: str, k: int) -> Overrides:
    """Return the overrides of a cell."""
    optimizer_settings = dict(OPTIMIZERS[optimizer])
    if optimizer_settings["optim.lr_scaling"] != "none":
        optimizer_settings["optim.lr_reference_batch_size"] = _rows_per_micro_batch(config) * BASELINE_FREQUENCY
    current = configuration.flatten_config(config)
    changes = {name: value for name, value in optimizer_settings.items() if current[name] != value}
    # A stored configuration has the batch size instead of the frequency.
    has_same_batch_size = config.recipe.global_batch_size == k * _rows_per_micro_batch(config)
    return changes if has_same_batch_size else {**changes, FREQUENCY_SETTING: k, BATCH_SIZE_SETTING: None}


def _without_neutral_rule(overrides: Overrides, k: int) -> Overrides:
    """Return the overrides without the scaling rule at the first frequency, where it has no effect."""
    return {**overrides, "optim.lr_scaling": "none"} if k == BASELINE_FREQUENCY else overrides


# ----------------------------------------------------------------------------------------------------------- execution


@dataclass(frozen=True)
class StudyResult:
    """The result of a study."""

    study: Run
    table: StudyTable


def run_study(
    config: Config,
    folder: Path,
    reuse: run_folders.Reuse = "refuse",
    on_event: controller.OnEvent | None = None,
    tokens_root: Path | None = None,
) -> StudyResult:
    """Train the runs of the study and build its table. A resume trains the unfinished runs.

    Raises the errors of `plan_study`, `ConfigError` if a resumed study differs, and `UserError` if no run has finished.

    """
    check_study(config)
    with open_search(config, folder, reuse, tokens_root) as (resolved_config, task):
        study_plan, study = (
            _StudyAttempt(resolved_config, replace(task, measures_noise=True), on_event).run(),
            Run(task.search),
        )
        trials_by_number = {trial.number: trial for trial in Journal(study.trials).history.trials}
        results = [
            study_table.read_cell_result(
                cell, study.trial(cell.run_number), _failure_reason(trials_by_number[cell.run_number])
            )
            for cell in study_plan.cells
        ]
        if all(result.error for result in results):
            raise UserError(f"no run of the study has finished; {results[0].error}", code="no_score")
        # Networks may have been measured by an earlier attempt.
        networks = (
            study_table.measured_networks(json_files.load_json_object(study.study_table))
            if study.study_table.is_file()
            else {}
        )
        study_result = StudyResult(
            study,
            study_table.build_study_table(
                results, headline_metric(resolved_config), study_plan.skipped_frequencies, networks
            ),
        )
        study_table.save_document(study, study_result.table.document)
        controller.run_optional_step(study, "page", study_table.write_study_page, on_event or (lambda event: None))
    return study_result


def _failure_reason(trial: Trial) -> str | None:
    return trial.error or trial.divergence


class _StudyAttempt:
    """An attempt of a study."""

    def __init__(self, config: Config, task: SearchTask, on_event: controller.OnEvent | None):
        self._config, self._task, self._study = config, task, Run(task.search)
        self._search_log = SearchLog(self._study, on_event, config.deploy.cluster)

    def run(self) -> StudyPlan:
        prepared_run = self._task.prepare_trial(0, first_overrides(self._config))  # all runs have the same rows
        if not prepared_run.store.num_rows("test"):
            reason = "the table needs test rows, which are missing"
            fix = "name a file of them with --test, or give a share"
            raise ConfigError([Problem("data.test", None, reason, fix, code="no_rows")])
        study_plan = plan_study(self._config, prepared_run.store.num_rows("train"))
        self._create_trials(study_plan)
        rows = prepared_run.order.rows_until(prepared_run.num_steps)
        if self._pending_assignments(rows):
            with self._search_log.follow_trials(), trial_pool.open_slots(self._config, self._task, 1) as slot_pool:
                while pending := self._pending_assignments(rows):
                    if slot_pool.idle_slots:
                        self._search_log.dispatch(slot_pool, slot_pool.idle_slots[0], pending[0])
                    self._search_log.receive(slot_pool)
        self._search_log.complete_copy()
        return study_plan

    def _create_trials(self, study_plan: StudyPlan) -> None:
        """Write the runs to the journal; those of a resumed study must be the same."""
        trials = self._search_log.history.trials
        for number, settings in study_plan.runs.items():
            if number >= len(trials):
                self._search_log.write("created", trial=number, settings=dict(settings), proposed_by=STUDY_PROPOSER)
            elif trials[number].settings != settings:
                label, reason = trials[number].label, "the study was started with other runs, e.g. {}"
                fix = "undo the change, or start another study with --new"
                raise ConfigError(
                    [Problem("tune.study", STUDY_PROPOSER, reason.format(label), fix, code="changed_setting")]
                )

    def _pending_assignments(self, rows: int) -> list[Assignment]:
        """Return the unfinished runs in order."""
        pending_trials = [trial for trial in self._search_log.history.trials if trial.status == "created"]
        return [Assignment(trial.number, trial.settings, None, rows) for trial in pending_trials]
