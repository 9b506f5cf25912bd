"""Scores of an artefact through the path that answers requests, on a token store's split or on a file."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from rtrain.config import Data
from rtrain.data import records
from rtrain.data.store import Store
from rtrain.errors import ConfigError, Problem
from rtrain.predict import BATCH_ROWS, Predictor
from rtrain.tasks.base import Floats, Ints
from rtrain.tasks.metrics import metric_for


def on_split(
    predictor: Predictor, store: Store, split: str, batch_rows: int = BATCH_ROWS
) -> tuple[dict[str, float], Floats]:
    """(scores, logits in index order) over all rows of a split; each row once."""
    found = logits(predictor, store, split, np.arange(store.rows(split)), batch_rows)
    metric = metric_for(predictor.task.output, len(predictor.artifact.labels))
    metric.add(found, store.column(split, "target"))
    return metric.scores(), found


def logits(predictor: Predictor, store: Store, split: str, positions: Ints, batch_rows: int = BATCH_ROWS) -> Floats:
    """Logits of the rows at `positions`, in that order; neighbours in length share a batch."""
    order = np.argsort(store.column(split, "length")[positions], kind="stable")
    found = np.empty((len(positions), len(predictor.artifact.labels)), dtype=np.float32)
    for start in range(0, len(order), batch_rows):
        places = order[start : start + batch_rows]
        found[places] = predictor.run_tokens(store.read(split, positions[places]))
    return found


def run(folder: Path, data: Data) -> dict[str, Any]:
    """Scores of an artefact on the rows of a file; rows that cannot be read are counted, a strange label is wrong."""
    source = records.inspect(data)
    predictor = Predictor.load(folder)
    rows = [record for piece in source.pieces for record in records.read(piece, data)]
    good = [record for record in rows if record.reason is None]
    if not good:
        raise ConfigError([Problem("data.path", data.path, "no row can be used", "give rows with text and label")])
    start = time.perf_counter()
    inputs = [{"text": row.text, "text_pair": row.pair} if row.pair is not None else row.text for row in good]
    found = predictor.logits(inputs)
    seconds = time.perf_counter() - start
    metric = metric_for(predictor.task.output, len(predictor.artifact.labels))
    metric.add(found, predictor.task.targets([row.label for row in good], predictor.artifact.labels))
    return {**metric.scores(), "bad_rows": len(rows) - len(good), "rows_per_second": round(len(good) / seconds, 1)}
