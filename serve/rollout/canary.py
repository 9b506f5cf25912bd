"""Whether a candidate takes the place of the version that answers: what is seen of both, and what follows from it.
Pure: `trial` sees, `rollout` carries out.

Its errors are compared with those of the other version in the same time: each step begins to count anew, since an
incident that is over would hide what fails now. The comparison is looked at several times, and the chance of a wrong
word is spent over all of the looks (Bonferroni; Lan & DeMets 1983 on the spending of it).

A candidate first answers live texts that the other version has answered, unseen by clients (`shadow`). Then it answers
requests itself, a few at first (`weighted`). What it must show for each step is told below; it is dropped for the first
thing that it lacks, and promoted if nothing is left to show.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from rtrain.config import Serve

WEIGHTS = (0.05, 0.25)
"""Shares of the requests that a candidate answers before it answers all of them."""
WEIGHTED_REQUESTS = 50
"""Requests that a candidate answers in each step."""
LOOKS = (3, 4, 5, 6, 8, 10, 13, 16, 20, 25, 32, 40, WEIGHTED_REQUESTS)
"""Requests of a step after which the errors of both versions are compared (the R10 series of ISO 3)."""
WEIGHTED_S = 60.0
"""Seconds after which a step ends all the same: where few requests come, few can be lost."""
DOUBT = 0.01
"""Chance of a wrong word where a candidate is just as good as it has to be. For errors it is that of the whole trial:
an equal share of it for each of `LOOKS` of each step."""
LOOKS_OF_A_TRIAL = len(WEIGHTS) * len(LOOKS)
Stage = Literal["shadow", "weighted", "promoted", "dropped"]


class Aim(NamedTuple):
    """What is asked of a candidate."""

    share: float
    """The part of the live texts that both versions are to answer."""
    rows: int
    """Texts by which it is judged, over all replicas."""
    agreement: float
    """Least share of the same answers."""
    slower: float
    """Times as long as the other version that it may take for a text."""
    seconds: float
    """In which the texts have to come."""

    @classmethod
    def of(cls, settings: Serve) -> "Aim":
        return cls(
            settings.shadow,
            settings.shadow_rows,
            settings.shadow_agreement,
            settings.shadow_slower,
            settings.shadow_s,
        )


class Tally(NamedTuple):
    """What one replica, or all of them, have seen since the candidate was loaded."""

    rows: int = 0
    """Texts answered by both."""
    agreed: int = 0
    """Those of these with the same answer."""
    slower: int = 0
    """Those of these for which the candidate took more than `Aim.slower` times as long, call after call."""
    failed: int = 0
    """Texts on which the candidate failed, unseen by clients."""
    requests: int = 0
    """That the candidate has answered itself; not those that it refused for what the client had sent."""
    errors: int = 0
    """Those of these with the status 500 or above: it failed, was full or too slow."""
    old_requests: int = 0
    old_errors: int = 0
    """The same of the other version, meanwhile."""

    def plus(self, other: "Tally") -> "Tally":
        return Tally(*(one + another for one, another in zip(self, other, strict=True)))

    def since(self, other: "Tally") -> "Tally":
        """What has come since that one was seen."""
        return Tally(*(one - another for one, another in zip(self, other, strict=True)))


NOTHING = Tally()


def total(tallies: Iterable[Tally]) -> Tally:
    found = NOTHING
    for tally in tallies:
        found = found.plus(tally)
    return found


@dataclass(frozen=True)
class State:
    """Where a candidate stands."""

    began: float
    stage: Stage = "shadow"
    step: int = 0
    """A place in `WEIGHTS`."""
    step_began: float = 0.0
    before: Tally = NOTHING
    """What had been seen when the step began, or began to count anew."""
    last: Tally = NOTHING
    """What was seen at the last look."""
    looks: int = 0
    """Of `LOOKS`, those that the step has had."""
    reason: str = ""
    """Why it was dropped or promoted."""

    @property
    def weight(self) -> float:
        """Share of the requests that the candidate answers."""
        return WEIGHTS[self.step] if self.stage == "weighted" else 0.0

    @property
    def over(self) -> bool:
        return self.stage in ("promoted", "dropped")


def follow(state: State, seen: Tally, aim: Aim, now: float) -> State:
    """Where the candidate stands by what has been seen of it until now."""
    if state.over:
        return state
    if seen.failed:
        return replace(state, stage="dropped", reason=f"it failed on {seen.failed} of {seen.rows + seen.failed} texts")
    if state.stage == "shadow":
        return _shadowed(state, seen, aim, now)
    if seen.requests < state.last.requests or seen.old_requests < state.last.old_requests:
        # A replica has ended and taken with it what it saw: what is left is of no one time.
        state = replace(state, before=seen, looks=0)
    total_seen, seen = seen, seen.since(state.before)
    due = sum(requests <= seen.requests for requests in LOOKS)
    if due > state.looks and seen.errors and _more_often(seen) < DOUBT * (due - state.looks) / LOOKS_OF_A_TRIAL:
        return replace(state, stage="dropped", reason=_errors(seen))
    state = replace(state, last=total_seen, looks=due)
    enough, waited = seen.requests >= WEIGHTED_REQUESTS, now - state.step_began
    if not enough and seen.errors * seen.old_requests > seen.old_errors * seen.requests:
        # Neither chance nor fault by so few: the clock promotes nothing that fails more often.
        if waited < aim.seconds:
            return state
        return replace(state, stage="dropped", reason=f"{_errors(seen)}, and no more came in {aim.seconds:g} s")
    if not enough and waited < WEIGHTED_S:
        return state
    if state.step + 1 < len(WEIGHTS):
        return replace(state, step=state.step + 1, step_began=now, before=total_seen, looks=0)
    return replace(state, stage="promoted", reason=f"{state.reason}; {total_seen.requests} requests answered")


def dropped(state: State, reason: str) -> State:
    return state if state.over else replace(state, stage="dropped", reason=reason)


def _errors(seen: Tally) -> str:
    other = f"the other version on {seen.old_errors} of {seen.old_requests}"
    return f"it failed on {seen.errors} of {seen.requests} requests, {other}"


def _shadowed(state: State, seen: Tally, aim: Aim, now: float) -> State:
    if seen.rows < aim.rows:
        if now - state.began < aim.seconds:
            return state
        few = f"{seen.rows} of {aim.rows} texts came while the engines had nothing else to do, in {aim.seconds:g} s"
        return replace(state, stage="dropped", reason=few)
    same = f"the same answer to {seen.agreed} of {seen.rows} texts"
    if upper_bound(seen.rows - seen.agreed, seen.rows) > 1 - aim.agreement:
        reason = f"{same}: too few to be sure of {100 * aim.agreement:g} %"
        return replace(state, stage="dropped", reason=reason)
    if chance(seen.slower, seen.rows) < DOUBT:
        reason = f"more than {aim.slower:g} times as long as the other version for {seen.slower} of {seen.rows} texts"
        return replace(state, stage="dropped", reason=reason)
    return replace(state, stage="weighted", step=0, step_began=now, before=seen, last=seen, reason=same)


@functools.lru_cache(1 << 14)
def _more_often(seen: Tally) -> float:
    """The chance of so many of all errors among the candidate's requests where both versions fail equally often
    (Fisher's exact test, one-sided)."""
    from scipy.stats import hypergeom

    errors, requests = seen.errors + seen.old_errors, seen.requests + seen.old_requests
    return float(hypergeom.sf(seen.errors - 1, requests, errors, seen.requests))


def upper_bound(count: int, rows: int) -> float:
    """The chance of what was seen `count` times in `rows` is above this with the chance `DOUBT` at most (Clopper and
    Pearson 1934)."""
    from scipy.stats import beta

    return 1.0 if count == rows else float(beta.ppf(1 - DOUBT, count + 1, rows - count))


def chance(count: int, rows: int) -> float:
    """The chance that `count` or more of `rows` fair coins show heads: the paired sign test (Arbuthnot 1710; Conover
    1999) of whether a text takes the candidate so much longer more often than not."""
    from scipy.stats import binom

    return float(binom.sf(count - 1, rows, 0.5))
