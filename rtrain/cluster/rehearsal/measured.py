"""What a rehearsal has measured, part by part. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rtrain.cluster.rehearsal.faults import Fault
from rtrain.cluster.rehearsal.machines.book import Machine
from rtrain.cluster.rehearsal.plan import Plan

SAME_WEIGHTS = 1e-8
"""Most that the weights of two layouts may differ in float64, where sums are added in another order."""
ENDS = {"terminated": "idle", "left": "by itself", "killed": "killed", "down": "taken down"}


@dataclass(frozen=True)
class Node:
    """A machine, as the certificate tells of it. Times are seconds since the rehearsal began."""

    name: str
    type: str
    asked: float
    joined: float | None
    """When it was a node of the cluster; None where it never was."""
    ended: float
    end: str
    dollars: float | None
    """What so many seconds of it would cost, on demand; None where its price is not known."""

    @property
    def seconds_to_join(self) -> float | None:
        return None if self.joined is None else round(self.joined - self.asked, 1)


@dataclass(frozen=True)
class Rows:
    """Which rows the disturbed run was trained on, by its ledger."""

    agrees: bool
    """Whether everything that the run wrote down is in the ledger that is computed anew."""
    lost: int
    repeated: int
    same_order: bool
    """Whether they came in the order of the undisturbed run."""


@dataclass(frozen=True)
class Weights:
    """The last weights of the disturbed run beside those of the undisturbed one."""

    identical: bool
    difference: float
    """Norm of the difference, over the norm of the weights."""
    same_workers: bool
    """Whether every start had the workers of the undisturbed run: then the weights must be identical. Else they are
    equal up to rounding where nothing is dropped, and with dropout as far apart as two masks make them."""


@dataclass(frozen=True)
class Served:
    """What became of the endpoint."""

    seconds: float
    """From the request for the job until it answered."""
    replicas: int
    nodes: int
    """On so many of them replicas were."""
    asked: int
    answers: int
    equal: int
    """Answers that are those of `rtrain predict`."""
    refused: int
    """Requests that were asked again, as nobody took them, or the node that did was lost."""
    lost: str | None
    """The node that was cut off in the middle; None where the replicas were on one node alone."""
    longest_s: float
    """The longest time for which a client waited, with its requests that were asked again."""
    stopped_s: float
    """From the request to stop until the job had ended."""
    cut: int
    """Requests that were taken after that, and not answered."""

    def problems(self) -> list[str]:
        found = []
        if self.answers < self.asked:
            found.append(f"the endpoint answered {self.answers} of {self.asked} requests")
        if self.equal < self.answers:
            found.append(f"{self.answers - self.equal} answers of the endpoint are not those of rtrain predict")
        if self.cut:
            found.append(f"{self.cut} requests were taken and not answered when the endpoint was stopped")
        return found

    def text(self) -> str:
        lost = f"; {self.lost} cut off in the middle, {self.refused} requests asked again" if self.lost else ""
        return (
            f"served by {self.replicas} replicas on {self.nodes} nodes after {self.seconds:.0f} s: {self.answers} "
            f"answers to {self.asked} requests, {self.equal} as rtrain predict gives them, the longest after "
            f"{self.longest_s:.1f} s{lost}; stopped within {self.stopped_s:.0f} s, {self.cut} requests cut"
        )


@dataclass(frozen=True)
class Resized:
    """What became of a run that lost a node at the cluster's cap, and got it back, beside one that did not: in float64
    and without dropout."""

    notice: Fault
    workers: Sequence[int]
    """How many each start had. The first may have fewer than the run may have: nodes come one after another."""
    update: int
    """The last one that both runs have a checkpoint of."""
    agrees: bool
    """Whether everything that the run wrote down is in the ledger that is computed anew."""
    lost: int
    repeated: int
    same_order: bool
    difference: float
    """Norm of the difference of both runs' weights, over how far the steady run's weights moved in its second half."""
    started: int
    needed: int
    """Worker nodes that were started, and that had to be."""
    seconds: float
    left_behind: Sequence[str]

    def problems(self) -> list[str]:
        found = [f"the run that was to go on smaller, its notice: {problem}" for problem in self.notice.problems()]
        most = max(self.workers)
        if min(self.workers[self.workers.index(most) :]) == most or self.workers[-1] != most:
            found.append(f"the run was to go on smaller and to grow again; its starts had {list(self.workers)} workers")
        if self.lost or self.repeated or not (self.agrees and self.same_order):
            found.append("the run that was resized was trained on other rows than the steady one")
        if not self.difference <= SAME_WEIGHTS:
            found.append(f"the weights of the run that was resized are {self.difference:.1e} off the steady one's")
        if self.started > self.needed:
            found.append(f"{self.started} worker nodes were started for the resized run, where {self.needed} do")
        return [*found, *(f"left behind: {one}" for one in self.left_behind)]

    def text(self) -> str:
        return (
            f"resized in float64: workers {', '.join(map(str, self.workers))}; training again "
            f"{self.notice.seconds_to_next_update:.1f} s after the notice; at update {self.update} {self.lost} rows "
            f"lost, {self.repeated} repeated, weights {self.difference:.1e} off a steady run's ({self.seconds:.0f} s)"
        )


def nodes_of(
    machines: Mapping[str, Machine], joined: Mapping[str, float], plan: Plan, faults: Sequence[Fault], begin: float
) -> list[Node]:
    """The machines of a rehearsal that began at `begin` (seconds since 1970), all of which have ended."""
    met = {fault.node: {"notice": "spot notice", "kill": "killed"}[fault.kind] for fault in faults}
    found = []
    for name, one in machines.items():
        ended, price = one.ended or one.asked, plan.by_name[one.type].dollars
        dollars = None if price is None else round((ended - one.asked) / 3600 * price, 6)
        up = round(joined[name] - begin, 1) if name in joined else None
        end = met.get(name, ENDS[one.why or "down"])
        found.append(Node(name, one.type, round(one.asked - begin, 1), up, round(ended - begin, 1), end, dollars))
    return found


def most_at_a_time(nodes: Sequence[Node]) -> int:
    """The most of these nodes that there were at one moment. One that is taken counts until it has ended."""
    return max((sum(one.asked <= node.asked < one.ended for one in nodes) for node in nodes), default=0)


def dollars_between(nodes: Sequence[Node], begin: float, end: float) -> float | None:
    """What these nodes cost from `begin` to `end`, seconds since the rehearsal began; None where a price is not
    known."""
    total = 0.0
    for node in nodes:
        if node.dollars is None:
            return None
        there = min(end, node.ended) - max(begin, node.asked)
        total += node.dollars * max(0.0, there) / max(node.ended - node.asked, 1e-9)
    return round(total, 6)
