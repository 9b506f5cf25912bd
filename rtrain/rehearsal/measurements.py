"""What a rehearsal has measured: its nodes, and two runs of one recipe beside each other."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rtrain.checkpoint import format as checkpoint_format
from rtrain.core.run_folder import Run
from rtrain.rehearsal.faults import Fault
from rtrain.rehearsal.machines.machine_registry import Machine
from rtrain.rehearsal.plan import Plan
from rtrain.verification import ledger

Arrays = Mapping[str, npt.NDArray[Any]]
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
class Resized:
    """What became of a run that lost a node at the cluster's cap, and got it back, beside one that did not: in float64
    and without dropout."""

    notice: Fault
    workers: Sequence[int]
    """How many each start had. The first may have fewer than the run may have: nodes come one after another."""
    update: int
    """The last one that both runs have a checkpoint of."""
    rows: Rows
    """Those of that update, of which the order is compared."""
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
        if self.rows.lost or self.rows.repeated or not (self.rows.agrees and self.rows.same_order):
            found.append("the run that was resized was trained on other rows than the steady one")
        if not self.difference <= SAME_WEIGHTS:
            found.append(f"the weights of the run that was resized are {self.difference:.1e} off the steady one's")
        if self.started > self.needed:
            found.append(f"{self.started} worker nodes were started for the resized run, where {self.needed} do")
        return [*found, *(f"left behind: {one}" for one in self.left_behind)]

    def text(self) -> str:
        rows = self.rows
        return (
            f"resized in float64: workers {', '.join(map(str, self.workers))}; training again "
            f"{self.notice.seconds_to_next_update:.1f} s after the notice; at update {self.update} {rows.lost} rows "
            f"lost, {rows.repeated} repeated, weights {self.difference:.1e} off a steady run's ({self.seconds:.0f} s)"
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


def compare_rows(control: Run, run: Run) -> Rows:
    found, undisturbed = ledger.check(run), ledger.check(control)
    agrees = found.passed and undisturbed.passed
    same = (found.order_digest, found.updates) == (undisturbed.order_digest, undisturbed.updates)
    return Rows(agrees, found.missing, found.repeated, same)


def compare_weights(control: Run, run: Run, same_workers: bool) -> Weights:
    """The newest checkpoints of two runs that have ended, compared."""
    ours, theirs = (_weights(one, max(checkpoint_format.updates(one.checkpoints))) for one in (run, control))
    identical = ours.keys() == theirs.keys() and all(
        ours[name].tobytes() == tensor.tobytes() for name, tensor in theirs.items()
    )
    norm = _norm(theirs)
    return Weights(identical, _norm(_apart(ours, theirs)) / norm if norm else 0.0, same_workers)


def compare_at(run: Run, control: Run, update: int) -> tuple[bool, float]:
    """Two runs' checkpoints of one update: whether their rows came in one order, and how far their weights are apart,
    over how far the control's have moved since its checkpoint before."""
    states = [
        checkpoint_format.read_state(checkpoint_format.path_of(one.checkpoints, update)) for one in (run, control)
    ]
    before = max(other for other in checkpoint_format.updates(control.checkpoints) if other < update)
    ours, theirs, start = _weights(run, update), _weights(control, update), _weights(control, before)
    moved = _norm(_apart(theirs, start))
    return states[0].ledger == states[1].ledger, _norm(_apart(ours, theirs)) / moved if moved else math.inf


def _weights(run: Run, update: int) -> Arrays:
    from safetensors.numpy import load_file

    return load_file(checkpoint_format.path_of(run.checkpoints, update) / "model.safetensors")


def _apart(ours: Arrays, theirs: Arrays) -> Arrays:
    """The differences, in float64; where one has a tensor that the other lacks, that itself."""
    wide = [{name: one.astype(np.float64) for name, one in tensors.items()} for tensors in (ours, theirs)]
    nothing = np.zeros(())
    return {name: np.asarray(wide[0].get(name, nothing) - wide[1].get(name, nothing)) for name in wide[0] | wide[1]}


def _norm(tensors: Arrays) -> float:
    return math.sqrt(sum(float(np.square(one.astype(np.float64)).sum()) for one in tensors.values()))
