"""Copies of training rows: which copies a row has, their hashes, and which are rejected. Pure functions; `noise` adds
noise to texts, `rewriting` has models rewrite them.

A copy is a training row because its source row is one. A copy whose text hashes to another split is rejected, so no
copy can equal a row that the hash has put there. Rows of validation and test files, and rows whose split a column
names, are unknown here: `rtrain.data.contamination` counts the evaluation rows that equal a copy. A copy keeps its
row's label, line, slices and group.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rtrain.config import AugmentConfig, Recipe
from rtrain.core.errors import ConfigError, Problem
from rtrain.data.augment.noise import TextNoise, add_noise, add_noise_to_tokens
from rtrain.data.row_reader import SourceRow
from rtrain.tasks.base import Task, Variation

if TYPE_CHECKING:
    import tokenizers

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
        raise ConfigError(
            [Problem("augment.mask", settings.mask, reason, "write 0; use typo, swap or drop", code="no_mask_token")]
        )
    return TextNoise(**settings.noise_shares, mask_token=mask or MASK_TOKENS[0])


def find_problems(recipe: Recipe, task: Task) -> list[Problem]:
    """Settings of `augment` that would make the labels of the recipe's task wrong."""
    settings, problems = recipe.augment, []
    if not settings.is_active or task.augmentable == "text":
        return []
    if settings.paraphrase is not None:
        reason = f"labels of {task.name} are about places in the text, which another text has not"
        problems.append(Problem("augment.paraphrase", settings.paraphrase, reason, "remove it", code="unsupported"))
    for name in ("swap", "drop") if task.augmentable == "words" else ():
        if share := settings.noise_shares[name]:
            reason = f"labels of {task.name} are about words in their order"
            problems.append(Problem(f"augment.{name}", share, reason, "write 0; use typo or mask", code="unsupported"))
    if task.augmentable == "nothing" and settings.copies:
        reason = f"labels of {task.name} are about places in the text, which noise moves"
        problems.append(Problem("augment.copies", settings.copies, reason, "write 0", code="unsupported"))
    return problems


def make_copies(
    row: SourceRow,
    content: int,
    settings: AugmentConfig,
    noise: TextNoise,
    augmentable: Variation,
    rewritten_texts: Sequence[str],
    is_allowed: Callable[[SourceRow], bool],
) -> list[RowCopy]:
    """The copies of a training row whose content hashes to `content`; equal rows have equal copies.

    `rewritten_texts`: texts that a model has made of the row. `augmentable`: what noise may change without making the
    task's labels wrong. `is_allowed` says whether a copy may be used.
    """
    seen_texts = {(row.text, row.pair)}
    row_copies: list[RowCopy] = []
    for number, text in enumerate(rewritten_texts):
        _add_copy(
            row._replace(text=text), _derive_key(content, "rewritten", number), seen_texts, is_allowed, row_copies
        )
    max_copies = len(row_copies) + settings.copies
    for number in range(MAX_TRIES_PER_COPY * settings.copies):
        if len(row_copies) == max_copies:
            break
        copy = _make_noisy_copy(row, content, noise, augmentable, settings.seed, number)
        _add_copy(copy, _derive_key(content, f"noise {settings.seed}", number), seen_texts, is_allowed, row_copies)
    return row_copies


def _add_copy(
    copy: SourceRow,
    key: int,
    seen_texts: set[tuple[str, str | None]],
    is_allowed: Callable[[SourceRow], bool],
    row_copies: list[RowCopy],
) -> None:
    texts = (copy.text, copy.pair)
    if texts not in seen_texts and copy.text.strip() and is_allowed(copy):
        seen_texts.add(texts)
        row_copies.append((copy, key))


def _make_noisy_copy(
    row: SourceRow, content: int, noise: TextNoise, augmentable: Variation, seed: int, number: int
) -> SourceRow:
    if augmentable == "words":
        return row._replace(text=" ".join(add_noise_to_tokens(row.text.split(" "), noise, seed, number, content)))
    text = add_noise(row.text, noise, seed, number, content)
    pair = None if row.pair is None else add_noise(row.pair, noise, seed, number, content ^ PAIR_KEY_BIT)
    return row._replace(text=text, pair=pair)


def _derive_key(content: int, kind: str, number: int) -> int:
    digest = hashlib.blake2b(f"{content} {kind} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
