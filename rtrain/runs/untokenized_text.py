"""Entities in running text: how words are split, and the score of a model on running text.

Training rows have words that an annotator has split; an endpoint gets running text. The words of held-out rows show the
characters at which the data set splits (`rtrain.core.text_segmentation.find_word_cuts`), and requests are split at the
same characters. The same rows, joined to running text, measure the endpoint's answers.

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
from rtrain.tasks.token_tags import to_tag_names

MAX_ROWS = 1000
"""Maximum rows of a split that are scored as running text."""
SPLITS = ("test", "valid")


class TaggedRow(NamedTuple):
    words: list[str]
    tags: list[str]


def find_word_boundaries(task: Task, store: Store) -> dict[str, str]:
    """Return an artifact's facts about characters at which words are split; empty for other tasks."""
    if task.output != "tags":
        return {}
    return find_word_cuts(
        word for split in SPLITS for row in _read_rows(store, split, store.num_rows(split)) for word in row.words
    )


def measure_running_text(run: Run, task: Task, store: Store) -> None:
    """Add the scores of held-out rows as running text to the log and to the split's file of scores."""
    for split in SPLITS if task.output == "tags" else ():
        rows = list(_read_rows(store, split, min(MAX_ROWS, store.num_rows(split))))
        if not rows:
            continue
        predictor = Predictor.load(run.artifact)
        text_scores = score.score_running_text(predictor, [row.words for row in rows], [row.tags for row in rows])
        run.append_event("running_text", split=split, rows=len(rows), scores=text_scores)
        if (document := scores.read_scores(run.scores(split))) is not None:
            scores.write_scores(
                run.scores(split), {**document, "running_text": {"rows": len(rows), "scores": text_scores}}
            )
        return


def _read_rows(store: Store, split: str, max_rows: int) -> Iterator[TaggedRow]:
    """Yield the rows of a split whose words are all in the store."""
    positions = np.arange(max_rows, dtype=np.int64)
    texts = store.kept_texts(split, positions)
    for row_texts, targets in zip(texts, store.targets(split, positions), strict=True):
        words = [] if row_texts is None else row_texts[0].split(" ")
        tags = to_tag_names(targets[targets >= -1], store.manifest.head)
        if words and len(words) == len(tags):
            yield TaggedRow(words, tags)
