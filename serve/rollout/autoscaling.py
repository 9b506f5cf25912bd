"""How many replicas there should be, from what their engines do and what waits for them.

Ray Serve asks `policy` (its own interface for policies, `AutoscalingConfig.policy`) with what each replica reports by
`record_autoscaling_stats`, averaged over its look-back period; it adds its delays and bounds. It copies this module to
its controller, so nothing is imported here but the standard library.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

HIGH, LOW = 0.8, 0.5
"""Shares of the replicas' time: above the first there are more, below the second of fewer replicas there are fewer. A
number that one rule has chosen is right by the other, so that the same load never goes back and forth."""
DRAIN_S = 10.0
"""Seconds in which what waits should be worked off."""
LOOK_BACK_S, UP_S, DOWN_S = 12.0, 3.0, 60.0
"""Seconds over which a replica's load is averaged, and for which more or fewer replicas must have been wanted."""
QUEUED, SPEED, BUSY = "queued_tokens", "tokens_per_second", "busy"


class Load(NamedTuple):
    """What a replica reports."""

    queued_tokens: float
    tokens_per_second: float
    """What its engine answers while it works; 0 before it has."""
    busy: float
    """Share of the time in which its engine worked."""


class Context(Protocol):
    """What is read of Ray's AutoscalingContext."""

    target_num_replicas: int
    policy_state: dict[str, Any]

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None:
        """Values by replica by name."""
        ...


class Meter:
    """What a replica reports of the time since it last did."""

    def __init__(self, now: float):
        self._now, self._seconds, self._tokens, self._speed = now, 0.0, 0, 0.0

    def report(self, now: float, queued_tokens: int, seconds: float, tokens: int) -> dict[str, float]:
        """`seconds` and `tokens`: totals of the engine's calls so far."""
        passed, worked, done = now - self._now, seconds - self._seconds, tokens - self._tokens
        if worked > 0:
            self._speed = done / worked
        self._now, self._seconds, self._tokens = now, seconds, tokens
        return {
            QUEUED: float(queued_tokens),
            SPEED: self._speed,
            BUSY: min(1.0, worked / passed) if passed > 0 else 0.0,
        }


def busiest(reports: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """One report for the several engines of a replica, each with threads of its own: that of the one with most to do.
    None of them may have too little, so that their mean would hide it."""

    def demand(report: Mapping[str, float]) -> float:
        load = Load(report[QUEUED], report[SPEED], report[BUSY])
        return load.busy + _queued_s(load) / DRAIN_S

    found = max(reports, key=demand, default=None)
    return dict(found) if found else {}


def bounds(least: int, most: int) -> dict[str, Any]:
    """Ray Serve's autoscaling_config, decided by `policy`."""
    return {
        "min_replicas": least,
        "initial_replicas": least,
        "max_replicas": most,
        "look_back_period_s": LOOK_BACK_S,
        "upscale_delay_s": UP_S,
        "downscale_delay_s": DOWN_S,
        "policy": {"policy_function": "serve.rollout.autoscaling:policy"},
    }


def policy(context: Context) -> tuple[int, dict[str, Any]]:
    """(wanted number of replicas, state to keep), as Ray Serve asks for them. As many as before where none reports."""
    told = context.aggregated_metrics or {}
    replicas = told.get(BUSY, {})
    loads = [
        Load(told.get(QUEUED, {}).get(one, 0.0), told.get(SPEED, {}).get(one, 0.0), busy)
        for one, busy in replicas.items()
    ]
    wanted = desired(loads, context.target_num_replicas) if loads else context.target_num_replicas
    return wanted, context.policy_state


def desired(loads: Iterable[Load], current: int) -> int:
    """How many replicas the load wants, at least 1; `current` where that is neither too many nor too few."""
    demand = sum(load.busy + _queued_s(load) / DRAIN_S for load in loads)
    most, least = _at(demand, LOW), _at(demand, HIGH)
    return min(max(current, least), most)


def _queued_s(load: Load) -> float:
    """Seconds of work that wait for a replica."""
    return load.queued_tokens / load.tokens_per_second if load.tokens_per_second else 0.0


def _at(demand: float, share: float) -> int:
    """Replicas that would be busy for that share of their time; rounding must not add one."""
    return max(1, math.ceil(demand / share - 1e-9))
