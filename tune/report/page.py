"""search.html: the verdict, the trials, charts, the cost, and next steps. Optuna's dashboard draws more
(`optuna_export`)."""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.config import Config, TuneConfig
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.metrics.registry import get_metric
from rtrain.report import charts
from rtrain.report.charts import LineSeries, ScatterPoint
from rtrain.report.page import (
    Block,
    Cell,
    Figure,
    Note,
    Recommendation,
    RecommendationList,
    Section,
    Table,
    Tile,
    render_html,
    write_page as write_page,
)
from rtrain.report.svg import format_duration, truncate
from rtrain.tasks import base
from tune.history import History, format_value, read_journal, replay_journal
from tune.report import table

MAX_ERROR_CHARACTERS = 300
GLOSSARY = (
    ("rung", "a number of rows at which trials are compared; the better half continues to twice the rows"),
    ("steering rows", "the validation rows for comparisons at rungs"),
    ("holdout rows", "the other validation rows, for the finals only"),
    ("frozen", "paused at a rung with a checkpoint, can be resumed"),
    ("finished", "trained to its end"),
    ("k", "micro-batches between two all-reduces (train.aggregation_frequency)"),
)
COST_HEADERS: Mapping[str, str] = {"latency": "ms for a text", "bytes": "MB of weights"}
"""Header of the column with the inference cost, by `tune.cost`."""
LR_SETTING, FREQUENCY_SETTING = "optim.lr", "train.aggregation_frequency"


@dataclass(frozen=True)
class SearchPageData:
    search: Run
    config: Config
    history: History
    headline: str

    @property
    def tune(self) -> TuneConfig:
        return self.config.deploy.tune

    @property
    def score_label(self) -> str:
        return table.score_label(self.headline)

    @property
    def sign(self) -> int:
        return -1 if self.headline.startswith("neg_") else 1


def write_search_page(search: Run) -> Path:
    """Write search.html. Raises `UserError` if no trial has started."""
    events = read_journal(search.trials)
    if not replay_journal(events).trials:
        message = f"no trial of {search} has started; continue with {search.resume_command}"
        raise UserError(message, code="not_begun")
    return write_page(search.search_page, render_search_page(search, events, table.describe_search(search)))


def render_search_page(search: Run, events: Sequence[Mapping[str, Any]], verdict_text: str) -> str:
    """Render the page from the journal's events. `verdict_text`: the verdict in one sentence."""
    config, history = configuration.load_config(str(search.config)), replay_journal(events)
    headline = get_metric(base.get_task(config.recipe.task).output).headline
    data = SearchPageData(search, config, history, headline)
    figures = [*_best_score_figure(data, events), *_lr_frequency_figure(data)]
    steps, note = _list_next_steps(search, history.winner)
    sections = [
        _trials_section(data),
        Section("space", "Scores", "", figures or [Note("No trial has a score yet.")]),
        _cost_section(data),
        Section("next", "What to do next", "", [RecommendationList("What to do next", steps, note)]),
    ]
    count = len(history.original_trials)
    trials = f"{count:,} trial{'' if count == 1 else 's'}"
    subtitle = f"A search from the recipe {config.recipe.name} by rtrain, {trials}"
    lead = f"{verdict_text[:1].upper()}{verdict_text[1:].removesuffix('.')}."
    return render_html(search.name, subtitle, _make_tiles(data), sections, lead=lead)


def _make_tiles(data: SearchPageData) -> list[Tile]:
    history, usage = data.history, table.measure_usage(data.history, data.tune)
    states = [trial.status for trial in history.original_trials]
    statuses = ("finished", "frozen", "created", "failed", "diverged")
    status_counts = ", ".join(f"{states.count(word)} {word}" for word in statuses if word in states)
    tiles = [Tile("trials", f"{len(states):,}", status_counts)]
    if usage.budget_rows:
        note = f"{usage.search_rows:,} of {usage.budget_rows:,} rows; {usage.final_rows:,} more for the finals"
        tiles.append(Tile("of the budget used", f"{100 * usage.search_rows / usage.budget_rows:.0f} %", note))
    if usage.saved_rows is not None and usage.all_full_runs_rows and usage.saved_rows > 0:
        note = f"of the {usage.all_full_runs_rows:,} that full runs of all trials would take"
        tiles.append(Tile("rows saved", f"{100 * usage.saved_rows / usage.all_full_runs_rows:.0f} %", note))
    training = f"{format_duration(usage.seconds)} of training"
    return [*tiles, Tile("time", format_duration(history.seconds or usage.seconds), training)]


def _trials_section(data: SearchPageData) -> Section:
    history, cost = data.history, COST_HEADERS.get(data.tune.cost)
    headers, *rows = table.table_cells(history, history.original_trials, data.headline, data.tune)
    table_rows: list[Sequence[Cell]] = [
        (*row, f"{trial.seconds:,.0f}", *([format_value(trial.cost)] if cost else []))
        for row, trial in zip(rows, history.original_trials, strict=True)
    ]
    note = (
        f"Under each rung: {data.score_label} on the steering rows. Holdout: on the holdout rows, the mean over the "
        "seeds of finished runs."
    )
    columns = (*headers, "seconds", *([cost] if cost else []))
    blocks: list[Block] = [Table("Trials", columns, table_rows, note, wide=True)]
    errors = [
        (trial.number, trial.label, truncate(trial.error or f"diverged: {trial.divergence}", MAX_ERROR_CHARACTERS))
        for trial in history.trials
        if not trial.is_valid
    ]
    if errors:
        blocks.append(Table("Why trials failed", ("trial", "settings", "error"), errors, wide=True))
    blocks.append(Table("Glossary", ("word", "meaning"), GLOSSARY, wide=True))
    stop_note = f"No further trials were created: {history.stop_reason}." if history.stop_reason else ""
    return Section("trials", "Trials", stop_note, blocks)


def _best_score_figure(data: SearchPageData, events: Sequence[Mapping[str, Any]]) -> Iterator[Block]:
    points_by_rung = dict[int, tuple[list[float], list[float]]]()
    for event in events:
        if event["kind"] == "rung_result" and math.isfinite(event["score"]):
            seconds, scores = points_by_rung.setdefault(event["rung"], ([], []))
            seconds.append(event["time"] - events[0]["time"])
            scores.append(max([*scores[-1:], event["score"]]))
    chart_lines = [
        LineSeries(f"rung {rung + 1}", seconds, [data.sign * score for score in scores], has_dots=True)
        for rung, (seconds, scores) in sorted(points_by_rung.items())
    ]
    if chart_lines:
        note = "On the steering rows. At one rung all trials have equally many rows."
        chart = charts.draw_lines(chart_lines, "seconds since the search began", f"best {data.score_label}")
        yield Figure(f"The best {data.score_label} over time", chart, note)


def _lr_frequency_figure(data: SearchPageData) -> Iterator[Block]:
    """Yield the chart of trials over learning rate and aggregation frequency, if both were searched."""
    if not {LR_SETTING, FREQUENCY_SETTING} <= {*table.searched_settings(data.history, data.tune)}:
        return
    recipe = data.config.recipe
    default_frequency = recipe.global_batch_size / (recipe.train.workers * recipe.train.micro_batch_size)
    scores = {trial.number: score for trial, score in table.first_rung_scores(data.history) if math.isfinite(score)}
    median = sorted(scores.values())[len(scores) // 2] if scores else 0.0
    dots = []
    for trial in data.history.original_trials:
        score = scores.get(trial.number)
        series = 2 if score is None else 3 if trial.number == data.history.winner else int(score < median)
        outcome = trial.status if score is None else f"{data.score_label} {table.format_score(data.headline, score)}"
        learning_rate = trial.settings.get(LR_SETTING, recipe.optim.lr)
        frequency = trial.settings.get(FREQUENCY_SETTING, default_frequency)
        if frequency is not None:  # otherwise the trial sets the batch size
            hint = f"trial {trial.number}, {trial.label}: {outcome}"
            dots.append(ScatterPoint(learning_rate, frequency, series, str(trial.number), hint))
    chart = charts.draw_named_points(
        dots, ("better half", "others", "no score", "winner"), LR_SETTING, FREQUENCY_SETTING
    )
    note = "A point is a trial, with its number; its color is its place by the score at the first rung."
    yield Figure("Trials over learning rate and aggregation frequency", chart, note)


def _cost_section(data: SearchPageData) -> Section:
    usage, tune = table.measure_usage(data.history, data.tune), data.tune
    rows = [
        ("rows until the first rung", f"{usage.first_rung_rows:,}"),
        ("rows of later rungs", f"{usage.later_rung_rows:,}"),
        ("rows of the finals: the best trials and trial 0, with several seeds", f"{usage.final_rows:,}"),
        ("seconds of training, over all trials", f"{usage.seconds:,.0f}"),
        ("time of the search", format_duration(data.history.seconds)),
    ]
    if usage.full_run_rows:
        full_runs = (usage.search_rows + usage.final_rows) / usage.full_run_rows
        rows.append(("equivalent full runs", f"{full_runs:.1f}"))
    if tune.worker_cost_per_hour is not None:
        money = data.history.billed_cost(data.config.recipe.train.workers, tune.worker_cost_per_hour)
        rows.append((f"money, at {tune.worker_cost_per_hour:g} an hour of a worker", f"{money:.2f}"))
    note = "Rows of failed trials since their last rung are unknown."
    return Section("cost", "Cost", "", [Table("Cost", ("", ""), rows, note)])


def _list_next_steps(search: Run, winner_number: int | None) -> tuple[list[Recommendation], str]:
    if winner_number is None:
        reason = "Trials resume from their checkpoints: nothing is trained twice"
        note = "TEACHER is the run whose model the students learn from." if search.is_student else ""
        return [Recommendation("Continue the search", reason, search.resume_command)], note
    winner, default_run, steps, note = search.trial(winner_number), search.trial(0), list[Recommendation](), ""
    if winner.is_finished:
        command = shlex.join(["rtrain", "serve", str(winner.artifact)])
        steps.append(Recommendation("Serve the winner", "it is trained to its end", command))
    if winner_number and default_run.is_finished and winner.is_finished:
        command = shlex.join(["rtrain", "compare", str(default_run.folder), str(winner.folder)])
        title = "Compare the winner with the recipe's own settings"
        steps.append(Recommendation(title, "row by row, also on the test rows", command))
    if not search.is_student:  # a student needs its teacher, not only a recipe
        command = shlex.join(["rtrain", "train", str(search.best_config), "--out", "NEW_FOLDER"])
        steps.append(Recommendation("Train with the winner's settings", "e.g. on more rows, by --data FILE", command))
        note = "Replace NEW_FOLDER."
    command = shlex.join(["rtrain", "report", str(winner.folder)])
    reason = "its predictions, slices and most frequent errors"
    steps.append(Recommendation("Read the winner's own report", reason, command))
    return steps, note
