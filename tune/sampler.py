"""Propose the next point of the space from the observed ones. No Ray, and no state.

Each proposal uses a new sampler with all observations, seeded by the search's seed and the trial's number, so a resumed
search proposes the same points.

"""

import importlib.util
import math
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rtrain.core.errors import ConfigError, Problem
from tune.points import Dimension, halton, is_finite, iter_grid, list_grid, random_points, same_point

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


@dataclass(frozen=True)
class Observation:
    """A tried point and its value."""

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
        shuffled_grid = list_grid(dimensions)
        random.Random(f"grid {seed}").shuffle(shuffled_grid)
        new_point = _first_untried(shuffled_grid, tried_points)
        return (new_point, "grid") if new_point else None
    elif sampler != "random" and any(values for _, values in points_in_space):
        proposer = sampler if sampler != "auto" else "gp" if planned_trials <= MAX_GP_TRIALS else "tpe"
        if new_point := _propose_by_model(
            dimensions, points_in_space, random.Random(f"ask {seed} {number}").getrandbits(31), proposer
        ):
            return new_point, proposer
    random_draws = islice(random_points(dimensions, seed, number), MAX_RANDOM_DRAWS)
    new_point = _first_untried(random_draws, tried_points) or (
        _first_untried(iter_grid(dimensions), tried_points) if is_finite(dimensions) else None
    )
    return (new_point, "random") if new_point else None


TriedPoint = tuple[Mapping[str, Any], tuple[float, ...] | None]
"""A point of the space, and its values or None."""


def _points_in_space(observations: Sequence[Observation]) -> list[TriedPoint]:
    return [(observation.point, observation.values) for observation in observations if observation.point is not None]


def _first_untried(
    points: Iterable[dict[str, Any]], tried_points: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Return the first untried point."""
    return next(
        (point for point in points if not any(same_point(point, tried_point) for tried_point in tried_points)), None
    )


# -------------------------------------------------------------------------------------------------------------- optuna


def is_installed() -> bool:
    """Return whether Optuna is installed."""
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
    """Silence Optuna's messages about studies."""
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
    library = import_optuna(sampler_name)
    known_values = [values for _, values in tried_points if values]
    worst_values = [min(values) for values in zip(*known_values, strict=True)]
    distributions = {dimension.name: _make_distribution(library, dimension) for dimension in dimensions}
    with quiet_logging(library):
        if sampler_name == "gp":
            sampler = library.samplers.GPSampler(seed=seed, n_startup_trials=0)
        else:
            sampler = library.samplers.TPESampler(seed=seed, n_startup_trials=0, multivariate=True)
        study = library.create_study(directions=["maximize"] * len(worst_values), sampler=sampler)
        for point, values in tried_points:
            params = {dimension.name: _encode(dimension, point[dimension.name]) for dimension in dimensions}
            study.add_trial(
                library.trial.create_trial(
                    params=params, distributions=distributions, values=list(values or worst_values)
                )
            )
        for _ in range(MAX_SAMPLER_ATTEMPTS):
            trial = study.ask(distributions)
            new_point = {dimension.name: _decode(dimension, trial.params[dimension.name]) for dimension in dimensions}
            if fresh := _first_untried([new_point], [point for point, _ in tried_points]):
                return fresh
            study.tell(trial, worst_values)
    return None


def _make_distribution(library: Any, dimension: Dimension) -> Any:
    """Return Optuna's distribution of a dimension's encoded values: indices of choices, as integers if they are
    ordered."""
    if dimension.choices and dimension.is_ordered:
        return library.distributions.IntDistribution(0, len(dimension.choices) - 1)
    if dimension.choices:
        return library.distributions.CategoricalDistribution(tuple(range(len(dimension.choices))))
    distribution_class = (
        library.distributions.IntDistribution if dimension.is_integer else library.distributions.FloatDistribution
    )
    return distribution_class(dimension.low, dimension.high, log=dimension.log)


def _encode(dimension: Dimension, value: Any) -> Any:
    return dimension.index_of(value) if dimension.choices else dimension.clip(value)


def _decode(dimension: Dimension, value: Any) -> Any:
    return dimension.choices[value] if dimension.choices else dimension.round_value(value)


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
    process = _fit_gaussian_process(
        np.array([_unit_features(dimensions, point) for point, _ in scored_points]), (scores - mean) / deviation, seed
    )
    predicted_mean, predicted_std = process.predict(
        np.array([_unit_features(dimensions, point) for point in new_points]), return_std=True
    )
    noise_free_std = np.sqrt(np.maximum(predicted_std**2 - process.kernel_.k2.noise_level, 1e-18))
    gain = predicted_mean - (scores.max() - mean) / deviation
    improvement = gain * norm.cdf(gain / noise_free_std) + noise_free_std * norm.pdf(gain / noise_free_std)
    return float(max(0.0, improvement.max()) * deviation)


def _fit_gaussian_process(unit_points: Any, values: Any, seed: int) -> Any:
    """Fit a Gaussian process to standardized values at points of the unit cube."""
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
            features += [
                math.sqrt(0.5) * (number == dimension.index_of(value)) for number in range(len(dimension.choices))
            ]
    return features
