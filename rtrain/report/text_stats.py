"""What a run's texts are, as figures, before they are trained on: cut, unknown to the vocabulary, labelled twice.

A sample of the training rows is read; equal texts are looked for in the first rows. Both bound time and memory.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rtrain.data.store.store import Store
from rtrain.inference.drift_baseline import unknown_id

if TYPE_CHECKING:
    import tokenizers

SAMPLE = 10_000
"""Rows whose tokens are looked at."""
COMPARED = 1 << 20
"""Rows among which equal texts are looked for."""
PIECES = 1.5
"""Pieces of the vocabulary per word from which on a row counts as cut to pieces. With the vocabulary of BERT-base
(uncased), English messages have 1.0 to 1.4, German and Spanish ones 1.5 to 1.8, Polish and Russian ones over 2.4."""
BEGINS = ("\u0120", "\u2581")
"""Signs before the pieces that begin a word, in byte-level and SentencePiece vocabularies."""


def describe_texts(store: Store, tokenizer: "tokenizers.Tokenizer") -> dict[str, Any]:
    """`cut` of all `rows`; of the sampled training rows the share of `unknown` tokens, and the share of rows whose
    words are cut to `pieces`; these are None where the vocabulary does not tell."""
    rows = store.rows("train")
    tokens = store.read("train", np.unique(np.linspace(0, rows - 1, min(rows, SAMPLE)).astype(np.int64)))
    ids, unknown = tokens.ids, unknown_id(tokenizer)
    added = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    text = ~np.isin(ids, list(added - {unknown}))
    facts: dict[str, Any] = {"rows": sum(store.manifest.rows.values()), "cut": store.manifest.truncated}
    facts["unknown"] = None if unknown is None else float((ids == unknown).sum() / max(1, text.sum()))
    continues = _continues(tokenizer)
    if continues is None:
        return {**facts, "pieces": None}
    row = np.repeat(np.arange(len(tokens)), tokens.lengths_of_rows)
    pieces = np.bincount(row[text], minlength=len(tokens))
    words = np.bincount(row[text & ~continues[ids]], minlength=len(tokens))
    return {**facts, "pieces": float((pieces > PIECES * np.maximum(1, words)).mean())}


def _continues(tokenizer: "tokenizers.Tokenizer") -> npt.NDArray[np.bool_] | None:
    """Whether each piece of the vocabulary goes on with a word; None where the pieces do not say so."""
    vocabulary = tokenizer.get_vocab()
    facts = np.zeros(max(vocabulary.values()) + 1, dtype=np.bool_)
    if any(piece.startswith("##") for piece in vocabulary):
        facts[[number for piece, number in vocabulary.items() if piece.startswith("##")]] = True
    elif any(piece.startswith(BEGINS) for piece in vocabulary):
        facts[[number for piece, number in vocabulary.items() if piece[:1].isalpha() and piece[0] not in BEGINS]] = True
    else:
        return None
    return facts


def find_conflicts(store: Store, output: str) -> dict[str, Any] | None:
    """Training rows with the text of another one and another label, as a task of that `output` reads labels: how many
    `rows`, of how many `texts`, and the `places` of the first. None where there are none, or labels are no classes."""
    keys = store.keys("train")[: min(store.labelled("train"), COMPARED)]
    if output not in ("classes", "labels", "heads") or not len(keys):
        return None
    _, text, rows_of_text = np.unique(keys, return_inverse=True, return_counts=True)
    repeated = np.flatnonzero(rows_of_text[text] > 1)
    if not len(repeated):
        return None
    targets = [values.tobytes() for values in store.targets("train", repeated)]
    label = np.unique(np.array(targets, dtype=object), return_inverse=True)[1]
    pairs = np.unique(np.column_stack([text[repeated], label]), axis=0)
    texts, labels_of_text = np.unique(pairs[:, 0], return_counts=True)
    chosen = texts[labels_of_text > 1]
    if not len(chosen):
        return None
    positions = repeated[np.isin(text[repeated], chosen)]
    return {"rows": len(positions), "texts": len(chosen), "places": store.places("train", positions)}
