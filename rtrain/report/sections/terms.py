"""Frequent words of the training rows and words that set a label apart, from the tokens: what was cut is not there."""

import re
from collections import Counter
from pathlib import Path

import numpy as np

from rtrain.data.stores.store import Store
from rtrain.report import stats
from rtrain.report.collect import Collected
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Figure, Note, Table
from rtrain.report.drawing.charts import Bar

STRETCHES, STRETCH_ROWS = 8, 2500
"""A few stretches of neighbours are read: scattered rows would need every shard of a large store."""
MOST_TERMS, DRAWN, MOST_LABELS = 4000, 25, 15
WORD = re.compile(r"[^\W\d_]{3,}+(?! ?['\u2019] ?t\b)")
"""Not the `don` of `don ' t`: tokenizers set the apostrophe apart."""


def blocks(run: Collected, store: Store) -> list[Block]:
    if run.tokenizer is None:
        return [
            Note("Frequent words are shown once the run is finished: its artefact has the tokenizer that spells them.")
        ]
    positions = stretches(store.labelled("train"))
    words = texts(store, run.tokenizer, positions)
    counts: Counter[str] = Counter()
    for row in words:
        counts.update(set(row))
    drawn = [(word, count) for word, count in counts.most_common(MOST_TERMS) if word not in stop_words()][:DRAWN]
    if not drawn:
        return []
    items = [Bar(word, 100 * count / len(words), f"{word}: {count:,} of {len(words):,} rows") for word, count in drawn]
    note = (
        f"Share of {len(words):,} training rows with the word; English function words and words under 3 letters left "
        "out."
    )
    title = f"“{drawn[0][0]}” is the most frequent word: in {100 * drawn[0][1] / len(words):.0f} % of the rows"
    found: list[Block] = [Figure(title, charts.bars(items, "rows with the word (%)"), note)]
    if (codes := run.classes()) is not None:
        found.append(_by_label(store.manifest.labels, codes[positions], words, counts))
    return found


def stretches(rows: int) -> stats.Ints:
    """Positions of all rows, or of eight stretches spread over the split."""
    if rows <= STRETCHES * STRETCH_ROWS:
        return np.arange(rows)
    starts = np.linspace(0, rows - STRETCH_ROWS, STRETCHES).astype(np.int64)
    return np.unique(np.concatenate([start + np.arange(STRETCH_ROWS) for start in starts]))


def texts(store: Store, tokenizer: Path, positions: stats.Ints) -> list[list[str]]:
    """The words of each row, in lower case, as the tokenizer spells its tokens."""
    import tokenizers

    read = store.read("train", positions)
    rows = np.split(read.ids, np.cumsum(read.lengths_of_rows)[:-1])  # of all of its windows
    spelt = tokenizers.Tokenizer.from_file(str(tokenizer)).decode_batch([row.tolist() for row in rows])
    return [WORD.findall(text.lower()) for text in spelt]


def stop_words() -> frozenset[str]:
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

    return frozenset(ENGLISH_STOP_WORDS)


def _by_label(labels: tuple[str, ...], codes: stats.Ints, words: list[list[str]], counts: Counter[str]) -> Table:
    names = [word for word, count in counts.most_common(MOST_TERMS) if count > 1]
    index = {word: place for place, word in enumerate(names)}
    groups = [code for code, _ in Counter(codes.tolist()).most_common(MOST_LABELS)]
    place_of = {code: place for place, code in enumerate(groups)}
    matrix = np.zeros((len(groups) + 1, len(names)), dtype=np.int64)  # the last: all other labels
    for code, row in zip(codes.tolist(), words, strict=True):
        known = [index[word] for word in set(row) if word in index]
        matrix[place_of.get(code, len(groups)), known] += 1
    found = stats.distinctive(matrix)[: len(groups)]
    rows = [
        (labels[code], ", ".join(names[term] for term in terms) or "-")
        for code, terms in zip(groups, found, strict=True)
    ]
    note = (
        "Words that occur in rows of the label far more often than in the others (log-odds with a prior). A word that "
        "should have nothing to do with its label is a trap in the data."
    )
    if len(labels) > len(groups):
        note += f" The {len(groups)} most frequent labels are listed."
    return Table("Words that set each label apart", ("label", "words"), rows, note)
