"""Whether a search has found anything: its trials from its folder, and the winner beside the recipe's own settings."""

import json

from rtrain import config as configuration
from rtrain.comparison import answers, chance, measure, sides, verdict
from rtrain.comparison.chance import Difference
from rtrain.errors import UserError
from rtrain.report.drawing.svg import score_name
from rtrain.run import Run
from tune import search as searching, space
from tune.search import Trial
from tune.trial import headline_of

OWN = "the recipe's own settings"


def trials(search: Run) -> list[Trial]:
    """The trials of a search, also of one that has not ended: then those that have begun."""
    if search.trials.is_file():
        listed = map(json.loads, search.trials.read_text(encoding="utf-8").splitlines())
        # By number: the folder may have been moved since.
        return [Trial(**{**one, "run": str(search.trial(one["number"]).folder)}) for one in listed]
    config = configuration.load(str(search.config))
    return [
        searching.summarise(config, search.trial(number).folder, number, override, None)
        for number, override in enumerate(space.trials(config))
        if search.trial(number).exists
    ]


def of(search: Run) -> str:
    """The verdict on a search in one sentence. Of one that has not chosen, how far it has come."""
    found = trials(search)
    name = headline_of(configuration.load(str(search.config)))
    try:
        best = searching.best(found)
    except UserError as error:
        return str(error)
    if not search.trials.is_file():
        begun = f"{len(found)} trial{'' if len(found) == 1 else 's'} begun"
        return f"the search has not ended: {begun}, of which trial {best.number} leads so far"
    default = next((trial for trial in found if trial.number == 0 and trial.score is not None), None)
    if best.number == 0:
        return _default_won(search, found, name)
    if default is None:
        return f"trial {best.number} has won; {OWN} (trial 0) came to no score to compare with"
    return _beside(search, default, best, name)


def _default_won(search: Run, found: list[Trial], name: str) -> str:
    default = next(trial for trial in found if trial.number == 0)
    others = [trial for trial in found if trial.number and trial.score is not None and not trial.error]
    on = f"{rows_of(search.trial(0)):,} validation rows"
    if not others:
        return f"no other trial came to a score: the default stands (trial 0, {OWN})"
    ties = [trial for trial in others if trial.score == default.score]
    shown = _shown(name, default)
    if ties:
        numbers = " and ".join(str(trial.number) for trial in [default, *ties])
        return f"a tie on {on}: trials {numbers} have {shown}; the default stands (trial 0, {OWN})"
    second = max(others, key=lambda trial: trial.score or 0.0)
    against = _score(name, second)
    return f"the default stands (trial 0, {OWN}): {shown} on {on}, {against} of trial {second.number}, the next best"


def _beside(search: Run, default: Trial, best: Trial, name: str) -> str:
    """By the rows' answers where both trials were trained to their end, and so have left them; else by the scores at
    the search's budget."""
    own, winner = search.trial(0), search.trial(best.number)
    if own.predictions("valid").is_file() and winner.predictions("valid").is_file():
        both = sides.find([own.folder, winner.folder])
        paired = answers.paired(both, ("valid",))
        if not isinstance(paired, str):
            return _told(best, measure.headline(both, paired), "both trained to their end")
    rows = rows_of(winner)
    assert default.score is not None  # `of`
    assert best.score is not None  # `searching.best`
    if not rows or not all(0 <= score <= 1 for score in (default.score, best.score)):
        scores = f"{_shown(name, best)} against {_score(name, default)} on {rows:,} validation rows"
        return f"trial {best.number} leads {OWN}: {scores}; scores alone do not tell how sure that is"
    one = chance.unpaired(name, default.score, best.score, rows)
    return _told(best, one, "at the search's budget")


def _told(best: Trial, one: Difference, when: str) -> str:
    on, figures = f"{one.rows:,} validation rows", verdict.figures(one)
    if one.verdict > 0:
        return f"trial {best.number} is better than {OWN}: {figures}, on {on} ({when})"
    if one.verdict < 0:
        return f"trial {best.number} won the search, and is worse than {OWN}: {figures}, on {on} ({when})"
    return f"a tie on {on}: the default stands; trial {best.number} beside {OWN}: {figures} ({when})"


def _shown(name: str, trial: Trial) -> str:
    return f"{score_name(name.removeprefix('neg_'))} {_score(name, trial)}"


def _score(name: str, trial: Trial) -> str:
    assert trial.score is not None  # those without are left out
    return f"{-trial.score if verdict.is_error(name) else trial.score:.4f}"


def rows_of(trial: Run) -> int:
    """Validation rows on which a trial was scored."""
    scored = [event for event in trial.events("evaluated") if event["split"] == "valid"]
    return int(scored[-1]["scores"].get("rows", 0)) if scored else 0
