"""A tokenizer's vocabulary cut to the pieces that are needed: pure functions on the document of a tokenizer.json.

Of the three models that encoders have, each splits a text whose pieces are all kept as before:

- WordPiece takes the longest piece that fits. A longer one that was not there before is not there after.
- BPE applies the first merge of its list that fits, again and again. With every ancestor of a kept piece, each merge of
  the old derivation is still there, and no new one can come before it.
- Unigram takes the split of the highest score. The old one is still there with its score, among fewer rivals.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rtrain.core.errors import UserError

Document = Mapping[str, Any]
"""The content of a tokenizer.json."""

MODELS = ("WordPiece", "BPE", "Unigram")
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""A piece that stands for one byte of a character without a piece of its own (`byte_fallback`)."""
RESERVED = re.compile(r"\[.+\]|<.+>|madeupword\d+")
"""Pieces that no text is split into, such as BERT's 994 `[unused]`: no vocabulary is filled up with them."""
SPACE = "▁"
"""What stands for a blank in the pieces of Unigram models."""


def pieces(document: Document) -> dict[int, str]:
    """Every piece by its id: the model's own, and the added ones."""
    vocabulary = document["model"]["vocab"]
    own = enumerate(piece for piece, _ in vocabulary) if isinstance(vocabulary, list) else _turned(vocabulary)
    return dict(own) | {token["id"]: token["content"] for token in document.get("added_tokens") or ()}


def kept(
    document: Document,
    used: Iterable[int],
    at_least: int = 0,
    also: Collection[int] = (),
    pad: int | None = None,
    most: int | None = None,
) -> list[int]:
    """The ids that stay, in the order of their new numbers.

    These are single characters and bytes, into which an unknown word falls apart; special and added tokens; those of
    `also` that exist; the `used` ones, of which the first are kept where there are more than `most` pieces in all; and,
    up to `at_least` pieces, the first others: vocabularies are in the order of frequency, or of merges. The piece `pad`
    keeps its number, since RoBERTa and its kin count positions from it. Raises `UserError` for a tokenizer that cannot
    be cut, or that has more than `most` characters and special tokens.
    """
    _refuse(document)
    found, parents = pieces(document), _parents(document)
    wanted = _with_ancestors((set(also) & found.keys()) | _always(document, found), parents)
    if most is not None and len(wanted) > most:
        raise UserError(
            f"compress.vocabulary_most={most}: single characters and special tokens alone are {len(wanted)} pieces; "
            "write more, or null",
            code="out_of_range",
        )
    limit = len(found) if most is None else most
    _fill(wanted, (number for number in used if number in found), parents, limit, limit)
    spare = (number for number in sorted(found) if not RESERVED.fullmatch(found[number]))
    _fill(wanted, spare, parents, min(at_least, limit), limit)
    return _ordered(wanted, _own(document), pad)


def _fill(
    wanted: set[int],
    further: Iterable[int],
    parents: Mapping[int, list[tuple[int, int]]],
    enough: int,
    most: int,
) -> None:
    """Add the first of `further`, each with its ancestors, until `wanted` has `enough`, and never more than `most`."""
    for number in further:
        added = _with_ancestors({number}, parents) - wanted
        if len(wanted) >= enough or len(wanted) + len(added) > most:
            return
        wanted |= added


def renumbered(document: Document, ids: Sequence[int]) -> dict[str, Any]:
    """The document of a tokenizer that has the pieces `ids` alone, numbered by their places in it."""
    new = {old: place for place, old in enumerate(ids)}
    return {
        **document,
        "added_tokens": [{**token, "id": new[token["id"]]} for token in document.get("added_tokens") or ()],
        "padding": _padding(document.get("padding"), new),
        "post_processor": _processor(document.get("post_processor"), new),
        "model": _model(document["model"], ids, new),
    }


# ------------------------------------------------------------------------------------------------------- what is kept


def _refuse(document: Document) -> None:
    model = document["model"]
    kind = model.get("type")
    if kind not in MODELS:
        raise UserError(
            f"compress.vocabulary=trim: a tokenizer of model {kind} is not cut (only {', '.join(MODELS)}); write keep",
            code="unsupported",
        )
    if kind == "Unigram" and model.get("unk_id") is None and not model.get("byte_fallback"):
        raise UserError(
            "compress.vocabulary=trim: the Unigram tokenizer has no piece for what is unknown (unk_id), so a character "
            "without a piece would be an error; write keep",
            code="unsupported",
        )


def _turned(vocabulary: Mapping[str, int]) -> Iterable[tuple[int, str]]:
    return ((number, piece) for piece, number in vocabulary.items())


def _own(document: Document) -> set[int]:
    """Ids of the model's own pieces; added tokens beyond them are numbered after them."""
    vocabulary = document["model"]["vocab"]
    return set(range(len(vocabulary))) if isinstance(vocabulary, list) else set(vocabulary.values())


def _always(document: Document, found: Mapping[int, str]) -> set[int]:
    """Ids that stay whatever the rows are."""
    model = document["model"]
    wanted = {token["id"] for token in document.get("added_tokens") or ()}
    wanted |= {number for number, piece in found.items() if _is_character(piece, model) or BYTE.fullmatch(piece)}
    wanted |= {number for number, piece in found.items() if piece == model.get("unk_token")}
    wanted |= set(_named(document.get("post_processor")))
    if padding := document.get("padding"):
        wanted.add(padding["pad_id"])
    if model["type"] == "Unigram":
        if model["unk_id"] is not None:
            wanted.add(model["unk_id"])
        # An unknown character costs 10 more than the piece of the lowest score: with it gone, splits could change.
        scores = [score for _, score in model["vocab"]]
        wanted.add(scores.index(min(scores)))
    return wanted


def _is_character(piece: str, model: Mapping[str, Any]) -> bool:
    """Whether a piece is one character, at the beginning of a word, inside one or at its end."""
    bare = piece.removeprefix(model.get("continuing_subword_prefix") or "")
    bare = bare.removesuffix(model.get("end_of_word_suffix") or "") or bare
    return len(bare) == 1 or (model["type"] == "Unigram" and len(bare.removeprefix(SPACE)) == 1)


def _named(processor: Mapping[str, Any] | None) -> Iterable[int]:
    """The ids that a post-processor puts around texts."""
    if processor is None:
        return
    yield from (number for one in processor.get("special_tokens", {}).values() for number in one["ids"])
    yield from (processor[side][1] for side in ("sep", "cls") if side in processor)
    for inner in processor.get("processors", ()):
        yield from _named(inner)


def _parents(document: Document) -> dict[int, list[tuple[int, int]]]:
    """BPE: the pairs of pieces that merge into each piece."""
    model = document["model"]
    found: dict[int, list[tuple[int, int]]] = {}
    for merge in model.get("merges") or ():
        left, right = _pair(merge)
        vocabulary = model["vocab"]
        found.setdefault(vocabulary[_product(left, right, model)], []).append((vocabulary[left], vocabulary[right]))
    return found


def _pair(merge: str | Sequence[str]) -> tuple[str, str]:
    """The sides of a merge; older files write them as one text."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _product(left: str, right: str, model: Mapping[str, Any]) -> str:
    return left + right.removeprefix(model.get("continuing_subword_prefix") or "")


def _with_ancestors(wanted: Collection[int], parents: Mapping[int, list[tuple[int, int]]]) -> set[int]:
    """The pieces and all that they are merged from, by whatever way."""
    found, left = set(wanted), list(wanted)
    while left:
        for pair in parents.get(left.pop(), ()):
            left += [number for number in pair if number not in found]
            found.update(pair)
    return found


def _ordered(wanted: set[int], own: set[int], pad: int | None) -> list[int]:
    inside, outside = sorted(wanted & own), sorted(wanted - own)
    if pad in inside and pad < len(inside):
        inside.remove(pad)
        inside.insert(pad, pad)
    return inside + outside


# ------------------------------------------------------------------------------------------------------ new numbers


def _model(model: Mapping[str, Any], ids: Sequence[int], new: Mapping[int, int]) -> dict[str, Any]:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        entries = [vocabulary[number] for number in ids if number < len(vocabulary)]
        return {**model, "vocab": entries, "unk_id": None if model["unk_id"] is None else new[model["unk_id"]]}
    left = {piece: new[number] for piece, number in vocabulary.items() if number in new}
    found = {**model, "vocab": dict(sorted(left.items(), key=lambda entry: entry[1]))}
    if "merges" in model:
        merges = ((merge, *_pair(merge)) for merge in model["merges"])
        found["merges"] = [
            merge
            for merge, one, other in merges
            if one in left and other in left and _product(one, other, model) in left
        ]
    return found


def _padding(padding: Mapping[str, Any] | None, new: Mapping[int, int]) -> dict[str, Any] | None:
    return None if padding is None else {**padding, "pad_id": new[padding["pad_id"]]}


def _processor(processor: Mapping[str, Any] | None, new: Mapping[int, int]) -> dict[str, Any] | None:
    if processor is None:
        return None
    found = dict(processor)
    if "special_tokens" in found:
        found["special_tokens"] = {
            name: {**one, "ids": [new[number] for number in one["ids"]]}
            for name, one in found["special_tokens"].items()
        }
    for side in ("sep", "cls"):
        if side in found:
            text, number = found[side]
            found[side] = [text, new[number]]
    if "processors" in found:
        found["processors"] = [_processor(inner, new) for inner in found["processors"]]
    return found
