"""Autoscaling: number of replicas from engine utilization and queued work.

Ray Serve calls `policy` (`AutoscalingConfig.policy`) with the reports of all replicas (`record_autoscaling_stats`),
averaged over its look-back period; it applies its own delays and bounds. Ray copies this module to its controller, so
it imports the standard library alone.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

HIGH_UTILIZATION, LOW_UTILIZATION = 0.8, 0.5
"""Utilization of the replicas: above the first number replicas are added, below the second of a smaller set they are
removed. A count chosen by one rule satisfies the other, so a constant load never oscillates."""
DRAIN_S = 10.0
"""Seconds in which what waits should be worked off."""
LOOK_BACK_PERIOD_S, UPSCALE_DELAY_S, DOWNSCALE_DELAY_S = 12.0, 3.0, 60.0
"""Seconds over which a replica's load is averaged, and for which more or fewer replicas must have been wanted."""
QUEUED_TOKENS, TOKENS_PER_SECOND, BUSY_SHARE = "queued_tokens", "tokens_per_second", "busy"


class ReplicaLoad(NamedTuple):
    """Load report of a replica."""

    queued_tokens: float
    tokens_per_second: float
    """What its engine answers while it works; 0 before it has."""
    busy_share: float
    """Share of the time in which its engine worked."""


class AutoscalingContext(Protocol):
    """Used part of Ray's AutoscalingContext."""

    target_num_replicas: int
    policy_state: dict[str, Any]

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None:
        """Values by replica by name."""
        ...


class LoadMeter:
    """Load of a replica since its last report."""

    def __init__(self, now: float):
        self._last_time, self._last_seconds, self._last_tokens, self._tokens_per_second = now, 0.0, 0, 0.0

    def report(self, now: float, queued_tokens: int, seconds: float, tokens: int) -> dict[str, float]:
        """`seconds` and `tokens`: totals of the engine's calls so far."""
        elapsed = now - self._last_time
        busy_seconds = seconds - self._last_seconds
        new_tokens = tokens - self._last_tokens
        if busy_seconds > 0:
            self._tokens_per_second = new_tokens / busy_seconds
        self._last_time, self._last_seconds, self._last_tokens = now, seconds, tokens
        return {
            QUEUED_TOKENS: float(queued_tokens),
            TOKENS_PER_SECOND: self._tokens_per_second,
            BUSY_SHARE: min(1.0, busy_seconds / elapsed) if elapsed > 0 else 0.0,
        }


def select_busiest(reports: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """One report for the several engines of a replica, each with threads of its own: that of the one with most to do.
    None of them may have too little, so that their mean would hide it."""

    def demand(report: Mapping[str, float]) -> float:
        load = ReplicaLoad(report[QUEUED_TOKENS], report[TOKENS_PER_SECOND], report[BUSY_SHARE])
        return load.busy_share + _queued_s(load) / DRAIN_S

    busiest_report = max(reports, key=demand, default=None)
    return dict(busiest_report) if busiest_report else {}


def autoscaling_config(min_replicas: int, max_replicas: int) -> dict[str, Any]:
    """Ray Serve's autoscaling_config, decided by `policy`."""
    return {
        "min_replicas": min_replicas,
        "initial_replicas": min_replicas,
        "max_replicas": max_replicas,
        "look_back_period_s": LOOK_BACK_PERIOD_S,
        "upscale_delay_s": UPSCALE_DELAY_S,
        "downscale_delay_s": DOWNSCALE_DELAY_S,
        "policy": {"policy_function": "serve.rollout.autoscaling:policy"},
    }


def policy(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """(wanted number of replicas, state to keep), as Ray Serve asks for them. As many as before where none reports."""
    metrics = context.aggregated_metrics or {}
    replicas = metrics.get(BUSY_SHARE, {})
    loads = [
        ReplicaLoad(
            metrics.get(QUEUED_TOKENS, {}).get(replica, 0.0), metrics.get(TOKENS_PER_SECOND, {}).get(replica, 0.0), busy
        )
        for replica, busy in replicas.items()
    ]
    num_replicas = desired_replicas(loads, context.target_num_replicas) if loads else context.target_num_replicas
    return num_replicas, context.policy_state


def desired_replicas(loads: Iterable[ReplicaLoad], current_replicas: int) -> int:
    """How many replicas the load wants, at least 1; `current_replicas` where that is neither too many nor too few."""
    demand = sum(load.busy_share + _queued_s(load) / DRAIN_S for load in loads)
    max_replicas = _replicas_at_utilization(demand, LOW_UTILIZATION)
    min_replicas = _replicas_at_utilization(demand, HIGH_UTILIZATION)
    return min(max(current_replicas, min_replicas), max_replicas)


def _queued_s(load: ReplicaLoad) -> float:
    """Seconds of work that wait for a replica."""
    return load.queued_tokens / load.tokens_per_second if load.tokens_per_second else 0.0


def _replicas_at_utilization(demand: float, utilization: float) -> int:
    """Replicas that would be busy for that share of their time; rounding must not add one."""
    return max(1, math.ceil(demand / utilization - 1e-9))
