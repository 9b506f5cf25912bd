"""Nodes that may be up together: what is found, beside all there are."""

import itertools
from typing import Any

from hypothesis import given, settings, strategies

from rtrain.cluster import capacity, placement
from rtrain.cluster.capacity import Host, Needs, Room

AMOUNTS = strategies.integers(0, 4)
KINDS = strategies.lists(strategies.tuples(AMOUNTS, AMOUNTS, strategies.booleans(), AMOUNTS), min_size=1, max_size=3)


def startable(kinds: list[tuple[int, int, bool, int]], limit: int, head: int) -> capacity.Startable:
    """By type its CPUs, its GPUs, whether it has the workers' label, and how many there may be."""
    types: dict[str, Any] = {
        f"{place}": {
            "resources": {"CPU": cpus, "GPU": gpus},
            "labels": {"for": "workers"} if labelled else {},
            "max_workers": most,
        }
        for place, (cpus, gpus, labelled, most) in enumerate(kinds)
    }
    types["head"] = {"resources": {"CPU": head}}
    return capacity.startable({"max_workers": limit, "head_node_type": "head", "available_node_types": types})


def together(may: capacity.Startable) -> list[list[Host]]:
    """All clusters that there can be."""
    ranges = [range(min(most, may.limit) + 1) for _, most in may.kinds.values()]
    return [
        [*may.heads, *(host for (host, _), count in zip(may.kinds.values(), counts, strict=True) for _ in range(count))]
        for counts in itertools.product(*ranges)
        if sum(counts) <= may.limit
    ]


def placed(hosts: list[Host], needs: Needs, workers: int, runs: int = 1) -> bool:
    """Whether workers and data tasks find places one by one: workers first where no data task may run."""
    spare = runs * needs.of(workers).data
    free, left = [], runs * workers
    for host in hosts:
        cpus, gpus = (int(host.has.get(name, 0)) for name in ("CPU", "GPU"))
        own, of_data = capacity.has(host.labels, needs.labels), capacity.has(host.labels, needs.data_labels)
        if needs.device == "gpu":
            left -= gpus if own else 0
            spare -= cpus if of_data else 0
        elif own and of_data:
            free.append(cpus)
        elif own:
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
    may, needs = startable(kinds, limit, head), Needs(device, None, labels, data_labels)
    clusters = together(may)
    best = max((n for n in range(1, 17) if any(placed(one, needs, n) for one in clusters)), default=0)
    assert placement.workers([], may, needs, 16) == best
    runs = max((n for n in range(1, 17) if any(placed(one, needs, 2, n) for one in clusters)), default=0)
    assert placement.runs([], may, needs, 2) == runs
    if best < 16:
        assert placement.remedy(may, needs, needs.of(best + 1))
    for one in clusters:
        assert needs.most(one, 16) <= best


def test_the_cheapest_nodes_are_taken_and_of_equal_ones_the_limit_is_kept() -> None:
    offers = [Room(1, 0, 0), Room(0, 8, 0), Room(2, 3, 0)]
    assert placement.numbers(offers, [4, 4, 4], 1, Room(4, 2, 0), [1, 1, 5]) is None
    assert placement.numbers(offers, [4, 4, 4], 4, Room(4, 2, 0), [1, 1, 5]) == [2, 0, 1]
    assert placement.numbers(offers, [4, 4, 4], 5, Room(4, 2, 0), [1, 1, 5]) == [4, 1, 0]
    assert placement.numbers(offers, [4, 4, 4], 5, Room(4, 2, 0), [1, 1, 0.5]) == [0, 0, 2]
    assert placement.numbers(offers, [4, 4, 4], 0, Room(0, -2, 0), [1, 1, 1]) == [0, 0, 0]
