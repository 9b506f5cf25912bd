"""Measurements of a rehearsal: its nodes, and the comparison of two runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rtrain.checkpoint import format as checkpoint_format
from rtrain.core.run_folder import Run
from rtrain.rehearsal.faults import InjectedFault
from rtrain.rehearsal.machines.machine_registry import MachineRecord
from rtrain.rehearsal.plan import RehearsalPlan
from rtrain.verification import ledger

ArraysByName = Mapping[str, npt.NDArray[Any]]
WEIGHT_TOLERANCE = 1e-8
"""Maximum relative difference between weights of two layouts in float64, where sums are added in another order."""
END_LABELS = {"terminated": "idle", "left": "by itself", "killed": "killed", "down": "taken down"}


@dataclass(frozen=True)
class RehearsedNode:
    """A machine in the certificate. Times are seconds since the rehearsal began."""

    name: str
    type: str
    requested_at: float
    joined_at: float | None
    """When it joined the cluster; None if it never did."""
    ended_at: float
    end_reason: str
    dollars: float | None
    """On-demand cost of its lifetime; None if its price is unknown."""

    @property
    def seconds_to_join(self) -> float | None:
        return None if self.joined_at is None else round(self.joined_at - self.requested_at, 1)


@dataclass(frozen=True)
class RowComparison:
    """Rows of the disturbed run, by its ledger."""

    matches_ledger: bool
    """Whether the recorded ledger equals the recomputed one."""
    lost: int
    repeated: int
    same_order: bool
    """Whether the order equals the undisturbed run's."""


@dataclass(frozen=True)
class WeightComparison:
    """Final weights of the disturbed run, compared with the undisturbed run's."""

    identical: bool
    difference: float
    """Norm of the difference over the norm of the weights."""
    same_workers: bool
    """Whether every attempt had the workers of the undisturbed run: then the weights must be identical. Otherwise they
    are equal up to rounding without dropout, and differ by two masks with dropout."""


@dataclass(frozen=True)
class ResizeResult:
    """Outcome of a run that lost a node at the cluster's cap and got it back, compared with a steady run: in float64,
    without dropout."""

    notice: InjectedFault
    workers_by_attempt: Sequence[int]
    """Number of workers of each attempt. The first may be smaller: nodes join one after another."""
    step: int
    """The last step for which both runs have a checkpoint."""
    rows: RowComparison
    """Rows of that step; their order is compared."""
    difference: float
    """Norm of the difference of both runs' weights, over the distance that the steady run's weights moved in its second
    half."""
    started_nodes: int
    required_nodes: int
    """Worker nodes that were started, and that were required."""
    seconds: float
    left_behind: Sequence[str]

    def problems(self) -> list[str]:
        problems = [f"notice of the resized run: {problem}" for problem in self.notice.problems()]
        max_workers = max(self.workers_by_attempt)
        if (
            min(self.workers_by_attempt[self.workers_by_attempt.index(max_workers) :]) == max_workers
            or self.workers_by_attempt[-1] != max_workers
        ):
            problems.append(
                f"the run did not shrink and grow again; its attempts had {list(self.workers_by_attempt)} workers"
            )
        if self.rows.lost or self.rows.repeated or not (self.rows.matches_ledger and self.rows.same_order):
            problems.append("the resized run trained on other rows than the steady run")
        if not self.difference <= WEIGHT_TOLERANCE:
            problems.append(f"the weights of the resized run differ by {self.difference:.1e} from the steady run's")
        if self.started_nodes > self.required_nodes:
            problems.append(
                f"{self.started_nodes} worker nodes were started for the resized run; {self.required_nodes} are enough"
            )
        return [*problems, *(f"left behind: {name}" for name in self.left_behind)]

    def format(self) -> str:
        rows = self.rows
        return (
            f"resized in float64: workers {', '.join(map(str, self.workers_by_attempt))}; training resumed "
            f"{self.notice.seconds_to_next_step:.1f} s after the notice; at step {self.step} {rows.lost} rows "
            f"lost, {rows.repeated} repeated, weights differ by {self.difference:.1e} from a steady run's "
            f"({self.seconds:.0f} s)"
        )


def rehearsed_nodes(
    machines: Mapping[str, MachineRecord],
    join_times: Mapping[str, float],
    plan: RehearsalPlan,
    faults: Sequence[InjectedFault],
    began_at: float,
) -> list[RehearsedNode]:
    """The terminated machines of a rehearsal that began at `began_at` (seconds since 1970)."""
    fault_labels = {fault.node: {"notice": "spot notice", "kill": "killed"}[fault.kind] for fault in faults}
    nodes = []
    for name, machine in machines.items():
        ended_at, price = machine.ended_at or machine.requested_at, plan.types_by_name[machine.type].dollars_per_hour
        dollars = None if price is None else round((ended_at - machine.requested_at) / 3600 * price, 6)
        joined_at = round(join_times[name] - began_at, 1) if name in join_times else None
        end_reason = fault_labels.get(name, END_LABELS[machine.end_reason or "down"])
        nodes.append(
            RehearsedNode(
                name,
                machine.type,
                round(machine.requested_at - began_at, 1),
                joined_at,
                round(ended_at - began_at, 1),
                end_reason,
                dollars,
            )
        )
    return nodes


def max_concurrent(nodes: Sequence[RehearsedNode]) -> int:
    """Maximum number of concurrent nodes. A preempted node counts until it ends."""
    return max(
        (sum(other.requested_at <= node.requested_at < other.ended_at for other in nodes) for node in nodes), default=0
    )


def compare_rows(control: Run, run: Run) -> RowComparison:
    run_ledger, control_ledger = ledger.check_ledger(run), ledger.check_ledger(control)
    matches_ledger = run_ledger.passed and control_ledger.passed
    same_order = (run_ledger.order_digest, run_ledger.steps) == (control_ledger.order_digest, control_ledger.steps)
    return RowComparison(matches_ledger, run_ledger.missing_rows, run_ledger.repeated_rows, same_order)


def compare_weights(control: Run, run: Run, same_workers: bool) -> WeightComparison:
    """Compare the newest checkpoints of two finished runs."""
    weights, control_weights = (
        _load_weights(each_run, max(checkpoint_format.list_steps(each_run.checkpoints))) for each_run in (run, control)
    )
    identical = weights.keys() == control_weights.keys() and all(
        weights[name].tobytes() == tensor.tobytes() for name, tensor in control_weights.items()
    )
    norm = _norm(control_weights)
    return WeightComparison(
        identical, _norm(_difference(weights, control_weights)) / norm if norm else 0.0, same_workers
    )


def compare_checkpoints(run: Run, control: Run, step: int) -> tuple[bool, float]:
    """Compare two runs' checkpoints of one step: whether their rows came in the same order, and the distance of their
    weights, over the distance that the control's weights moved since its previous checkpoint."""
    states = [
        checkpoint_format.read_state(checkpoint_format.checkpoint_path(each_run.checkpoints, step))
        for each_run in (run, control)
    ]
    previous_step = max(
        earlier_step for earlier_step in checkpoint_format.list_steps(control.checkpoints) if earlier_step < step
    )
    weights, control_weights, previous_weights = (
        _load_weights(run, step),
        _load_weights(control, step),
        _load_weights(control, previous_step),
    )
    distance_moved = _norm(_difference(control_weights, previous_weights))
    return states[0].ledger == states[1].ledger, _norm(
        _difference(weights, control_weights)
    ) / distance_moved if distance_moved else math.inf


def _load_weights(run: Run, step: int) -> ArraysByName:
    from safetensors.numpy import load_file

    return load_file(checkpoint_format.checkpoint_path(run.checkpoints, step) / "model.safetensors")


def _difference(ours: ArraysByName, theirs: ArraysByName) -> ArraysByName:
    """Differences in float64; a tensor that only one side has counts in full."""
    float64_tensors = [
        {name: tensor.astype(np.float64) for name, tensor in tensors.items()} for tensors in (ours, theirs)
    ]
    zero = np.zeros(())
    return {
        name: np.asarray(float64_tensors[0].get(name, zero) - float64_tensors[1].get(name, zero))
        for name in float64_tensors[0] | float64_tensors[1]
    }


def _norm(tensors: ArraysByName) -> float:
    return math.sqrt(sum(float(np.square(tensor.astype(np.float64)).sum()) for tensor in tensors.values()))
