"""`rtrain verify --ledger RUN`: which rows a run trained on, recomputed offline and compared with what it recorded.

A run's ledger is a hash chain over the row ids of its updates. Every checkpoint holds its link, every progress event
too, and the workers together proved at each update that the rows which they held were those of the chain. So it is
enough to compute the chain anew from the token store and the order, and to look where it parts from the records.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rtrain import config as configuration
from rtrain.checkpoint import format as checkpoint_format
from rtrain.core.errors import UserError, meant
from rtrain.core.run_folder import Run
from rtrain.data.order import Order, chain, rows_digest
from rtrain.data.store.store import Store
from rtrain.trainer.trainer import GENESIS


@dataclass(frozen=True)
class Report:
    """What the ledger of a run shows. `passed` only if every record agrees and every row came exactly once an epoch."""

    passed: bool
    rows: int
    updates: int
    """Updates that the run has recorded."""
    updates_per_epoch: int
    order_digest: str
    """The recomputed chain after those updates."""
    checked: dict[int, str]
    """Update -> where it is recorded (`checkpoint`, `progress` or `trained`), for every record that agrees."""
    mismatched: dict[int, str]
    repeated: int
    """Rows that an epoch of the order holds more than once, over all epochs that were begun."""
    missing: int
    """Rows that a whole epoch of the order does not hold."""

    def to_document(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        epochs, rest = divmod(self.updates, self.updates_per_epoch)
        trained = f"{self.rows:,} rows x {epochs} epochs" + (f" and {rest} updates" if rest else "")
        if self.passed:
            return (
                f"every row once per epoch: {trained}, {self.updates} updates; "
                f"the recorded ledger agrees at all of {len(self.checked)} points"
            )
        lines = [f"NOT every row once per epoch ({trained}): {self.repeated} repeated, {self.missing} missing"]
        if self.mismatched:
            first = min(self.mismatched)
            sound = max((update for update in self.checked if update < first), default=0)
            lines.append(
                f"other rows than the order's were trained on between update {sound} and update {first} "
                f"(recorded by {self.mismatched[first]}); {len(self.mismatched)} of "
                f"{len(self.mismatched) + len(self.checked)} records disagree"
            )
        return "\n".join(lines)


def check(run: Run) -> Report:
    """Recompute the order of `run` from its configuration and token store. Needs no Ray; reads the index alone."""
    if not run.exists:
        fix = meant(run.folder) or "name the folder given to --out"
        raise UserError(f"--ledger: {run} holds no run (no {run.config.name}); {fix}", code="not_a_run")
    recipe = configuration.load(str(run.config)).recipe
    store = _store(run)
    recorded = _recorded(run)
    if not recorded:
        raise UserError(f"--ledger: {run} has recorded no update yet; train it first", code="not_started")
    order = Order(
        store.manifest.digest, store.rows("train"), recipe.rows_per_update, recipe.train.epochs, recipe.train.seed
    )
    last = max(update for update, _, _ in recorded)
    wanted = {update for update, _, _ in recorded}
    links, repeated, missing = _recompute(store, order, last, wanted)
    checked: dict[int, str] = {}
    mismatched: dict[int, str] = {}
    for update, link, source in recorded:
        (checked if links[update] == link else mismatched)[update] = source
    return Report(
        passed=not (mismatched or repeated or missing),
        rows=order.rows,
        updates=last,
        updates_per_epoch=order.updates_per_epoch,
        order_digest=links[last],
        checked={update: checked[update] for update in sorted(checked) if update not in mismatched},
        mismatched=mismatched,
        repeated=repeated,
        missing=missing,
    )


def _store(run: Run) -> Store:
    created = run.first("created")
    if created is None:
        reason = f"--ledger: {run.log} does not say where the run's token store is; the log is damaged"
        raise UserError(reason, code="damaged")
    store = Store(Path(created["store"]))
    if store.manifest.digest != created["data_digest"]:
        raise UserError(
            f"--ledger: the token store {store.folder} is now {store.manifest.digest}; the run was trained on "
            f"{created['data_digest']}",
            code="different_rows",
        )
    return store


def _recorded(run: Run) -> list[tuple[int, str, str]]:
    """(update, link, source) of everything that the run wrote down; a start that was killed recorded truly too."""
    found = [(event["update"], event["ledger"], "progress") for event in run.events("progress")]
    found += [
        (event["updates"], event["order_digest"], "trained") for event in run.events("trained") if event["updates"]
    ]
    for update in checkpoint_format.updates(run.checkpoints):
        state = checkpoint_format.read_state(checkpoint_format.path_of(run.checkpoints, update))
        found.append((state.update, state.ledger, "checkpoint"))
    return found


def _recompute(store: Store, order: Order, last: int, wanted: set[int]) -> tuple[dict[int, str], int, int]:
    """(chain after each wanted update, rows repeated, rows missing) over the first `last` updates of `order`."""
    row_ids = store.column("train", "row_id")
    link, links = GENESIS, {}
    repeated = missing = 0
    seen = np.zeros(order.rows, dtype=np.uint8)
    for update in range(last):
        positions = order.positions(update)
        np.add.at(seen, positions, 1)
        link = chain(link, rows_digest(update, row_ids[positions]))
        if update + 1 in wanted:
            links[update + 1] = link.hex()
        ends_epoch = (update + 1) % order.updates_per_epoch == 0
        if ends_epoch or update + 1 == last:
            repeated += int((seen > 1).sum())
            missing += int((seen == 0).sum()) if ends_epoch else 0
            seen[:] = 0
    # Two rows under one id would make the chain blind to their exchange.
    repeated += order.rows - len(np.unique(row_ids[: order.rows]))
    return links, repeated, missing
