"""Seconds in which workers sum their gradients, by the wires between them: alpha for each step, and the bytes over the
bandwidth. Pure.

A ring (Patarasuk and Yuan 2009) makes 2 (n - 1) steps, and each worker sends 2 (n - 1) / n of the bytes. A tree
(Sanders et al. 2009) makes 2 log2(n) steps, and each worker sends the bytes twice: up, and down again.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

GBIT: Final = 1e9 / 8
PAYLOAD: Final = 0.94
"""Share of a network's bits that are not headers, with frames of 1,500 bytes over TCP."""


@dataclass(frozen=True)
class Link:
    """What a worker sends through. Each has one of its own, and sends and receives at a time."""

    name: str
    base_s: float
    """Seconds of any exchange, however small."""
    ring_s: float
    """Seconds of a step of a ring beside those of its bytes."""
    tree_s: float
    """The same of a tree."""
    bytes_per_s: float


# Seconds: NCCL's own constants for large messages (its `Simple` protocol, `ncclTunerConstantsDefaults` in tuning.cc).
# Bytes: NVLink is what NCCL reaches on an A100; PCIe a slot of 16 lanes of the third generation, as delivered; EFA the
# four cards of a p4d.24xlarge, 400 Gbit/s. TCP's 50 us are between two hosts of a cloud's zone.
PRESETS: Final[Mapping[str, Link]] = {
    link.name: link
    for link in (
        Link("nvlink", 8.4e-6, 3.4e-6, 4.0e-6, 240e9),
        Link("pcie", 8.4e-6, 5.7e-6, 4.0e-6, 12e9),
        Link("efa", 8.4e-6, 14.0e-6, 14.0e-6, 400 * GBIT * PAYLOAD),
        Link("100gbit", 100e-6, 50e-6, 50e-6, 100 * GBIT * PAYLOAD),
        Link("25gbit", 100e-6, 50e-6, 50e-6, 25 * GBIT * PAYLOAD),
        Link("10gbit", 100e-6, 50e-6, 50e-6, 10 * GBIT * PAYLOAD),
        Link("1gbit", 100e-6, 50e-6, 50e-6, 1 * GBIT * PAYLOAD),
    )
}


def ring(size: float, workers: int, link: Link) -> float:
    """Seconds in which `workers` sum `size` bytes around a ring."""
    if workers < 2:
        return 0.0
    return link.base_s + 2 * (workers - 1) * (link.ring_s + size / workers / link.bytes_per_s)


def tree(size: float, workers: int, link: Link) -> float:
    """The same over a tree, whose steps overlap but for their latency."""
    if workers < 2:
        return 0.0
    return link.base_s + 2 * math.ceil(math.log2(workers)) * link.tree_s + 2 * size / link.bytes_per_s


def quickest(size: float, workers: int, link: Link) -> tuple[str, float]:
    """`ring` or `tree`, whichever takes less, as NCCL chooses; and its seconds."""
    found = {"ring": ring(size, workers, link), "tree": tree(size, workers, link)}
    name = min(found, key=lambda one: found[one])
    return name, found[name]


@dataclass(frozen=True)
class Fabric:
    """The wires of a cluster: those within a node, and one way out of each node that its workers share."""

    inside: Link
    between: Link
    per_node: int = 1
    """Workers of a node."""

    def seconds(self, size: float, workers: int, groups: int = 1) -> float:
        """Seconds of an exchange of `size` bytes. Over several nodes: summed within each, so that each of its workers
        has a part, the parts between the nodes, side by side, and given to all within each again.

        `groups` do the same at a time, of neighbours one each, and share their nodes' ways out.
        """
        within = max(1, self.per_node // groups)
        nodes = math.ceil(workers / within)
        if nodes < 2:
            return quickest(size, workers, self.inside)[1]
        out = quickest(size * min(groups, self.per_node), nodes, self.between)[1]
        return quickest(size, min(workers, within), self.inside)[1] + out

    def sent(self, size: float, workers: int) -> float:
        """Seconds in which `size` bytes go from one of `workers` neighbours to the next."""
        link = self.inside if workers <= self.per_node else self.between
        return link.ring_s + size / link.bytes_per_s


def uniform(link: Link) -> Fabric:
    """All workers have the same wires."""
    return Fabric(link, link)
