"""Certificate of a rehearsal: measurements and verdict. Pure."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rtrain.rehearsal.faults import InjectedFault
from rtrain.rehearsal.measurements import RehearsedNode, ResizeResult, RowComparison, WeightComparison
from rtrain.rehearsal.plan import RehearsalPlan
from rtrain.rehearsal.ports import Listener


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
        return (
            max(self.required_nodes, self.plan.min_workers)
            + len(self.faults)
            + min(self.required_nodes, self.idle_terminations)
        )

    @property
    def dollars(self) -> float | None:
        prices = [node.dollars for node in self.nodes if node.dollars is not None]
        return sum(prices) if len(prices) == len(self.nodes) else None

    @property
    def max_dollars_per_hour(self) -> float | None:
        prices = [node_type.dollars_per_hour for node_type in (self.plan.head, *self.plan.node_types)]
        if any(price is None for price in prices):
            return None
        node_prices = sorted(
            (
                (node_type.dollars_per_hour or 0.0)
                for node_type in self.plan.node_types
                for _ in range(node_type.max_workers)
            ),
            reverse=True,
        )
        return (self.plan.head.dollars_per_hour or 0.0) + sum(node_prices[: self.plan.max_workers])

    def problems(self) -> list[str]:
        """Reasons for failure; empty if it passed."""
        problems = list(self.errors)
        problems += [listener.description for listener in sorted(self.listeners) if not listener.is_allowed]
        if not self.errors:
            if len(self.faults) < self.planned_faults:
                problems.append(
                    f"the run ended before {self.planned_faults - len(self.faults)} of {self.planned_faults} faults; "
                    "rehearse a longer run, with more train.epochs"
                )
            problems += [
                f"{_describe_fault(fault)}: {problem}" for fault in self.faults for problem in fault.problems()
            ]
            if self.row_comparison is None or not (
                self.row_comparison.matches_ledger and self.row_comparison.same_order
            ):
                problems.append("the run trained on other rows than the undisturbed run")
            if self.weight_comparison is None or (
                self.weight_comparison.same_workers and not self.weight_comparison.identical
            ):
                problems.append("the weights differ from the undisturbed run's, with the same workers")
            if self.weight_comparison is not None and not math.isfinite(self.weight_comparison.difference):
                problems.append("the weights have non-finite values")
            problems += [] if self.resize_result is None else self.resize_result.problems()
            if self.max_concurrent_nodes > self.plan.max_workers:
                problems.append(
                    f"{self.max_concurrent_nodes} concurrent worker nodes; the file allows {self.plan.max_workers}"
                )
            if self.expected_nodes is not None and self.started_nodes > self.expected_nodes:
                problems.append(f"{self.started_nodes} worker nodes were started; {self.expected_nodes} are enough")
            if self.scale_down_s is None:
                problems.append("idle nodes were not terminated")
        if self.row_comparison is not None and (self.row_comparison.lost or self.row_comparison.repeated):
            problems.append(f"{self.row_comparison.lost} rows lost, {self.row_comparison.repeated} repeated")
        return [*problems, *(f"left behind: {name}" for name in self.left_behind)]

    @property
    def has_passed(self) -> bool:
        return not self.problems()

    def list_not_rehearsed(self) -> list[str]:
        """Differences between the rehearsed cluster and the cluster of the file."""
        plan = self.plan
        omissions = [
            "setup commands, images, disks, addresses and permissions: rtrain cluster lint checks them",
            "the network between nodes: all nodes shared this machine, its processors and its memory",
        ]
        if plan.rehearsal_idle_timeout_s < plan.idle_timeout_s:
            omissions.append(
                f"the idle timeout of {plan.idle_timeout_s:.0f} s, which was shortened to "
                f"{plan.rehearsal_idle_timeout_s:.0f} s"
            )
        if plan.has_gpus and self.device == "cpu":
            omissions.append("GPUs: the run trained on CPUs, as its settings say")
        elif plan.has_gpus:
            omissions += [
                "GPUs, which were only declared: each worker took one, and computed on a CPU",
                "behavior of GPUs: NCCL instead of gloo, the format of train.precision=auto, larger micro-batches, "
                "and shorter times",
            ]
        if plan.watcher is None:
            omissions.append("a spot notice: the file starts no watcher")
        if self.resize_result is None:
            omissions.append("a run that shrinks and grows again: rehearse it with --extra resize")
        if self.weight_comparison is not None and not self.weight_comparison.same_workers:
            omissions.append(
                "equality of the weights: an attempt had another number of workers, so dropout drew other masks; "
                "their difference is reported, not judged"
            )
        return omissions

    def to_document(self) -> dict[str, Any]:
        return {
            "passed": self.has_passed,
            "problems": self.problems(),
            "cluster": {
                "head": self.plan.head.name,
                "types": {node_type.name: asdict(node_type) for node_type in self.plan.node_types},
                "max_workers": self.plan.max_workers,
                "idle_s": {"file": self.plan.idle_timeout_s, "rehearsed": self.plan.rehearsal_idle_timeout_s},
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
            "rows": None if self.row_comparison is None else asdict(self.row_comparison),
            "weights": None if self.weight_comparison is None else asdict(self.weight_comparison),
            "resized": None if self.resize_result is None else asdict(self.resize_result),
            "dollars": self.dollars,
            "max_dollars_per_hour": self.max_dollars_per_hour,
            "left_behind": list(self.left_behind),
            "not_rehearsed": self.list_not_rehearsed(),
            "seconds": self.seconds,
        }

    def format(self) -> str:
        lines = [f"{'node':<16}  {'type':<12}  {'requested':>9}  {'joined':>7}  {'ended':>7}  {'':<11}  {'dollars':>8}"]
        for node in self.nodes:
            join_time = "-" if node.joined_at is None else f"{node.joined_at:.0f} s"
            price = "?" if node.dollars is None else f"{node.dollars:.4f}"
            lines.append(
                f"{node.name:<16}  {node.type:<12}  {node.requested_at:>7.0f} s  {join_time:>7}  "
                f"{node.ended_at:>5.0f} s  "
                f"{node.end_reason:<11}  {price:>8}"
            )
        lines.append("")
        expected_note = "too few allowed" if self.expected_nodes is None else f"{self.expected_nodes} expected"
        lines.append(
            f"worker nodes: {self.started_nodes} started, {expected_note}; at most {self.max_concurrent_nodes} at a "
            f"time, of {self.plan.max_workers}; "
            f"first after {_format_seconds(self.scale_up_s)}, idle nodes terminated after "
            f"{_format_seconds(self.scale_down_s)}"
        )
        lines += [_format_fault(fault) for fault in self.faults]
        lines.append(
            f"{self.steps} steps, {self.restarts} restarts, workers {', '.join(map(str, self.workers_by_attempt))}"
        )
        if self.row_comparison is not None:
            order_note = "the undisturbed run's order" if self.row_comparison.same_order else "ANOTHER ORDER"
            lines.append(
                f"rows: {self.row_comparison.lost} lost, {self.row_comparison.repeated} repeated, in {order_note}"
            )
        if self.weight_comparison is not None:
            identical_note = "the undisturbed run's, bit for bit"
            difference_note = f"relative difference {self.weight_comparison.difference:.1e} to the undisturbed run's"
            lines.append(f"weights: {identical_note if self.weight_comparison.identical else difference_note}")
        lines += [self.resize_result.format()] if self.resize_result is not None else []
        forbidden = [listener for listener in self.listeners if not listener.is_allowed]
        lines.append(f"listening sockets: {len(self.listeners)}, {len(forbidden)} of them not allowed")
        lines.append(
            f"cost, at on-demand list prices: {_format_dollars(self.dollars)} for these {self.seconds:.0f} s; "
            f"{_format_dollars(self.max_dollars_per_hour)} an hour at most"
        )
        lines += ["", *(f"not rehearsed: {omission}" for omission in self.list_not_rehearsed()), ""]
        lines += self.problems()
        lines.append(f"{'passed' if self.has_passed else 'FAILED'} ({self.seconds:.0f} s)")
        return "\n".join(lines)


def _format_fault(fault: InjectedFault) -> str:
    if not fault.has_recovered:
        return f"{_describe_fault(fault)}: the run did not recover"
    checkpoint_note = (
        "" if fault.seconds_to_checkpoint is None else f"checkpoint after {fault.seconds_to_checkpoint:.1f} s, "
    )
    join_note = ""
    if fault.seconds_after_join is not None:
        join_note = f", with all workers {fault.seconds_after_join:.1f} s after a node had joined"
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
