"""Whether requests still look like the validation rows: how far they are from them, and an alarm that can be trusted.

The alarm is the Shiryaev-Roberts statistic of bets against "the requests are drawn as the validation rows were". A bet
names tails of histograms, e.g. scores up to 0.8, and multiplies its stake by 1 - e + e / p where a row falls into the
tail and by 1 - e where not; p is the tail's chance among validation rows. Of such rows a bet wins nothing on average,
so the statistic less the number of rows is a supermartingale, and reaches `ROWS_PER_ALARM` after that many rows on
average, whatever the histograms (Shin, Ramdas and Rinaldo 2022, E-detectors, arXiv:2203.03532). The mean over several
bets keeps this. Validation rows are few, so p is an upper bound of the chance, that of Clopper and Pearson 1934.

Labels raise no alarm: that a month brings other questions is no unknown input. Their distance is told.
"""

import functools
import math
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rtrain import reference
from rtrain.reference import Features

ROWS_PER_ALARM = 100_000
"""Mean number of rows to an alarm where nothing has changed."""
SHARES = (0.05, 0.2)
"""Shares of foreign rows that are betted on."""
TAILS = (0.01, 0.03, 0.1, 0.3)
"""The widest tails of a histogram's ends that are no likelier than these are betted on: each by itself, and those of
all histograms together, since unknown input often shows in several."""
ENDS = {"tokens": ("low", "high"), "unknown": ("high",), "score": ("low",)}
"""Which end of a histogram unknown input is looked for in."""
DOUBT = 1e-3
"""Chance that a tail is likelier than its bound."""
WINDOW = 1000
"""Rows over which distances are measured."""
LEAST_ROWS = 100
"""Validation rows below which nothing can be said."""
AT_LEAST = 0.5
"""Rows of a bin, where there are fewer: an empty one would be endlessly far."""


class Tail(NamedTuple):
    feature: str
    first: int
    after: int
    """The tail's bins, `after` not included."""
    chance: float
    """Upper bound of a validation row's chance to be there."""


Bet = tuple[Tail, ...]
"""The stake is shared equally among its tails."""


class Drift:
    """Compares rows with an artefact's reference, one after another. A pure function of what it is told."""

    def __init__(self, document: Mapping[str, Any]):
        """`document`: what `rtrain.reference.measure` has made."""
        self._counts = {name: np.array(document[name]["counts"]) for name in ENDS if name in document}
        self._edges = {name: document[name]["edges"] for name in self._counts}
        self._labels: Mapping[str, int] = document.get("labels", {})
        self.bets = bets_on(self._counts)
        self._pays = {name: self._payoff(name, len(counts)) for name, counts in self._counts.items()}
        self._stakes = np.zeros(len(self.bets) * len(SHARES))
        self._places: dict[str, deque[int]] = {name: deque(maxlen=WINDOW) for name in self._counts}
        self._named: deque[list[str]] = deque(maxlen=WINDOW)
        self.rows = 0
        self.alarms = 0

    @property
    def evidence(self) -> float:
        """Grows with unknown input, about 1 a row at most without; at `ROWS_PER_ALARM` there is an alarm, and it starts
        anew."""
        return float(self._stakes.sum()) / max(1, len(self._stakes))

    def observe(self, found: Features) -> None:
        """Rows of requests, in their order."""
        pays = np.zeros((len(found.tokens), len(self.bets)))
        numbers = found.numbers()
        for name, payoff in self._pays.items():
            # Where a row has no such number, an answer without a score say, the stake is kept.
            values = numbers.get(name, np.full(len(found.tokens), np.nan))
            there = ~np.isnan(values)
            places = reference.place(values[there], self._edges[name])
            pays[there] += payoff[places]
            pays[~there] += self._weights(name)
            self._places[name].extend(places.tolist())
        shares = np.array(SHARES)
        gains = (1 - shares + shares * pays[:, :, None]).reshape(len(pays), -1)
        for gain in gains:
            self._stakes = (self._stakes + 1) * gain
            if self.evidence >= ROWS_PER_ALARM:
                self.alarms += 1
                self._stakes = np.zeros(len(self._stakes))
        if found.labels is not None and self._labels:
            self._named.extend(found.labels)
        self.rows += len(found.tokens)

    def distances(self) -> dict[str, float]:
        """The population stability index of each histogram over the last `WINDOW` rows; by its custom up to 0.1 is
        nothing, and from 0.25 on much. It is (bins - 1) x (1 / window + 1 / validation rows) by chance alone."""
        found = {}
        for name, counts in self._counts.items():
            if self._places[name]:
                found[name] = stability_index(counts, np.bincount(self._places[name], minlength=len(counts)))
        if self._named:
            seen = Counter(label for row in self._named for label in row)
            names = sorted({*self._labels, *seen})
            both = [np.array([side.get(name, 0) for name in names]) for side in (self._labels, seen)]
            found["labels"] = stability_index(*both)
        return found

    def _weights(self, feature: str) -> npt.NDArray[np.float64]:
        """[bets]: the share of each stake that is on a feature's tails."""
        return np.array([sum(tail.feature == feature for tail in bet) / len(bet) for bet in self.bets])

    def _payoff(self, feature: str, bins: int) -> npt.NDArray[np.float64]:
        """[bins, bets]: what a row in a bin of a feature's histogram pays on each stake of 1."""
        found = np.zeros((bins, len(self.bets)))
        for number, bet in enumerate(self.bets):
            for tail in bet:
                if tail.feature == feature:
                    found[tail.first : tail.after, number] += 1 / tail.chance / len(bet)
        return found


def bets_on(histograms: Mapping[str, npt.NDArray[np.int64]]) -> list[Bet]:
    """The bets that are worth their stakes; none where there are too few validation rows."""
    found: list[Bet] = []
    for most in TAILS:
        tails = [
            tail
            for name, counts in histograms.items()
            for end in ENDS[name]
            if (tail := widest(name, counts, end, most)) is not None
        ]
        found += [(tail,) for tail in tails] + ([tuple(tails)] if len(tails) > 1 else [])
    return list(dict.fromkeys(found))


def widest(feature: str, counts: npt.NDArray[np.int64], end: str, most: float) -> Tail | None:
    """The widest tail at an end of a histogram that is no likelier than `most`."""
    rows, bins, found = int(counts.sum()), len(counts), None
    if rows < LEAST_ROWS:
        return None
    for edge in range(1, bins):
        first, after = (0, edge) if end == "low" else (bins - edge, bins)
        chance = most_likely(int(counts[first:after].sum()), rows)
        if chance > most:
            break
        found = Tail(feature, first, after, chance)
    return found


@functools.lru_cache(maxsize=1000)
def most_likely(count: int, rows: int, doubt: float = DOUBT) -> float:
    """An upper bound of the chance of what was seen `count` times in `rows`: with a larger one, so few would have been
    seen with a chance below `doubt`."""
    if count == rows:
        return 1.0
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, rows + 1)))])
    seen = np.arange(count + 1)
    ways = logs[rows] - logs[seen] - logs[rows - seen]
    low, high = count / rows, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        at_most = float(np.exp(ways + seen * math.log(middle) + (rows - seen) * math.log1p(-middle)).sum())
        low, high = (middle, high) if at_most > doubt else (low, middle)
    return high


def stability_index(reference_counts: npt.NDArray[Any], counts: npt.NDArray[Any]) -> float:
    """Sum over bins of (q - p) ln(q / p)."""
    p, q = (np.maximum(side, AT_LEAST) / np.maximum(side, AT_LEAST).sum() for side in (reference_counts, counts))
    return float(((q - p) * np.log(q / p)).sum())
