"""Augmented copies of training rows: copies with noise or with a model's texts, and copies for a student.

A copy is a training row because its source row is one. A copy whose text hashes to another split is rejected, so no
copy can equal a row that the hash has put there. Rows of validation and test files, and rows whose split a column
names, are unknown here: `rtrain.data.splits.find_in_training_set` finds the evaluation rows that equal a copy. A copy
keeps its row's label, line, slices and group.

Noise is typos, swaps, drops and masks of words, without a model (EDA, Wei and Zou 2019). It is a pure function of
(seed, copy, row id) and the text: it is the same on every worker, node and resume, and for rows in any order.
`rtrain.data.paraphrase` has models rewrite texts.
"""

import hashlib
import html
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rtrain.config import AugmentConfig, Recipe
from rtrain.config.recipe import NEUTRAL_ROW_SETTINGS, drop_neutral
from rtrain.core import atomic_write, plugins
from rtrain.core.errors import Problem
from rtrain.data import row_reader
from rtrain.data.row_reader import SourceRow
from rtrain.data.sources import make_config_error
from rtrain.data.splits import Splits
from rtrain.tasks.base import Task, Variation

if TYPE_CHECKING:
    import tokenizers


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


# -------------------------------------------------------------------------------------------------- the copies of a row

MASK_TOKENS = ("[MASK]", "<mask>")
MAX_TRIES_PER_COPY = 4
"""Tries for each requested copy: some change nothing, repeat another copy, or are rejected."""
PAIR_KEY_BIT = 1 << 63
"""Turns the key of a row's noise into that of its second text, so that the two texts get different noise."""

RowCopy = tuple[SourceRow, int]
"""A copy, and its content hash, which is made from its row's content hash and the copy's number."""


def make_noise(settings: AugmentConfig, tokenizer: "tokenizers.Tokenizer") -> TextNoise:
    """The noise of the settings, with the tokenizer's mask token. Raises `ConfigError` if masks are asked for and the
    tokenizer has no mask token."""
    mask = next((token for token in MASK_TOKENS if tokenizer.token_to_id(token) is not None), None)
    if settings.mask and mask is None:
        reason = f"the model's tokenizer has no mask token ({' or '.join(MASK_TOKENS)})"
        fix = "write 0; use typo, swap or drop"
        raise make_config_error("augment.mask", settings.mask, reason, fix, "no_mask_token")
    return TextNoise(**settings.noise_shares, mask_token=mask or MASK_TOKENS[0])


def find_problems(recipe: Recipe, task: Task) -> list[Problem]:
    """Settings of `augment` that would make the labels of the recipe's task wrong."""
    settings, problems = recipe.augment, []
    if not settings.is_active or task.augmentable == "text":
        return []
    if settings.paraphrase is not None:
        reason = f"labels of {task.name} are about places in the text, which another text has not"
        problems.append(Problem("augment.paraphrase", settings.paraphrase, reason, "remove it", code="unsupported"))
    if settings.functions:
        reason = f"labels of {task.name} are about places in the text, which another text has not"
        problems.append(Problem("augment.functions", settings.functions, reason, "remove it", code="unsupported"))
    for name in ("swap", "drop") if task.augmentable == "words" else ():
        if share := settings.noise_shares[name]:
            reason = f"labels of {task.name} are about words in their order"
            problems.append(Problem(f"augment.{name}", share, reason, "write 0; use typo or mask", code="unsupported"))
    if task.augmentable == "nothing" and settings.copies:
        reason = f"labels of {task.name} are about places in the text, which noise moves"
        problems.append(Problem("augment.copies", settings.copies, reason, "write 0", code="unsupported"))
    return problems


@dataclass(frozen=True)
class CopyMaker:
    """Makes the copies of training rows; equal rows have equal copies."""

    settings: AugmentConfig
    noise: TextNoise
    augmentable: Variation
    """What noise may change without making the task's labels wrong."""
    is_allowed: Callable[[SourceRow], bool]
    """Whether a copy may be used."""

    def make_copies(self, row: SourceRow, content: int, rewritten_texts: Sequence[str] = ()) -> list[RowCopy]:
        """The copies of a row whose content hashes to `content`; a model has made `rewritten_texts` of the row."""
        seen_texts = {(row.text, row.pair)}
        copies: list[RowCopy] = []

        def add_copy(copy: SourceRow, kind: str, number: int) -> None:
            texts = (copy.text, copy.pair)
            if texts not in seen_texts and copy.text.strip() and self.is_allowed(copy):
                seen_texts.add(texts)
                copies.append((copy, _derive_key(content, kind, number)))

        for number, text in enumerate(rewritten_texts):
            add_copy(row._replace(text=text), "rewritten", number)
        max_copies = len(copies) + self.settings.copies
        for number in range(MAX_TRIES_PER_COPY * self.settings.copies):
            if len(copies) == max_copies:
                break
            add_copy(self._add_noise(row, content, number), f"noise {self.settings.seed}", number)
        for name in self.settings.functions:
            key = hashlib.blake2b(f"{self.settings.seed} {content} {name}".encode(), digest_size=16).digest()
            generator = np.random.Generator(np.random.Philox(key=np.frombuffer(key, dtype=np.uint64)))
            text = plugins.find_value("augmentation", name)(row.text, generator)
            add_copy(row._replace(text=text), f"function {name} {self.settings.seed}", 0)
        return copies

    def _add_noise(self, row: SourceRow, content: int, number: int) -> SourceRow:
        draw = (self.noise, self.settings.seed, number)
        if self.augmentable == "words":
            return row._replace(text=" ".join(add_noise_to_tokens(row.text.split(" "), *draw, content)))
        text = add_noise(row.text, *draw, content)
        pair = None if row.pair is None else add_noise(row.pair, *draw, content ^ PAIR_KEY_BIT)
        return row._replace(text=text, pair=pair)


def _derive_key(content: int, kind: str, number: int) -> int:
    digest = hashlib.blake2b(f"{content} {kind} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


# ------------------------------------------------------------------------------------------------- copies for a student

FOLDER, FILE = ".copies", "rows.jsonl"
REPLACED_SHARE = 0.2
"""The share of a copy's words that are another row's."""
MAX_WORDS = 1_000_000
"""Most words in the pool of replacements; a large data set is sampled."""
_WORD = re.compile(r"\S+")


def build_or_open_copies(recipe: Recipe, root: Path) -> Path:
    """The file with `distill.augmented_copies` copies of each training row, made once for the runs under `root`.

    Validation and test rows are not copied: a student would train on its evaluation rows. Raises `ConfigError` as
    `row_reader.inspect_source` does, and if no row has a word.
    """
    source = row_reader.inspect_source(recipe.data, root).with_cached_digests(root)
    data_settings = drop_neutral(
        recipe.data.model_dump(mode="json", exclude={"path", "valid", "test"}), NEUTRAL_ROW_SETTINGS
    )
    address = hashlib.sha256(
        json.dumps([source.digest(), data_settings, recipe.distill.augmented_copies, REPLACED_SHARE]).encode()
    ).hexdigest()
    final = root / FOLDER / address[:16]
    if (final / FILE).is_file():
        return final / FILE
    atomic_write.remove_stale_drafts(final)
    draft = atomic_write.Draft(final)
    try:
        words = sample_words(
            word
            for texts in _iter_training_texts(recipe, source)
            for text in texts.values()
            for word in _WORD.findall(text)
        )
        if not any(map(_has_letters, words)):
            reason, fix = "no training row has a word to put another in place of", "leave it out"
            raise make_config_error(
                "distill.augmented_copies", recipe.distill.augmented_copies, reason, fix, "no_words"
            )
        with (draft.folder / FILE).open("w", encoding="utf-8") as out:
            for row, texts in enumerate(_iter_training_texts(recipe, source)):
                for copy in range(recipe.distill.augmented_copies):
                    rng = np.random.default_rng((copy, row))
                    changed = {column: replace_words(text, words, rng) for column, text in texts.items()}
                    if changed != texts:
                        out.write(f"{json.dumps(changed)}\n")
        (draft.folder / atomic_write.LOCK_FILE).unlink()
        try:
            atomic_write.publish_folder(draft.folder, final)
        except OSError:
            if not (final / FILE).is_file():
                raise
            # Another run has made the same folder meanwhile.
    finally:
        shutil.rmtree(draft.folder, ignore_errors=True)
        draft.release()
    return final / FILE


def sample_words(words: Iterator[str]) -> list[str]:
    """At most `MAX_WORDS` of the words, sampled uniformly: frequent words stay frequent."""
    reservoir: list[str] = []
    rng = np.random.default_rng(0)
    for number, word in enumerate(words):
        if number < MAX_WORDS:
            reservoir.append(word)
        elif (slot := int(rng.integers(number + 1))) < MAX_WORDS:
            reservoir[slot] = word
    return reservoir


def replace_words(text: str, words: list[str], rng: np.random.Generator) -> str:
    """The text with about `REPLACED_SHARE` of its words replaced by some of `words`; signs, numbers and white space
    stay."""

    def replace_word(word: re.Match[str]) -> str:
        draw, index = rng.random(), int(rng.integers(len(words)))
        return words[index] if draw < REPLACED_SHARE and _has_letters(word[0]) else word[0]

    return _WORD.sub(replace_word, text)


def _has_letters(word: str) -> bool:
    return any(map(str.isalpha, word))


def _iter_training_texts(recipe: Recipe, source: row_reader.DataSource) -> Iterator[dict[str, str]]:
    """The texts of each training row by their columns, without bad ones."""
    splits = Splits.from_config(recipe.data, source)
    for source_file in source.files:
        for row in row_reader.read_rows(source_file, recipe.data) if source_file.role == "train" else ():
            if row.reason is None and splits.assign_split(row, source_file.role) == "train":
                second = recipe.data.text_pair
                first, *further_columns = (*recipe.data.text_columns, *recipe.data.features)
                texts = {first: row.text, **dict.fromkeys(further_columns, "")} | (
                    {second: row.pair or ""} if second else {}
                )
                # The file is read like the rows: its texts are stripped of HTML again, and decoded.
                is_html = recipe.data.strip_html
                yield {name: html.escape(text, quote=False) if is_html else text for name, text in texts.items()}
