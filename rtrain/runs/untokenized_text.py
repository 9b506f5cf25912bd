"""Entities in running text: the cut of words out of it, and the score of a model on it.

A run is trained and scored on words that an annotator has cut; an endpoint gets running text. The token store keeps the
texts of held-out rows. Their words show the signs at which the data set cuts
(`rtrain.core.text_segmentation.find_word_cuts`), and requests are cut at the same signs. The same rows, joined as
running text, measure the endpoint's answers.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rtrain.core.run_folder import Run
from rtrain.core.text_segmentation import find_word_cuts
from rtrain.data.store.store import Store
from rtrain.inference import score
from rtrain.inference.predictor import Predictor
from rtrain.metrics import scores
from rtrain.tasks.base import Task
from rtrain.tasks.token_tags import names

MOST_ROWS = 1000
"""Rows of a split that are answered as running text."""
SPLITS = ("test", "valid")


class Row(NamedTuple):
    words: list[str]
    tags: list[str]


def find_cuts(task: Task, store: Store) -> dict[str, str]:
    """Facts of an artifact about the signs at which words are cut; empty for other tasks."""
    if task.output != "tags":
        return {}
    return find_word_cuts(
        word for split in SPLITS for row in _read_rows(store, split, store.rows(split)) for word in row.words
    )


def measure(run: Run, task: Task, store: Store) -> None:
    """Add the scores of held-out rows as running text to the log and to the split's file of scores."""
    for split in SPLITS if task.output == "tags" else ():
        rows = list(_read_rows(store, split, min(MOST_ROWS, store.rows(split))))
        if not rows:
            continue
        predictor = Predictor.load(run.artifact)
        found = score.score_running_text(predictor, [row.words for row in rows], [row.tags for row in rows])
        run.append("running_text", split=split, rows=len(rows), scores=found)
        if (document := scores.read(run.scores(split))) is not None:
            scores.write(run.scores(split), {**document, "running_text": {"rows": len(rows), "scores": found}})
        return


def _read_rows(store: Store, split: str, most: int) -> Iterator[Row]:
    """Rows of a split of which the store keeps every word."""
    positions = np.arange(most, dtype=np.int64)
    texts = store.texts(split, positions)
    for kept, targets in zip(texts, store.targets(split, positions), strict=True):
        words = [] if kept is None else kept[0].split(" ")
        tags = names(targets[targets >= -1], store.manifest.head)
        if words and len(words) == len(tags):
            yield Row(words, tags)
