"""Points of a search's space: each gives each searched setting a value. Pure: a seed gives the same points again."""

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DIGITS = 3
"""Significant digits of a drawn number: a difference beyond them is lost in the spread of seeds, and hard to read."""


@dataclass(frozen=True)
class Dimension:
    """A setting that is searched: numbers of a range, both ends included, or choices.

    Each value has a place between 0 and 1. Those of a range follow its (logarithmic) length, choices lie as far from
    each other as from their neighbours.
    """

    name: str
    """Dotted."""
    low: float | int | None = None
    high: float | int | None = None
    log: bool = False
    choices: tuple[Any, ...] = ()
    """Numbers in rising order; others as they were given."""

    @property
    def whole(self) -> bool:
        """Whether the numbers of its range are whole ones."""
        return isinstance(self.low, int)

    @property
    def ordered(self) -> bool:
        """Whether its values are numbers, so that neighbours are alike."""
        return not self.choices or all(is_number(value) for value in self.choices)

    def at(self, place: float) -> Any:
        """The value at a place from 0 to 1."""
        if self.choices:
            return self.choices[min(int(place * len(self.choices)), len(self.choices) - 1)]
        begin, end = self._ends
        length = begin + place * (end - begin)
        return self.rounded(math.exp(length) if self.log else length)

    def place(self, value: Any) -> float | None:
        """Where a value lies; None where it is outside."""
        if self.choices:
            index = self.index(value)
            return None if index is None else (index + 0.5) / len(self.choices)
        low, high = self._range
        if not is_number(value) or (self.whole and value != int(value)):
            return None
        if not (low <= value <= high or same_value(value, low) or same_value(value, high)):
            return None
        begin, end = self._ends
        return min(1.0, max(0.0, ((math.log(value) if self.log else value) - begin) / (end - begin)))

    def index(self, value: Any) -> int | None:
        """Which of the choices a value is; None where it is none of them."""
        return next((number for number, choice in enumerate(self.choices) if same_value(choice, value)), None)

    def rounded(self, number: float) -> float | int:
        """The nearest number of the range that is written with few digits."""
        if self.whole:
            return self.clipped(round(number))
        low, high = self._range
        scale = number if self.log else high - low
        return self.clipped(round(number, DIGITS - math.floor(math.log10(scale)) - self.log))

    def clipped(self, number: float | int) -> float | int:
        """The number of the range that is nearest."""
        low, high = self._range
        return min(high, max(low, number))

    @property
    def _range(self) -> tuple[float | int, float | int]:
        if self.low is None or self.high is None:
            raise ValueError(f"{self.name} has choices, and no range")
        return self.low, self.high

    @property
    def _ends(self) -> tuple[float, float]:
        """The range as a length. Of whole numbers each has the same part of it, so that it begins half a number before
        the first."""
        low, high = self._range
        if self.whole:
            low, high = low - 0.5, high + 0.5
        return (math.log(low), math.log(high)) if self.log else (low, high)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def same_value(one: Any, two: Any) -> bool:
    """Whether two values are one setting: numbers up to the rounding of a computation."""
    if is_number(one) and is_number(two):
        return math.isclose(one, two, rel_tol=1e-9, abs_tol=1e-300)
    return type(one) is type(two) and bool(one == two)


def spread(dimensions: Sequence[Dimension], count: int, seed: int) -> list[dict[str, Any]]:
    """So many points, spread evenly over the space: a Halton sequence, scrambled by the seed (Owen 2017,
    arXiv:1706.02808). Those of a smaller count are the first of a larger one."""
    from scipy.stats import qmc

    if not dimensions:
        return []
    places = qmc.Halton(len(dimensions), scramble=True, rng=seed).random(count)
    return [_point(dimensions, row) for row in places.tolist()]


def grid(dimensions: Sequence[Dimension]) -> list[dict[str, Any]]:
    """All points, the last setting going round first. Raises `ValueError` where they are without number."""
    return list(walk(dimensions))


def walk(dimensions: Sequence[Dimension]) -> Iterator[dict[str, Any]]:
    """The points of `grid` one by one: of whole numbers there may be many."""
    names = [dimension.name for dimension in dimensions]
    return (dict(zip(names, values, strict=True)) for values in itertools.product(*map(_all, dimensions)))


def finite(dimensions: Sequence[Dimension]) -> bool:
    """Whether the points can be counted, since no setting has a range of fractions."""
    return all(one.choices or one.whole for one in dimensions)


def _all(dimension: Dimension) -> Sequence[Any]:
    if isinstance(dimension.low, int) and isinstance(dimension.high, int):
        return range(dimension.low, dimension.high + 1)
    if not dimension.choices:
        raise ValueError(f"the numbers of {dimension.name} are without number")
    return dimension.choices


def random_point(dimensions: Sequence[Dimension], seed: int, number: int) -> dict[str, Any]:
    """The point that trial `number` of a search by that seed draws, each place as likely as any other."""
    return next(draws(dimensions, seed, number))


def draws(dimensions: Sequence[Dimension], seed: int, number: int) -> Iterator[dict[str, Any]]:
    """`random_point`, and what would be drawn in its place."""
    draw = random.Random(f"search {seed} {number}")
    while True:
        yield _point(dimensions, [draw.random() for _ in dimensions])


def _point(dimensions: Sequence[Dimension], places: Sequence[float]) -> dict[str, Any]:
    return {one.name: one.at(place) for one, place in zip(dimensions, places, strict=True)}


def equal(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    """Whether two points of a space are the same."""
    return one.keys() == two.keys() and all(same_value(value, two[name]) for name, value in one.items())
