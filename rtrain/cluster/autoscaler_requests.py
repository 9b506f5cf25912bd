"""What a run asks an autoscaler for: places for all workers that it may have, and for its data tasks.

An autoscaler starts nodes for what is asked for and has no place. Workers of a fixed number ask by themselves, where
Ray Train places them. A run that waits for its least number, or goes on with fewer than it may have, asks here.

What is asked for is a size of the whole cluster, and requests of several names add up: beside Ray Train's own, for the
workers that run, this one would start a node for each of them twice. So Ray Train does not ask (`group.Layout.asked`),
and one request of one size stands from the start of a run to its end. Were it smaller for a moment, a node that is up
and waits for the run to grow onto it would be ended as idle, and started again. (A placement group would ask for
exactly what is lacking, and take the CPUs of the data tasks while it waits; `ray.autoscaler.sdk.request_resources` is
overwritten by Ray Data within 20 s.)
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from rtrain.cluster import capacity, placement
from rtrain.cluster.capacity import NEEDS, Host, Labels, Needs, Startable

REPEAT_S, EXPIRE_S = 15.0, 45.0
"""Seconds after which a request is given again, and after which one that is not ends by itself."""


# ---------------------------------------------------------------------------------------------------------- decisions


class Place(NamedTuple):
    """A CPU or GPU that is asked for; or several, or a part of one, on one node."""

    resource: str
    labels: Labels = capacity.ANY
    """Those that its node must have."""
    amount: float = 1.0

    def fits(self, host: Host) -> bool:
        return host.has.get(self.resource, 0.0) >= self.amount and capacity.has(host.labels, self.labels)


def of_worker(needs: Needs) -> Place:
    return Place(NEEDS[needs.device], needs.labels, needs.share)


def places(most: int, needs: Needs, hosts: Sequence[Host], may: Startable) -> list[Place]:
    """The places of a run's workers and data tasks, each of one CPU or GPU; none where no worker will ever have one.

    `most`: workers that the run may have. `hosts`: the nodes that are up. `may`: what may be started; an autoscaler
    that is asked for more than it may start at a time starts none of it.
    """
    workers = placement.workers(hosts, may, needs, most)
    if not workers:
        return []
    spare = needs.of(workers).data
    return [of_worker(needs)] * workers + [Place(NEEDS["cpu"], needs.data_labels)] * spare


def told(asked: Sequence[Place], may: Startable, seconds: float) -> str:
    """What is waited for, with which types of node, and for how long: `seconds` since the waiting began."""
    counts: dict[str, float] = {}
    for place in asked:
        counts[place.resource] = counts.get(place.resource, 0.0) + place.amount
    listed = " and ".join(f"{count:g} {name}{'' if count <= 1 else 's'}" for name, count in sorted(counts.items()))
    named = sorted(name for name, (host, _) in may.kinds.items() if any(place.fits(host) for place in asked))
    return f"the autoscaler is asked for {listed} on {' or '.join(named) or 'no'} nodes, for {seconds:.0f} s now"


# ------------------------------------------------------------------------------------------------------------- asking


class Asked(Protocol):
    """Who takes requests: `ray_internals.Requests`, or a test."""

    def ask(self, bundles: Sequence[dict[str, float]], labels: Sequence[dict[str, str]], expire_s: float) -> None: ...

    def take_back(self) -> None: ...


class Demand:
    """The request of one run: given when it is new or changes, repeated before it expires, taken back at the end.

    Not for several threads.
    """

    def __init__(self, requests: Asked, clock: Callable[[], float] = time.monotonic):
        self._requests, self._clock = requests, clock
        self._places: list[Place] = []
        self._last = 0.0

    @property
    def places(self) -> list[Place]:
        return list(self._places)

    def want(self, places: Sequence[Place]) -> None:
        """Ask for these, and for nothing else."""
        now = self._clock()
        if not places:
            self.end()
            return
        if list(places) != self._places or now - self._last >= REPEAT_S:
            self._places, self._last = list(places), now
            bundles = [{place.resource: place.amount} for place in places]
            self._requests.ask(bundles, [dict(place.labels) for place in places], EXPIRE_S)

    def end(self) -> None:
        if self._places:
            self._places = []
            self._requests.take_back()
