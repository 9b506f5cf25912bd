"""The verdict of a search in one sentence: the winner against the recipe's own settings."""

from rtrain import config as configuration
from rtrain.core.run_folder import Run
from rtrain.evaluation import compare_summary
from rtrain.evaluation.significance import Difference
from tune import finals
from tune.finals import SearchVerdict
from tune.history import History, read_journal, replay_journal
from tune.report import stats

DEFAULT_SETTINGS = "the recipe's own settings"
COST_SUPERLATIVES = {"training": "fastest", "latency": "one of the least latency", "bytes": "smallest"}
"""Description of a winner selected by cost, by `tune.cost`."""


def describe_search(search: Run) -> str:
    """Return the verdict of a search in one sentence, or its progress."""
    history = replay_journal(read_journal(search.trials))
    target = configuration.load_config(str(search.config)).deploy.tune.target
    return describe_history(history, target)


def describe_history(history: History, target: float | None = None) -> str:
    """Return the verdict or progress of a history. `target`: the score of the objective `time_to_target`."""
    if history.winner is not None:
        return describe_verdict(SearchVerdict(**history.verdict), target)
    if history.original_trials and not any(trial.is_valid for trial in history.original_trials):
        return f"no trial of the search has a score; {finals.describe_failures(history)}"
    trial_count = f"{len(history.original_trials)} trial{'' if len(history.original_trials) == 1 else 's'}"
    leading_trial = stats.leading_trial(history)
    return f"the search has not ended: {trial_count}" + (
        "" if leading_trial is None else f", trial {leading_trial.number} leads so far"
    )


def describe_verdict(search_verdict: SearchVerdict, target: float | None = None) -> str:
    """Return the sentence of a verdict."""
    if search_verdict.kind == "unopposed":
        return f"trial {search_verdict.winner} has won; {DEFAULT_SETTINGS} (trial 0) have no score to compare with"
    if search_verdict.compared_trial is None:
        return f"no other trial has a score: the default stands (trial 0, {DEFAULT_SETTINGS})"
    evidence = _format_evidence(search_verdict)
    cost_clause = (
        f", the {COST_SUPERLATIVES[search_verdict.cost_kind]} of the equally good trials,"
        if search_verdict.won_by_cost
        else ""
    )
    if search_verdict.kind == "default" and search_verdict.won_by_cost:
        return (
            f"the default stands (trial 0, {DEFAULT_SETTINGS}){cost_clause.removesuffix(',')}: "
            f"{_format_scores(search_verdict, target, default_first=True)}{evidence}"
        )
    if search_verdict.kind == "default":
        return (
            f"the default is at the top (trial 0, {DEFAULT_SETTINGS}): "
            f"{_format_scores(search_verdict, target, default_first=True)}{evidence}"
        )
    if search_verdict.kind == "better":
        return (
            f"trial {search_verdict.winner}{cost_clause} is better than {DEFAULT_SETTINGS}: "
            f"{_format_scores(search_verdict, target)}{evidence}"
        )
    return (
        f"trial {search_verdict.winner}{cost_clause} has the higher mean; that its settings are better than "
        f"{DEFAULT_SETTINGS} "
        f"with any seed is not shown{evidence}: "
        f"{_format_scores(search_verdict, target)}"
    )


def _format_scores(search_verdict: SearchVerdict, target: float | None, default_first: bool = False) -> str:
    """Format both scores with the difference and its interval, or which trials reached a score."""
    is_time = search_verdict.score_name == finals.SECONDS_SCORE
    goal = f"the target {target:g}" if is_time and target is not None else "a finite score"
    reached_seeds = {
        search_verdict.compared_trial: search_verdict.candidate_reached_seeds or 0,
        0: search_verdict.baseline_reached_seeds or 0,
    }
    if any(0 < count < search_verdict.seeds for count in reached_seeds.values()):
        reached_parts = (
            f"by trial {number} with {count} of {search_verdict.seeds} seeds" for number, count in reached_seeds.items()
        )
        return f"{goal} was reached {' and '.join(reached_parts)}"
    if search_verdict.baseline_score is None or search_verdict.candidate_score is None:
        trials_with_score = [
            str(trial)
            for trial, score in (
                (0, search_verdict.baseline_score),
                (search_verdict.compared_trial, search_verdict.candidate_score),
            )
            if score is not None
        ]
        return f"{goal} was reached by {f'trial {trials_with_score[0]} alone' if trials_with_score else 'neither'}"
    low, high = (
        search_verdict.difference if bound is None else bound
        for bound in (search_verdict.ci_low, search_verdict.ci_high)
    )
    assert search_verdict.score_name is not None  # two scores are of one name
    assert search_verdict.difference is not None
    assert low is not None
    assert high is not None
    difference = Difference(
        search_verdict.score_name,
        search_verdict.baseline_score,
        search_verdict.candidate_score,
        search_verdict.difference,
        low,
        high,
        0.0,
        search_verdict.rows,
    )
    name = f"seconds to {target:g}" if is_time and target is not None else compare_summary.format_score_name(difference)
    candidate_text, baseline_text = (
        compare_summary.format_score(difference, search_verdict.candidate_score),
        compare_summary.format_score(difference, search_verdict.baseline_score),
    )
    if default_first:
        rank_text = "the best" if search_verdict.won_by_cost else "the next best"
        return f"{name} {baseline_text} against {candidate_text} of trial {search_verdict.compared_trial}, {rank_text}"
    return f"{name} {candidate_text} against {baseline_text}, {compare_summary.format_change(difference)}"


def _format_evidence(search_verdict: SearchVerdict) -> str:
    """Format the rows and seeds of the decision."""
    seed_count = f"{search_verdict.seeds} seed{'' if search_verdict.seeds == 1 else 's'}"
    if search_verdict.score_name == finals.SECONDS_SCORE:
        return f", with {seed_count}"
    row_kind = "validation rows, which also steered the search" if search_verdict.used_steering_rows else "holdout rows"
    fold_clause = ", each on its own validation fold" if search_verdict.folds > 1 and search_verdict.seeds > 1 else ""
    return f", on {search_verdict.rows:,} {row_kind}, with {seed_count}{fold_clause}"
