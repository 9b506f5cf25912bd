"""`rtrain drill RECIPE`: a run that is killed again and again ends like one that was never touched.

Two runs of the same recipe and rows: a control, and one that meets every fault of `faults.FAULTS` in turn. They must
end with the same weights, bit for bit, and with the same ledger of rows; every fault must resume from a checkpoint.
Where workers share a model, a rank of each kind of their groups is among those that die or hang.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.checkpoint import format as checkpoint_format
from rtrain.config import Config
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.data.store import builder
from rtrain.report import html, summary
from rtrain.runs import controller, node_checks, prepare
from rtrain.verification import ledger
from rtrain.verification.faults import FAULTS, Fault, of_groups, workers_left

SAVE_EVERY = 8
"""How many updates lie between two checkpoints where the recipe names no number."""
KEEP = 3
"""Two are spoilt at a time; a third must be there to resume from."""
GOES_WITHIN_S = 15.0
STALL_S = 20.0
"""A drill does not wait five minutes for a stopped worker."""


@dataclass
class Met:
    """A fault, and what became of the run."""

    name: str
    at_update: int
    """Updates that the log knew of when the fault came."""
    allowed: int
    """Updates that may be recomputed: those since the newest checkpoint that the fault leaves whole."""
    injected: float = field(default=0.0, repr=False)
    resumed_from: int = -1
    recomputed_updates: int = -1
    seconds_to_next_update: float = -1.0
    """From the fault to the end of the first update that the run had not reached before it."""

    @property
    def passed(self) -> bool:
        return self.resumed_from > 0 and 0 <= self.recomputed_updates <= self.allowed


@dataclass
class Certificate:
    passed: bool
    weights_identical: bool
    rows_lost: int
    rows_repeated: int
    order_identical: bool
    left_behind: list[str]
    """Drafts in the run folder, and processes of workers that outlived the run."""
    updates: int
    save_every: int
    workers: int
    faults: list[dict[str, Any]]
    seconds: float

    def to_document(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        lines = [f"{'fault':<28}  {'at':>5}  {'resumed':>7}  {'again':>5}  {'s to next update':>16}"]
        for fault in self.faults:
            lines.append(
                f"{fault['name']:<28}  {fault['at_update']:>5}  {fault['resumed_from']:>7}  "
                f"{fault['recomputed_updates']:>5}  {fault['seconds_to_next_update']:>16.1f}"
                f"{'' if fault['passed'] else '   FAILED'}"
            )
        weights = "the same weights, bit for bit" if self.weights_identical else "OTHER WEIGHTS"
        rows = "the same rows" if self.order_identical else "OTHER ROWS"
        lines.append(
            f"{'passed' if self.passed else 'FAILED'}: after {len(self.faults)} faults in {self.updates} updates of "
            f"{self.workers} workers: {weights} and {rows} as the undisturbed run; "
            f"{self.rows_lost} rows lost, {self.rows_repeated} repeated ({self.seconds:.0f} s)"
        )
        lines += [f"left behind: {name}" for name in self.left_behind]
        return "\n".join(lines)


class Saboteur:
    """Follows a run's events, and meets it with the next fault whenever it has got on far enough since the last."""

    def __init__(self, run: Run, faults: Sequence[Fault], save_every: int, on_event: controller.OnEvent | None):
        self._run, self._left, self._save_every, self._on_event = run, list(faults), save_every, on_event
        self.met: list[Met] = []

    def __call__(self, event: dict[str, Any]) -> None:
        if self._on_event:
            self._on_event(event)
        current = self.met[-1] if self.met else None
        if event["kind"] == "started" and current and current.resumed_from < 0:
            current.resumed_from = event["update"]
            current.recomputed_updates = current.at_update - event["update"]
        if event["kind"] != "progress":
            return
        if current and current.seconds_to_next_update < 0:
            if current.resumed_from < 0:
                current.at_update = event["update"]  # logged before the fault took its effect
            elif event["update"] > current.at_update:
                current.seconds_to_next_update = round(event["time"] - current.injected, 1)
        elif self._left and event["update"] >= self._next():
            self._meet(self._left.pop(0), event["update"])

    def _next(self) -> int:
        """Two intervals beyond the last fault, and half an interval beyond a save: something is there to be lost."""
        last = self.met[-1].at_update if self.met else 0
        return (last // self._save_every + 2) * self._save_every + self._save_every // 2

    def _meet(self, fault: Fault, update: int) -> None:
        allowed = fault.intervals * self._save_every
        self.met.append(Met(fault.name, update, allowed, injected=time.time()))
        if self._on_event:
            self._on_event({"kind": "stage", "text": f"fault: {fault.name}"})
        fault.inject(self._run)


def run(
    config: Config, folder: Path, faults: Sequence[Fault] | None = None, on_event: controller.OnEvent | None = None
) -> Certificate:
    """Drill a recipe on the Ray that the process is connected to; both runs are kept under `folder`. `faults`: None for
    all of `FAULTS`, and those of the groups of workers in which the recipe shares a model out."""
    begin, train = time.monotonic(), config.recipe.train
    faults = (*FAULTS, *of_groups(train, train.workers)) if faults is None else faults
    save_every = config.recipe.train.save_every or SAVE_EVERY
    config = configuration.with_overrides(
        config,
        {"train.save_every": save_every, "train.keep": KEEP, "train.log_every": 1, "cluster.stall_s": STALL_S}
        | {"cluster.storage": None},
    )
    updates = 3 * save_every * (len(faults) + 1)
    config = _long_enough(config, folder.parent, updates)
    control = prepare.prepare(config, folder / "control", tokens_root=folder.parent)
    controller.fit(control, until=updates, on_event=on_event)
    drilled = prepare.prepare(config, folder / "drilled", tokens_root=folder.parent)
    saboteur = Saboteur(drilled.run, faults, save_every, on_event)
    _fit(drilled, updates, saboteur)
    certificate = _judge(control, drilled, saboteur.met, len(faults), updates)
    certificate.seconds = round(time.monotonic() - begin, 1)
    drilled.run.append("drilled", certificate=certificate.to_document())
    summary.write(drilled.run)
    html.write(drilled.run)
    return certificate


def _long_enough(config: Config, root: Path, updates: int) -> Config:
    """The recipe with as many epochs as so many updates need."""
    source, model, *_ = node_checks.share(config, *prepare.check(config, root), root)
    store, _ = builder.ensure(config.recipe, source, model, root)
    per_epoch = -(-store.rows("train") // config.recipe.rows_per_update)
    epochs = max(config.recipe.train.epochs, -(-updates // per_epoch))
    return configuration.with_overrides(config, {"train.epochs": epochs})


def _fit(prepared: prepare.Prepared, updates: int, saboteur: Saboteur) -> None:
    """To the end; where a fault ends in an error for the user, what he would do next: mend it, and resume."""
    before = 0
    while True:
        try:
            controller.fit(prepared, until=updates, on_event=saboteur)
            return
        except UserError as error:
            if len(saboteur.met) == before:
                raise
            before = len(saboteur.met)
            saboteur({"kind": "stage", "text": f"ended by: {str(error).splitlines()[0]}"})
            prepared = prepare.prepare(prepared.config, prepared.run.folder, "resume", prepared.store.folder.parents[1])


def _judge(
    control: prepare.Prepared, drilled: prepare.Prepared, met: Sequence[Met], wanted: int, updates: int
) -> Certificate:
    shown = ledger.check(drilled.run)
    weights = [_weights(prepared.run, updates) for prepared in (control, drilled)]
    identical = weights[0] is not None and weights[0] == weights[1]
    order = shown.passed and shown.order_digest == ledger.check(control.run).order_digest
    faults = [{**asdict(fault), "passed": fault.passed} for fault in met]
    left = _left_behind(drilled.run)
    passed = identical and order and not left and len(met) == wanted and all(fault.passed for fault in met)
    train = drilled.config.recipe.train
    return Certificate(
        passed=passed,
        weights_identical=identical,
        rows_lost=shown.missing,
        rows_repeated=shown.repeated,
        order_identical=order,
        left_behind=left,
        updates=updates,
        save_every=train.save_every or 0,
        workers=train.workers,
        faults=faults,
        seconds=0.0,
    )


def _left_behind(run: Run) -> list[str]:
    """What should be gone: looked for again while it goes, since Ray ends its processes in the background."""
    give_up = time.monotonic() + GOES_WITHIN_S
    while True:
        drafts = [path for folder in (run.folder, run.checkpoints) for path in folder.glob(".*")]
        found = [*(str(path) for path in sorted(drafts)), *workers_left()]
        if not found or time.monotonic() > give_up:
            return found
        time.sleep(0.5)


def _weights(run: Run, update: int) -> str | None:
    """Digest of weights and optimizer state after `update`."""
    folder = checkpoint_format.path_of(run.checkpoints, update)
    files = [folder / name for name in ("model.safetensors", "optim.safetensors")]
    if not all(path.is_file() for path in files):
        return None
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
