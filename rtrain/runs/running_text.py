"""Entities in running text: how the rows' words are cut out of it, and how well a model answers it.

A run is trained and scored on words that somebody has cut; an endpoint is asked running text. The held-out rows, whose
texts the token store keeps, say at which signs their words are cut (`rtrain.words.word_cuts`), so that requests are cut
alike; and the same rows, put together as running text, say what an endpoint's answers are worth.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rtrain import score
from rtrain.data.stores.store import Store
from rtrain.metrics import scores
from rtrain.predict import Predictor
from rtrain.run import Run
from rtrain.tasks.base import Task
from rtrain.tasks.token_tags import names
from rtrain.words import word_cuts

MOST_ROWS = 1000
"""Rows of a split that are answered once more."""
SPLITS = ("test", "valid")


class Row(NamedTuple):
    words: list[str]
    tags: list[str]


def cuts(task: Task, store: Store) -> dict[str, str]:
    """What an artefact's facts say of the signs at which words are cut; nothing for other tasks."""
    if task.output != "tags":
        return {}
    return word_cuts(word for split in SPLITS for row in _whole(store, split, store.rows(split)) for word in row.words)


def measure(run: Run, task: Task, store: Store) -> None:
    """Add the scores of held-out rows as running text to the log and to the split's file of scores."""
    for split in SPLITS if task.output == "tags" else ():
        rows = list(_whole(store, split, min(MOST_ROWS, store.rows(split))))
        if not rows:
            continue
        predictor = Predictor.load(run.artifact)
        found = score.on_running_text(predictor, [row.words for row in rows], [row.tags for row in rows])
        run.append("running_text", split=split, rows=len(rows), scores=found)
        if (document := scores.read(run.scores(split))) is not None:
            scores.write(run.scores(split), {**document, "running_text": {"rows": len(rows), "scores": found}})
        return


def _whole(store: Store, split: str, most: int) -> Iterator[Row]:
    """The first rows of a split whose words are all kept."""
    positions = np.arange(most, dtype=np.int64)
    texts = store.texts(split, positions)
    for kept, targets in zip(texts, store.targets(split, positions), strict=True):
        words = [] if kept is None else kept[0].split(" ")
        tags = names(targets[targets >= -1], store.manifest.head)
        if words and len(words) == len(tags):
            yield Row(words, tags)
