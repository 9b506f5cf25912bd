"""Noise on the words of training rows: typos, swaps, drops and masks, without a model (EDA, Wei and Zou 2019).

The noise is a pure function of (seed, copy, row id) and the text: it is the same on every worker, node and resume, and
for rows in any order.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

_WORDS = re.compile(r"(\S+)(\s*)")
_DRAWS = 3
"""Random numbers per word: they choose what is done to it, how, and where."""


@dataclass(frozen=True)
class Noise:
    """The share of words, 0 to 1, that gets each kind of noise: one kind at a place. A word that a swap has carried on
    may get what the next place has, too. Words are separated by white space."""

    typo: float = 0.0
    """Two neighbouring letters change places, or a letter is left out or written twice. Words with a digit stay."""
    swap: float = 0.0
    """The word changes places with the next; where the next place has a swap as well, it is carried on."""
    drop: float = 0.0
    """The word is left out; a text never becomes empty."""
    mask: float = 0.0
    """The word is replaced by `mask_token`."""
    mask_token: str = "[MASK]"
    """The mask token as the model's tokenizer writes it."""

    @property
    def shares(self) -> dict[str, float]:
        """The share of each kind, in the order in which they are drawn."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "mask_token"}


def noisy(text: str, noise: Noise, seed: int, copy: int, row: int) -> str:
    """The text with noise on its words; white space between words stays. `copy` is the number of the copy of row
    `row`."""
    start = len(text) - len(text.lstrip())
    pairs = _WORDS.findall(text)
    words, gaps = [word for word, _ in pairs], [gap for _, gap in pairs]
    actions = _actions(len(words), noise, seed, copy, row)
    kept = [True] * len(words)
    for index, (action, how, where) in enumerate(actions):
        if action == "swap" and index + 1 < len(words):
            words[index], words[index + 1] = words[index + 1], words[index]
        elif action == "drop":
            kept[index] = False
        elif action in ("typo", "mask"):
            words[index] = _changed(words[index], action, how, where, noise)
    if not any(kept):
        return text
    changed = "".join(word + gap for word, gap, keep in zip(words, gaps, kept, strict=True) if keep)
    return text[:start] + (changed if kept[-1] else changed.rstrip())


def noisy_tokens(tokens: Sequence[str], noise: Noise, seed: int, copy: int, row: int) -> list[str]:
    """The tokens with typos and masks. Swaps and drops are left out, so that each tag still belongs to its token."""
    actions = _actions(len(tokens), noise, seed, copy, row)
    return [
        _changed(token, action, how, where, noise) if action in ("typo", "mask") else token
        for token, (action, how, where) in zip(tokens, actions, strict=True)
    ]


def _actions(words: int, noise: Noise, seed: int, copy: int, row: int) -> Iterator[tuple[str, float, float]]:
    """(kind of noise or empty, and two numbers in [0, 1) that say how and where) for each word."""
    key = hashlib.blake2b(f"{seed} {copy} {row} noise".encode(), digest_size=16).digest()
    # Only the raw stream is used: numpy promises that alone to be the same from version to version.
    raw = np.random.Philox(key=np.frombuffer(key, dtype=np.uint64)).random_raw(words * _DRAWS)
    draws = (np.asarray(raw, dtype=np.uint64) >> np.uint64(11)).astype(np.float64) / (1 << 53)
    for what, how, where in draws.reshape(words, _DRAWS).tolist():
        kind = ""
        for name, share in noise.shares.items():
            if what < share:
                kind = name
                break
            what -= share
        yield kind, how, where


def _changed(word: str, action: str, how: float, where: float, noise: Noise) -> str:
    return noise.mask_token if action == "mask" else _typo(word, how, where)


def _typo(word: str, how: float, where: float) -> str:
    # A changed digit would not be a typo but another amount or date. A word of one letter has nothing to confuse.
    letters = [index for index, character in enumerate(word) if character.isalpha()]
    if len(letters) < 2 or any(character.isdigit() for character in word):
        return word
    at = letters[int(where * len(letters))]
    if how < 1 / 3 and at + 1 < len(word) and word[at + 1].isalpha() and word[at] != word[at + 1]:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    if how < 2 / 3:
        return word[:at] + word[at + 1 :]
    return word[: at + 1] + word[at:]
