"""Decide the next trial of a search from its configuration and history: a point of the space, a repeat, or none.

No Ray, and no state. Each proposal uses a new sampler with all observations, seeded by the search's seed and the
trial's number, so a resumed search makes the same proposals.
"""

import importlib.util
import math
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from rtrain.config import Config
from rtrain.core.errors import ConfigError, Problem
from tune import space
from tune.history import History, Trial
from tune.space import Dimension, halton, is_finite, iter_grid, random_points, same_point
from tune.successive_halving import Objective, RungSchedule, exact_trial_counts, first_rung_seed_std, rung_result

STARTUP_TRIALS = 4
"""Trials before the first proposal of a model. Optuna's default of 10 is more than most searches of full runs have."""
MAX_GP_TRIALS = 50
"""Maximum trials for which `auto` is a Gaussian process: it is better with few trials, and slower with many."""
MAX_SAMPLER_ATTEMPTS = 4
"""Attempts of a sampler to propose an untried point."""
MAX_RANDOM_DRAWS = 1000
"""Random draws without an untried point, after which a finite space is enumerated."""
MIN_GAIN_VALUES = 5
"""Minimum values to compute an expected gain."""
GAIN_CANDIDATES = 512
"""Candidate points for the maximum of the expected gain."""
BATCH_SIZE_PRIOR = "prior"
"""Proposer of the trial with the fastest batch size of trial 0."""


@dataclass(frozen=True)
class Observation:
    point: Mapping[str, Any] | None
    """A value for each dimension, by name (`space.locate_point`). None if the settings are outside of the space: models
    do not use them."""
    value: float | tuple[float, ...] | None
    """Value of each objective; larger is better. None if the trial failed, diverged, or is pending."""
    is_pending: bool = False
    """Whether the trial is running."""

    @property
    def values(self) -> tuple[float, ...] | None:
        """Finite values by objective, or None."""
        raw_values = self.value if isinstance(self.value, tuple) else (self.value,)
        finite_values = tuple(value for value in raw_values if value is not None and math.isfinite(value))
        return finite_values if len(finite_values) == len(raw_values) and not self.is_pending else None


def check_sampler(sampler: str) -> None:
    """Raise `ConfigError` if the sampler's package is not installed."""
    if sampler not in ("random", "grid"):
        import_optuna(sampler)


def propose(
    dimensions: Sequence[Dimension],
    observations: Sequence[Observation],
    *,
    number: int,
    seed: int,
    sampler: str,
    planned_trials: int,
) -> tuple[dict[str, Any], str] | None:
    """Return (point of trial `number`, name of the proposer); None if every point of the space was tried.

    The first `STARTUP_TRIALS` points are quasi-random (`halton`). Then `sampler` proposes: a Gaussian process (`gp`),
    tree-structured Parzen estimators (`tpe`), `random`, `grid`, or `auto`: one of the first two by `planned_trials`. A
    tried or pending point is never proposed again: `random` is the fallback. The order of `observations` has no
    influence.
    """
    points_in_space = sorted(_points_in_space(observations), key=lambda item: repr((sorted(item[0].items()), item[1])))
    tried_points = [point for point, _ in points_in_space]
    if len(points_in_space) < STARTUP_TRIALS:
        # One sequence for the search; each trial starts at its number.
        if new_point := _first_untried(halton(dimensions, number + 16 * STARTUP_TRIALS, seed)[number:], tried_points):
            return new_point, "spread"
    elif sampler == "grid":
        shuffled_grid = list(iter_grid(dimensions))
        random.Random(f"grid {seed}").shuffle(shuffled_grid)
        new_point = _first_untried(shuffled_grid, tried_points)
        return (new_point, "grid") if new_point else None
    elif sampler != "random" and any(values for _, values in points_in_space):
        proposer = sampler if sampler != "auto" else "gp" if planned_trials <= MAX_GP_TRIALS else "tpe"
        sampler_seed = random.Random(f"ask {seed} {number}").getrandbits(31)
        if new_point := _propose_by_model(dimensions, points_in_space, sampler_seed, proposer):
            return new_point, proposer
    new_point = _first_untried(islice(random_points(dimensions, seed, number), MAX_RANDOM_DRAWS), tried_points)
    if new_point is None and is_finite(dimensions):
        new_point = _first_untried(iter_grid(dimensions), tried_points)
    return (new_point, "random") if new_point else None


TriedPoint = tuple[Mapping[str, Any], tuple[float, ...] | None]
"""A point of the space, and its values or None."""


def _points_in_space(observations: Sequence[Observation]) -> list[TriedPoint]:
    return [(observation.point, observation.values) for observation in observations if observation.point is not None]


def _first_untried(
    points: Iterable[dict[str, Any]], tried_points: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    return next((point for point in points if not any(same_point(point, tried) for tried in tried_points)), None)


# -------------------------------------------------------------------------------------------------------------- optuna


def is_installed() -> bool:
    return importlib.util.find_spec("optuna") is not None


def import_optuna(sampler: str = "auto") -> Any:
    """Import Optuna, which is an extra. Raises `ConfigError` if it is missing."""
    try:
        import optuna
    except ImportError:
        fix = "pip install 'rtrain[tune]', or write tune.sampler=random or grid"
        reason = "it needs optuna, which is not installed"
        raise ConfigError([Problem("tune.sampler", sampler, reason, fix, code="not_installed")]) from None
    return optuna


@contextmanager
def quiet_logging(library: Any) -> Iterator[None]:
    previous_level = library.logging.get_verbosity()
    library.logging.set_verbosity(library.logging.ERROR)
    try:
        yield
    finally:
        library.logging.set_verbosity(previous_level)


def _propose_by_model(
    dimensions: Sequence[Dimension], tried_points: Sequence[TriedPoint], seed: int, sampler_name: str
) -> dict[str, Any] | None:
    """Return the point that a model of all values proposes; None if it proposes tried points only.

    A trial without values counts as the worst: a failed one, to avoid its neighborhood, and a pending one, so that
    concurrent trials differ (the constant liar of Ginsbourger et al. 2010).
    """
    optuna = import_optuna(sampler_name)
    known_values = [values for _, values in tried_points if values]
    worst_values = [min(values) for values in zip(*known_values, strict=True)]
    distributions = {dimension.name: _make_distribution(optuna, dimension) for dimension in dimensions}
    with quiet_logging(optuna):
        if sampler_name == "gp":
            sampler = optuna.samplers.GPSampler(seed=seed, n_startup_trials=0)
        else:
            sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=0, multivariate=True)
        study = optuna.create_study(directions=["maximize"] * len(worst_values), sampler=sampler)
        for point, values in tried_points:
            params = {
                dimension.name: (dimension.index_of if dimension.choices else dimension.clip)(point[dimension.name])
                for dimension in dimensions
            }
            trial_values = list(values or worst_values)
            trial = optuna.trial.create_trial(params=params, distributions=distributions, values=trial_values)
            study.add_trial(trial)
        for _ in range(MAX_SAMPLER_ATTEMPTS):
            trial = study.ask(distributions)
            new_point = {
                dimension.name: dimension.choices[value] if dimension.choices else dimension.round_value(value)
                for dimension in dimensions
                for value in (trial.params[dimension.name],)
            }
            if fresh := _first_untried([new_point], [point for point, _ in tried_points]):
                return fresh
            study.tell(trial, worst_values)
    return None


def _make_distribution(optuna: Any, dimension: Dimension) -> Any:
    """Return Optuna's distribution of a dimension's encoded values: indices of choices, as integers if they are
    ordered."""
    kinds, count = optuna.distributions, len(dimension.choices)
    if dimension.choices:
        return (
            kinds.IntDistribution(0, count - 1)
            if dimension.is_ordered
            else kinds.CategoricalDistribution(tuple(range(count)))
        )
    kind = kinds.IntDistribution if dimension.is_integer else kinds.FloatDistribution
    return kind(dimension.low, dimension.high, log=dimension.log)


# ------------------------------------------------------------------------------------------------------ expected gain


def expected_gain(dimensions: Sequence[Dimension], observations: Sequence[Observation], seed: int) -> float | None:
    """Return the maximum expected improvement of an untried point over the best value; None with fewer than
    `MIN_GAIN_VALUES` values, or with several objectives.

    The expected improvement of Jones, Schonlau and Welch (1998, equation 15), with mean m and deviation s of a Gaussian
    process at the point, best value b, d = m - b, and Phi and phi of the standard normal distribution,

        EI = d Phi(d / s) + s phi(d / s)

    The process has a Matern 5/2 kernel with a length scale for each dimension and a noise, fitted by maximum
    likelihood. s is the deviation without the noise: variation between seeds is not a gain.
    """
    import numpy as np
    from scipy.stats import norm

    tried_points = _points_in_space(observations)
    scored_points = [(point, values[0]) for point, values in tried_points if values and len(values) == 1]
    if len(scored_points) < MIN_GAIN_VALUES or not dimensions:
        return None
    scores = np.array([score for _, score in scored_points])
    mean, deviation = scores.mean(), scores.std()
    points = [point for point, _ in tried_points]
    # A truncated enumeration would cover only the corner where the first settings are lowest.
    is_small_space = (
        is_finite(dimensions) and sum(1 for _ in islice(iter_grid(dimensions), GAIN_CANDIDATES + 1)) <= GAIN_CANDIDATES
    )
    candidates = iter_grid(dimensions) if is_small_space else halton(dimensions, GAIN_CANDIDATES, seed)
    new_points = [point for point in islice(candidates, GAIN_CANDIDATES) if _first_untried([point], points)]
    if not new_points or deviation == 0:
        return 0.0
    scored_features = np.array([_unit_features(dimensions, point) for point, _ in scored_points])
    process = _fit_gaussian_process(scored_features, (scores - mean) / deviation, seed)
    new_features = np.array([_unit_features(dimensions, point) for point in new_points])
    predicted_mean, predicted_std = process.predict(new_features, return_std=True)
    noise_free_std = np.sqrt(np.maximum(predicted_std**2 - process.kernel_.k2.noise_level, 1e-18))
    gain = predicted_mean - (scores.max() - mean) / deviation
    improvement = gain * norm.cdf(gain / noise_free_std) + noise_free_std * norm.pdf(gain / noise_free_std)
    return float(max(0.0, improvement.max()) * deviation)


def _fit_gaussian_process(unit_points: Any, values: Any, seed: int) -> Any:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    matern = Matern([0.5] * unit_points.shape[1], [(0.05, 20.0)] * unit_points.shape[1], nu=2.5)
    kernel = ConstantKernel(1.0, (0.01, 100.0)) * matern + WhiteKernel(0.01, (1e-6, 1.0))
    process = GaussianProcessRegressor(kernel, n_restarts_optimizer=4, random_state=seed % 2**32)
    with warnings.catch_warnings():
        # A length scale at its bound means that the setting has no influence, which is valid.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return process.fit(unit_points, values)


def _unit_features(dimensions: Sequence[Dimension], point: Mapping[str, Any]) -> list[float]:
    """Return a point's features in the unit cube; unordered choices are one-hot, all at equal distance."""
    features: list[float] = []
    for dimension in dimensions:
        value = point[dimension.name]
        if dimension.is_ordered:
            features.append(dimension.to_unit(value) or 0.0)
        else:
            choice_index = dimension.index_of(value)
            features += [math.sqrt(0.5) * (index == choice_index) for index in range(len(dimension.choices))]
    return features


# --------------------------------------------------------------------------------------------------------------- policy


@dataclass(frozen=True)
class SearchPolicy:
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
        return tuple(count for count in exact_trial_counts(self.planned_trials) if count >= MIN_GAIN_VALUES)

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

        It is the best trial: the gain is relative to it, and trials that barely learn have little seed noise. The
        repeat is the next seed of the finals, which resume it if the trial gets there.
        """
        valid_trials = [trial for trial in history.original_trials if trial.is_valid]
        best_trial = Objective.from_settings(self.config.deploy.tune).rank(valid_trials, 0)[0]
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
        if history.max_useful_batch_size is None:
            return self._space
        return space.prune_by_noise(self.config, self._space, history.max_useful_batch_size)

    def observations(self, history: History) -> list[Observation]:
        """Return the sampler's observations: each trial's point, and its value at the first rung, where all trials have
        equally many rows."""
        dimensions, objective = self.dimensions(history), Objective.from_settings(self.config.deploy.tune)

        def observe(trial: Trial) -> Observation:
            point, result = space.locate_point(self.config, dimensions, trial.settings), rung_result(trial, 0)
            if result is None or not trial.is_valid:
                return Observation(point, None, is_pending=trial.is_valid)
            return Observation(point, objective.sampler_value(trial, result))

        return list(map(observe, history.original_trials))

    def propose(self, history: History) -> tuple[dict[str, Any], str] | None:
        """Return (settings of the next trial, proposer); None if every point of the space was tried."""
        number, tune = len(history.original_trials), self.config.deploy.tune
        if 0 < number <= len(tune.points_to_evaluate):
            return space.trial_overrides(self.config, tune.points_to_evaluate[number - 1]), "points"
        proposed = propose(
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
        if proposer == "spread" and (fast_point := self._with_fastest_batch_size(history, point)):
            point, proposer = fast_point, BATCH_SIZE_PRIOR
        return space.trial_overrides(self.config, point), proposer

    def _with_fastest_batch_size(self, history: History, point: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the first quasi-random point with the fastest batch size (`frequency_model.batch_size_prior` of trial
        0). None if it is unknown, not searched, or was tried with the point's other settings."""
        is_tried = any(trial.proposed_by == BATCH_SIZE_PRIOR for trial in history.original_trials)
        if history.fastest_batch_size is None or is_tried:
            return None
        fast_point = space.with_batch_size(self.config, self.dimensions(history), point, history.fastest_batch_size)
        tried_points = [observation.point for observation in self.observations(history) if observation.point]
        return None if fast_point is None else _first_untried([fast_point], tried_points)

    def expected_gain(self, history: History) -> float | None:
        """Return the expected improvement of another trial over the best one at the first rung; None if unknown."""
        return expected_gain(self.dimensions(history), self.observations(history), self.config.recipe.train.seed)
