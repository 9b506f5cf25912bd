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
_DRAWS_PER_WORD = 3
"""Random numbers per word: the kind of noise, the kind of typo, and its position."""


@dataclass(frozen=True)
class TextNoise:
    """The share of words, 0 to 1, that gets each kind of noise: one kind at a position. A swapped word can also get the
    noise of its new position. Words are separated by white space."""

    typo: float = 0.0
    """Two adjacent letters change places, or a letter is left out or written twice. Words with a digit stay."""
    swap: float = 0.0
    """The word changes places with the next word, and moves on if the next position has a swap too."""
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


def add_noise(text: str, noise: TextNoise, seed: int, copy: int, row: int) -> str:
    """The text with noise on its words; white space between words stays. `copy` is the number of the copy of row
    `row`."""
    start = len(text) - len(text.lstrip())
    pairs = _WORDS.findall(text)
    words, gaps = [word for word, _ in pairs], [gap for _, gap in pairs]
    actions = _draw_actions(len(words), noise, seed, copy, row)
    keep_mask = [True] * len(words)
    for index, (action, typo_draw, position_draw) in enumerate(actions):
        if action == "swap" and index + 1 < len(words):
            words[index], words[index + 1] = words[index + 1], words[index]
        elif action == "drop":
            keep_mask[index] = False
        elif action in ("typo", "mask"):
            words[index] = _apply_action(words[index], action, typo_draw, position_draw, noise)
    if not any(keep_mask):
        return text
    changed = "".join(word + gap for word, gap, keep in zip(words, gaps, keep_mask, strict=True) if keep)
    return text[:start] + (changed if keep_mask[-1] else changed.rstrip())


def add_noise_to_tokens(tokens: Sequence[str], noise: TextNoise, seed: int, copy: int, row: int) -> list[str]:
    """The tokens with typos and masks. Swaps and drops are left out, so that each tag still belongs to its token."""
    actions = _draw_actions(len(tokens), noise, seed, copy, row)
    return [
        _apply_action(token, action, typo_draw, position_draw, noise) if action in ("typo", "mask") else token
        for token, (action, typo_draw, position_draw) in zip(tokens, actions, strict=True)
    ]


def _draw_actions(words: int, noise: TextNoise, seed: int, copy: int, row: int) -> Iterator[tuple[str, float, float]]:
    """(kind of noise or empty, and two numbers in [0, 1) that say how and where) for each word."""
    key = hashlib.blake2b(f"{seed} {copy} {row} noise".encode(), digest_size=16).digest()
    # Only the raw stream is used: numpy promises that alone to be the same from version to version.
    raw = np.random.Philox(key=np.frombuffer(key, dtype=np.uint64)).random_raw(words * _DRAWS_PER_WORD)
    draws = (np.asarray(raw, dtype=np.uint64) >> np.uint64(11)).astype(np.float64) / (1 << 53)
    for action_draw, typo_draw, position_draw in draws.reshape(words, _DRAWS_PER_WORD).tolist():
        kind = ""
        for name, share in noise.shares.items():
            if action_draw < share:
                kind = name
                break
            action_draw -= share
        yield kind, typo_draw, position_draw


def _apply_action(word: str, action: str, typo_draw: float, position_draw: float, noise: TextNoise) -> str:
    return noise.mask_token if action == "mask" else _add_typo(word, typo_draw, position_draw)


def _add_typo(word: str, typo_draw: float, position_draw: float) -> str:
    # A changed digit would not be a typo but another amount or date. A word of one letter has nothing to confuse.
    letters = [index for index, character in enumerate(word) if character.isalpha()]
    if len(letters) < 2 or any(character.isdigit() for character in word):
        return word
    letter_index = letters[int(position_draw * len(letters))]
    if (
        typo_draw < 1 / 3
        and letter_index + 1 < len(word)
        and word[letter_index + 1].isalpha()
        and word[letter_index] != word[letter_index + 1]
    ):
        return word[:letter_index] + word[letter_index + 1] + word[letter_index] + word[letter_index + 2 :]
    if typo_draw < 2 / 3:
        return word[:letter_index] + word[letter_index + 1 :]
    return word[: letter_index + 1] + word[letter_index:]
