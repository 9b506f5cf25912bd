"""`rtrain verify --ledger RUN`: recompute the rows of a run offline and compare them with its records.

A run's ledger is a hash chain over the row ids of its steps. Every checkpoint and every progress event holds its link,
and the workers verify at each step that their rows are those of the chain. So it suffices to recompute the chain from
the token store and the order, and to compare it with the records.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rtrain import config as configuration
from rtrain.checkpoint import format as checkpoint_format
from rtrain.core.errors import UserError, suggest_path
from rtrain.core.run_folder import Run
from rtrain.data.order import RowOrder, chain_digest, hash_step_rows
from rtrain.data.store.store import Store
from rtrain.trainer.trainer import INITIAL_LEDGER


@dataclass(frozen=True)
class LedgerReport:
    """Result of a ledger check. `passed` if every record agrees and every row occurred exactly once an epoch."""

    passed: bool
    rows: int
    steps: int
    """Recorded steps of the run."""
    steps_per_epoch: int
    order_digest: str
    """The recomputed chain after those steps."""
    matching_records: dict[int, str]
    """Step -> source of the record (`checkpoint`, `progress` or `trained`), for every matching record."""
    mismatching_records: dict[int, str]
    repeated_rows: int
    """Rows that occur more than once in an epoch, over all started epochs."""
    missing_rows: int
    """Rows that are missing in a complete epoch."""

    def to_document(self) -> dict[str, Any]:
        return asdict(self)

    def format_text(self) -> str:
        epochs, rest = divmod(self.steps, self.steps_per_epoch)
        rows_text = f"{self.rows:,} rows x {epochs} epochs" + (f" and {rest} steps" if rest else "")
        if self.passed:
            return (
                f"every row once per epoch: {rows_text}, {self.steps} steps; "
                f"the recorded ledger agrees at all of {len(self.matching_records)} points"
            )
        lines = [
            f"NOT every row once per epoch ({rows_text}): {self.repeated_rows} repeated, {self.missing_rows} missing"
        ]
        if self.mismatching_records:
            first_mismatching_step = min(self.mismatching_records)
            last_matching_step = max(
                (step for step in self.matching_records if step < first_mismatching_step), default=0
            )
            lines.append(
                f"other rows than the order's were trained on between step {last_matching_step} and step "
                f"{first_mismatching_step} "
                f"(recorded by {self.mismatching_records[first_mismatching_step]}); {len(self.mismatching_records)} of "
                f"{len(self.mismatching_records) + len(self.matching_records)} records disagree"
            )
        return "\n".join(lines)


def check_ledger(run: Run) -> LedgerReport:
    """Recompute the order of `run` from its configuration and token store. Needs no Ray, and reads only the index."""
    if not run.exists:
        fix = suggest_path(run.folder) or "name the folder given to --out"
        raise UserError(f"--ledger: {run} holds no run (no {run.config.name}); {fix}", code="not_a_run")
    recipe = configuration.load_config(str(run.config)).recipe
    store = _open_store(run)
    records = _read_records(run)
    if not records:
        raise UserError(f"--ledger: {run} has recorded no step yet; train it first", code="not_started")
    order = RowOrder(
        store.manifest.digest, store.num_rows("train"), recipe.global_batch_size, recipe.train.epochs, recipe.train.seed
    )
    last_step = max(step for step, _, _ in records)
    steps = {step for step, _, _ in records}
    links, repeated, missing = _recompute_chain(store, order, last_step, steps)
    matching: dict[int, str] = {}
    mismatching: dict[int, str] = {}
    for step, link, source in records:
        (matching if links[step] == link else mismatching)[step] = source
    return LedgerReport(
        passed=not (mismatching or repeated or missing),
        rows=order.rows,
        steps=last_step,
        steps_per_epoch=order.steps_per_epoch,
        order_digest=links[last_step],
        matching_records={step: matching[step] for step in sorted(matching) if step not in mismatching},
        mismatching_records=mismatching,
        repeated_rows=repeated,
        missing_rows=missing,
    )


def _open_store(run: Run) -> Store:
    created_event = run.first_event("created")
    if created_event is None:
        reason = f"--ledger: {run.log} does not say where the run's token store is; the log is damaged"
        raise UserError(reason, code="damaged")
    store = Store(Path(created_event["store"]))
    if store.manifest.digest != created_event["data_digest"]:
        raise UserError(
            f"--ledger: the token store {store.folder} is now {store.manifest.digest}; the run was trained on "
            f"{created_event['data_digest']}",
            code="different_rows",
        )
    return store


def _read_records(run: Run) -> list[tuple[int, str, str]]:
    """(step, link, source) of all records of the run, including those of killed attempts."""
    records = [(event["step"], event["ledger"], "progress") for event in run.events("progress")]
    records += [(event["steps"], event["order_digest"], "trained") for event in run.events("trained") if event["steps"]]
    for step in checkpoint_format.list_steps(run.checkpoints):
        state = checkpoint_format.read_state(checkpoint_format.checkpoint_path(run.checkpoints, step))
        records.append((state.step, state.ledger, "checkpoint"))
    return records


def _recompute_chain(store: Store, order: RowOrder, last_step: int, steps: set[int]) -> tuple[dict[int, str], int, int]:
    """(chain after each of `steps`, rows repeated, rows missing) over the first `last_step` steps of `order`."""
    row_ids = store.column("train", "row_id")
    link, links = INITIAL_LEDGER, {}
    repeated = missing = 0
    row_counts = np.zeros(order.rows, dtype=np.uint8)
    for step in range(last_step):
        positions = order.positions(step)
        np.add.at(row_counts, positions, 1)
        link = chain_digest(link, hash_step_rows(step, row_ids[positions]))
        if step + 1 in steps:
            links[step + 1] = link.hex()
        ends_epoch = (step + 1) % order.steps_per_epoch == 0
        if ends_epoch or step + 1 == last_step:
            repeated += int((row_counts > 1).sum())
            missing += int((row_counts == 0).sum()) if ends_epoch else 0
            row_counts[:] = 0
    # The chain could not detect an exchange of two rows with the same id.
    repeated += order.rows - len(np.unique(row_ids[: order.rows]))
    return links, repeated, missing
