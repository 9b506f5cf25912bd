"""Certificate of a rehearsal: measurements of its nodes, comparison of two runs, and verdict."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rtrain.checkpoint import format as checkpoint_format
from rtrain.core.run_folder import Run
from rtrain.rehearsal.faults import InjectedFault, Listener
from rtrain.rehearsal.machine import MachineRecord
from rtrain.rehearsal.plan import RehearsalPlan
from rtrain.verification import verify

ArraysByName = Mapping[str, npt.NDArray[Any]]
WEIGHT_TOLERANCE = 1e-8
"""Maximum relative difference between weights of two layouts in float64, where sums are added in another order."""
END_LABELS = {"terminated": "idle", "left": "by itself", "killed": "killed", "down": "taken down"}
FAULT_LABELS = {"notice": "spot notice", "kill": "killed"}


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

    @property
    def are_equal(self) -> bool:
        return self.matches_ledger and self.same_order


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
        workers = list(self.workers_by_attempt)
        has_shrunk = min(workers[workers.index(max(workers)) :]) < max(workers)
        if not has_shrunk or workers[-1] != max(workers):
            problems.append(f"the run did not shrink and grow again; its attempts had {workers} workers")
        if self.rows.lost or self.rows.repeated or not self.rows.are_equal:
            problems.append("the resized run trained on other rows than the steady run")
        if not self.difference <= WEIGHT_TOLERANCE:
            problems.append(f"the weights of the resized run differ by {self.difference:.1e} from the steady run's")
        if self.started_nodes > self.required_nodes:
            started = f"{self.started_nodes} worker nodes were started for the resized run"
            problems.append(f"{started}; {self.required_nodes} are enough")
        return [*problems, *(f"left behind: {name}" for name in self.left_behind)]

    def format(self) -> str:
        return (
            f"resized in float64: workers {', '.join(map(str, self.workers_by_attempt))}; training resumed "
            f"{self.notice.seconds_to_next_step:.1f} s after the notice; at step {self.step} {self.rows.lost} rows "
            f"lost, {self.rows.repeated} repeated, weights differ by {self.difference:.1e} from a steady run's "
            f"({self.seconds:.0f} s)"
        )


@dataclass
class RehearsalCertificate:
    plan: RehearsalPlan
    nodes: Sequence[RehearsedNode]
    max_concurrent_nodes: int
    required_nodes: int | None
    """Minimum worker nodes of one run at a time; None if the limits of the file are too small."""
    scale_up_s: float | None
    """Seconds from the first job's start until its first node joined; None if no node was needed."""
    scale_down_s: float | None
    """Seconds from the last job's end until only `min_workers` nodes were left; None if that did not happen."""
    listeners: Sequence[Listener]
    faults: Sequence[InjectedFault]
    planned_faults: int
    restarts: int
    row_comparison: RowComparison | None
    weight_comparison: WeightComparison | None
    steps: int
    workers_by_attempt: Sequence[int]
    """Number of workers of each attempt of the disturbed run."""
    device: str
    """`gpu`: each worker took a declared GPU; `cpu`: a CPU."""
    resize_result: ResizeResult | None
    """None if the resize rehearsal was not requested."""
    left_behind: Sequence[str]
    seconds: float
    idle_terminations: int = 0
    """Idle worker nodes that were terminated before the disturbed run began, which then needed replacements."""
    errors: Sequence[str] = field(default=())
    """Errors that aborted the rehearsal."""

    @property
    def started_nodes(self) -> int:
        return sum(node.type != self.plan.head.name for node in self.nodes)

    @property
    def expected_nodes(self) -> int | None:
        """Worker nodes that the rehearsal needs in total: for one run, one replacement per fault, and replacements of
        idle terminations."""
        if self.required_nodes is None:
            return None
        idle_replacements = min(self.required_nodes, self.idle_terminations)
        return max(self.required_nodes, self.plan.min_workers) + len(self.faults) + idle_replacements

    @property
    def dollars(self) -> float | None:
        prices = [node.dollars for node in self.nodes if node.dollars is not None]
        return sum(prices) if len(prices) == len(self.nodes) else None

    @property
    def max_dollars_per_hour(self) -> float | None:
        head_price, node_prices = self.plan.head.dollars_per_hour, list[float]()
        for node_type in self.plan.node_types:
            if node_type.dollars_per_hour is None:
                return None
            node_prices += [node_type.dollars_per_hour] * node_type.max_workers
        if head_price is None:
            return None
        return head_price + sum(sorted(node_prices, reverse=True)[: self.plan.max_workers])

    def problems(self) -> list[str]:
        """Reasons for failure; empty if it passed."""
        rows = self.row_comparison
        problems = [*self.errors, *(port.description for port in sorted(self.listeners) if not port.is_allowed)]
        problems += [] if self.errors else self._unmet_expectations()
        if rows is not None and (rows.lost or rows.repeated):
            problems.append(f"{rows.lost} rows lost, {rows.repeated} repeated")
        return [*problems, *(f"left behind: {name}" for name in self.left_behind)]

    def _unmet_expectations(self) -> list[str]:
        """Reasons for failure of a rehearsal that was not aborted."""
        problems, rows, weights = list[str](), self.row_comparison, self.weight_comparison
        if (missing_faults := self.planned_faults - len(self.faults)) > 0:
            problems.append(
                f"the run ended before {missing_faults} of {self.planned_faults} faults; "
                "rehearse a longer run, with more train.epochs"
            )
        problems += [f"{_describe_fault(fault)}: {problem}" for fault in self.faults for problem in fault.problems()]
        if rows is None or not rows.are_equal:
            problems.append("the run trained on other rows than the undisturbed run")
        if weights is None or (weights.same_workers and not weights.identical):
            problems.append("the weights differ from the undisturbed run's, with the same workers")
        if weights is not None and not math.isfinite(weights.difference):
            problems.append("the weights have non-finite values")
        problems += [] if self.resize_result is None else self.resize_result.problems()
        if self.max_concurrent_nodes > self.plan.max_workers:
            allowed = f"the file allows {self.plan.max_workers}"
            problems.append(f"{self.max_concurrent_nodes} concurrent worker nodes; {allowed}")
        if self.expected_nodes is not None and self.started_nodes > self.expected_nodes:
            problems.append(f"{self.started_nodes} worker nodes were started; {self.expected_nodes} are enough")
        return problems if self.scale_down_s is not None else [*problems, "idle nodes were not terminated"]

    @property
    def has_passed(self) -> bool:
        return not self.problems()

    def list_not_rehearsed(self) -> list[str]:
        """Differences between the rehearsed cluster and the cluster of the file."""
        plan, weights = self.plan, self.weight_comparison
        omissions = {
            "setup commands, images, disks, addresses and permissions: rtrain cluster lint checks them": True,
            "the network between nodes: all nodes shared this machine, its processors and its memory": True,
            f"the idle timeout of {plan.idle_timeout_s:.0f} s, which was shortened to "
            f"{plan.rehearsal_idle_timeout_s:.0f} s": plan.rehearsal_idle_timeout_s < plan.idle_timeout_s,
            "GPUs: the run trained on CPUs, as its settings say": plan.has_gpus and self.device == "cpu",
            "GPUs, which were only declared: each worker took one, and computed on a CPU": plan.has_gpus
            and self.device != "cpu",
            "behavior of GPUs: NCCL instead of gloo, the format of train.precision=auto, larger micro-batches, "
            "and shorter times": plan.has_gpus and self.device != "cpu",
            "a spot notice: the file starts no watcher": plan.watcher is None,
            "a run that shrinks and grows again: rehearse it with --extra resize": self.resize_result is None,
            "equality of the weights: an attempt had another number of workers, so dropout drew other masks; "
            "their difference is reported, not judged": weights is not None and not weights.same_workers,
        }
        return [omission for omission, is_omitted in omissions.items() if is_omitted]

    def to_document(self) -> dict[str, Any]:
        def as_optional_dict(part: Any) -> dict[str, Any] | None:
            return None if part is None else asdict(part)

        idle_timeouts = {"file": self.plan.idle_timeout_s, "rehearsed": self.plan.rehearsal_idle_timeout_s}
        return {
            "passed": self.has_passed,
            "problems": self.problems(),
            "cluster": {
                "head": self.plan.head.name,
                "types": {node_type.name: asdict(node_type) for node_type in self.plan.node_types},
                "max_workers": self.plan.max_workers,
                "idle_s": idle_timeouts,
            },
            "nodes": [{**asdict(node), "seconds_to_join": node.seconds_to_join} for node in self.nodes],
            "started_nodes": self.started_nodes,
            "expected_nodes": self.expected_nodes,
            "max_concurrent_nodes": self.max_concurrent_nodes,
            "scale_up_s": self.scale_up_s,
            "scale_down_s": self.scale_down_s,
            "ports": [{**asdict(listener), "is_allowed": listener.is_allowed} for listener in sorted(self.listeners)],
            "faults": [{**asdict(fault), "passed": fault.has_passed} for fault in self.faults],
            "restarts": self.restarts,
            "steps": self.steps,
            "workers_by_attempt": list(self.workers_by_attempt),
            "device": self.device,
            "rows": as_optional_dict(self.row_comparison),
            "weights": as_optional_dict(self.weight_comparison),
            "resized": as_optional_dict(self.resize_result),
            "dollars": self.dollars,
            "max_dollars_per_hour": self.max_dollars_per_hour,
            "left_behind": list(self.left_behind),
            "not_rehearsed": self.list_not_rehearsed(),
            "seconds": self.seconds,
        }

    def format(self) -> str:
        rows, weights = self.row_comparison, self.weight_comparison
        lines = [f"{'node':<16}  {'type':<12}  {'requested':>9}  {'joined':>7}  {'ended':>7}  {'':<11}  {'dollars':>8}"]
        for node in self.nodes:
            price = "?" if node.dollars is None else f"{node.dollars:.4f}"
            lines.append(
                f"{node.name:<16}  {node.type:<12}  {node.requested_at:>7.0f} s  {_format_seconds(node.joined_at):>7}  "
                f"{node.ended_at:>5.0f} s  {node.end_reason:<11}  {price:>8}"
            )
        expected_note = "too few allowed" if self.expected_nodes is None else f"{self.expected_nodes} expected"
        lines += [
            "",
            f"worker nodes: {self.started_nodes} started, {expected_note}; at most {self.max_concurrent_nodes} at a "
            f"time, of {self.plan.max_workers}; first after {_format_seconds(self.scale_up_s)}, idle nodes terminated "
            f"after {_format_seconds(self.scale_down_s)}",
            *map(_format_fault, self.faults),
            f"{self.steps} steps, {self.restarts} restarts, workers {', '.join(map(str, self.workers_by_attempt))}",
        ]
        if rows is not None:
            order_note = "the undisturbed run's order" if rows.same_order else "ANOTHER ORDER"
            lines.append(f"rows: {rows.lost} lost, {rows.repeated} repeated, in {order_note}")
        if weights is not None:
            difference_note = f"relative difference {weights.difference:.1e} to the undisturbed run's"
            weight_note = "the undisturbed run's, bit for bit" if weights.identical else difference_note
            lines.append(f"weights: {weight_note}")
        lines += [] if self.resize_result is None else [self.resize_result.format()]
        num_forbidden = sum(not listener.is_allowed for listener in self.listeners)
        return "\n".join(
            [
                *lines,
                f"listening sockets: {len(self.listeners)}, {num_forbidden} of them not allowed",
                f"cost, at on-demand list prices: {_format_dollars(self.dollars)} for these {self.seconds:.0f} s; "
                f"{_format_dollars(self.max_dollars_per_hour)} an hour at most",
                "",
                *(f"not rehearsed: {omission}" for omission in self.list_not_rehearsed()),
                "",
                *self.problems(),
                f"{'passed' if self.has_passed else 'FAILED'} ({self.seconds:.0f} s)",
            ]
        )


def _format_fault(fault: InjectedFault) -> str:
    if not fault.has_recovered:
        return f"{_describe_fault(fault)}: the run did not recover"
    checkpoint_s, rejoin_s = fault.seconds_to_checkpoint, fault.seconds_after_join
    checkpoint_note = "" if checkpoint_s is None else f"checkpoint after {checkpoint_s:.1f} s, "
    join_note = "" if rejoin_s is None else f", with all workers {rejoin_s:.1f} s after a node had joined"
    return (
        f"{_describe_fault(fault)} at step {fault.at_step}: {checkpoint_note}training resumed after "
        f"{fault.seconds_to_next_step:.1f} s{join_note}, {fault.recomputed_steps} steps recomputed"
    )


def _describe_fault(fault: InjectedFault) -> str:
    return f"{'spot notice' if fault.kind == 'notice' else 'killed without notice'} ({fault.node})"


def _format_seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} s"


def _format_dollars(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f} $" if value < 0.1 else f"{value:.2f} $"


# ------------------------------------------------------------------------------------------------------- measurements


def rehearsed_nodes(
    machines: Mapping[str, MachineRecord],
    join_times: Mapping[str, float],
    plan: RehearsalPlan,
    faults: Sequence[InjectedFault],
    began_at: float,
) -> list[RehearsedNode]:
    """The terminated machines of a rehearsal that began at `began_at` (seconds since 1970)."""
    fault_labels = {fault.node: FAULT_LABELS[fault.kind] for fault in faults}

    def measure(name: str, machine: MachineRecord) -> RehearsedNode:
        ended_at, price = machine.ended_at or machine.requested_at, plan.types_by_name[machine.type].dollars_per_hour
        return RehearsedNode(
            name,
            machine.type,
            round(machine.requested_at - began_at, 1),
            round(join_times[name] - began_at, 1) if name in join_times else None,
            round(ended_at - began_at, 1),
            fault_labels.get(name, END_LABELS[machine.end_reason or "down"]),
            None if price is None else round((ended_at - machine.requested_at) / 3600 * price, 6),
        )

    return [measure(name, machine) for name, machine in machines.items()]


def max_concurrent(nodes: Sequence[RehearsedNode]) -> int:
    """Maximum number of concurrent nodes. A preempted node counts until it ends."""
    return max(
        (sum(other.requested_at <= node.requested_at < other.ended_at for other in nodes) for node in nodes), default=0
    )


def compare_rows(control: Run, run: Run) -> RowComparison:
    run_ledger, control_ledger = verify.check_ledger(run), verify.check_ledger(control)
    same_order = (run_ledger.order_digest, run_ledger.steps) == (control_ledger.order_digest, control_ledger.steps)
    matches_ledger = run_ledger.passed and control_ledger.passed
    return RowComparison(matches_ledger, run_ledger.missing_rows, run_ledger.repeated_rows, same_order)


def compare_weights(control: Run, run: Run, same_workers: bool) -> WeightComparison:
    """Compare the newest checkpoints of two finished runs."""
    weights, control_weights = (
        _load_weights(each_run, max(checkpoint_format.list_steps(each_run.checkpoints))) for each_run in (run, control)
    )
    identical = weights.keys() == control_weights.keys() and all(
        weights[name].tobytes() == tensor.tobytes() for name, tensor in control_weights.items()
    )
    norm = _distance(control_weights, {})
    return WeightComparison(identical, _distance(weights, control_weights) / norm if norm else 0.0, same_workers)


def compare_checkpoints(run: Run, control: Run, step: int) -> tuple[bool, float]:
    """Compare two runs' checkpoints of one step: whether their rows came in the same order, and the distance of their
    weights, over the distance that the control's weights moved since its previous checkpoint."""
    state, control_state = (
        checkpoint_format.read_state(checkpoint_format.checkpoint_path(each_run.checkpoints, step))
        for each_run in (run, control)
    )
    previous_step = max(earlier for earlier in checkpoint_format.list_steps(control.checkpoints) if earlier < step)
    control_weights = _load_weights(control, step)
    distance_moved = _distance(control_weights, _load_weights(control, previous_step))
    distance = _distance(_load_weights(run, step), control_weights)
    return state.ledger == control_state.ledger, distance / distance_moved if distance_moved else math.inf


def _load_weights(run: Run, step: int) -> ArraysByName:
    from safetensors.numpy import load_file

    return load_file(checkpoint_format.checkpoint_path(run.checkpoints, step) / "model.safetensors")


def _distance(tensors: ArraysByName, other_tensors: ArraysByName) -> float:
    """Norm of the difference in float64; a tensor that only one of both has counts in full."""
    zero = np.zeros(())
    names = dict.fromkeys([*tensors, *other_tensors])
    pairs = ((tensors.get(name, zero), other_tensors.get(name, zero)) for name in names)
    return math.sqrt(
        sum(float(np.square(left.astype(np.float64) - right.astype(np.float64)).sum()) for left, right in pairs)
    )
