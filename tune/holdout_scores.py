"""The validation rows that steer no rung of a search, and what the answers of a finished trial are worth on them.

Whoever picks the best of several by some rows flatters it on these very rows (Cawley & Talbot 2010): so the rungs are
told the scores of one part, the steering rows, and the end is judged on the other, the held-back rows. A row's side is
a hash of its content, the same on every machine, in every start and with any number of workers.
"""

import numpy as np
import numpy.typing as npt
import pyarrow.parquet

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.data.row_reader import Source
from rtrain.data.splits import Splits
from rtrain.data.store import columns
from rtrain.data.store.store import Store, open_store
from rtrain.evaluation import row_scores
from rtrain.inference import artifact
from rtrain.metrics.sums import Bools, Ints
from rtrain.report import row_predictions
from rtrain.tasks import base
from tune import finals
from tune.difference_ci import Held
from tune.history import History

KEY = np.uint64(0x5EA2C40F4E1DBAC7)
"""Makes this hash another one than any that a row's id may be used in."""
SPLIT = "valid"
FEW = 200
"""With fewer held-back rows than these, each seed of the end is judged on rows of its own (`parts`)."""


def mask(row_ids: npt.NDArray[np.uint64], share: float) -> Bools:
    """Which of the validation rows are held back, (rows,); about that share of them.

    `row_ids` are those of all validation rows, in any order. Rows of equal texts and labels are on one side; those of
    equal texts and other labels may not be, since an id tells no text. Of two rows or more there is one on each side,
    unless the share is 0: then nothing is held back, and nothing of a single row.
    """
    if share == 0 or len(row_ids) < 2:
        return np.zeros(len(row_ids), dtype=np.bool_)
    first = columns.firsts(row_ids)
    draw = _mixed(first)
    held = draw < np.uint64(min(int(share * 2**64), 2**64 - 1))
    if held.all() == held.any():
        # By chance, of few rows: the one row that is nearest to the other side, with its equals unless there are none
        # but these, goes there.
        nearest = draw == (draw.max() if held.all() else draw.min())
        if nearest.all():
            nearest = row_ids == row_ids.max()
        held = held ^ nearest
    return held


def held(store: Store, share: float) -> Ints:
    """Positions of the held-back rows among the validation rows of a store."""
    return np.flatnonzero(mask(store.column(SPLIT, "row_id"), share))


def steering(store: Store, share: float) -> Ints:
    """Positions of the validation rows that steer the rungs."""
    return np.flatnonzero(~mask(store.column(SPLIT, "row_id"), share))


def _mixed(ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A hash of 64 bits each: the finaliser of SplitMix64 (Steele, Lea & Flood 2014)."""
    found = ids ^ KEY
    found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return found ^ (found >> np.uint64(31))


def parts(config: Config, source: Source, store: Store) -> int:
    """Into how many parts the rows that could validate are cut, so that each seed of the end is judged on other ones.

    1 where enough rows are held back, or none are asked for. 0 where the validation rows are few and named by a file or
    a column: then all seeds are judged on the same ones.
    """
    share = config.deploy.tune.held_back
    if not share or len(held(store, share)) >= FEW:
        return 1
    found = Splits.of(config.recipe.data, source).valid_parts
    return found if found != 1 else 0


def of(run: Run, share: float) -> Held:
    """The answers of a finished run, by its best weights, to the rows that are held back; to all validation rows where
    `share` is 0, and where these are another part than the search's own (`data.valid_part`), which no rung has seen.

    Raises `UserError` for a run whose answers cannot be judged.
    """
    config = configuration.load(str(run.config))
    rows, output = row_predictions.read(run, SPLIT), base.get(config.recipe.task).output
    if rows is None:
        raise UserError(f"{run} left no answers to its validation rows", code="no_answers")
    table = pyarrow.parquet.read_table(run.predictions(SPLIT), columns=["row_id", "position"])
    ids, position = table["row_id"].to_numpy(), table["position"].to_numpy()
    every_row = not share or config.recipe.data.valid_part > 0
    chosen = np.ones(len(ids), dtype=np.bool_) if every_row else mask(ids, share)
    at = np.flatnonzero(chosen if chosen.any() else ~chosen)
    if output == "number" and not np.isfinite(rows.prediction[at].astype(np.float64)).all():
        raise UserError(f"{run} answers with what is no finite number: its training has gone astray", code="diverged")
    sheet = row_scores.Sheet(
        target=rows.target[at],
        prediction=rows.prediction[at],
        loss=rows.loss[at],
        facts=artifact.read(run.artifact, verify=False).facts if run.finished else {},
        # Only a summary is judged by more than its file holds.
        store=open_store(run.store) if output == "summary" and run.store is not None else None,
        split=SPLIT,
        position=position[at],
    )
    judged = row_scores.judge(output, sheet)
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
