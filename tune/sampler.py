"""Which point of the space to try next, given what became of those that were tried. No Ray, and no state.

Each question is answered by a new sampler that is told everything anew, seeded by the search's seed and the trial's
number: a search that was killed asks again just what it would have asked.
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
from tune.points import Dimension, draws, equal, finite, grid, spread, walk

START = 4
"""Trials before the first one that a model of the others proposes. Optuna's own samplers would take 10, which is more
than most searches of full runs have."""
GP_TRIALS = 50
"""Most trials for which `auto` takes a Gaussian process: it makes more of few trials, and takes longer with many."""
ATTEMPTS = 4
"""Times that a sampler is asked for a point that was not tried."""
DRAWN = 1000
"""Points drawn in a row that were all tried, after which the points of a finite space are counted through."""
GAIN_VALUES = 5
"""Fewest values from which a gain is expected."""
CANDIDATES = 512
"""Points among which the one of the largest expected gain is looked for."""


@dataclass(frozen=True)
class Told:
    """A point that was tried, and what it came to."""

    point: Mapping[str, Any] | None
    """A value for each dimension, by name: `space.coordinates` of a trial's settings. None where these are outside of
    the space: then it tells a model nothing."""
    value: float | tuple[float, ...] | None
    """Larger is better, of each objective; None where the trial failed, diverged, or is not there yet."""
    pending: bool = False
    """Whether the trial is on its way."""

    @property
    def values(self) -> tuple[float, ...] | None:
        """By objective; None where there are none to go by."""
        found = self.value if isinstance(self.value, tuple) else (self.value,)
        known = tuple(value for value in found if value is not None and math.isfinite(value))
        return known if len(known) == len(found) and not self.pending else None


def check(sampler: str) -> None:
    """Raise `ConfigError` where a sampler is not installed."""
    if sampler not in ("random", "grid"):
        optuna(sampler)


def propose(
    dimensions: Sequence[Dimension], told: Sequence[Told], *, number: int, seed: int, sampler: str, planned: int
) -> tuple[dict[str, Any], str] | None:
    """The point of trial `number` and what has proposed it; None where every point of the space was tried.

    Until `START` points of the space were tried they are spread over it (`spread`). Then `sampler` proposes them: a
    Gaussian process (`gp`), tree-structured Parzen estimators (`tpe`), `random`, `grid`, or `auto`, one of the first
    two by how many trials are `planned`. A point that was tried, or is being tried, is never proposed again: where a
    sampler does so, `random` takes its place. The order of `told` has no influence.
    """
    inside = sorted(_inside(told), key=lambda one: repr((sorted(one[0].items()), one[1])))
    tried = [point for point, _ in inside]
    if len(inside) < START:
        # A sequence for the whole search, which each trial enters at its number.
        if fresh := _first(spread(dimensions, number + 16 * START, seed)[number:], tried):
            return fresh, "spread"
    elif sampler == "grid":
        shuffled = grid(dimensions)
        random.Random(f"grid {seed}").shuffle(shuffled)
        fresh = _first(shuffled, tried)
        return (fresh, "grid") if fresh else None
    elif sampler != "random" and any(values for _, values in inside):
        by = sampler if sampler != "auto" else "gp" if planned <= GP_TRIALS else "tpe"
        if fresh := _modelled(dimensions, inside, random.Random(f"ask {seed} {number}").getrandbits(31), by):
            return fresh, by
    drawn = islice(draws(dimensions, seed, number), DRAWN)
    fresh = _first(drawn, tried) or (_first(walk(dimensions), tried) if finite(dimensions) else None)
    return (fresh, "random") if fresh else None


Tried = tuple[Mapping[str, Any], tuple[float, ...] | None]
"""A point of the space, and its values where it has any."""


def _inside(told: Sequence[Told]) -> list[Tried]:
    return [(one.point, one.values) for one in told if one.point is not None]


def _first(points: Iterable[dict[str, Any]], tried: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The first point that was not tried."""
    return next((point for point in points if not any(equal(point, one) for one in tried)), None)


# -------------------------------------------------------------------------------------------------------------- optuna


def installed() -> bool:
    """Whether Optuna is."""
    return importlib.util.find_spec("optuna") is not None


def optuna(sampler: str = "auto") -> Any:
    """The package, which comes with an extra. Raises `ConfigError` where it is missing."""
    try:
        import optuna
    except ImportError:
        fix = "pip install 'rtrain[tune]', or write tune.sampler=random or grid"
        reason = "it needs optuna, which is not installed"
        raise ConfigError([Problem("tune.sampler", sampler, reason, fix, code="not_installed")]) from None
    return optuna


@contextmanager
def quiet(library: Any) -> Iterator[None]:
    """Inside, Optuna says nothing of the studies that it makes."""
    before = library.logging.get_verbosity()
    library.logging.set_verbosity(library.logging.ERROR)
    try:
        yield
    finally:
        library.logging.set_verbosity(before)


def _modelled(dimensions: Sequence[Dimension], inside: Sequence[Tried], seed: int, by: str) -> dict[str, Any] | None:
    """The point that a model of all values proposes; None where it proposes none but those that were tried.

    A trial without values counts as the worst of all: one that failed, so that it is not tried nearby again, and one
    that is on its way, so that trials of the same time differ (the constant liar of Ginsbourger et al. 2010).
    """
    library = optuna(by)
    known = [values for _, values in inside if values]
    worst = [min(values) for values in zip(*known, strict=True)]
    distributions = {one.name: _distribution(library, one) for one in dimensions}
    with quiet(library):
        if by == "gp":
            sampler = library.samplers.GPSampler(seed=seed, n_startup_trials=0)
        else:
            sampler = library.samplers.TPESampler(seed=seed, n_startup_trials=0, multivariate=True)
        study = library.create_study(directions=["maximize"] * len(worst), sampler=sampler)
        for point, values in inside:
            params = {one.name: _encoded(one, point[one.name]) for one in dimensions}
            study.add_trial(
                library.trial.create_trial(params=params, distributions=distributions, values=list(values or worst))
            )
        for _ in range(ATTEMPTS):
            trial = study.ask(distributions)
            proposed = {one.name: _decoded(one, trial.params[one.name]) for one in dimensions}
            if fresh := _first([proposed], [point for point, _ in inside]):
                return fresh
            study.tell(trial, worst)
    return None


def _distribution(library: Any, dimension: Dimension) -> Any:
    """How Optuna draws a dimension's encoded values: choices by their numbers, those of ordered ones as neighbours."""
    if dimension.choices and dimension.ordered:
        return library.distributions.IntDistribution(0, len(dimension.choices) - 1)
    if dimension.choices:
        return library.distributions.CategoricalDistribution(tuple(range(len(dimension.choices))))
    kind = library.distributions.IntDistribution if dimension.whole else library.distributions.FloatDistribution
    return kind(dimension.low, dimension.high, log=dimension.log)


def _encoded(dimension: Dimension, value: Any) -> Any:
    return dimension.index(value) if dimension.choices else dimension.clipped(value)


def _decoded(dimension: Dimension, value: Any) -> Any:
    return dimension.choices[value] if dimension.choices else dimension.rounded(value)


# ------------------------------------------------------------------------------------------------------ expected gain


def expected_gain(dimensions: Sequence[Dimension], told: Sequence[Told], seed: int) -> float | None:
    """By how much the best point of the space that was not tried is expected to be above the best value, in units of
    the value; None with fewer than `GAIN_VALUES` values, or with several objectives.

    The expected improvement of Jones, Schonlau and Welch (1998, equation 15), with mean m and deviation s of a Gaussian
    process at the point, best value b, d = m - b, and Phi and phi of the standard normal distribution,

        EI = d Phi(d / s) + s phi(d / s)

    The process has a Matern 5/2 kernel with a length for each dimension and a noise, all fitted to the values by their
    likelihood. s is the deviation of what is behind the noise: how a trial's luck differs from seed to seed is no gain.
    """
    import numpy as np
    from scipy.stats import norm

    inside = _inside(told)
    known = [(point, values[0]) for point, values in inside if values and len(values) == 1]
    if len(known) < GAIN_VALUES or not dimensions:
        return None
    scores = np.array([score for _, score in known])
    mean, deviation = scores.mean(), scores.std()
    tried = [point for point, _ in inside]
    # A walk over more points than are looked at would see one corner: those in which the first settings are lowest.
    few = finite(dimensions) and sum(1 for _ in islice(walk(dimensions), CANDIDATES + 1)) <= CANDIDATES
    candidates = walk(dimensions) if few else spread(dimensions, CANDIDATES, seed)
    fresh = [point for point in islice(candidates, CANDIDATES) if _first([point], tried)]
    if not fresh or deviation == 0:
        return 0.0
    process = _fitted(np.array([_features(dimensions, point) for point, _ in known]), (scores - mean) / deviation, seed)
    middle, apart = process.predict(np.array([_features(dimensions, point) for point in fresh]), return_std=True)
    behind = np.sqrt(np.maximum(apart**2 - process.kernel_.k2.noise_level, 1e-18))
    gain = middle - (scores.max() - mean) / deviation
    improvement = gain * norm.cdf(gain / behind) + behind * norm.pdf(gain / behind)
    return float(max(0.0, improvement.max()) * deviation)


def _fitted(places: Any, values: Any, seed: int) -> Any:
    """A Gaussian process of standardised values at places of the unit cube."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    smooth = Matern([0.5] * places.shape[1], [(0.05, 20.0)] * places.shape[1], nu=2.5)
    kernel = ConstantKernel(1.0, (0.01, 100.0)) * smooth + WhiteKernel(0.01, (1e-6, 1.0))
    process = GaussianProcessRegressor(kernel, n_restarts_optimizer=4, random_state=seed % 2**32)
    with warnings.catch_warnings():
        # A length at its bound says that the setting has no influence: that is an answer.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return process.fit(places, values)


def _features(dimensions: Sequence[Dimension], point: Mapping[str, Any]) -> list[float]:
    """A point's place in the unit cube; a dimension of names has one direction for each, all equally far apart."""
    found: list[float] = []
    for one in dimensions:
        value = point[one.name]
        if one.ordered:
            found.append(one.place(value) or 0.0)
        else:
            found += [math.sqrt(0.5) * (number == one.index(value)) for number in range(len(one.choices))]
    return found
