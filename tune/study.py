"""What the aggregation frequency buys in time and costs in score: full trainings of one recipe at several frequencies,
by AdamW, by AdamW under the linear rule, and by RAdam; no search, no halving.

The published study that it follows: "Faster NLP with Deep Learning: Distributed Training" (Determined AI, 2020), on
BERT and SQuAD. The linear rule is Goyal et al. 2017 (arXiv:1706.02677); RAdam is Liu et al. 2020 (arXiv:1908.03265).

Its trainings are trials of a search without a search: the same folders and journal, the same slots. One runs at a time,
since trainings beside each other would share the processor, and their times are the table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.config.deploy import SPACE
from rtrain.core import json_files
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.core.run_folder import Run
from rtrain.data.order import Order as Updates
from rtrain.runs import controller, run_folders
from tune import trial_pool
from tune.history import Journal, Trial
from tune.report import study_table
from tune.report.study_table import FIRST, Cell, Table
from tune.search_log import Record
from tune.trainable import Order, Task, headline_of, held, refused

FREQUENCY, ROWS = "train.aggregation_frequency", "train.rows_per_update"
FREQUENCIES = (1, 2, 10, 100)
"""Those of the published study; a `tune.space` of one's own may name others."""
FEWEST_UPDATES = 20
"""Below, a warm-up of a tenth of the updates is one or two of them: no longer the frequency alone is compared."""
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "AdamW": {"optim.name": "adamw", "optim.lr_scaling": "none"},
    "AdamW, linear rule": {"optim.name": "adamw", "optim.lr_scaling": "linear"},
    "RAdam": {"optim.name": "radam", "optim.lr_scaling": "none"},
}
"""The rows of the table. The rule takes the recipe's learning rate as that of the first frequency."""
Settings = Mapping[str, Any]
BY = "study"
"""What has proposed the trials of a study."""


# ---------------------------------------------------------------------------------------------------------- what to run


@dataclass(frozen=True)
class Plan:
    cells: tuple[Cell, ...]
    runs: Mapping[int, Settings]
    """What each run sets otherwise than the recipe, by number; run 0 is the first frequency with AdamW."""
    left_out: Mapping[int, str]
    """Frequencies that these rows are too few for, and why."""


def plan(config: Config, rows: int) -> Plan:
    """The runs for `rows` training rows.

    Raises `ConfigError` if a setting contradicts the study, and `UserError` if the rows leave nothing to compare.
    """
    check(config)
    wanted, of_pass = frequencies(config), _rows_of_passes(config)
    left_out = {k: why for k in wanted if (why := too_few(rows, of_pass * k, config.recipe.train.epochs))}
    kept = [k for k in wanted if k not in left_out]
    if FIRST not in kept or len(kept) < 2:
        told = "; ".join(f"k={k}: {why}" for k, why in left_out.items())
        raise UserError(
            f"{rows} training rows are too few to compare aggregation frequencies ({told}); give more rows, or more "
            "epochs with --set train.epochs",
            code="too_few_rows",
        )
    cells, runs, known = list[Cell](), dict[int, Settings](), dict[str, int]()
    for optimizer in OPTIMIZERS:
        for k in kept:
            changed = _changed(config, optimizer, k)
            # The rule changes nothing at the first frequency: the same weights need no second training.
            weights = configuration.with_overrides(config, _neutral(changed, k)).recipe.identity()
            number = known.setdefault(weights, len(known))
            runs.setdefault(number, changed)
            cells.append(Cell(optimizer, k, number))
    return Plan(tuple(cells), runs, left_out)


def frequencies(config: Config) -> tuple[int, ...]:
    """Those that `tune.space` names as a list, where it is not that of a search; else the published ones."""
    space = config.deploy.tune.space
    named = None if space == SPACE else space.get(FREQUENCY)
    return tuple(sorted(int(k) for k in named)) if isinstance(named, tuple) else FREQUENCIES


def too_few(rows: int, rows_per_update: int, epochs: int) -> str | None:
    """Why a training with these updates tells nothing about the frequency; None if it does."""
    if rows_per_update > rows:
        return f"one update takes {rows_per_update} rows, and there are {rows}"
    updates = Updates("", rows, rows_per_update, epochs, 0).updates
    return f"{updates} updates, fewer than {FEWEST_UPDATES}" if updates < FEWEST_UPDATES else None


def check(config: Config) -> None:
    """Everything about a study that can be refused before its rows are read. Raises `ConfigError`."""
    problems = refused(config)
    data = config.recipe.data
    if data.valid_share == 0 and not (data.valid or data.split):
        reason = "a run's best weights are those with the best validation score, and there are no validation rows"
        problems.append(Problem("data.valid_share", 0, reason, "give a share, e.g. 0.1", code="no_rows"))
    wrong = _of_space(config)
    problems += wrong
    if not wrong and FIRST not in frequencies(config):
        reason = f"times are told against an exchange after every pass, {FREQUENCY}={FIRST}"
        problems.append(Problem("tune.space", frequencies(config), reason, f"add {FIRST}", code="missing"))
    if problems:
        raise ConfigError(problems)


def _of_space(config: Config) -> list[Problem]:
    """What a `tune.space` of one's own has beside frequencies, and values of these that are none."""
    space = config.deploy.tune.space
    if space == SPACE:
        return []
    reason, fix = "a study compares aggregation frequencies alone", f"leave it out, or write {FREQUENCY}: [1, 2, 10]"
    others = [name for name in space if name != FREQUENCY]
    found = [Problem(f"tune.space.{name}", None, reason, fix, code="not_searchable") for name in others]
    values = space.get(FREQUENCY, FREQUENCIES)
    named = values if isinstance(values, tuple) else ()
    whole = named and all(type(value) is int and value > 0 for value in named)
    if not whole or len(set(named)) < len(named):
        reason = "no list of different whole numbers above 0"
        found.append(
            Problem(f"tune.space.{FREQUENCY}", values, reason, "write for example [1, 2, 10]", code="wrong_type")
        )
    return found


def first(config: Config) -> Settings:
    """What run 0 sets otherwise than the recipe, which may have another frequency."""
    return _changed(config, next(iter(OPTIMIZERS)), FIRST)


def _rows_of_passes(config: Config) -> int:
    """Rows of one pass of each worker."""
    return config.recipe.train.workers * config.recipe.train.micro_batch


def _changed(config: Config, optimizer: str, k: int) -> Settings:
    """What a cell sets otherwise than the recipe."""
    chosen = dict(OPTIMIZERS[optimizer])
    if chosen["optim.lr_scaling"] != "none":
        chosen["optim.lr_rows"] = _rows_of_passes(config) * FIRST
    now = configuration.flat(config)
    changed = {name: value for name, value in chosen.items() if now[name] != value}
    # A stored configuration has the rows of an update in place of the frequency that has set them.
    same = config.recipe.rows_per_update == k * _rows_of_passes(config)
    return changed if same else {**changed, FREQUENCY: k, ROWS: None}


def _neutral(changed: Settings, k: int) -> Settings:
    """The same settings, without the rule where it changes nothing."""
    return {**changed, "optim.lr_scaling": "none"} if k == FIRST else changed


# ----------------------------------------------------------------------------------------------------------- running it


@dataclass(frozen=True)
class Studied:
    """The result of a study."""

    study: Run
    table: Table


def run(
    config: Config,
    folder: Path,
    reuse: run_folders.Reuse = "refuse",
    on_event: controller.OnEvent | None = None,
    tokens_root: Path | None = None,
) -> Studied:
    """Train what the table needs, and make it. A study that was stopped goes on with the runs that have not ended.

    Raises what `plan` raises, `ConfigError` if a resumed study would be another one, and `UserError` if no run came to
    its end.
    """
    check(config)
    with held(config, folder, reuse, tokens_root) as (settled, task):
        planned, study = _Study(settled, replace(task, measures=True), on_event).run(), Run(task.search)
        known = {trial.number: trial for trial in Journal(study.trials).history.trials}
        results = [
            study_table.of_run(cell, study.trial(cell.number), _why(known[cell.number])) for cell in planned.cells
        ]
        if all(one.error for one in results):
            raise UserError(f"no run of the study came to its end; {results[0].error}", code="no_score")
        # Networks were measured for the study of the start before.
        networks = study_table.measured(json_files.read(study.study_table)) if study.study_table.is_file() else {}
        found = Studied(study, study_table.table(results, headline_of(settled), planned.left_out, networks))
        study_table.keep(study, found.table.document)
        controller.add(study, "page", study_table.write, on_event or (lambda event: None))
    return found


def _why(trial: Trial) -> str | None:
    return trial.error or trial.diverged


class _Study:
    """One start of a study."""

    def __init__(self, config: Config, task: Task, on_event: controller.OnEvent | None):
        self._config, self._task, self._study = config, task, Run(task.search)
        self._record = Record(self._study, on_event, config.deploy.cluster)

    def run(self) -> Plan:
        prepared = self._task.prepared(0, first(self._config))  # its rows are those of all
        if not prepared.store.rows("test"):
            reason = "the table has the scores of test rows, and there are none"
            fix = "name a file of them with --test, or give a share"
            raise ConfigError([Problem("data.test", None, reason, fix, code="no_rows")])
        planned = plan(self._config, prepared.store.rows("train"))
        self._ask(planned)
        rows = prepared.order.rows_until(prepared.updates)
        if self._waiting(rows):
            with self._record.following(), trial_pool.opened(self._config, self._task, 1) as open_slots:
                while waiting := self._waiting(rows):
                    if open_slots.idle:
                        self._record.give(open_slots, open_slots.idle[0], waiting[0])
                    self._record.hear(open_slots)
        self._record.finish_copy()
        return planned

    def _ask(self, planned: Plan) -> None:
        """Write down the runs; those of a resumed study must be the same."""
        known = self._record.history.trials
        for number, settings in planned.runs.items():
            if number >= len(known):
                self._record.write("asked", trial=number, settings=dict(settings), by=BY)
            elif known[number].settings != settings:
                shown, reason = known[number].named, "the study was started with other runs, of which one is {}"
                fix = "leave out what was changed, or start another study with --new"
                raise ConfigError([Problem("tune.study", BY, reason.format(shown), fix, code="changed_setting")])

    def _waiting(self, rows: int) -> list[Order]:
        """The runs that have yet to come to their ends, in their order."""
        asked = [trial for trial in self._record.history.trials if trial.status == "asked"]
        return [Order(trial.number, trial.settings, None, rows) for trial in asked]
