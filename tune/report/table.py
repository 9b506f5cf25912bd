"""Terminal output of a search: event lines, progress, and the table of trials. Pure functions."""

from collections.abc import Mapping, Sequence
from typing import Any

from rtrain.config import TuneConfig
from rtrain.report.drawing.svg import format_duration, humanize_score_name
from tune.history import SEED_REPEAT, History, RungResult, Trial, find_trial
from tune.report import stats, verdict

PROPOSER_PHRASES = {
    "points": "from tune.points_to_evaluate",
    "spread": "spread over the space",
    "prior": "with the fastest batch size of trial 0",
    "gp": "by the Gaussian process",
    "tpe": "by the Parzen estimators",
    "random": "drawn at random",
    "grid": "the grid's next point",
}
MAX_ERROR_CHARACTERS = 160
"""Maximum characters of an error in a line."""


def format_table(history: History, headline: str, tune: TuneConfig, max_trials: int = 40) -> str:
    """Format the table of at most `max_trials` trials, with a legend.

    `headline` is the task's main score; negative errors are shown as errors.

    """
    if not history.trials:
        return "no trial has started"
    shown_trials = _select_trials(history, max_trials)
    rows = table_cells(history, shown_trials, headline, tune)
    rung_count = len(rows[0]) - 7
    right_aligned = {0, *range(3, 5 + rung_count)}
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(size) if column in right_aligned else cell.ljust(size)
            for column, (cell, size) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    if len(shown_trials) < len(history.original_trials):
        lines.append(
            f"and {len(history.original_trials) - len(shown_trials)} more trials; the page of the search has them all"
        )
    lines.append(_format_legend(headline, _short_setting_names(history, tune), history))
    if failed_trials := [trial for trial in history.trials if not trial.is_valid]:
        lines.append(f"{len(failed_trials)} of {len(history.trials)} trials failed or diverged:")
        lines += [
            f"trial {trial.number}: {_truncate(trial.error or trial.divergence or '')}" for trial in failed_trials
        ]
    return "\n".join(lines)


def _short_setting_names(history: History, tune: TuneConfig) -> dict[str, str]:
    return stats.shorten_names(stats.searched_settings(history, tune))


def _select_trials(history: History, max_trials: int) -> list[Trial]:
    """Return at most `max_trials` trials ordered by number: trial 0, and the best of the latest rungs."""

    def sort_key(trial: Trial) -> tuple[float, ...]:
        last_result = trial.rung_results[-1] if trial.rung_results else None
        priority = (trial.number not in (0, history.winner), trial.final_result is None)
        return (*priority, -last_result.rung if last_result else 1, -last_result.score if last_result else 0.0)

    selected = sorted(history.original_trials, key=sort_key)[:max_trials]
    return sorted(selected, key=lambda trial: trial.number)


def table_cells(history: History, trials: Sequence[Trial], headline: str, tune: TuneConfig) -> list[tuple[str, ...]]:
    """Return the header of the table and a row for each trial."""
    short_names, rung_count = (
        _short_setting_names(history, tune),
        1 + max((result.rung for trial in history.original_trials for result in trial.rung_results), default=-1),
    )

    def make_row(trial: Trial) -> tuple[str, ...]:
        score_by_rung = {result.rung: result.score for result in trial.rung_results}
        holdout = stats.holdout_score(history, trial.number)
        return (
            str(trial.number),
            stats.trial_label(trial, short_names),
            trial.proposed_by,
            *(
                format_score(headline, score_by_rung[rung]) if rung in score_by_rung else "-"
                for rung in range(rung_count)
            ),
            format_score(headline, holdout.score) if holdout else "-",
            str(holdout.seeds) if holdout else "-",
            trial.status,
            "<- best" if trial.number == history.winner else "",
        )

    head = (
        "trial",
        "sets",
        "by",
        *(f"rung {rung + 1}" for rung in range(rung_count)),
        "holdout",
        "seeds",
        "status",
        "",
    )
    return [head, *map(make_row, trials)]


def _format_legend(headline: str, short_names: Mapping[str, str], history: History) -> str:
    parts = [f"rung: {score_label(headline)} on the steering rows", "holdout: on the holdout rows, the mean over seeds"]
    if any(trial.status == "frozen" for trial in history.original_trials):
        parts.append("frozen: paused at a rung, can be resumed")
    parts += [f"{text}: {name}" for name, text in short_names.items() if text != name]
    return "; ".join(parts)


def score_label(headline: str) -> str:
    return humanize_score_name(headline.removeprefix("neg_"))


def format_score(headline: str, value: float) -> str:
    return f"{-value if headline.startswith('neg_') else value:.4f}"


def _truncate(error: str) -> str:
    line = " ".join(error.split())
    return line if len(line) <= MAX_ERROR_CHARACTERS else f"{line[: MAX_ERROR_CHARACTERS - 1]}…"


# ---------------------------------------------------------------------------------------------------- while it runs


def format_event(event: Mapping[str, Any], history: History, headline: str, tune: TuneConfig) -> str:
    """Format an event {what, trial, the journal's fields} as a line; empty for some kinds. `history` includes the
    event."""
    number, score_text = event.get("trial", -1), score_label(headline)
    match event["what"]:
        case "created":
            return (
                f"trial {number}: "
                f"{_describe_trial(find_trial(history.trials, number), _short_setting_names(history, tune))}"
            )
        case "rung_result":
            return f"trial {number}: {_describe_rung_result(event, history, headline)}"
        case "failed":
            return f"trial {number}: failed: {_truncate(event['error'])}"
        case "diverged":
            return f"trial {number}: diverged: {_truncate(event['reason'])}"
        case "finished":
            holdout_text = (
                f"{score_text} {format_score(headline, event['holdout_score'])} on "
                f"{event['holdout_rows']:,} holdout rows"
            )
            return f"trial {number}: trained to its end ({event['rows']:,} rows): {holdout_text}"
        case "noise":
            return (
                f"batch sizes far above {event['max_useful_batch_size']:,} rows are not searched: they gain "
                "little by the gradient noise scale"
            )
        case "stopped":
            return f"no further trials: {event['reason']}"
        case "reopened":
            return "further trials: the budget is larger now"
        case "winner":
            return f"winner: trial {event['winner']}; {verdict.describe_history(history, tune.target)}"
    return ""


def _describe_trial(trial: Trial, short_names: Mapping[str, str]) -> str:
    if trial.proposed_by == SEED_REPEAT:
        return f"trial {trial.repeat_of} repeated with seed {trial.seed}"
    set_values = stats.trial_label(trial, short_names)
    return (
        f"{set_values}, {PROPOSER_PHRASES[trial.proposed_by]}" if trial.proposed_by in PROPOSER_PHRASES else set_values
    )


def _describe_rung_result(event: Mapping[str, Any], history: History, headline: str) -> str:
    rung, trial = event["rung"], find_trial(history.trials, event["trial"])
    rung_scores = [
        result.score for trial in history.original_trials for result in trial.rung_results if result.rung == rung
    ]
    rank = 1 + sum(score > event["score"] for score in rung_scores)
    placement = f"place {rank} of {len(rung_scores)} so far" if len(rung_scores) > 1 else "the first there"
    if trial.repeat_of is not None:
        placement = f"with another seed than trial {trial.repeat_of}"
    score_text = f"{score_label(headline)} {format_score(headline, event['score'])}"
    return f"{score_text} at rung {rung + 1} ({event['rows']:,} rows, {format_duration(event['seconds'])}), {placement}"


def progress_line(history: History, headline: str, tune: TuneConfig) -> str:
    """Format the progress of a search as a line: phase, best score, and used budget."""
    parts, usage = [_describe_phase(history, tune)], stats.measure_usage(history, tune)
    leading_trial = stats.leading_trial(history)
    if leading_trial is not None:
        holdout = stats.holdout_score(history, leading_trial.number)
        value = holdout.score if holdout else leading_trial.rung_results[-1].score
        location = "holdout" if holdout else f"rung {leading_trial.rung_results[-1].rung + 1}"
        parts.append(
            f"best {score_label(headline)} {format_score(headline, value)} ({location}, trial {leading_trial.number})"
        )
    if usage.budget_rows:
        parts.append(f"{100 * usage.search_rows / usage.budget_rows:.0f} % of the rows")
    return "  ".join(parts)


def _describe_phase(history: History, tune: TuneConfig) -> str:
    trials = history.original_trials
    if history.winner is not None:
        return "ended"
    if finished_count := sum(trial.final_result is not None for trial in trials):
        # A repeat at a rung belongs to the halving.
        repeats = [trial for trial in history.trials if trial.repeat_of is not None and trial.status != "frozen"]
        if not repeats:
            return f"finals: {finished_count} finished"
        newest_repeat = repeats[-1]
        return (
            f"finals: seed {sum(repeat.repeat_of == newest_repeat.repeat_of for repeat in repeats)} of trial "
            f"{newest_repeat.repeat_of}"
        )
    waiting_count = sum(trial.status == "created" for trial in trials)
    deepest = max((result.rung for trial in trials for result in trial.rung_results), default=0)
    arrived_count = sum(_has_result(trial.rung_results, deepest) for trial in trials)
    deepest_phase = f"rung {deepest + 1}: {arrived_count} there" if deepest else ""
    if history.stop_reason is not None and not waiting_count:
        return deepest_phase or f"first rung: all {len(trials)} there"
    out_of = f" of {tune.trials}" if tune.trials else ""
    first_phase = f"first rung: {len(trials) - waiting_count}{out_of}"
    return f"{first_phase}, {deepest_phase}" if deepest_phase else first_phase


def _has_result(rung_results: Sequence[RungResult], rung: int) -> bool:
    return any(result.rung == rung for result in rung_results)


class SearchFollower:
    """Formats the events of a search in order. A resumed search starts with its history."""

    def __init__(self, headline: str, tune: TuneConfig, history: History | None = None):
        self._headline, self._tune = headline, tune
        self._history = history or History()

    def format_event(self, event: Mapping[str, Any]) -> str:
        fields = {name: value for name, value in event.items() if name not in ("kind", "what", "time")}
        self._history = self._history.with_event({"kind": event["what"], **fields})
        return format_event(event, self._history, self._headline, self._tune)

    @property
    def progress_line(self) -> str:
        return progress_line(self._history, self._headline, self._tune)
