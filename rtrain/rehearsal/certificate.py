"""What a rehearsal has come to: measured on the cluster, judged here, and told. Pure."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rtrain.rehearsal.faults import Fault
from rtrain.rehearsal.measurements import Node, Resized, Rows, Weights
from rtrain.rehearsal.plan import Plan
from rtrain.rehearsal.ports import Listener


@dataclass
class Certificate:
    plan: Plan
    nodes: Sequence[Node]
    most_at_a_time: int
    needed: int | None
    """Worker nodes that one run needs at least, at a time; None where no number of them is enough."""
    scale_up_s: float | None
    """From the first job's start to the first node that came for it; None where no node was needed."""
    scale_down_s: float | None
    """From the end of the last job until only the file's fewest nodes were left; None where that did not come."""
    ports: Sequence[Listener]
    faults: Sequence[Fault]
    wanted_faults: int
    restarts: int
    rows: Rows | None
    weights: Weights | None
    updates: int
    workers: Sequence[int]
    """How many each start of the disturbed run had."""
    device: str
    """`gpu`: each worker took a GPU that was counted; else a CPU."""
    resized: Resized | None
    """None where it was not asked for."""
    left_behind: Sequence[str]
    seconds: float
    idled: int = 0
    """Worker nodes that were ended as idle before the disturbed run had begun, which then needed as many anew."""
    errors: Sequence[str] = field(default=())
    """What broke the rehearsal off."""

    @property
    def started(self) -> int:
        return sum(node.type != self.plan.head.name for node in self.nodes)

    @property
    def wanted_nodes(self) -> int | None:
        """Worker nodes that the rehearsal needs in all: those of a run, one in place of each that was taken, and those
        that the next run needs anew."""
        if self.needed is None:
            return None
        return max(self.needed, self.plan.least) + len(self.faults) + min(self.needed, self.idled)

    @property
    def dollars(self) -> float | None:
        known = [node.dollars for node in self.nodes if node.dollars is not None]
        return sum(known) if len(known) == len(self.nodes) else None

    @property
    def dollars_an_hour_at_most(self) -> float | None:
        prices = [kind.dollars for kind in (self.plan.head, *self.plan.kinds)]
        if any(price is None for price in prices):
            return None
        each = sorted(((kind.dollars or 0.0) for kind in self.plan.kinds for _ in range(kind.most)), reverse=True)
        return (self.plan.head.dollars or 0.0) + sum(each[: self.plan.most])

    def problems(self) -> list[str]:
        """Why it does not pass; nothing where it does."""
        found = list(self.errors)
        found += [one.text for one in sorted(self.ports) if not one.allowed]
        if not self.errors:
            if len(self.faults) < self.wanted_faults:
                found.append(
                    f"the run had ended before {self.wanted_faults - len(self.faults)} of {self.wanted_faults} faults: "
                    "rehearse a longer one, with more train.epochs"
                )
            found += [f"{_what(one)}: {problem}" for one in self.faults for problem in one.problems()]
            if self.rows is None or not (self.rows.agrees and self.rows.same_order):
                found.append("other rows than those of the undisturbed run were trained on")
            if self.weights is None or (self.weights.same_workers and not self.weights.identical):
                found.append("other weights than those of the undisturbed run, with the same workers")
            if self.weights is not None and not math.isfinite(self.weights.difference):
                found.append("weights that are no finite numbers")
            found += [] if self.resized is None else self.resized.problems()
            if self.most_at_a_time > self.plan.most:
                found.append(f"{self.most_at_a_time} worker nodes at a time, and the file allows {self.plan.most}")
            if self.wanted_nodes is not None and self.started > self.wanted_nodes:
                found.append(f"{self.started} worker nodes were started, where {self.wanted_nodes} do")
            if self.scale_down_s is None:
                found.append("nodes without work were not ended")
        if self.rows is not None and (self.rows.lost or self.rows.repeated):
            found.append(f"{self.rows.lost} rows lost, {self.rows.repeated} repeated")
        return [*found, *(f"left behind: {one}" for one in self.left_behind)]

    @property
    def passed(self) -> bool:
        return not self.problems()

    def not_rehearsed(self) -> list[str]:
        """Where the cluster of the file is another one than this was."""
        plan = self.plan
        found = [
            "set-up commands, images, disks, addresses and rights: rtrain cluster lint reads them",
            "the network between nodes: all of them were on this machine, whose processors and memory they shared",
        ]
        if plan.rehearsed_idle_s < plan.idle_s:
            found.append(f"idle nodes end after {plan.idle_s:.0f} s there, here after {plan.rehearsed_idle_s:.0f}")
        if plan.counts_gpus and self.device == "cpu":
            found.append("GPUs: the run was trained on CPUs, as it asks for")
        elif plan.counts_gpus:
            found += [
                "GPUs, which were counted and not there: each worker took one, and computed on a CPU",
                "what a GPU does otherwise: NCCL sums gradients (here gloo), train.precision=auto takes its format, "
                "passes are as large as its memory holds, and seconds are fewer",
            ]
        if plan.watcher is None:
            found.append("a spot notice: the file starts no watcher, so that none would be heard")
        if self.resized is None:
            found.append("a run that goes on with fewer workers, and grows again: --also resize tries it")
        if self.weights is not None and not self.weights.same_workers:
            found.append(
                "whether the weights are the undisturbed run's: a start had other workers, for which dropout drops "
                "other activations, so that their difference is told and not judged"
            )
        return found

    def to_document(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "problems": self.problems(),
            "cluster": {
                "head": self.plan.head.name,
                "types": {kind.name: asdict(kind) for kind in self.plan.kinds},
                "max_workers": self.plan.most,
                "idle_s": {"file": self.plan.idle_s, "rehearsed": self.plan.rehearsed_idle_s},
            },
            "nodes": [{**asdict(node), "seconds_to_join": node.seconds_to_join} for node in self.nodes],
            "nodes_started": self.started,
            "nodes_needed": self.wanted_nodes,
            "nodes_at_a_time": self.most_at_a_time,
            "scale_up_s": self.scale_up_s,
            "scale_down_s": self.scale_down_s,
            "ports": [{**asdict(one), "allowed": one.allowed} for one in sorted(self.ports)],
            "faults": [{**asdict(one), "passed": one.passed} for one in self.faults],
            "restarts": self.restarts,
            "updates": self.updates,
            "workers": list(self.workers),
            "device": self.device,
            "rows": None if self.rows is None else asdict(self.rows),
            "weights": None if self.weights is None else asdict(self.weights),
            "resized": None if self.resized is None else asdict(self.resized),
            "dollars": self.dollars,
            "dollars_an_hour_at_most": self.dollars_an_hour_at_most,
            "left_behind": list(self.left_behind),
            "not_rehearsed": self.not_rehearsed(),
            "seconds": self.seconds,
        }

    def text(self) -> str:
        lines = [f"{'node':<16}  {'type':<12}  {'asked':>7}  {'joined':>7}  {'ended':>7}  {'':<11}  {'dollars':>8}"]
        for node in self.nodes:
            joined = "-" if node.joined is None else f"{node.joined:.0f} s"
            price = "?" if node.dollars is None else f"{node.dollars:.4f}"
            lines.append(
                f"{node.name:<16}  {node.type:<12}  {node.asked:>5.0f} s  {joined:>7}  {node.ended:>5.0f} s  "
                f"{node.end:<11}  {price:>8}"
            )
        lines.append("")
        needed = "no number of them is enough" if self.wanted_nodes is None else f"{self.wanted_nodes} do"
        lines.append(
            f"worker nodes: {self.started} started, {needed}; {self.most_at_a_time} at a time, of {self.plan.most}; "
            f"first one after {_seconds(self.scale_up_s)}, idle ones gone after {_seconds(self.scale_down_s)}"
        )
        lines += [_fault_text(fault) for fault in self.faults]
        lines.append(f"{self.updates} updates, {self.restarts} restarts, workers {', '.join(map(str, self.workers))}")
        if self.rows is not None:
            order = "the undisturbed run's order" if self.rows.same_order else "ANOTHER ORDER"
            lines.append(f"rows: {self.rows.lost} lost, {self.rows.repeated} repeated, in {order}")
        if self.weights is not None:
            same = "the undisturbed run's, bit for bit"
            other = f"relative difference {self.weights.difference:.1e} to the undisturbed run's"
            lines.append(f"weights: {same if self.weights.identical else other}")
        lines += [self.resized.text()] if self.resized is not None else []
        closed = [one for one in self.ports if not one.allowed]
        lines.append(f"listening sockets: {len(self.ports)}, of which {len(closed)} are on no list")
        lines.append(
            f"money, at list prices on demand: {_dollars(self.dollars)} for these {self.seconds:.0f} s; "
            f"{_dollars(self.dollars_an_hour_at_most)} an hour at most"
        )
        lines += ["", *(f"not rehearsed: {one}" for one in self.not_rehearsed()), ""]
        lines += self.problems()
        lines.append(f"{'passed' if self.passed else 'FAILED'} ({self.seconds:.0f} s)")
        return "\n".join(lines)


def _fault_text(fault: Fault) -> str:
    if not fault.is_over:
        return f"{_what(fault)}: the run did not get over it"
    saved = "" if fault.seconds_to_checkpoint is None else f"checkpoint after {fault.seconds_to_checkpoint:.1f} s, "
    joined = ""
    if fault.seconds_after_join is not None:
        joined = f", with all workers {fault.seconds_after_join:.1f} s after a node had joined"
    return (
        f"{_what(fault)} at update {fault.at_update}: {saved}training again after "
        f"{fault.seconds_to_next_update:.1f} s{joined}, {fault.recomputed} updates computed again"
    )


def _what(fault: Fault) -> str:
    return f"{'spot notice' if fault.kind == 'notice' else 'killed without notice'} ({fault.node})"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} s"


def _dollars(value: float | None) -> str:
    return "not known" if value is None else f"{value:.4f} $" if value < 0.1 else f"{value:.2f} $"
