"""Study of the aggregation frequency: the time and score of full trainings of one recipe at several frequencies, with
AdamW, AdamW with the linear scaling rule, and RAdam. Its table as text, JSON and a page.

It follows the published study "Faster NLP with Deep Learning: Distributed Training" (Determined AI, 2020), on
BERT and SQuAD. The linear rule is Goyal et al. 2017 (arXiv:1706.02677); RAdam is Liu et al. 2020 (arXiv:1908.03265).

Its trainings use a search's folders, journal and slots. They run one at a time, since concurrent trainings would share
the processor, and the table has their times.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.config.tune import DEFAULT_SPACE
from rtrain.core import json_files
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.core.run_folder import Run
from rtrain.data.order import RowOrder
from rtrain.metrics.registry import get_metric
from rtrain.report import charts, summary
from rtrain.report.charts import ScatterPoint
from rtrain.report.page import Block, Figure, Note, Section, Table, render_html, write_page
from rtrain.runs import controller, run_folders
from rtrain.tasks import base
from tune import trial_pool
from tune.history import Trial
from tune.search_log import SearchLog
from tune.space import BATCH_SIZE_SETTING, FREQUENCY_SETTING
from tune.trainable import Assignment, SearchTask, headline_metric, open_search, strategy_problems

BASELINE_FREQUENCY = 1
"""Baseline of the comparisons."""
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
STUDY_PROPOSER = "study"
"""Proposer of the trials of a study."""
PREDICTED_NETWORKS = {"10 Gbit/s": 1e10, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
"""Networks for which times are predicted, in bits per second and direction."""
SMALL_LOSS = 0.01
"""Maximum score loss of a setting that counts as cheap."""
Overrides = Mapping[str, Any]


# ----------------------------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True)
class StudyCell:
    """A cell of the table. Cells with equal weights share a run."""

    optimizer: str
    frequency: int
    run_number: int
    """Number of its run."""


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
    reasons = {k: too_few_rows(rows, rows_per_micro_batch * k, config.recipe.train.epochs) for k in requested}
    skipped = {k: reason for k, reason in reasons.items() if reason}
    compared = [k for k in requested if k not in skipped]
    if BASELINE_FREQUENCY not in compared or len(compared) < 2:
        skip_list = "; ".join(f"k={k}: {reason}" for k, reason in skipped.items())
        raise UserError(
            f"{rows} training rows are too few to compare aggregation frequencies ({skip_list}); give more rows, or "
            "more epochs with --set train.epochs",
            code="too_few_rows",
        )
    cells, runs, number_by_weights = list[StudyCell](), dict[int, Overrides](), dict[str, int]()
    for optimizer in OPTIMIZERS:
        for k in compared:
            overrides = _cell_overrides(config, optimizer, k)
            # At the first frequency the rule has no effect: equal weights are trained once.
            neutral_rule = {"optim.lr_scaling": "none"} if k == BASELINE_FREQUENCY else {}
            weights = configuration.with_overrides(config, {**overrides, **neutral_rule}).recipe.recipe_digest()
            number = number_by_weights.setdefault(weights, len(number_by_weights))
            runs.setdefault(number, overrides)
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
    num_steps = RowOrder("", rows, global_batch_size, epochs, 0).num_steps
    return f"{num_steps} steps, fewer than {MIN_STEPS}" if num_steps < MIN_STEPS else None


def check_study(config: Config) -> None:
    """Check a study before its rows are read. Raises `ConfigError` with all problems."""
    problems, data, space_problems = strategy_problems(config), config.recipe.data, _space_problems(config)
    if data.valid_share == 0 and not (data.valid or data.split_column):
        reason = "the best weights of a run need validation rows, which are missing"
        problems.append(Problem("data.valid_share", 0, reason, "give a share, e.g. 0.1", code="no_rows"))
    problems += space_problems
    if not space_problems and BASELINE_FREQUENCY not in (frequencies := list_frequencies(config)):
        reason = (
            f"times are relative to an all-reduce after every micro-batch, {FREQUENCY_SETTING}={BASELINE_FREQUENCY}"
        )
        problems.append(Problem("tune.space", frequencies, reason, f"add {BASELINE_FREQUENCY}", code="missing"))
    if problems:
        raise ConfigError(problems)


def _space_problems(config: Config) -> list[Problem]:
    """Return the problems of `tune.space`: other settings than the frequency, and invalid frequencies."""
    space = config.deploy.tune.space
    if space == DEFAULT_SPACE:
        return []
    reason = "a study compares aggregation frequencies alone"
    fix = f"leave it out, or write {FREQUENCY_SETTING}: [1, 2, 10]"
    problems = [
        Problem(f"tune.space.{name}", None, reason, fix, code="not_searchable")
        for name in space
        if name != FREQUENCY_SETTING
    ]
    values = space.get(FREQUENCY_SETTING, FREQUENCIES)
    frequencies = values if isinstance(values, tuple) else ()
    are_positive_integers = all(type(value) is int and value > 0 for value in frequencies)
    if not frequencies or not are_positive_integers or len(set(frequencies)) < len(frequencies):
        reason, fix = "not a list of distinct positive integers", "write for example [1, 2, 10]"
        problems.append(Problem(f"tune.space.{FREQUENCY_SETTING}", values, reason, fix, code="wrong_type"))
    return problems


def first_overrides(config: Config) -> Overrides:
    return _cell_overrides(config, next(iter(OPTIMIZERS)), BASELINE_FREQUENCY)


def _rows_per_micro_batch(config: Config) -> int:
    return config.recipe.train.workers * config.recipe.train.micro_batch_size


def _cell_overrides(config: Config, optimizer: str, k: int) -> Overrides:
    optimizer_settings = dict(OPTIMIZERS[optimizer])
    if optimizer_settings["optim.lr_scaling"] != "none":
        optimizer_settings["optim.lr_reference_batch_size"] = _rows_per_micro_batch(config) * BASELINE_FREQUENCY
    current = configuration.flatten_config(config)
    changes = {name: value for name, value in optimizer_settings.items() if current[name] != value}
    # A stored configuration has the batch size instead of the frequency.
    has_same_batch_size = config.recipe.global_batch_size == k * _rows_per_micro_batch(config)
    return changes if has_same_batch_size else {**changes, FREQUENCY_SETTING: k, BATCH_SIZE_SETTING: None}


# -------------------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True)
class CellResult:
    optimizer: str
    frequency: int
    score: float | None = None
    """The task's headline on the test rows; None if the run failed."""
    seconds: float | None = None
    """Seconds of training, without start, evaluations and checkpoints."""
    steps: int = 0
    sync_s: float = 0.0
    """Mean seconds that an all-reduce adds to a micro-batch; 0 with one worker."""
    gradient_bytes: int = 0
    """Bytes of a gradient."""
    workers: int = 1
    error: str | None = None
    """Error of a failed run."""

    @property
    def sync_share(self) -> float | None:
        """Share of the time in all-reduces."""
        return None if not self.seconds else self.steps * self.sync_s / self.seconds

    def predict_seconds(self, bits_per_second: float) -> float | None:
        sync_s = predict_sync_seconds(self.gradient_bytes, self.workers, bits_per_second)
        return None if self.seconds is None else self.seconds + self.steps * (sync_s - self.sync_s)


def read_cell_result(cell: StudyCell, run: Run, reason: str | None = None) -> CellResult:
    """Read the result of a run. `reason`: its failure, if it is known."""
    log = run.events()
    if summary.run_status(log) != "finished":
        errors = [event["error"] for event in log if event["kind"] == "failed"] or ["the run did not end"]
        return CellResult(cell.optimizer, cell.frequency, error=str(reason or errors[-1]).splitlines()[0])
    run_summary = summary.summarize(run)
    sync_cost = (run.last_event("trained") or {}).get("gradient_sync") or {"seconds": 0.0, "bytes": 0}
    return CellResult(
        cell.optimizer,
        cell.frequency,
        score=run_summary["metrics"]["test"][get_metric(base.get_task(run_summary["task"]).output).headline],
        seconds=run_summary["seconds"]["train"] + run_summary["seconds"]["input_wait"],
        steps=run_summary["steps"],
        sync_s=sync_cost["seconds"],
        gradient_bytes=sync_cost["bytes"],
        workers=run_summary["workers"],
    )


def predict_sync_seconds(gradient_bytes: int, workers: int, bits_per_second: float) -> float:
    """Return the seconds of an all-reduce over a link: in a ring, each worker sends 2 (n - 1) / n of a gradient
    (Patarasuk and Yuan 2009). Without latency and without overlap with the backward pass."""
    return 2 * (workers - 1) / workers * gradient_bytes * 8 / bits_per_second


# ---------------------------------------------------------------------------------------------------------------- table


@dataclass(frozen=True)
class FigureTable:
    title: str
    frequencies: Sequence[int]
    rows: Mapping[str, Sequence[str]]
    """The figure at each frequency, by optimizer."""

    @property
    def to_markdown(self) -> str:
        head = f"| {self.title} | " + " | ".join(f"k = {k}" for k in self.frequencies) + " |"
        lines = [f"| {name} | " + " | ".join(row) + " |" for name, row in self.rows.items()]
        return "\n".join([head, "|---|" + "---|" * len(self.frequencies), *lines])


@dataclass(frozen=True)
class StudyTable:
    figures: Sequence[FigureTable]
    notes: Sequence[str]
    """Skipped frequencies and failed runs, with reasons."""
    document: Mapping[str, Any]

    @property
    def to_markdown(self) -> str:
        """Markdown for the terminal."""
        return "\n\n".join(
            [*(part.to_markdown for part in self.figures), *(["\n".join(self.notes)] if self.notes else [])]
        )


FigureOf = Callable[[CellResult], float | None]


def build_study_table(
    results: Sequence[CellResult], headline: str, skipped_frequencies: Mapping[int, str] | None = None
) -> StudyTable:
    """Build the table of a study: rows are optimizers, columns are frequencies; a part for each figure, and for the
    predicted times over each of `PREDICTED_NETWORKS`."""
    baselines = {result.optimizer: result for result in results if result.frequency == BASELINE_FREQUENCY}
    skipped = skipped_frequencies or {}

    def saved_share(result: CellResult, seconds: FigureOf) -> float | None:
        baseline_seconds, result_seconds = seconds(baselines[result.optimizer]), seconds(result)
        return None if not baseline_seconds or result_seconds is None else 1 - result_seconds / baseline_seconds

    def saved_share_here(result: CellResult) -> float | None:
        return saved_share(result, lambda cell_result: cell_result.seconds)

    def score_loss(result: CellResult) -> float | None:
        baseline_score = baselines[result.optimizer].score
        return None if baseline_score is None or result.score is None else baseline_score - result.score

    figures = [
        _figure_table(f"{headline} on the test rows", results, lambda result: result.score, "{:.4f}"),
        _figure_table(f"score loss against k = {BASELINE_FREQUENCY}", results, score_loss, "{:+.4f}"),
        _figure_table("seconds of training here", results, lambda result: result.seconds, "{:.1f}"),
        _figure_table("share in gradient synchronization", results, lambda result: result.sync_share, "{:.1%}"),
        _figure_table(f"time saved against k = {BASELINE_FREQUENCY}", results, saved_share_here, "{:.1%}"),
    ]
    networks = {}
    for name, bits_per_second in PREDICTED_NETWORKS.items():
        seconds = partial(CellResult.predict_seconds, bits_per_second=bits_per_second)
        share = partial(saved_share, seconds=seconds)
        figures.append(_figure_table(f"seconds over {name}, predicted (saved)", results, seconds, "{:.1f}", share))
        networks[name] = {
            "source": "predicted",
            "results": [
                {
                    "optimizer": result.optimizer,
                    "frequency": result.frequency,
                    "seconds": seconds(result),
                    "saved_share": share(result),
                }
                for result in results
            ],
        }
    document = {
        "headline": headline,
        "results": [
            {
                **asdict(result),
                "sync_share": result.sync_share,
                "saved_share": saved_share_here(result),
                "score_loss": score_loss(result),
            }
            for result in results
        ],
        "skipped": {str(k): reason for k, reason in skipped.items()},
        "networks": networks,
    }
    notes = [f"k = {k} is skipped: {reason}." for k, reason in skipped.items()]
    notes += [f"{result.optimizer}, k = {result.frequency}: {result.error}" for result in results if result.error]
    return StudyTable(figures, notes, document)


def load_study_table(document: Mapping[str, Any]) -> StudyTable:
    field_names = CellResult.__dataclass_fields__.keys()
    results = [CellResult(**{name: result[name] for name in field_names}) for result in document["results"]]
    return build_study_table(
        results, document["headline"], {int(k): reason for k, reason in document["skipped"].items()}
    )


def _figure_table(
    title: str, results: Sequence[CellResult], value: FigureOf, number_format: str, share: FigureOf | None = None
) -> FigureTable:
    """Build one figure for all results; `share` is shown in parentheses."""
    rows: dict[str, dict[int, str]] = {}
    for result in results:
        figure, share_value = value(result), share(result) if share else None
        text = "failed" if figure is None else number_format.format(figure)
        row = rows.setdefault(result.optimizer, {})
        row[result.frequency] = text if share_value is None else f"{text} ({share_value:.0%})"
    columns = sorted({k for row in rows.values() for k in row})
    return FigureTable(title, columns, {name: [row.get(k, "") for k in columns] for name, row in rows.items()})


# ------------------------------------------------------------------------------------------------------------ execution


@dataclass(frozen=True)
class StudyResult:
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
        study = Run(task.search)
        search_log = SearchLog(study, on_event, config.deploy.cluster)
        study_plan = _train_runs(resolved_config, replace(task, measures_noise=True), search_log)
        trials = {trial.number: trial for trial in search_log.history.trials}
        results = [
            read_cell_result(
                cell, study.trial(cell.run_number), trials[cell.run_number].error or trials[cell.run_number].divergence
            )
            for cell in study_plan.cells
        ]
        if all(result.error for result in results):
            raise UserError(f"no run of the study has finished; {results[0].error}", code="no_score")
        table = build_study_table(results, headline_metric(resolved_config), study_plan.skipped_frequencies)
        study.study_table.write_text(json.dumps(table.document, indent=1) + "\n", encoding="utf-8")
        controller.run_optional_step(study, "page", write_study_page, search_log.notify)
    return StudyResult(study, table)


def _train_runs(config: Config, task: SearchTask, search_log: SearchLog) -> StudyPlan:
    prepared_run = task.prepare_trial(0, first_overrides(config))  # all runs have the same rows
    if not prepared_run.store.num_rows("test"):
        reason = "the table needs test rows, which are missing"
        fix = "name a file of them with --test, or give a share"
        raise ConfigError([Problem("data.test", None, reason, fix, code="no_rows")])
    study_plan = plan_study(config, prepared_run.store.num_rows("train"))
    _create_trials(study_plan, search_log)
    rows = prepared_run.order.rows_until(prepared_run.num_steps)

    def pending_trials() -> list[Trial]:
        return [trial for trial in search_log.history.trials if trial.status == "created"]

    if pending_trials():
        with search_log.follow_trials(), trial_pool.open_slots(config, task, 1) as slot_pool:
            while pending := pending_trials():
                if slot_pool.idle_slots:
                    assignment = Assignment(pending[0].number, pending[0].settings, None, rows)
                    search_log.dispatch(slot_pool, slot_pool.idle_slots[0], assignment)
                search_log.receive(slot_pool)
    search_log.complete_copy()
    return study_plan


def _create_trials(study_plan: StudyPlan, search_log: SearchLog) -> None:
    """Write the runs to the journal; those of a resumed study must be the same."""
    trials = search_log.history.trials
    for number, settings in study_plan.runs.items():
        if number >= len(trials):
            search_log.write("created", trial=number, settings=dict(settings), proposed_by=STUDY_PROPOSER)
        elif trials[number].settings != settings:
            reason = f"the study was started with other runs, e.g. {trials[number].label}"
            fix = "undo the change, or start another study with --new"
            raise ConfigError([Problem("tune.study", STUDY_PROPOSER, reason, fix, code="changed_setting")])


# ----------------------------------------------------------------------------------------------------------------- page


def write_study_page(study: Run) -> Path:
    """Write study.html. Raises `UserError` if the study has not ended."""
    if not study.study_table.is_file():
        message = f"the study {study} has not ended; continue with rtrain tune --resume --out {study}"
        raise UserError(message, code="not_finished")
    document = json_files.load_json_object(study.study_table)
    return write_page(study.study_page, render_study_page(study.name, document))


def render_study_page(name: str, document: Mapping[str, Any]) -> str:
    table, results = load_study_table(document), document["results"]
    valid_results = [result for result in results if result["error"] is None]
    blocks: list[Block] = [
        Table(part.title, ("", *(f"k = {k}" for k in part.frequencies)), [(at, *row) for at, row in part.rows.items()])
        for part in table.figures
    ]
    blocks += map(Note, table.notes)
    sections = [
        Section("trade", "Score for the time", "", _score_time_figure(document["headline"], valid_results)),
        Section("table", "The table", "k: micro-batches between two all-reduces.", blocks),
    ]
    subtitle = f"A study of aggregation frequencies by rtrain, {len(results)} trainings"
    return render_html(name, subtitle, [], sections, lead=summarize_finding(document["headline"], valid_results))


def summarize_finding(headline: str, results: Sequence[Mapping[str, Any]]) -> str:
    """Return the finding in one sentence: the fastest setting with a small score loss."""
    baseline = f"k = {BASELINE_FREQUENCY}"
    close_results = [
        result
        for result in results
        if result["frequency"] != BASELINE_FREQUENCY
        and None not in (result["score_loss"], result["saved_share"])
        and round(result["score_loss"], 4) <= SMALL_LOSS
    ]
    if not close_results:
        limit = f"within {SMALL_LOSS:g} of that with {baseline}"
        return f"No frequency above {BASELINE_FREQUENCY} keeps the {headline} {limit}."
    best = max(close_results, key=lambda result: result["saved_share"])
    share, direction = abs(best["saved_share"]), "less" if best["saved_share"] >= 0 else "more"
    setting, loss = f"{best['optimizer']} with k = {best['frequency']}", f"{-best['score_loss']:+.4f} of {headline}"
    return f"{setting} takes {share:.0%} {direction} time than with {baseline}, for {loss}."


def _score_time_figure(headline: str, results: Sequence[Mapping[str, Any]]) -> list[Block]:
    names = list(dict.fromkeys(result["optimizer"] for result in results))
    dots = [
        ScatterPoint(
            *(result["seconds"], result["score"], names.index(result["optimizer"]), f"k={result['frequency']}"),
            f"{result['optimizer']}, k = {result['frequency']}: {result['score']:.4f} in {result['seconds']:,.0f} s",
        )
        for result in results
        if result["seconds"]
    ]
    if not dots:
        return []
    chart = charts.draw_named_points(dots, names, "seconds of training", headline)
    return [Figure(f"The {headline} on the test rows for the time", chart, "Each point is a training to its end.")]
