"""Which nodes an autoscaler may have up at a time that have room for a run.

The numbers of nodes are limited by type and over all types, workers run on nodes with their labels, and data tasks
beside them or elsewhere. The nodes with most GPUs may so leave no place for the CPUs of the data tasks: the numbers of
all types are looked for together, as an integer program. Pure.
"""

import math
from collections.abc import Sequence

from rtrain.cluster.capacity import Host, Needs, Room, Startable, largest


def numbers(
    offers: Sequence[Room], most: Sequence[int], limit: int, lacking: Room, prices: Sequence[float]
) -> list[int] | None:
    """How many nodes of each type have what is lacking, at the least price; None where no numbers have.

    `offers`: what a node of each type has. `most`: how many of each there may be, `limit` of all together.
    """
    if not any(lack > 0 for lack in lacking):
        return [0] * len(offers)
    if not offers or not Room(*(limit * max(has) for has in zip(*offers, strict=True))).holds(lacking):
        return None
    if len(offers) == 1:  # the commonest case, without half a second of imports
        number = max(math.ceil(lack / has) for lack, has in zip(lacking, offers[0], strict=True) if lack > 0)
        return [number] if number <= min(limit, *most) else None
    from scipy.optimize import Bounds, LinearConstraint, milp

    enough = LinearConstraint([*zip(*offers, strict=True)], lb=lacking)
    together = LinearConstraint([[1] * len(offers)], ub=limit)
    found = milp(prices, integrality=1, bounds=Bounds(0, most), constraints=[enough, together])
    return None if found.x is None else [round(number) for number in found.x]


def holds(may: Startable, needs: Needs, need: Room) -> bool:
    """Whether nodes that may be up together have room for `need`, which is of `needs`."""
    base, offers = needs.offered(may.heads), [needs.offered([host]) for host, _ in may.kinds.values()]
    most, prices = [most for _, most in may.kinds.values()], [1] * len(offers)
    return numbers(offers, most, may.limit, need.beyond(base), prices) is not None


def workers(hosts: Sequence[Host], may: Startable, needs: Needs, at_most: int) -> int:
    """How many workers of a run, up to `at_most`, have room beside their data tasks: on the nodes that are up, or on
    those that may be up together."""
    up = needs.most(hosts, at_most)
    return up if up == at_most else max(up, largest(at_most, lambda number: holds(may, needs, needs.of(number))))


def runs(hosts: Sequence[Host], may: Startable, needs: Needs, each: int) -> int:
    """How many runs of `each` workers have room at a time, with their data tasks; 0 where one has none."""
    room = needs.offered(hosts)
    kinds = [needs.offered([host]).places * min(most, may.limit) for host, most in may.kinds.values()]
    at_most = max(room.places, needs.offered(may.heads).places + sum(kinds)) // each
    up = largest(at_most, lambda number: room.holds(needs.of(each, number)))
    return max(up, largest(at_most, lambda number: holds(may, needs, needs.of(each, number))))


def told(may: Startable, needs: Needs) -> str:
    """The types of node that have something of what is needed, and how many of them there may be."""
    listed = []
    for name, (host, most) in may.kinds.items():
        if any(needs.offered([host])):
            has = " and ".join(f"{host.has[one]:g} {one}" for one in ("GPU", "CPU") if host.has.get(one))
            listed.append(f"{name} ({has}{f'; max_workers: {most}' if most < may.limit else ''})")
    return f"{', '.join(listed) or 'no node type'}; max_workers: {may.limit} over all types"


def remedy(may: Startable, needs: Needs, need: Room) -> str:
    """What to change of the autoscaler's file so that there is room for `need`."""
    many = sum(need)
    if holds(may._replace(limit=many), needs, need):
        return f"raise max_workers, {may.limit} over all types,"
    for name, (host, most) in may.kinds.items():
        if holds(may._replace(kinds={**may.kinds, name: (host, many)}), needs, need):
            return f"raise max_workers of {name}, {most},"
    free = {name: (host, many) for name, (host, _) in may.kinds.items()}
    if holds(Startable(may.heads, free, many), needs, need):
        return "raise max_workers, of these types and over all types,"
    return "add a node type that has what is lacking,"
