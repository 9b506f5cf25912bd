"""Select and renumber tokens of a vocabulary: pure functions on the document of a tokenizer.json.

Each of the three tokenizer models splits a text as before if all its tokens are kept:

- WordPiece takes the longest token that fits. Trimming adds no longer one.
- BPE applies the first merge of its list that fits, repeatedly. Every ancestor of a kept token is kept, so each merge
of the old derivation is still present, and no new merge precedes it.
- Unigram takes the split with the highest score. The old split keeps its score, with fewer alternatives.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rtrain.core.errors import UserError

Document = Mapping[str, Any]
"""The content of a tokenizer.json."""

SUPPORTED_MODELS = ("WordPiece", "BPE", "Unigram")
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""A token for one byte of a character outside the vocabulary (`byte_fallback`)."""
RESERVED = re.compile(r"\[.+\]|<.+>|madeupword\d+")
"""Tokens that no text contains, such as BERT's 994 `[unused]`; they never fill up a vocabulary."""
SPACE = "▁"
"""The replacement for a blank in the tokens of Unigram models."""


def tokens_by_id(document: Document) -> dict[int, str]:
    """All tokens by id, including added tokens."""
    vocabulary = document["model"]["vocab"]
    model_tokens = enumerate(piece for piece, _ in vocabulary) if isinstance(vocabulary, list) else _invert(vocabulary)
    return dict(model_tokens) | {token["id"]: token["content"] for token in document.get("added_tokens") or ()}


def select_ids(
    document: Document,
    used_ids: Iterable[int],
    min_size: int = 0,
    extra_ids: Collection[int] = (),
    pad_id: int | None = None,
    max_size: int | None = None,
) -> list[int]:
    """Select the ids to keep, in the order of their new numbers.

    These are single characters and bytes, which spell unknown words; special and added tokens; the `extra_ids` that
    exist; the `used_ids`, cut to `max_size` tokens in all; and the first other tokens up to `min_size`: vocabularies
    are ordered by frequency or by merges. The token `pad_id` keeps its number, since RoBERTa and relatives count
    positions from it. Raises `UserError` for an unsupported tokenizer, or for one with more than `max_size` characters
    and special tokens.
    """
    _check_supported(document)
    tokens, parents = tokens_by_id(document), _merge_parents(document)
    selected = _with_ancestors((set(extra_ids) & tokens.keys()) | _required_ids(document, tokens), parents)
    if max_size is not None and len(selected) > max_size:
        raise UserError(
            f"compress.max_vocab_size={max_size}: single characters and special tokens alone are {len(selected)} "
            "pieces; "
            "write more, or null",
            code="out_of_range",
        )
    limit = len(tokens) if max_size is None else max_size
    _add_until(selected, (number for number in used_ids if number in tokens), parents, limit, limit)
    spare_ids = (number for number in sorted(tokens) if not RESERVED.fullmatch(tokens[number]))
    _add_until(selected, spare_ids, parents, min(min_size, limit), limit)
    return _order_ids(selected, _model_ids(document), pad_id)


def _add_until(
    selected: set[int],
    candidates: Iterable[int],
    parents: Mapping[int, list[tuple[int, int]]],
    target_size: int,
    max_size: int,
) -> None:
    """Add the first of `candidates`, each with its ancestors, until `selected` has `target_size`, but never more than
    `max_size`."""
    for number in candidates:
        added = _with_ancestors({number}, parents) - selected
        if len(selected) >= target_size or len(selected) + len(added) > max_size:
            return
        selected |= added


def renumber(document: Document, ids: Sequence[int]) -> dict[str, Any]:
    """The document of a tokenizer with only the tokens `ids`, renumbered by their order."""
    new_ids = {old: place for place, old in enumerate(ids)}
    return {
        **document,
        "added_tokens": [{**token, "id": new_ids[token["id"]]} for token in document.get("added_tokens") or ()],
        "padding": _renumber_padding(document.get("padding"), new_ids),
        "post_processor": _renumber_processor(document.get("post_processor"), new_ids),
        "model": _renumber_model(document["model"], ids, new_ids),
    }


# ------------------------------------------------------------------------------------------------------- selection


def _check_supported(document: Document) -> None:
    model = document["model"]
    model_type = model.get("type")
    if model_type not in SUPPORTED_MODELS:
        raise UserError(
            f"compress.vocabulary=trim: a tokenizer of model {model_type} is not cut (only "
            f"{', '.join(SUPPORTED_MODELS)}); write keep",
            code="unsupported",
        )
    if model_type == "Unigram" and model.get("unk_id") is None and not model.get("byte_fallback"):
        raise UserError(
            "compress.vocabulary=trim: the Unigram tokenizer has no unknown token (unk_id), so a character "
            "without a piece would be an error; write keep",
            code="unsupported",
        )


def _invert(vocabulary: Mapping[str, int]) -> Iterable[tuple[int, str]]:
    return ((number, piece) for piece, number in vocabulary.items())


def _model_ids(document: Document) -> set[int]:
    """Ids of the model's own tokens; added tokens are numbered after them."""
    vocabulary = document["model"]["vocab"]
    return set(range(len(vocabulary))) if isinstance(vocabulary, list) else set(vocabulary.values())


def _required_ids(document: Document, tokens: Mapping[int, str]) -> set[int]:
    """Ids that are kept for all rows."""
    model = document["model"]
    required = {token["id"] for token in document.get("added_tokens") or ()}
    required |= {number for number, piece in tokens.items() if _is_character(piece, model) or BYTE.fullmatch(piece)}
    required |= {number for number, piece in tokens.items() if piece == model.get("unk_token")}
    required |= set(_post_processor_ids(document.get("post_processor")))
    if padding := document.get("padding"):
        required.add(padding["pad_id"])
    if model["type"] == "Unigram":
        if model["unk_id"] is not None:
            required.add(model["unk_id"])
        # An unknown character costs 10 more than the lowest score, so removing that token could change splits.
        scores = [score for _, score in model["vocab"]]
        required.add(scores.index(min(scores)))
    return required


def _is_character(piece: str, model: Mapping[str, Any]) -> bool:
    """Whether a token is one character at the beginning, inside or at the end of a word."""
    bare = piece.removeprefix(model.get("continuing_subword_prefix") or "")
    bare = bare.removesuffix(model.get("end_of_word_suffix") or "") or bare
    return len(bare) == 1 or (model["type"] == "Unigram" and len(bare.removeprefix(SPACE)) == 1)


def _post_processor_ids(processor: Mapping[str, Any] | None) -> Iterable[int]:
    """The ids that a post-processor adds around texts."""
    if processor is None:
        return
    yield from (number for token in processor.get("special_tokens", {}).values() for number in token["ids"])
    yield from (processor[side][1] for side in ("sep", "cls") if side in processor)
    for inner in processor.get("processors", ()):
        yield from _post_processor_ids(inner)


def _merge_parents(document: Document) -> dict[int, list[tuple[int, int]]]:
    """BPE: the pairs of tokens that merge into each token."""
    model = document["model"]
    parents: dict[int, list[tuple[int, int]]] = {}
    for merge in model.get("merges") or ():
        left, right = _split_merge(merge)
        vocabulary = model["vocab"]
        parents.setdefault(vocabulary[_merge_tokens(left, right, model)], []).append(
            (vocabulary[left], vocabulary[right])
        )
    return parents


def _split_merge(merge: str | Sequence[str]) -> tuple[str, str]:
    """The two sides of a merge; older files write them as one string."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _merge_tokens(left: str, right: str, model: Mapping[str, Any]) -> str:
    return left + right.removeprefix(model.get("continuing_subword_prefix") or "")


def _with_ancestors(ids: Collection[int], parents: Mapping[int, list[tuple[int, int]]]) -> set[int]:
    """The tokens with everything that they are merged from, recursively."""
    ancestors, pending = set(ids), list(ids)
    while pending:
        for pair in parents.get(pending.pop(), ()):
            pending += [number for number in pair if number not in ancestors]
            ancestors.update(pair)
    return ancestors


def _order_ids(selected: set[int], model_ids: set[int], pad_id: int | None) -> list[int]:
    model_tokens, added_tokens = sorted(selected & model_ids), sorted(selected - model_ids)
    if pad_id in model_tokens and pad_id < len(model_tokens):
        model_tokens.remove(pad_id)
        model_tokens.insert(pad_id, pad_id)
    return model_tokens + added_tokens


# ------------------------------------------------------------------------------------------------------ new numbers


def _renumber_model(model: Mapping[str, Any], ids: Sequence[int], new_ids: Mapping[int, int]) -> dict[str, Any]:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        entries = [vocabulary[number] for number in ids if number < len(vocabulary)]
        return {**model, "vocab": entries, "unk_id": None if model["unk_id"] is None else new_ids[model["unk_id"]]}
    token_ids = {piece: new_ids[number] for piece, number in vocabulary.items() if number in new_ids}
    renumbered = {**model, "vocab": dict(sorted(token_ids.items(), key=lambda entry: entry[1]))}
    if "merges" in model:
        merges = ((merge, *_split_merge(merge)) for merge in model["merges"])
        renumbered["merges"] = [
            merge
            for merge, left, other in merges
            if left in token_ids and other in token_ids and _merge_tokens(left, other, model) in token_ids
        ]
    return renumbered


def _renumber_padding(padding: Mapping[str, Any] | None, new_ids: Mapping[int, int]) -> dict[str, Any] | None:
    return None if padding is None else {**padding, "pad_id": new_ids[padding["pad_id"]]}


def _renumber_processor(processor: Mapping[str, Any] | None, new_ids: Mapping[int, int]) -> dict[str, Any] | None:
    if processor is None:
        return None
    renumbered = dict(processor)
    if "special_tokens" in renumbered:
        renumbered["special_tokens"] = {
            name: {**token, "ids": [new_ids[number] for number in token["ids"]]}
            for name, token in renumbered["special_tokens"].items()
        }
    for side in ("sep", "cls"):
        if side in renumbered:
            text, number = renumbered[side]
            renumbered[side] = [text, new_ids[number]]
    if "processors" in renumbered:
        renumbered["processors"] = [_renumber_processor(inner, new_ids) for inner in renumbered["processors"]]
    return renumbered
