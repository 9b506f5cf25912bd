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
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from rtrain.cluster import supply
from rtrain.cluster.supply import NEEDS, Node

Bundle = Mapping[str, float]
REPEAT_S, EXPIRE_S = 15.0, 45.0
"""Seconds after which a request is given again, and after which one that is not ends by itself."""


# ---------------------------------------------------------------------------------------------------------- decisions


def places(most: int, asked: int | None, device: str, may: Sequence[Node]) -> list[Bundle]:
    """The places of a run, each of one CPU or GPU; none where no worker will ever have one.

    `most`: workers that the run may have. `asked`: the setting `cluster.data_cpus`. `may`: the nodes that there can be,
    with those that are up: an autoscaler that is asked for more than these starts none of it.
    """
    workers = min(most, supply.fits(may, device, asked))
    data: list[Bundle] = [{NEEDS["cpu"]: 1.0}] * supply.data_cpus(asked, workers)
    return [{NEEDS[device]: 1.0}] * workers + data if workers else []


def told(bundles: Sequence[Bundle], types: Mapping[str, Node], seconds: float) -> str:
    """What is waited for, with which types of node, and for how long."""
    counts: dict[str, int] = {}
    for bundle in bundles:
        for name in bundle:
            counts[name] = counts.get(name, 0) + 1
    listed = " and ".join(f"{count} {name}{'' if count == 1 else 's'}" for name, count in sorted(counts.items()))
    named = sorted(name for name, node in types.items() if any(node.get(need, 0.0) >= 1 for need in counts))
    return f"the autoscaler is asked for {listed} on {' or '.join(named) or 'no'} nodes, for {seconds:.0f} s now"


# ------------------------------------------------------------------------------------------------------------- asking


class Asked(Protocol):
    """Who takes requests: `ray_internals.Requests`, or a test."""

    def ask(self, bundles: Sequence[Bundle], labels: Mapping[str, str], expire_s: float) -> None: ...

    def take_back(self) -> None: ...


class Demand:
    """The request of one run: given when it is new or changes, repeated before it expires, taken back at the end.

    Not for several threads.
    """

    def __init__(
        self, requests: Asked, labels: Mapping[str, str] = supply.ANY, clock: Callable[[], float] = time.monotonic
    ):
        """`labels`: those that the nodes must have."""
        self._requests, self.labels, self._clock = requests, labels, clock
        self._bundles: list[Bundle] = []
        self._since = self._last = 0.0

    @property
    def bundles(self) -> list[Bundle]:
        return list(self._bundles)

    @property
    def seconds(self) -> float:
        """For how long something has been asked for; 0 where nothing is."""
        return self._clock() - self._since if self._bundles else 0.0

    def want(self, bundles: Sequence[Bundle]) -> None:
        """Ask for these, and for nothing else."""
        now = self._clock()
        if not bundles:
            self.end()
            return
        if not self._bundles:
            self._since = now
        if list(bundles) != self._bundles or now - self._last >= REPEAT_S:
            self._bundles, self._last = list(bundles), now
            self._requests.ask(self._bundles, self.labels, EXPIRE_S)

    def end(self) -> None:
        if self._bundles:
            self._bundles = []
            self._requests.take_back()
