"""Whether a search has found anything, in one sentence: the winner beside the recipe's own settings."""

from rtrain import config as configuration
from rtrain.core.run_folder import Run
from rtrain.evaluation import compare_summary
from rtrain.evaluation.significance import Difference
from tune import finals
from tune.finals import Verdict
from tune.history import History, read_journal, replay
from tune.report import stats

OWN = "the recipe's own settings"
CHEAPEST = {"training": "fastest", "latency": "one of the least latency", "bytes": "smallest"}
"""A trial that was taken for its cost, by `tune.cost`."""


def of(search: Run) -> str:
    """The verdict on a search in one sentence; of one that has not chosen, how far it has come."""
    history = replay(read_journal(search.trials))
    target = configuration.load(str(search.config)).deploy.tune.target
    return told(history, target)


def told(history: History, target: float | None = None) -> str:
    """The same of its history; `target` is the score to be reached, where the least time is searched for."""
    if history.chosen is not None:
        return ended(Verdict(**history.verdict), target)
    if history.own and not any(trial.sound for trial in history.own):
        return f"no trial of the search came to a score; {finals.failures(history)}"
    begun = f"{len(history.own)} trial{'' if len(history.own) == 1 else 's'} begun"
    leader = stats.leader(history)
    return f"the search has not ended: {begun}" + ("" if leader is None else f", trial {leader.number} leads so far")


def ended(one: Verdict, target: float | None = None) -> str:
    """The sentence of a search that has ended."""
    if one.kind == "alone":
        return f"trial {one.best} has won; {OWN} (trial 0) came to no score to compare with"
    if one.against is None:
        return f"no other trial came to a score: the default stands (trial 0, {OWN})"
    where = _rows(one)
    faster = f", the {CHEAPEST[one.cost]} of those that are as good," if one.faster else ""
    if one.kind == "default" and one.faster:
        return (
            f"the default stands (trial 0, {OWN}){faster.removesuffix(',')}: {_figures(one, target, first=True)}{where}"
        )
    if one.kind == "default":
        return f"the default is at the top (trial 0, {OWN}): {_figures(one, target, first=True)}{where}"
    if one.kind == "better":
        return f"trial {one.best}{faster} is better than {OWN}: {_figures(one, target)}{where}"
    return (
        f"trial {one.best}{faster} is taken; that its settings are better than {OWN}, whatever the seed, is not "
        f"shown{where}: "
        f"{_figures(one, target)}"
    )


def _figures(one: Verdict, target: float | None, first: bool = False) -> str:
    """Both scores, that of trial 0 last with the difference and its interval, or first; or who has come to any."""
    seconds = one.name == finals.SECONDS
    what = f"the target {target:g}" if seconds and target is not None else "a finite score"
    times = {one.against: one.other_reached or 0, 0: one.first_reached or 0}
    if any(0 < count < one.seeds for count in times.values()):
        by = (f"by trial {number} with {count} of {one.seeds} seeds" for number, count in times.items())
        return f"{what} was reached {' and '.join(by)}"
    if one.first is None or one.other is None:
        reached = [str(trial) for trial, score in ((0, one.first), (one.against, one.other)) if score is not None]
        return f"{what} was reached by {f'trial {reached[0]} alone' if reached else 'neither'}"
    low, high = (one.difference if end is None else end for end in (one.low, one.high))
    assert one.name is not None  # two scores are of one name
    assert one.difference is not None
    assert low is not None
    assert high is not None
    shown = Difference(one.name, one.first, one.other, one.difference, low, high, 0.0, one.rows)
    name = f"seconds to {target:g}" if seconds and target is not None else compare_summary.named(shown)
    other, own = compare_summary.score(shown, one.other), compare_summary.score(shown, one.first)
    if first:
        place = "the best" if one.faster else "the next best"
        return f"{name} {own} against {other} of trial {one.against}, {place}"
    return f"{name} {other} against {own}, {compare_summary.change(shown)}"


def _rows(one: Verdict) -> str:
    """By what it was decided."""
    seeds = f"{one.seeds} seed{'' if one.seeds == 1 else 's'}"
    if one.name == finals.SECONDS:
        return f", with {seeds}"
    kind = "validation rows, which have steered the search too" if one.steered else "held-back validation rows"
    own = ", each judged on rows of its own" if one.parts > 1 and one.seeds > 1 else ""
    return f", on {one.rows:,} {kind}, with {seeds}{own}"
