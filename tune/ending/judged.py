"""What the answers of a finished trial are worth on the rows by which a search's end decides."""

import numpy as np
import pyarrow.parquet

from rtrain import artifact, config as configuration
from rtrain.comparison import by_row
from rtrain.config import Config
from rtrain.data.records import Source
from rtrain.data.splits import Splits
from rtrain.data.stores.store import Store, open_store
from rtrain.errors import UserError
from rtrain.report import answer_rows
from rtrain.run import Run
from rtrain.tasks import base
from tune.ending import finals, held_back
from tune.ending.chance import Held
from tune.known.history import History


def parts(config: Config, source: Source, store: Store) -> int:
    """Into how many parts the rows that could validate are cut, so that each seed of the end is judged on other ones.

    1 where enough rows are held back, or none are asked for. 0 where the validation rows are few and named by a file or
    a column: then all seeds are judged on the same ones.
    """
    share = config.deploy.tune.held_back
    if not share or len(held_back.held(store, share)) >= held_back.FEW:
        return 1
    found = Splits.of(config.recipe.data, source).valid_parts
    return found if found != 1 else 0


def of(run: Run, share: float) -> Held:
    """The answers of a finished run, by its best weights, to the rows that are held back; to all validation rows where
    `share` is 0, and where these are another part than the search's own (`data.valid_part`), which no rung has seen.

    Raises `UserError` for a run whose answers cannot be judged.
    """
    config = configuration.load(str(run.config))
    rows, output = answer_rows.read(run, held_back.SPLIT), base.get(config.recipe.task).output
    if rows is None:
        raise UserError(f"{run} left no answers to its validation rows")
    table = pyarrow.parquet.read_table(run.predictions(held_back.SPLIT), columns=["row_id", "position"])
    ids, position = table["row_id"].to_numpy(), table["position"].to_numpy()
    every_row = not share or config.recipe.data.valid_part > 0
    held = np.ones(len(ids), dtype=np.bool_) if every_row else held_back.mask(ids, share)
    at = np.flatnonzero(held if held.any() else ~held)
    if output == "number" and not np.isfinite(rows.prediction[at].astype(np.float64)).all():
        raise UserError(f"{run} answers with what is no finite number: its training has gone astray")
    sheet = by_row.Sheet(
        target=rows.target[at],
        prediction=rows.prediction[at],
        loss=rows.loss[at],
        facts=artifact.read(run.artifact, verify=False).facts if run.finished else {},
        # Only a summary is judged by more than its file holds.
        store=open_store(run.store) if output == "summary" and run.store is not None else None,
        split=held_back.SPLIT,
        position=position[at],
    )
    judged = by_row.judge(output, sheet)
    return Held(judged.headline, ids[at], judged.scores)


def every(search: Run, history: History, share: float, parts: int) -> dict[finals.Run, Held]:
    """By run of the end: what it is worth. One that cannot be judged is left out, and counts as failed."""
    found = {}
    own = [(trial.number, trial) for trial in history.own]
    for of_trial, trial in (*own, *finals.repeats(history, parts)):
        if trial.finished is not None:
            which = finals.Run(of_trial, trial.seed)
            try:
                found[which] = of(search.trial(trial.number), share)
            except UserError:
                continue
    return found
