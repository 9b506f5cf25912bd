"""What a terminal shows of a search: its events as lines, how far it is, and the table of its trials. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from rtrain.config import Tune
from rtrain.report.drawing.svg import duration, score_name
from tune.history import SEED, History, Reached, Trial, numbered
from tune.report import stats, verdict

PROPOSERS = {
    "points": "from tune.points",
    "spread": "spread over the space",
    "prior": "with the updates that trial 0 asks for",
    "gp": "by the Gaussian process",
    "tpe": "by the Parzen estimators",
    "random": "drawn at random",
    "grid": "the grid's next point",
}
LONGEST = 160
"""Characters of an error in a line."""


def text(history: History, headline: str, tune: Tune, most: int = 40) -> str:
    """The trials beside each other, at most so many of them, and what the words mean.

    `headline` is the task's main score; the negative of an error is shown as the error.
    """
    if not history.trials:
        return "no trial has begun"
    shown = _shown(history, most)
    rows = cells(history, shown, headline, tune)
    rungs = len(rows[0]) - 7
    right = {0, *range(3, 5 + rungs)}
    wide = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(size) if column in right else cell.ljust(size)
            for column, (cell, size) in enumerate(zip(row, wide, strict=True))
        ).rstrip()
        for row in rows
    ]
    if len(shown) < len(history.own):
        lines.append(f"and {len(history.own) - len(shown)} more trials; the page of the search has them all")
    lines.append(_legend(headline, _short(history, tune), history))
    if failed := [trial for trial in history.trials if not trial.sound]:
        lines.append(f"{len(failed)} of {len(history.trials)} trials failed or diverged:")
        lines += [f"trial {trial.number}: {_cut(trial.error or trial.diverged or '')}" for trial in failed]
    return "\n".join(lines)


def _short(history: History, tune: Tune) -> dict[str, str]:
    return stats.short_names(stats.searched(history, tune))


def _shown(history: History, most: int) -> list[Trial]:
    """All trials; of more than `most`, trial 0 and those that came furthest with the best scores, by number."""

    def standing(trial: Trial) -> tuple[float, ...]:
        last = trial.reached[-1] if trial.reached else None
        first = (trial.number not in (0, history.chosen), trial.finished is None)
        return (*first, -last.rung if last else 1, -last.score if last else 0.0)

    kept = sorted(history.own, key=standing)[:most]
    return sorted(kept, key=lambda trial: trial.number)


def cells(history: History, trials: Sequence[Trial], headline: str, tune: Tune) -> list[tuple[str, ...]]:
    """The head of the table, and a row for each of these trials."""
    short, rungs = (
        _short(history, tune),
        1 + max((one.rung for trial in history.own for one in trial.reached), default=-1),
    )

    def row(trial: Trial) -> tuple[str, ...]:
        reached = {one.rung: one.score for one in trial.reached}
        held = stats.held(history, trial.number)
        return (
            str(trial.number),
            stats.named(trial, short),
            trial.by,
            *(score(headline, reached[rung]) if rung in reached else "-" for rung in range(rungs)),
            score(headline, held.score) if held else "-",
            str(held.seeds) if held else "-",
            trial.status,
            "<- best" if trial.number == history.chosen else "",
        )

    head = ("trial", "sets", "by", *(f"rung {rung + 1}" for rung in range(rungs)), "held", "seeds", "status", "")
    return [head, *map(row, trials)]


def _legend(headline: str, short: Mapping[str, str], history: History) -> str:
    parts = [f"rung: {score_of(headline)} on the steering rows", "held: on the held-back rows, the mean over seeds"]
    if any(trial.status == "frozen" for trial in history.own):
        parts.append("frozen: stopped at a rung, and can go on from there")
    parts += [f"{told}: {name}" for name, told in short.items() if told != name]
    return "; ".join(parts)


def score_of(headline: str) -> str:
    return score_name(headline.removeprefix("neg_"))


def score(headline: str, value: float) -> str:
    return f"{-value if headline.startswith('neg_') else value:.4f}"


def _cut(error: str) -> str:
    line = " ".join(error.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


# ---------------------------------------------------------------------------------------------------- while it runs


def said(event: Mapping[str, Any], history: History, headline: str, tune: Tune) -> str:
    """The line of an event {what, trial, the journal's fields}, by the history with it; empty where there is none."""
    number, name = event.get("trial", -1), score_of(headline)
    match event["what"]:
        case "asked":
            return f"trial {number}: {_asked(numbered(history.trials, number), _short(history, tune))}"
        case "reached":
            return f"trial {number}: {_came(event, history, headline)}"
        case "failed":
            return f"trial {number}: failed: {_cut(event['error'])}"
        case "diverged":
            return f"trial {number}: diverged: {_cut(event['why'])}"
        case "finished":
            held = f"{name} {score(headline, event['held'])} on {event['held_rows']:,} held-back rows"
            return f"trial {number}: trained to its end ({event['rows']:,} rows): {held}"
        case "noise":
            return (
                f"no updates of much more than {event['rows']:,} rows are tried: their gradients' noise is less by then"
            )
        case "stopped":
            return f"no further trial is asked for: {event['why']}"
        case "reopened":
            return "further trials are asked for: the budget is another one now"
        case "chosen":
            return f"chosen: trial {event['best']}; {verdict.told(history, tune.target)}"
    return ""


def _asked(trial: Trial, short: Mapping[str, str]) -> str:
    if trial.by == SEED:
        return f"trial {trial.of} once more, with seed {trial.seed}"
    sets = stats.named(trial, short)
    return f"{sets}, {PROPOSERS[trial.by]}" if trial.by in PROPOSERS else sets


def _came(event: Mapping[str, Any], history: History, headline: str) -> str:
    rung, trial = event["rung"], numbered(history.trials, event["trial"])
    others = [one.score for trial in history.own for one in trial.reached if one.rung == rung]
    rank = 1 + sum(score > event["score"] for score in others)
    among = f"place {rank} of {len(others)} so far" if len(others) > 1 else "the first to come there"
    if trial.of is not None:
        among = f"with another seed than trial {trial.of}"
    came = f"{score_of(headline)} {score(headline, event['score'])}"
    return f"{came} at rung {rung + 1} ({event['rows']:,} rows, {duration(event['seconds'])}), {among}"


def standing(history: History, headline: str, tune: Tune) -> str:
    """How far a search is, in a line: the phase, the best so far, and the rows of its budget."""
    parts, spent = [_phase(history, tune)], stats.spent(history, tune)
    leading = stats.leader(history)
    if leading is not None:
        ended = stats.held(history, leading.number)
        value = ended.score if ended else leading.reached[-1].score
        where = "held back" if ended else f"rung {leading.reached[-1].rung + 1}"
        parts.append(f"best {score_of(headline)} {score(headline, value)} ({where}, trial {leading.number})")
    if spent.budget:
        parts.append(f"{100 * spent.searched / spent.budget:.0f} % of the rows")
    return "  ".join(parts)


def _phase(history: History, tune: Tune) -> str:
    own = history.own
    if history.chosen is not None:
        return "ended"
    if ended := sum(trial.finished is not None for trial in own):
        # One that is at a rung was trained there while trials were asked for.
        repeats = [trial for trial in history.trials if trial.of is not None and trial.status != "frozen"]
        if not repeats:
            return f"the end: {ended} trained to their ends"
        newest = repeats[-1]
        return f"the end: seed {sum(one.of == newest.of for one in repeats)} of trial {newest.of}"
    waiting = sum(trial.status == "asked" for trial in own)
    deepest = max((one.rung for trial in own for one in trial.reached), default=0)
    there = sum(_has(trial.reached, deepest) for trial in own)
    further = f"rung {deepest + 1}: {there} there" if deepest else ""
    if history.stopped is not None and not waiting:
        return further or f"first rung: all {len(own)} there"
    of = f" of {tune.trials}" if tune.trials else ""
    first = f"first rung: {len(own) - waiting}{of}"
    return f"{first}, {further}" if further else first


def _has(reached: Sequence[Reached], rung: int) -> bool:
    return any(one.rung == rung for one in reached)


class Follower:
    """A search as its user follows it: the history, one event after the other, and what is said of each. The history
    of a resumed search is where it begins."""

    def __init__(self, headline: str, tune: Tune, history: History | None = None):
        self._headline, self._tune = headline, tune
        self._history = history or History()

    def said(self, event: Mapping[str, Any]) -> str:
        fields = {name: value for name, value in event.items() if name not in ("kind", "what", "time")}
        self._history = self._history.after({"kind": event["what"], **fields})
        return said(event, self._history, self._headline, self._tune)

    @property
    def standing(self) -> str:
        return standing(self._history, self._headline, self._tune)
