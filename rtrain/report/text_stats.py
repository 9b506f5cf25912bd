"""Statistics of a run's texts before training: truncated rows, unknown tokens, split words, conflicting labels.

A sample of the training rows is read, and equal texts are searched in the first rows, to bound time and memory.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rtrain.data.store.store import Store
from rtrain.inference.drift_baseline import find_unknown_id

if TYPE_CHECKING:
    import tokenizers

SAMPLE_ROWS = 10_000
"""Sampled rows."""
MAX_COMPARED_ROWS = 1 << 20
"""Rows that are searched for equal texts."""
MIN_PIECES_PER_WORD = 1.5
"""Tokens per word from which on a row counts as split. The vocabulary of BERT-base (uncased) has 1.0 to 1.4 for English
messages, 1.5 to 1.8 for German and Spanish, over 2.4 for Polish and Russian."""
WORD_STARTS = ("\u0120", "\u2581")
"""Prefixes of tokens that begin a word, in byte-level and SentencePiece vocabularies."""


def describe_texts(store: Store, tokenizer: "tokenizers.Tokenizer") -> dict[str, Any]:
    """Fields of the event `texts`: `rows` and `truncated_rows` of all splits, `unknown_token_share` and
    `split_word_share` of the sampled training rows. The shares are None if the vocabulary does not define them."""
    rows = store.num_rows("train")
    tokens = store.read_tokens("train", np.unique(np.linspace(0, rows - 1, min(rows, SAMPLE_ROWS)).astype(np.int64)))
    ids, unknown = tokens.ids, find_unknown_id(tokenizer)
    added = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    text = ~np.isin(ids, list(added - {unknown}))
    fields: dict[str, Any] = {"rows": sum(store.manifest.rows.values()), "truncated_rows": store.manifest.truncated}
    fields["unknown_token_share"] = None if unknown is None else float((ids == unknown).sum() / max(1, text.sum()))
    continues_word = _find_continuations(tokenizer)
    if continues_word is None:
        return {**fields, "split_word_share": None}
    row = np.repeat(np.arange(len(tokens)), tokens.row_lengths)
    pieces = np.bincount(row[text], minlength=len(tokens))
    words = np.bincount(row[text & ~continues_word[ids]], minlength=len(tokens))
    return {**fields, "split_word_share": float((pieces > MIN_PIECES_PER_WORD * np.maximum(1, words)).mean())}


def _find_continuations(tokenizer: "tokenizers.Tokenizer") -> npt.NDArray[np.bool_] | None:
    """Whether each token of the vocabulary continues a word; None if the vocabulary does not mark it."""
    vocabulary = tokenizer.get_vocab()
    continues_word = np.zeros(max(vocabulary.values()) + 1, dtype=np.bool_)
    if any(piece.startswith("##") for piece in vocabulary):
        continues_word[[number for piece, number in vocabulary.items() if piece.startswith("##")]] = True
    elif any(piece.startswith(WORD_STARTS) for piece in vocabulary):
        continues_word[
            [number for piece, number in vocabulary.items() if piece[:1].isalpha() and piece[0] not in WORD_STARTS]
        ] = True
    else:
        return None
    return continues_word


def find_conflicts(store: Store, output: str) -> dict[str, Any] | None:
    """Find training rows with equal texts and different labels; None without such rows, or if labels are not classes.

    Returns:
        `rows`, the number of `texts`, and the `places` of the first rows.
    """
    keys = store.text_keys("train")[: min(store.num_labeled("train"), MAX_COMPARED_ROWS)]
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
    conflicting_texts = texts[labels_of_text > 1]
    if not len(conflicting_texts):
        return None
    positions = repeated[np.isin(text[repeated], conflicting_texts)]
    return {"rows": len(positions), "texts": len(conflicting_texts), "places": store.describe_rows("train", positions)}
