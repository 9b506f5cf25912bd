"""Nodes that may be up together, compared with brute force."""

import itertools
from typing import Any

from hypothesis import given, settings, strategies

from rtrain.cluster import capacity, placement
from rtrain.cluster.capacity import Capacity, NodeSpec, ResourceRequest

AMOUNTS = strategies.integers(0, 4)
KINDS = strategies.lists(strategies.tuples(AMOUNTS, AMOUNTS, strategies.booleans(), AMOUNTS), min_size=1, max_size=3)


def test_a_shortage_names_the_share_of_a_gpu_that_each_worker_needs() -> None:
    may = startable([(8, 1, True, 2)], limit=2, head=4)

    def reason(share: float) -> str:
        return placement.explain_shortage(may, ResourceRequest("gpu", data_cpus=2, gpu_share=share), 9)[0]

    assert "do not have one GPU for each of 9 workers and 2 CPUs for their data tasks" in reason(1.0)
    assert "do not have 0.25 of a GPU for each of 9 workers" in reason(0.25)


def startable(kinds: list[tuple[int, int, bool, int]], limit: int, head: int) -> capacity.AutoscalerLimits:
    """Node types: CPUs, GPUs, whether it has the workers' label, maximum count."""
    types: dict[str, Any] = {
        f"{place}": {
            "resources": {"CPU": cpus, "GPU": gpus},
            "labels": {"for": "workers"} if labelled else {},
            "max_workers": most,
        }
        for place, (cpus, gpus, labelled, most) in enumerate(kinds)
    }
    types["head"] = {"resources": {"CPU": head}}
    return capacity.parse_autoscaler_limits(
        {"max_workers": limit, "head_node_type": "head", "available_node_types": types}
    )


def together(may: capacity.AutoscalerLimits) -> list[list[NodeSpec]]:
    """All clusters that there can be."""
    ranges = [range(min(most, may.max_nodes) + 1) for _, most in may.node_types.values()]
    return [
        [
            *may.head_nodes,
            *(host for (host, _), count in zip(may.node_types.values(), counts, strict=True) for _ in range(count)),
        ]
        for counts in itertools.product(*ranges)
        if sum(counts) <= may.max_nodes
    ]


def placed(hosts: list[NodeSpec], needs: ResourceRequest, workers: int, runs: int = 1) -> bool:
    """Whether workers and data tasks find places one by one: workers first where no data task may run."""
    spare = runs * needs.capacity_for(workers).data_cpus
    free, left = [], runs * workers
    for host in hosts:
        cpus, gpus = (int(host.resources.get(name, 0)) for name in ("CPU", "GPU"))
        has_worker_labels, of_data = (
            capacity.matches_labels(host.labels, needs.labels),
            capacity.matches_labels(host.labels, needs.data_labels),
        )
        if needs.device == "gpu":
            left -= gpus if has_worker_labels else 0
            spare -= cpus if of_data else 0
        elif has_worker_labels and of_data:
            free.append(cpus)
        elif has_worker_labels:
            left -= cpus
        elif of_data:
            spare -= cpus
    return max(0, left) + max(0, spare) <= sum(free)


@settings(max_examples=80, deadline=None)
@given(
    kinds=KINDS,
    limit=strategies.integers(0, 4),
    head=AMOUNTS,
    device=strategies.sampled_from(["cpu", "gpu"]),
    labels=strategies.sampled_from([{}, {"for": "workers"}]),
    data_labels=strategies.sampled_from([{}, {"for": "workers"}]),
)
def test_as_many_have_room_as_on_the_best_of_all_clusters(
    kinds: list[tuple[int, int, bool, int]],
    limit: int,
    head: int,
    device: str,
    labels: dict[str, str],
    data_labels: dict[str, str],
) -> None:
    may, needs = startable(kinds, limit, head), ResourceRequest(device, None, labels, data_labels)
    clusters = together(may)
    best = max((n for n in range(1, 17) if any(placed(cluster, needs, n) for cluster in clusters)), default=0)
    assert placement.max_workers([], may, needs, 16) == best
    runs = max((n for n in range(1, 17) if any(placed(cluster, needs, 2, n) for cluster in clusters)), default=0)
    assert placement.max_concurrent_runs([], may, needs, 2) == runs
    if best < 16:
        assert placement.suggest_fix(may, needs, needs.capacity_for(best + 1))
    for item in clusters:
        assert needs.max_workers(item, 16) <= best
    if best:
        min_nodes = min(len(cluster) for cluster in clusters if placed(cluster, needs, best)) - len(may.head_nodes)
        assert sum(placement.min_node_counts(may, needs, needs.capacity_for(best)) or ()) == min_nodes


def test_the_cheapest_nodes_are_taken_and_of_equal_ones_the_limit_is_kept() -> None:
    offers = [Capacity(1, 0, 0), Capacity(0, 8, 0), Capacity(2, 3, 0)]
    assert placement.cheapest_node_counts(offers, [4, 4, 4], 1, Capacity(4, 2, 0), [1, 1, 5]) is None
    assert placement.cheapest_node_counts(offers, [4, 4, 4], 4, Capacity(4, 2, 0), [1, 1, 5]) == [2, 0, 1]
    assert placement.cheapest_node_counts(offers, [4, 4, 4], 5, Capacity(4, 2, 0), [1, 1, 5]) == [4, 1, 0]
    assert placement.cheapest_node_counts(offers, [4, 4, 4], 5, Capacity(4, 2, 0), [1, 1, 0.5]) == [0, 0, 2]
    assert placement.cheapest_node_counts(offers, [4, 4, 4], 0, Capacity(0, -2, 0), [1, 1, 1]) == [0, 0, 0]
