"""Resource requests of a run to the autoscaler: bundles for all workers that it may have, and for its data tasks.

An autoscaler starts nodes for requested resources that do not fit. Runs of a fixed number of workers request them
through Ray Train's placement group. Elastic runs, and runs that wait for `min_workers`, request them here.

A request is a size of the whole cluster, and requests of several names add up: with Ray Train's own request for the
running workers, this one would start a node for each worker twice. So Ray Train's request is disabled
(`worker_pool.WorkerGroupSpec.requests_own_nodes`), and one request of constant size lasts from the start of a run to
its end. If it shrank for a moment, a live node that waits for the run to grow would be terminated as idle, and started
again. (A placement group would request only the missing resources, and take the CPUs of the data tasks while it waits;
Ray Data overwrites `ray.autoscaler.sdk.request_resources` within 20 s.)
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from rtrain.cluster import capacity, placement
from rtrain.cluster.capacity import WORKER_RESOURCE, AutoscalerLimits, Labels, NodeSpec, ResourceRequest

RENEW_INTERVAL_S, REQUEST_TTL_S = 15.0, 45.0
"""Seconds between renewals of a request, and until a request expires."""


# ---------------------------------------------------------------------------------------------------------- decisions


class ResourceBundle(NamedTuple):
    """Requested CPUs or GPUs, or a fraction of one, on one node."""

    resource: str
    labels: Labels = capacity.ANY_LABELS
    """Labels that the node must have."""
    amount: float = 1.0

    def fits_on(self, node: NodeSpec) -> bool:
        has_amount = node.resources.get(self.resource, 0.0) >= self.amount
        return has_amount and capacity.matches_labels(node.labels, self.labels)


def worker_bundle(request: ResourceRequest) -> ResourceBundle:
    return ResourceBundle(WORKER_RESOURCE[request.device], request.labels, request.gpu_share)


def run_bundles(
    max_workers: int, request: ResourceRequest, nodes: Sequence[NodeSpec], limits: AutoscalerLimits
) -> list[ResourceBundle]:
    """Build the bundles of a run's workers and data tasks, each of one CPU or GPU; empty if no worker can ever be
    placed.

    Args:
        max_workers: Maximum number of workers of the run.
        nodes: Live nodes.
        limits: Limits of the autoscaler; it rejects a request above its concurrent maximum as a whole.
    """
    workers = placement.max_workers(nodes, limits, request, max_workers)
    if not workers:
        return []
    data_bundle = ResourceBundle(WORKER_RESOURCE["cpu"], request.data_labels)
    return [worker_bundle(request)] * workers + [data_bundle] * request.capacity_for(workers).data_cpus


def describe_request(bundles: Sequence[ResourceBundle], limits: AutoscalerLimits, waited_s: float) -> str:
    """Describe the pending request, the node types that satisfy it, and the time waited (`waited_s`)."""
    amounts: dict[str, float] = {}
    for bundle in bundles:
        amounts[bundle.resource] = amounts.get(bundle.resource, 0.0) + bundle.amount
    resources = [f"{amount:g} {name}{'' if amount <= 1 else 's'}" for name, amount in sorted(amounts.items())]
    types = limits.node_types.items()
    names = sorted(name for name, (node, _) in types if any(bundle.fits_on(node) for bundle in bundles))
    return (
        f"waiting for the autoscaler: {' and '.join(resources)} on {' or '.join(names) or 'no'} nodes, for "
        f"{waited_s:.0f} s now"
    )


# ------------------------------------------------------------------------------------------------------------- asking


class ResourceRequestClient(Protocol):
    """Client of the autoscaler: `ray_internals.AutoscalingClient`, or a test double."""

    def request_resources(
        self, bundles: Sequence[dict[str, float]], labels: Sequence[dict[str, str]], expire_s: float
    ) -> None: ...

    def cancel_request(self) -> None: ...


class ResourceDemand:
    """The resource request of one run: sent when it is new or changes, renewed before it expires, cancelled at the end.
    Not thread-safe."""

    def __init__(self, client: ResourceRequestClient, clock: Callable[[], float] = time.monotonic):
        self._client, self._clock = client, clock
        self._bundles: list[ResourceBundle] = []
        self._requested_at = 0.0

    @property
    def bundles(self) -> list[ResourceBundle]:
        return list(self._bundles)

    def request(self, bundles: Sequence[ResourceBundle]) -> None:
        """Request these bundles, and nothing else."""
        now = self._clock()
        if not bundles:
            self.release()
            return
        if list(bundles) != self._bundles or now - self._requested_at >= RENEW_INTERVAL_S:
            self._bundles, self._requested_at = list(bundles), now
            resources = [{bundle.resource: bundle.amount} for bundle in bundles]
            self._client.request_resources(resources, [dict(bundle.labels) for bundle in bundles], REQUEST_TTL_S)

    def release(self) -> None:
        if self._bundles:
            self._bundles = []
            self._client.cancel_request()
