"""Find node counts of an autoscaler that have capacity for a run. Pure.

Counts are limited by type and in total. Workers need nodes with their labels; data tasks may share those nodes or use
others.
Choosing the nodes with the most GPUs first may leave no CPUs for the data tasks, so all counts are solved together as
an integer program.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

from rtrain.cluster.capacity import (
    WORKER_RESOURCE,
    AutoscalerLimits,
    Capacity,
    NodeSpec,
    ResourceRequest,
    largest_feasible,
)


def cheapest_node_counts(
    capacities: Sequence[Capacity],
    max_counts: Sequence[int],
    max_nodes: int,
    missing: Capacity,
    prices: Sequence[float],
) -> list[int] | None:
    """Cheapest node counts by type that cover the missing capacity; None if impossible. `capacities`: capacity of a
    node of each type. `max_counts`: maximum count of each type, `max_nodes` of all types."""
    if not any(lack > 0 for lack in missing):
        return [0] * len(capacities)
    if not capacities or not Capacity(*(max_nodes * max(has) for has in zip(*capacities, strict=True))).covers(missing):
        return None
    if len(capacities) == 1:  # the common case avoids half a second of imports
        count = max(math.ceil(lack / has) for lack, has in zip(missing, capacities[0], strict=True) if lack > 0)
        return [count] if count <= min(max_nodes, *max_counts) else None
    from scipy.optimize import Bounds, LinearConstraint, milp

    capacity_constraint = LinearConstraint([*zip(*capacities, strict=True)], lb=missing)
    total_constraint = LinearConstraint([[1] * len(capacities)], ub=max_nodes)
    solution = milp(
        prices, integrality=1, bounds=Bounds(0, max_counts), constraints=[capacity_constraint, total_constraint]
    )
    return None if solution.x is None else [round(number) for number in solution.x]


def min_node_counts(limits: AutoscalerLimits, request: ResourceRequest, required: Capacity) -> list[int] | None:
    """Fewest nodes by type, beside the head, with capacity for `required`, a multiple of `request`; None if
    impossible."""
    missing = required.minus(request.capacity_of(limits.head_nodes))
    capacities = [request.capacity_of([node]) for node, _ in limits.node_types.values()]
    max_counts = [max_count for _, max_count in limits.node_types.values()]
    return cheapest_node_counts(capacities, max_counts, limits.max_nodes, missing, [1] * len(capacities))


def max_workers(nodes: Sequence[NodeSpec], limits: AutoscalerLimits, request: ResourceRequest, upper_bound: int) -> int:
    """Maximum workers of a run, up to `upper_bound`, that fit beside their data tasks: on the live nodes, or on the
    most the autoscaler may run at once."""
    live_workers = request.max_workers(nodes, upper_bound)
    if live_workers == upper_bound:
        return live_workers
    return max(live_workers, _max_startable(limits, request, upper_bound, request.capacity_for))


def max_concurrent_runs(
    nodes: Sequence[NodeSpec], limits: AutoscalerLimits, request: ResourceRequest, workers_per_run: int
) -> int:
    """Maximum concurrent runs of `workers_per_run` workers with their data tasks; 0 if none fits."""
    available, required = request.capacity_of(nodes), partial(request.capacity_for, workers_per_run)
    startable_slots = request.capacity_of(limits.head_nodes).worker_slots + sum(
        request.capacity_of([node]).worker_slots * min(max_count, limits.max_nodes)
        for node, max_count in limits.node_types.values()
    )
    upper_bound = max(available.worker_slots, startable_slots) // workers_per_run
    live_runs = largest_feasible(upper_bound, lambda runs: available.covers(required(runs)))
    return max(live_runs, _max_startable(limits, request, upper_bound, required))


def _max_startable(
    limits: AutoscalerLimits, request: ResourceRequest, upper_bound: int, required: Callable[[int], Capacity]
) -> int:
    return largest_feasible(upper_bound, lambda number: min_node_counts(limits, request, required(number)) is not None)


def explain_shortage(limits: AutoscalerLimits, request: ResourceRequest, workers: int) -> tuple[str, str]:
    """Why the most nodes that the autoscaler may run at once cannot place `workers` workers, and a change of its
    file."""
    required, resource = request.capacity_for(workers), WORKER_RESOURCE[request.device]
    amount = f"one {resource}" if request.gpu_share == 1 else f"{request.gpu_share:g} of a GPU"
    reason = (
        f"the nodes that the autoscaler may run at once do not have {amount} for each of {workers} workers and "
        f"{required.data_cpus} CPUs for their data tasks; the limits are {describe_limits(limits, request)}"
    )
    return reason, suggest_fix(limits, request, required)


def describe_limits(limits: AutoscalerLimits, request: ResourceRequest) -> str:
    """Describe the node types with useful capacity, and their maximum counts."""
    descriptions = []
    for name, (node, max_count) in limits.node_types.items():
        if any(request.capacity_of([node])):
            amounts = [f"{node.resources[key]:g} {key}" for key in ("GPU", "CPU") if node.resources.get(key)]
            limit = f"; max_workers: {max_count}" if max_count < limits.max_nodes else ""
            descriptions.append(f"{name} ({' and '.join(amounts)}{limit})")
    return f"{', '.join(descriptions) or 'no node type'}; max_workers: {limits.max_nodes} over all types"


def suggest_fix(limits: AutoscalerLimits, request: ResourceRequest, required: Capacity) -> str:
    """Suggest a change of the autoscaler's file that gives capacity for `required`. Return a clause, with a comma at
    its end, e.g. 'raise max_workers, 4 over all types,'."""
    total = sum(required)  # an upper bound of nodes: each gives at least 1

    def suffices(changed_limits: AutoscalerLimits) -> bool:
        return min_node_counts(changed_limits, request, required) is not None

    if suffices(limits._replace(max_nodes=total)):
        return f"raise max_workers, {limits.max_nodes} over all types,"
    for name, (node, max_count) in limits.node_types.items():
        if suffices(limits._replace(node_types={**limits.node_types, name: (node, total)})):
            return f"raise max_workers of {name}, {max_count},"
    unlimited_types = {name: (node, total) for name, (node, _) in limits.node_types.items()}
    if suffices(AutoscalerLimits(limits.head_nodes, unlimited_types, total)):
        return "raise max_workers, of these types and over all types,"
    return "add a node type with the missing resources,"
