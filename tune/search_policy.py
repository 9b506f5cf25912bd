"""What a search asks for next, by its configuration and its history alone. No Ray, and no state: a search that was
killed knows, once it has read its journal, just what it knew.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rtrain.config import Config
from tune import sampler, space
from tune.history import History, Trial
from tune.objective import Aim, at, spread_at_first_rung
from tune.points import Dimension, equal
from tune.successive_halving import Ladder, sizes

PRIOR = "prior"
"""What asks for the trial whose updates are those that trial 0 asks for."""


@dataclass(frozen=True)
class Asker:
    """A search as far as its questions go."""

    config: Config
    planned: int
    """How many trials the budget pays for."""

    @classmethod
    def of(cls, config: Config, ladder: Ladder) -> "Asker":
        tune = config.deploy.tune
        budget = tune.rows or round(tune.full_runs * ladder.full)
        most = tune.trials or ladder.affordable(budget)
        # A trial is repeated at each look.
        looks = len(cls(config, min(most, ladder.affordable(budget))).looks)
        return cls(config, min(most, ladder.affordable(budget - looks * ladder.rungs[0])))

    @property
    def looks(self) -> tuple[int, ...]:
        """The numbers of trials at which it is asked whether another one is worth its cost. After fewer, what is
        expected is a guess; after others, what was spent on trials would be lost on further rungs (`halving.sizes`)."""
        tune = self.config.deploy.tune
        if tune.objective != "score" or tune.sampler in ("random", "grid"):
            return ()
        return tuple(one for one in sizes(self.planned) if one >= sampler.GAIN_VALUES)

    def is_look(self, history: History) -> bool:
        """Not before all points of the user's own were tried: what is expected of others says nothing of them."""
        own = history.own
        return len(own) > len(self.config.deploy.tune.points) and sum(trial.sound for trial in own) in self.looks

    def repeat(self, history: History) -> Trial | None:
        """The trial that is to be trained to the first rung with another seed too, before its score is compared with
        what another trial is expected to come to: the best so far, since the gain is over it, and what barely learns
        hardly differs from seed to seed. None where it was repeated already.

        A seed more costs one first rung, and hardly that: it is the next seed of the search's end, which takes it up
        where it was left, if the trial comes so far.
        """
        best = Aim.of(self.config.deploy.tune).ranked([trial for trial in history.own if trial.sound], 0)[0]
        return None if any(trial.of == best.number for trial in history.trials) else best

    def enough(self, history: History) -> str | None:
        """Why another trial is not worth its cost: it is expected to gain less at the first rung than chance makes
        trials differ there. None where it is, and where either is not known."""
        chance = spread_at_first_rung(history)
        gain = None if chance is None else self.gain(history)
        if chance is None or gain is None or gain >= chance:
            return None
        return f"another trial is expected to gain {gain:.2g}, and chance alone makes {chance:.2g}"

    @cached_property
    def _space(self) -> tuple[Dimension, ...]:
        return space.dimensions(self.config)

    def dimensions(self, history: History) -> tuple[Dimension, ...]:
        """The space, without updates of many more rows than the noise of trial 0's gradients asks for, or that take
        longer than they gain."""
        return self._space if history.noise is None else space.under(self.config, self._space, history.noise)

    def told(self, history: History) -> list[sampler.Told]:
        """What the sampler is told: where each trial stands in the space, and what it came to at the first rung, where
        all have been trained on as many rows."""
        found, dimensions, aim = [], self.dimensions(history), Aim.of(self.config.deploy.tune)
        for trial in history.own:
            point, first = space.coordinates(self.config, dimensions, trial.settings), at(trial, 0)
            value = aim.value(trial, first) if first is not None and trial.sound else None
            found.append(sampler.Told(point, value, pending=first is None and trial.sound))
        return found

    def proposal(self, history: History) -> tuple[dict[str, Any], str] | None:
        """(settings of the next trial, what proposes them); None where every point of the space was tried."""
        number, tune = len(history.own), self.config.deploy.tune
        if 0 < number <= len(tune.points):
            return space.overrides(self.config, tune.points[number - 1]), "points"
        found = sampler.propose(
            self.dimensions(history),
            self.told(history),
            number=number,
            seed=self.config.recipe.train.seed,
            sampler=tune.sampler,
            planned=self.planned,
        )
        if found is None:
            return None
        point, by = found
        likely = self._likely(history, point) if by == "spread" else None
        return space.overrides(self.config, likely or point), PRIOR if likely else by

    def _likely(self, history: History, point: Mapping[str, Any]) -> dict[str, Any] | None:
        """The first point that is spread over the space, with the updates by which training ends soonest (what trial 0
        tells of them: `choose_k.prior`). None where these are not known, not searched, or were tried with that point's
        other settings."""
        if history.rows is None or any(trial.by == PRIOR for trial in history.own):
            return None
        likely = space.with_rows(self.config, self.dimensions(history), point, history.rows)
        tried = (one.point for one in self.told(history) if one.point)
        return None if likely is None or any(equal(one, likely) for one in tried) else likely

    def gain(self, history: History) -> float | None:
        """By how much one more trial is expected to be above the best one at the first rung; None where that is not
        known."""
        return sampler.expected_gain(self.dimensions(history), self.told(history), self.config.recipe.train.seed)
