"""Points of a search space: a value for each searched setting. Pure and deterministic by seed."""

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SIGNIFICANT_DIGITS = 3
"""Significant digits of a drawn number: smaller differences are below the noise of seeds."""


@dataclass(frozen=True)
class Dimension:
    """A searched setting: a closed range of numbers, or choices.

    Each value has a position in [0, 1]: linear or logarithmic in a range, evenly spaced for choices.

    """

    name: str
    """Dotted name of the setting."""
    low: float | int | None = None
    high: float | int | None = None
    log: bool = False
    choices: tuple[Any, ...] = ()
    """Numbers in ascending order; other values in the given order."""

    @property
    def is_integer(self) -> bool:
        """Whether its range is of integers."""
        return isinstance(self.low, int)

    @property
    def is_ordered(self) -> bool:
        """Whether its values are numbers, so that neighbors are similar."""
        return not self.choices or all(is_number(value) for value in self.choices)

    def from_unit(self, position: float) -> Any:
        """Return the value at a position in [0, 1]."""
        if self.choices:
            return self.choices[min(int(position * len(self.choices)), len(self.choices) - 1)]
        lower, upper = self._ends
        length = lower + position * (upper - lower)
        return self.round_value(math.exp(length) if self.log else length)

    def to_unit(self, value: Any) -> float | None:
        """Return the position of a value; None if it is outside."""
        if self.choices:
            index = self.index_of(value)
            return None if index is None else (index + 0.5) / len(self.choices)
        low, high = self._range
        if not is_number(value) or (self.is_integer and value != int(value)):
            return None
        if not (low <= value <= high or same_value(value, low) or same_value(value, high)):
            return None
        lower, upper = self._ends
        return min(1.0, max(0.0, ((math.log(value) if self.log else value) - lower) / (upper - lower)))

    def index_of(self, value: Any) -> int | None:
        """Return the index of a value among the choices; None if it is not a choice."""
        return next((number for number, choice in enumerate(self.choices) if same_value(choice, value)), None)

    def round_value(self, number: float) -> float | int:
        """Round a number to `SIGNIFICANT_DIGITS` within the range."""
        if self.is_integer:
            return self.clip(round(number))
        low, high = self._range
        scale = number if self.log else high - low
        return self.clip(round(number, SIGNIFICANT_DIGITS - math.floor(math.log10(scale)) - self.log))

    def clip(self, number: float | int) -> float | int:
        """Return the nearest number of the range."""
        low, high = self._range
        return min(high, max(low, number))

    @property
    def _range(self) -> tuple[float | int, float | int]:
        if self.low is None or self.high is None:
            raise ValueError(f"{self.name} has choices, not a range")
        return self.low, self.high

    @property
    def _ends(self) -> tuple[float, float]:
        """The (logarithmic) bounds. Integer ranges are extended by one half, so that each integer has the same
        share."""
        low, high = self._range
        if self.is_integer:
            low, high = low - 0.5, high + 0.5
        return (math.log(low), math.log(high)) if self.log else (low, high)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def same_value(first: Any, second: Any) -> bool:
    """Return whether two values are equal; numbers up to rounding errors."""
    if is_number(first) and is_number(second):
        return math.isclose(first, second, rel_tol=1e-9, abs_tol=1e-300)
    return type(first) is type(second) and bool(first == second)


def halton(dimensions: Sequence[Dimension], count: int, seed: int) -> list[dict[str, Any]]:
    """Return points of a Halton sequence over the space, scrambled by the seed (Owen 2017, arXiv:1706.02808). A smaller
    count is a prefix of a larger one."""
    from scipy.stats import qmc

    if not dimensions:
        return []
    unit_points = qmc.Halton(len(dimensions), scramble=True, rng=seed).random(count)
    return [_point_from_unit(dimensions, row) for row in unit_points.tolist()]


def list_grid(dimensions: Sequence[Dimension]) -> list[dict[str, Any]]:
    """Return all points; the last setting varies fastest. Raises `ValueError` for an infinite space."""
    return list(iter_grid(dimensions))


def iter_grid(dimensions: Sequence[Dimension]) -> Iterator[dict[str, Any]]:
    """Iterate over the points of `list_grid`: integer ranges may be large."""
    names = [dimension.name for dimension in dimensions]
    return (dict(zip(names, values, strict=True)) for values in itertools.product(*map(_list_values, dimensions)))


def is_finite(dimensions: Sequence[Dimension]) -> bool:
    """Return whether the space is finite: no setting has a range of floats."""
    return all(dimension.choices or dimension.is_integer for dimension in dimensions)


def _list_values(dimension: Dimension) -> Sequence[Any]:
    if isinstance(dimension.low, int) and isinstance(dimension.high, int):
        return range(dimension.low, dimension.high + 1)
    if not dimension.choices:
        raise ValueError(f"the range of {dimension.name} is not finite")
    return dimension.choices


def random_point(dimensions: Sequence[Dimension], seed: int, number: int) -> dict[str, Any]:
    """Return the uniformly drawn point of trial `number`."""
    return next(random_points(dimensions, seed, number))


def random_points(dimensions: Sequence[Dimension], seed: int, number: int) -> Iterator[dict[str, Any]]:
    """Iterate over `random_point` and further draws."""
    generator = random.Random(f"search {seed} {number}")
    while True:
        yield _point_from_unit(dimensions, [generator.random() for _ in dimensions])


def _point_from_unit(dimensions: Sequence[Dimension], positions: Sequence[float]) -> dict[str, Any]:
    return {dimension.name: dimension.from_unit(place) for dimension, place in zip(dimensions, positions, strict=True)}


def same_point(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether two points are equal."""
    return first.keys() == second.keys() and all(same_value(value, second[name]) for name, value in first.items())
