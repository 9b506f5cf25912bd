"""Decides the next trial of a search from its configuration and history. No Ray, and no state: a resumed search decides
the same from its journal.

"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rtrain.config import Config
from tune import sampler, space
from tune.history import History, Trial
from tune.objective import Objective, first_rung_seed_std, rung_result
from tune.points import Dimension, same_point
from tune.successive_halving import RungSchedule, exact_trial_counts

BATCH_SIZE_PRIOR = "prior"
"""Proposer of the trial with the fastest batch size of trial 0."""


@dataclass(frozen=True)
class SearchPolicy:
    """Decides the next trial from config and history."""

    config: Config
    planned_trials: int
    """Number of trials within the budget."""

    @classmethod
    def from_config(cls, config: Config, schedule: RungSchedule) -> "SearchPolicy":
        tune = config.deploy.tune
        budget = tune.budget_rows or round(tune.budget_full_runs * schedule.full_rows)
        max_trials = tune.trials or schedule.max_trials(budget)
        # A trial is repeated at each check point.
        num_check_points = len(cls(config, min(max_trials, schedule.max_trials(budget))).check_points)
        return cls(config, min(max_trials, schedule.max_trials(budget - num_check_points * schedule.rungs[0])))

    @property
    def check_points(self) -> tuple[int, ...]:
        """Numbers of trials at which the search checks whether another trial is worth its cost. Fewer trials give no
        estimate; other numbers need a further rung (`successive_halving.exact_trial_counts`)."""
        tune = self.config.deploy.tune
        if tune.objective != "score" or tune.sampler in ("random", "grid"):
            return ()
        return tuple(count for count in exact_trial_counts(self.planned_trials) if count >= sampler.MIN_GAIN_VALUES)

    def is_check_point(self, history: History) -> bool:
        """Return whether to check now. All points of the user must be tried before: the expected gain does not apply to
        them."""
        trials = history.original_trials
        return (
            len(trials) > len(self.config.deploy.tune.points_to_evaluate)
            and sum(trial.is_valid for trial in trials) in self.check_points
        )

    def noise_probe(self, history: History) -> Trial | None:
        """Return the trial to repeat at the first rung with another seed, before the expected gain is compared with the
        seed noise; None if it was repeated already.

        It is the best trial: the gain is relative to it, and trials that barely learn have little seed noise.


        A seed more costs one first rung, and hardly that: it is the next seed of the search's end, which takes it up
        where it was left, if the trial comes so far.
        """
        best_trial = Objective.from_settings(self.config.deploy.tune).rank(
            [trial for trial in history.original_trials if trial.is_valid], 0
        )[0]
        return None if any(trial.repeat_of == best_trial.number for trial in history.trials) else best_trial

    def stop_reason(self, history: History) -> str | None:
        """Return why another trial is not worth its cost: its expected gain at the first rung is below the seed noise.
        None if it is worth it, or if either is unknown."""
        seed_std = first_rung_seed_std(history)
        gain = None if seed_std is None else self.expected_gain(history)
        if seed_std is None or gain is None or gain >= seed_std:
            return None
        return f"the expected gain of another trial is {gain:.2g}, below the noise of seeds, {seed_std:.2g}"

    @cached_property
    def _space(self) -> tuple[Dimension, ...]:
        return space.build_dimensions(self.config)

    def dimensions(self, history: History) -> tuple[Dimension, ...]:
        """Return the space without batch sizes far above the noise scale of trial 0's gradients, or that take longer
        than they gain."""
        return (
            self._space
            if history.max_useful_batch_size is None
            else space.prune_by_noise(self.config, self._space, history.max_useful_batch_size)
        )

    def observations(self, history: History) -> list[sampler.Observation]:
        """Return the sampler's observations: each trial's point, and its value at the first rung, where all trials have
        equally many rows."""
        collected, dimensions, objective = (
            [],
            self.dimensions(history),
            Objective.from_settings(self.config.deploy.tune),
        )
        for trial in history.original_trials:
            point, first_result = space.locate_point(self.config, dimensions, trial.settings), rung_result(trial, 0)
            value = (
                objective.sampler_value(trial, first_result) if first_result is not None and trial.is_valid else None
            )
            collected.append(sampler.Observation(point, value, is_pending=first_result is None and trial.is_valid))
        return collected

    def propose(self, history: History) -> tuple[dict[str, Any], str] | None:
        """Return (settings of the next trial, proposer); None if every point of the space was tried."""
        number, tune = len(history.original_trials), self.config.deploy.tune
        if 0 < number <= len(tune.points_to_evaluate):
            return space.trial_overrides(self.config, tune.points_to_evaluate[number - 1]), "points"
        proposed = sampler.propose(
            self.dimensions(history),
            self.observations(history),
            number=number,
            seed=self.config.recipe.train.seed,
            sampler=tune.sampler,
            planned_trials=self.planned_trials,
        )
        if proposed is None:
            return None
        point, proposer = proposed
        fast_point = self._with_fastest_batch_size(history, point) if proposer == "spread" else None
        return space.trial_overrides(self.config, fast_point or point), BATCH_SIZE_PRIOR if fast_point else proposer

    def _with_fastest_batch_size(self, history: History, point: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the first quasi-random point with the fastest batch size (`frequency_model.batch_size_prior` of trial
        0). None if it is unknown, not searched, or was tried with the point's other settings."""
        if history.fastest_batch_size is None or any(
            trial.proposed_by == BATCH_SIZE_PRIOR for trial in history.original_trials
        ):
            return None
        fast_point = space.with_batch_size(self.config, self.dimensions(history), point, history.fastest_batch_size)
        tried_points = (observation.point for observation in self.observations(history) if observation.point)
        return (
            None if fast_point is None or any(same_point(point, fast_point) for point in tried_points) else fast_point
        )

    def expected_gain(self, history: History) -> float | None:
        """Return the expected improvement of another trial over the best one at the first rung; None if unknown."""
        return sampler.expected_gain(
            self.dimensions(history), self.observations(history), self.config.recipe.train.seed
        )
