"""A search as text for the terminal: event lines, progress, the table of trials, statistics, and the verdict in one
sentence. Pure functions of its history. Larger scores are better."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rtrain import config as configuration
from rtrain.config import TuneConfig
from rtrain.core.run_folder import Run
from rtrain.evaluation import significance
from rtrain.evaluation.significance import Difference
from rtrain.report.svg import format_duration, humanize_score_name
from tune import finals
from tune.finals import SearchVerdict
from tune.history import SEED_REPEAT, History, Trial, find_trial, format_value, read_journal, replay_journal

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
SHORT_NAMES = {"aggregation_frequency": "k"}
DEFAULT_SETTINGS = "the recipe's own settings"
COST_SUPERLATIVES = {"training": "fastest", "latency": "one of the least latency", "bytes": "smallest"}
"""Description of a winner selected by cost, by `tune.cost`."""


def format_table(history: History, headline: str, tune: TuneConfig, max_trials: int = 40) -> str:
    """Format the table of at most `max_trials` trials, with a legend.

    `headline` is the task's main score; negative errors are shown as errors.
    """
    if not history.trials:
        return "no trial has started"
    shown_trials = _select_trials(history, max_trials)
    rows = table_cells(history, shown_trials, headline, tune)
    right_aligned = {0, *range(3, len(rows[0]) - 2)}
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if column in right_aligned else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    if hidden_count := len(history.original_trials) - len(shown_trials):
        lines.append(f"and {hidden_count} more trials; the page of the search has them all")
    lines.append(_format_legend(headline, _short_setting_names(history, tune), history))
    if failed_trials := [trial for trial in history.trials if not trial.is_valid]:
        lines.append(f"{len(failed_trials)} of {len(history.trials)} trials failed or diverged:")
        lines += [
            f"trial {trial.number}: {_truncate(trial.error or trial.divergence or '')}" for trial in failed_trials
        ]
    return "\n".join(lines)


def _short_setting_names(history: History, tune: TuneConfig) -> dict[str, str]:
    return shorten_names(searched_settings(history, tune))


def _select_trials(history: History, max_trials: int) -> list[Trial]:
    """Return at most `max_trials` trials ordered by number: trial 0, and the best of the latest rungs."""

    def sort_key(trial: Trial) -> tuple[float, ...]:
        last_result = trial.rung_results[-1] if trial.rung_results else None
        priority = (trial.number not in (0, history.winner), trial.final_result is None)
        return (*priority, -last_result.rung if last_result else 1, -last_result.score if last_result else 0.0)

    selected = sorted(history.original_trials, key=sort_key)[:max_trials]
    return sorted(selected, key=lambda trial: trial.number)


def table_cells(history: History, trials: Sequence[Trial], headline: str, tune: TuneConfig) -> list[tuple[str, ...]]:
    short_names = _short_setting_names(history, tune)
    rungs = range(
        1 + max((result.rung for trial in history.original_trials for result in trial.rung_results), default=-1)
    )

    def make_row(trial: Trial) -> tuple[str, ...]:
        score_by_rung = {result.rung: format_score(headline, result.score) for result in trial.rung_results}
        holdout = holdout_score(history, trial.number)
        return (
            str(trial.number),
            trial_label(trial, short_names),
            trial.proposed_by,
            *(score_by_rung.get(rung, "-") for rung in rungs),
            format_score(headline, holdout.score) if holdout else "-",
            str(holdout.seeds) if holdout else "-",
            trial.status,
            "<- best" if trial.number == history.winner else "",
        )

    header = ("trial", "sets", "by", *(f"rung {rung + 1}" for rung in rungs), "holdout", "seeds", "status", "")
    return [header, *map(make_row, trials)]


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


# -------------------------------------------------------------------------------------------------------- while it runs


def format_event(event: Mapping[str, Any], history: History, headline: str, tune: TuneConfig) -> str:
    """Format an event {what, trial, the journal's fields} as a line; empty for some kinds. `history` includes the
    event."""
    trial = f"trial {event.get('trial', -1)}"
    match event["what"]:
        case "created":
            created_trial = find_trial(history.trials, event["trial"])
            return f"{trial}: {_describe_trial(created_trial, _short_setting_names(history, tune))}"
        case "rung_result":
            return f"{trial}: {_describe_rung_result(event, history, headline)}"
        case "failed":
            return f"{trial}: failed: {_truncate(event['error'])}"
        case "diverged":
            return f"{trial}: diverged: {_truncate(event['reason'])}"
        case "finished":
            score = f"{score_label(headline)} {format_score(headline, event['holdout_score'])}"
            rows = f"{event['holdout_rows']:,} holdout rows"
            return f"{trial}: trained to its end ({event['rows']:,} rows): {score} on {rows}"
        case "noise":
            return (
                f"batch sizes far above {event['max_useful_batch_size']:,} rows are not searched: they gain little by "
                "the gradient noise scale"
            )
        case "stopped":
            return f"no further trials: {event['reason']}"
        case "reopened":
            return "further trials: the budget is larger now"
        case "winner":
            return f"winner: trial {event['winner']}; {describe_history(history, tune.target)}"
    return ""


def _describe_trial(trial: Trial, short_names: Mapping[str, str]) -> str:
    if trial.proposed_by == SEED_REPEAT:
        return f"trial {trial.repeat_of} repeated with seed {trial.seed}"
    label, phrase = trial_label(trial, short_names), PROPOSER_PHRASES.get(trial.proposed_by)
    return label if phrase is None else f"{label}, {phrase}"


def _describe_rung_result(event: Mapping[str, Any], history: History, headline: str) -> str:
    rung, trial = event["rung"], find_trial(history.trials, event["trial"])
    rung_scores = [
        result.score for other in history.original_trials for result in other.rung_results if result.rung == rung
    ]
    if trial.repeat_of is not None:
        placement = f"with another seed than trial {trial.repeat_of}"
    elif len(rung_scores) > 1:
        rank = 1 + sum(score > event["score"] for score in rung_scores)
        placement = f"place {rank} of {len(rung_scores)} so far"
    else:
        placement = "the first there"
    score_text = f"{score_label(headline)} {format_score(headline, event['score'])}"
    return f"{score_text} at rung {rung + 1} ({event['rows']:,} rows, {format_duration(event['seconds'])}), {placement}"


def progress_line(history: History, headline: str, tune: TuneConfig) -> str:
    """Format the progress of a search as a line: phase, best score, and used budget."""
    parts, usage, leader = [_describe_phase(history, tune)], measure_usage(history, tune), leading_trial(history)
    if leader is not None:
        if holdout := holdout_score(history, leader.number):
            score, place = holdout.score, "holdout"
        else:
            score, place = leader.rung_results[-1].score, f"rung {leader.rung_results[-1].rung + 1}"
        parts.append(f"best {score_label(headline)} {format_score(headline, score)} ({place}, trial {leader.number})")
    if usage.budget_rows:
        parts.append(f"{100 * usage.search_rows / usage.budget_rows:.0f} % of the rows")
    return "  ".join(parts)


def _describe_phase(history: History, tune: TuneConfig) -> str:
    trials = history.original_trials
    if history.winner is not None:
        return "ended"
    if finished_count := sum(trial.final_result is not None for trial in trials):
        # A repeat at a rung belongs to the halving.
        repeats = [
            trial.repeat_of for trial in history.trials if trial.repeat_of is not None and trial.status != "frozen"
        ]
        if not repeats:
            return f"finals: {finished_count} finished"
        return f"finals: seed {repeats.count(repeats[-1])} of trial {repeats[-1]}"
    waiting_count = sum(trial.status == "created" for trial in trials)
    rungs_by_trial = [{result.rung for result in trial.rung_results} for trial in trials]
    deepest = max(set().union(*rungs_by_trial), default=0)
    deepest_phase = f"rung {deepest + 1}: {sum(deepest in rungs for rungs in rungs_by_trial)} there" if deepest else ""
    if history.stop_reason is not None and not waiting_count:
        return deepest_phase or f"first rung: all {len(trials)} there"
    out_of = f" of {tune.trials}" if tune.trials else ""
    first_phase = f"first rung: {len(trials) - waiting_count}{out_of}"
    return f"{first_phase}, {deepest_phase}" if deepest_phase else first_phase


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


# ----------------------------------------------------------------------------------------------------------- statistics


def searched_settings(history: History, tune: TuneConfig) -> list[str]:
    """Return the searched settings: those of the space, then those of points, without derived ones such as
    `optim.lr_scaling`."""
    names = dict.fromkeys([*tune.space, *(name for point in tune.points_to_evaluate for name in point)])
    return [name for name in names if any(trial.settings.get(name) is not None for trial in history.original_trials)]


def shorten_names(names: Iterable[str]) -> dict[str, str]:
    """Return a short name for each setting: its last part if it is unique; `k` for the aggregation frequency."""
    parts = {name: SHORT_NAMES.get(last := name.rpartition(".")[2], last) for name in names}
    short_parts = list(parts.values())
    return {name: short if short_parts.count(short) == 1 else name for name, short in parts.items()}


def trial_label(trial: Trial, short_names: Mapping[str, str]) -> str:
    if trial.repeat_of is not None:
        return f"trial {trial.repeat_of} with seed {trial.seed}"
    parts = [
        f"{text} {format_value(trial.settings[name])}" for name, text in short_names.items() if name in trial.settings
    ]
    return ", ".join(parts) or trial.label


def first_rung_scores(history: History) -> list[tuple[Trial, float]]:
    """Return (trial, its score at the first rung), where all trials have equally many rows."""
    return [
        (trial, result.score) for trial in history.original_trials for result in trial.rung_results if result.rung == 0
    ]


@dataclass(frozen=True)
class HoldoutMean:
    """Mean score of a trial's settings on the holdout rows, over the seeds of its finished runs."""

    score: float
    seeds: int
    rows: int


def holdout_score(history: History, number: int) -> HoldoutMean | None:
    """Return the mean over seeds, or None without a finished run."""
    results = [
        trial.final_result
        for trial in history.trials
        if number in (trial.number, trial.repeat_of) and trial.final_result
    ]
    if not results:
        return None
    mean = sum(result.holdout_score for result in results) / len(results)
    return HoldoutMean(mean, len(results), results[0].holdout_rows)


def leading_trial(history: History) -> Trial | None:
    """Return the winner, or the best valid trial at the latest rung."""
    if history.winner is not None:
        return find_trial(history.trials, history.winner)

    def sort_key(trial: Trial) -> tuple[float, ...]:
        if holdout := holdout_score(history, trial.number):
            return (math.inf, holdout.score, -trial.number)
        return (trial.rung_results[-1].rung, trial.rung_results[-1].score, -trial.number)

    scored_trials = (
        trial for trial in history.original_trials if trial.is_valid and (trial.rung_results or trial.final_result)
    )
    return max(scored_trials, key=sort_key, default=None)


@dataclass(frozen=True)
class SearchUsage:
    """Trained rows. Rows of failed trials since their last rung are unknown and not counted."""

    first_rung_rows: int
    """Rows until the first rung."""
    later_rung_rows: int
    """Rows from the first to the last rung of each trial."""
    final_rows: int
    """Rows of the finals."""
    full_run_rows: int | None
    """Rows of a full run; None if unknown."""
    budget_rows: int | None
    """Budget of the search without its finals; None if unknown."""
    all_full_runs_rows: int | None
    """Rows of full runs of all trials, after the last trial was created."""
    seconds: float
    """Seconds of training, over all trials."""

    @property
    def search_rows(self) -> int:
        """Rows that count against the budget."""
        return self.first_rung_rows + self.later_rung_rows

    @property
    def saved_rows(self) -> int | None:
        """Saved rows relative to full runs of all trials; negative if the finals took more."""
        return None if self.all_full_runs_rows is None else self.all_full_runs_rows - self.search_rows - self.final_rows


def measure_usage(history: History, tune: TuneConfig) -> SearchUsage:
    first_rows = later_rows = final_rows = 0
    for trial in history.trials:
        rungs = [result.rows for result in trial.rung_results] or [0]
        first_rows, later_rows = first_rows + rungs[0], later_rows + rungs[-1] - rungs[0]
        final_rows += trial.final_result.rows - rungs[-1] if trial.final_result else 0
    full_rows = full_run_rows(history, tune)
    budget = None if full_rows is None else round(tune.budget_full_runs * full_rows)
    return SearchUsage(
        first_rows,
        later_rows,
        final_rows,
        full_rows,
        tune.budget_rows or budget,
        None if full_rows is None or history.stop_reason is None else full_rows * len(history.original_trials),
        sum(trial.seconds for trial in history.trials),
    )


def full_run_rows(history: History, tune: TuneConfig) -> int | None:
    """Return the rows of a full run: of a finished run, or derived from the first rung."""
    if final_rows := [trial.final_result.rows for trial in history.trials if trial.final_result]:
        return max(final_rows)
    rungs = [result.rows for trial in history.trials for result in trial.rung_results if result.rung == 0]
    return round(min(rungs) / tune.min_resource_fraction) if rungs else None


# -------------------------------------------------------------------------------------------------------------- verdict


def describe_search(search: Run) -> str:
    """Return the verdict of a search in one sentence, or its progress."""
    history = replay_journal(read_journal(search.trials))
    target = configuration.load_config(str(search.config)).deploy.tune.target
    return describe_history(history, target)


def describe_history(history: History, target: float | None = None) -> str:
    """Return the verdict or progress of a history. `target`: the score of the objective `time_to_target`."""
    if history.winner is not None:
        return describe_verdict(SearchVerdict(**history.verdict), target)
    trials = history.original_trials
    if trials and not any(trial.is_valid for trial in trials):
        return f"no trial of the search has a score; {finals.describe_failures(history)}"
    leader = leading_trial(history)
    lead_clause = "" if leader is None else f", trial {leader.number} leads so far"
    return f"the search has not ended: {len(trials)} trial{'' if len(trials) == 1 else 's'}{lead_clause}"


def describe_verdict(result: SearchVerdict, target: float | None = None) -> str:
    winner = f"trial {result.winner}"
    if result.kind == "unopposed":
        return f"{winner} has won; {DEFAULT_SETTINGS} (trial 0) have no score to compare with"
    default = f"(trial 0, {DEFAULT_SETTINGS})"
    if result.compared_trial is None:
        return f"no other trial has a score: the default stands {default}"
    evidence, scores = _format_evidence(result), _format_scores(result, target)
    cost_clause = (
        f", the {COST_SUPERLATIVES[result.cost_kind]} of the equally good trials" if result.won_by_cost else ""
    )
    if result.kind == "default":
        return f"the default {'stands' if cost_clause else 'is at the top'} {default}{cost_clause}: {scores}{evidence}"
    if cost_clause:
        winner += f"{cost_clause},"
    if result.kind == "better":
        return f"{winner} is better than {DEFAULT_SETTINGS}: {scores}{evidence}"
    return (
        f"{winner} has the higher mean; that its settings are better than {DEFAULT_SETTINGS} with any seed is not "
        f"shown{evidence}: {scores}"
    )


def _format_scores(result: SearchVerdict, target: float | None) -> str:
    """Format both scores with the difference and its interval, or which trials reached a score."""
    is_time = result.score_name == finals.SECONDS_SCORE and target is not None
    goal = f"the target {target:g}" if is_time else "a finite score"
    reached_seeds = {result.compared_trial: result.candidate_reached_seeds or 0, 0: result.baseline_reached_seeds or 0}
    if any(0 < count < result.seeds for count in reached_seeds.values()):
        parts = (f"by trial {number} with {count} of {result.seeds} seeds" for number, count in reached_seeds.items())
        return f"{goal} was reached {' and '.join(parts)}"
    if result.baseline_score is None or result.candidate_score is None:
        scores = {0: result.baseline_score, result.compared_trial: result.candidate_score}
        trials_at_goal = [f"trial {trial} alone" for trial, score in scores.items() if score is not None]
        return f"{goal} was reached by {trials_at_goal[0] if trials_at_goal else 'neither'}"
    assert result.score_name is not None  # two scores are of one name
    assert result.difference is not None
    low, high = (result.difference if bound is None else bound for bound in (result.ci_low, result.ci_high))
    difference = Difference(
        *(
            result.score_name,
            result.baseline_score,
            result.candidate_score,
            result.difference,
            low,
            high,
            0.0,
            result.rows,
        )
    )
    name, baseline, candidate, change, _ = significance.format_cells(difference)
    if is_time:
        name = f"seconds to {target:g}"
    if result.kind == "default":
        rank = "the best" if result.won_by_cost else "the next best"
        return f"{name} {baseline} against {candidate} of trial {result.compared_trial}, {rank}"
    return f"{name} {candidate} against {baseline}, {change}"


def _format_evidence(result: SearchVerdict) -> str:
    seed_count = f"{result.seeds} seed{'' if result.seeds == 1 else 's'}"
    if result.score_name == finals.SECONDS_SCORE:
        return f", with {seed_count}"
    row_kind = "validation rows, which also steered the search" if result.used_steering_rows else "holdout rows"
    fold_clause = ", each on its own validation fold" if result.folds > 1 and result.seeds > 1 else ""
    return f", on {result.rows:,} {row_kind}, with {seed_count}{fold_clause}"
