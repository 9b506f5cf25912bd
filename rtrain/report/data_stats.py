"""Statistics of a run's rows, for the events `labels`, `texts` and `conflicts` and for the report.

Targets are read in blocks, texts from a sample of the training rows, and equal texts are searched in the first rows, to
bound time and memory.
"""

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rtrain.core.ragged import Ints, RaggedArray
from rtrain.data.store.store import Store
from rtrain.inference.drift_baseline import find_unknown_id

if TYPE_CHECKING:
    import tokenizers


BLOCK_ROWS = 1 << 18
MAX_SIMILAR_GROUPS = 3
"""Most listed groups of similar labels."""
MISSING_VALUE_NAMES = frozenset({"none", "na", "n/a", "null", "nan"})
"""Lower-case names that programs write for a missing value."""
MAX_LISTED_LABELS, FREQUENT_LABELS, RAREST_LABELS = 12, 6, 4
"""Up to so many labels are all listed with their counts; of more, the most frequent and the rarest."""
SAMPLE_ROWS = 10_000
"""Sampled rows."""
MAX_COMPARED_ROWS = 1 << 20
"""Rows that are searched for equal texts."""
MIN_PIECES_PER_WORD = 1.5
"""Tokens per word from which on a row counts as split. The vocabulary of BERT-base (uncased) has 1.0 to 1.4 for English
messages, 1.5 to 1.8 for German and Spanish, over 2.4 for Polish and Russian."""
WORD_STARTS = ("\u0120", "\u2581")
"""Prefixes of tokens that begin a word, in byte-level and SentencePiece vocabularies."""


def describe_labels(store: Store, output: str) -> list[dict[str, Any]]:
    """Fields of the event `labels` by kind of output; one event, or one per head. Their size is bounded."""
    names, rows = store.manifest.labels, store.num_labeled("train")
    if output == "classes":
        return [{"target_kind": "labels", **_label_fields(names, count_classes(store))}]
    if output == "labels":
        counts, rows_by_count = count_labels(store)
        return [
            {
                "target_kind": "labels",
                **_label_fields(names, counts),
                "labels_per_row": float(counts.sum() / rows),
                "rows_without_labels": rows_by_count[0],
            }
        ]
    if output == "heads":
        return [
            {"target_kind": "labels", "head": head, **_label_fields(head_labels, counts)}
            for head, head_labels, counts in count_heads(store)
        ]
    if output == "number":
        return [{"target_kind": "numbers", "rows": rows, **_target_range(store)}]
    if output == "tags":
        entity_counts = count_entities(store)
        counts_by_type = dict(zip(entity_counts.types, entity_counts.counts.tolist(), strict=True))
        return [
            {
                "target_kind": "entities",
                **_label_fields([*counts_by_type], entity_counts.counts),
                "rows": rows,
                "rows_with_entities": entity_counts.rows_with_entities,
            }
        ]
    if output == "spans":
        return [{"target_kind": "questions", "rows": rows, "answered": _count_answered(store)}]
    return []


def _label_fields(names: Sequence[str], counts: Ints) -> dict[str, Any]:
    order = np.argsort(-counts, kind="stable")
    pairs = [[names[place], int(counts[place])] for place in order]
    similar_groups = group_similar_labels([name for name, _ in pairs])
    fields: dict[str, Any] = {
        "label_count": len(pairs),
        **({"similar": similar_groups[:MAX_SIMILAR_GROUPS]} if similar_groups else {}),
    }
    if missing := [name for name, _ in pairs if name.casefold() in MISSING_VALUE_NAMES]:
        fields["missing_value_names"] = missing[:MAX_SIMILAR_GROUPS]
    if len(pairs) <= MAX_LISTED_LABELS:
        return {**fields, "most_frequent": pairs, "rarest": []}
    return {**fields, "most_frequent": pairs[:FREQUENT_LABELS], "rarest": pairs[-RAREST_LABELS:]}


def group_similar_labels(names: Iterable[str]) -> list[list[str]]:
    """Group labels that differ only in case, blanks, invisible characters or Unicode normalization.

    They stay different labels; the log warns.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        normalized = "".join(sign for sign in unicodedata.normalize("NFKC", name) if unicodedata.category(sign) != "Cf")
        groups.setdefault(" ".join(normalized.casefold().split()), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def count_classes(store: Store) -> Ints:
    size = len(store.manifest.labels)
    return sum((_count_values(block.values, size) for block in _iter_blocks(store)), np.zeros(size, dtype=np.int64))


def count_labels(store: Store) -> tuple[Ints, list[int]]:
    """Return (training rows of each label, training rows with 0, 1, 2, ... labels)."""
    size = len(store.manifest.labels)
    counts, rows_by_count = np.zeros(size, dtype=np.int64), np.zeros(size + 1, dtype=np.int64)
    for block in _iter_blocks(store):
        has_label = block.to_matrix(size) > 0
        counts += has_label.sum(axis=0)
        rows_by_count += np.bincount(has_label.sum(axis=1), minlength=size + 1)
    return counts, rows_by_count.tolist()


def count_heads(store: Store) -> list[tuple[str, list[str], Ints]]:
    """List (name, labels, training rows of each label) of the heads."""
    sizes, start, heads = store.manifest.facts["heads"], 0, []
    for name, size in sizes:
        names = [label.removeprefix(f"{name}=") for label in store.manifest.labels[start : start + size]]
        heads.append((name, names, np.zeros(size, dtype=np.int64)))
        start += size
    for block in _iter_blocks(store):
        for (_, names, counts), column in zip(heads, block.to_matrix(len(sizes)).T, strict=True):
            counts += _count_values(column, len(names))
    return heads


class EntityCounts(NamedTuple):
    types: tuple[str, ...]
    """Occurring types, the most frequent first."""
    counts: Ints
    rows_with_entities: int
    """Training rows with an entity."""


def count_entities(store: Store) -> EntityCounts:
    """Count the entities of the training rows by type. An entity begins at a B- tag, or (IO format) at the first I-
    after another tag."""
    labels = store.manifest.labels
    types = sorted({label[2:] for label in labels if label != "O"})
    kind = np.array([-1 if label == "O" else types.index(label[2:]) for label in labels])
    begins = np.array([label.startswith("B-") for label in labels])
    counts, rows_with_entities = np.zeros(len(types), dtype=np.int64), 0
    for block in _iter_blocks(store):
        has_tag = block.values >= 0  # the rest are not words, or have an unknown tag
        tags = block.values[has_tag].astype(np.int64)
        rows = np.repeat(np.arange(len(block)), block.counts)[has_tag]
        token_types = kind[tags]
        is_continued = np.zeros(len(tags), dtype=np.bool_)
        is_continued[1:] = (token_types[1:] == token_types[:-1]) & (rows[1:] == rows[:-1])
        is_start = (token_types >= 0) & (begins[tags] | ~is_continued)
        counts += np.bincount(token_types[is_start], minlength=len(types))
        rows_with_entities += len(np.unique(rows[is_start]))
    order = [int(place) for place in np.argsort(-counts, kind="stable") if counts[place]]
    return EntityCounts(tuple(types[place] for place in order), counts[order], rows_with_entities)


def _target_range(store: Store) -> Mapping[str, float]:
    """Return lowest, highest and mean target."""
    lows, highs, sums = zip(
        *(
            (block.values.min(), block.values.max(), block.values.sum(dtype=np.float64))
            for block in _iter_blocks(store)
        ),
        strict=True,
    )
    return {"low": float(min(lows)), "high": float(max(highs)), "mean": float(sum(sums) / store.num_labeled("train"))}


def _count_answered(store: Store) -> int:
    """Count training questions with an answer in some window; targets are (first, last) token, (0, 0) for none."""
    count = 0
    for block in _iter_blocks(store):
        rows = np.repeat(np.arange(len(block)), block.counts)
        count += len(np.unique(rows[1::2][block.values[1::2] > 0]))
    return count


def _iter_blocks(store: Store) -> Iterator[RaggedArray]:
    rows = store.num_labeled("train")
    for start in range(0, rows, BLOCK_ROWS):
        yield store.targets("train", np.arange(start, min(start + BLOCK_ROWS, rows)))


def _count_values(values: npt.NDArray[Any], size: int) -> Ints:
    places = values[values >= 0].astype(np.int64)
    return np.bincount(places, minlength=size)


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
