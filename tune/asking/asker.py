"""What a search asks for next, by its configuration and its history alone. No Ray, and no state: a search that was
killed knows, once it has read its journal, just what it knew.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rtrain.config import Config
from rtrain.exchange import noise
from tune.asking import ask_tell, space
from tune.asking.points import Dimension
from tune.known.aim import Aim, at
from tune.known.history import History


@dataclass(frozen=True)
class Asker:
    """A search as far as its questions go."""

    config: Config
    planned: int
    """How many trials the budget pays for."""

    @cached_property
    def _space(self) -> tuple[Dimension, ...]:
        return space.dimensions(self.config)

    def dimensions(self, history: History) -> tuple[Dimension, ...]:
        """The space, without updates of many more rows than the noise of trial 0's gradients asks for."""
        return self._space if history.noise is None else space.under(self.config, self._space, history.noise)

    def told(self, history: History) -> list[ask_tell.Told]:
        """What the sampler is told: where each trial stands in the space, and what it came to at the first rung, where
        all have been trained on as many rows."""
        found, dimensions, aim = [], self.dimensions(history), Aim.of(self.config.deploy.tune)
        for trial in history.own:
            point, first = space.coordinates(self.config, dimensions, trial.settings), at(trial, 0)
            value = aim.value(trial, first) if first is not None and trial.sound else None
            found.append(ask_tell.Told(point, value, pending=first is None and trial.sound))
        return found

    def proposal(self, history: History) -> tuple[dict[str, Any], str] | None:
        """(settings of the next trial, what proposes them); None where every point of the space was tried."""
        number, tune = len(history.own), self.config.deploy.tune
        if 0 < number <= len(tune.points):
            return space.overrides(self.config, tune.points[number - 1]), "points"
        found = ask_tell.propose(
            self.dimensions(history),
            self.told(history),
            number=number,
            seed=self.config.recipe.train.seed,
            sampler=tune.sampler,
            planned=self.planned,
        )
        return None if found is None else (space.overrides(self.config, found[0]), found[1])

    def gain(self, history: History) -> float | None:
        """By how much one more trial is expected to be above the best one at the first rung; None where that is not
        known, or not what is searched for."""
        tune = self.config.deploy.tune
        if tune.objective != "score" or tune.sampler in ("random", "grid"):
            return None
        return ask_tell.expected_gain(self.dimensions(history), self.told(history), self.config.recipe.train.seed)


def noise_rows(log: Iterable[Mapping[str, Any]]) -> int | None:
    """The noise scale of a trial's gradients, in rows, at the upper end of its interval; None where its log does not
    tell."""
    scale = noise.of_run(log)
    return None if scale is None or scale.high is None else math.ceil(scale.high)
