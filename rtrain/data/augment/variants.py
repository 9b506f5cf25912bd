"""Copies of training rows: which copies a row has, their hashes, and which are refused. Pure; `noise` makes texts with
noise, `rewriting` has models make texts.

A copy is a training row because its row is one, whatever the copy's own text would hash to. A copy whose text would
hash to another split is left out, so that no copy can equal a row that the hash has put there. Rows of validation and
test files, and those that a column names, are not known here: `rtrain.data.contamination` counts those that a copy
equals. A copy keeps its row's label, line, slices and group.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rtrain.config import Augment, Recipe
from rtrain.core.errors import ConfigError, Problem
from rtrain.data.augment.noise import Noise, noisy, noisy_tokens
from rtrain.data.row_reader import Record
from rtrain.tasks.base import Task, Variation

if TYPE_CHECKING:
    import tokenizers

MASKS = ("[MASK]", "<mask>")
TRIES = 4
"""Tries for each copy that is asked for: some change nothing, repeat another, or are refused."""
SECOND_TEXT = 1 << 63
"""Turns the key of a row's noise into that of its second text, so that the two texts get different noise."""

Copy = tuple[Record, int]
"""A copy, and its content hash, which is made from its row's content hash and the copy's number."""


def noise_of(settings: Augment, tokenizer: "tokenizers.Tokenizer") -> Noise:
    """The noise of the settings, with the tokenizer's mask token. Raises `ConfigError` if masks are asked for and the
    tokenizer has no mask token."""
    mask = next((token for token in MASKS if tokenizer.token_to_id(token) is not None), None)
    if settings.mask and mask is None:
        reason = f"the model's tokenizer has no mask token ({' or '.join(MASKS)})"
        raise ConfigError(
            [Problem("augment.mask", settings.mask, reason, "write 0; use typo, swap or drop", code="no_mask_token")]
        )
    return Noise(**settings.noise, mask_token=mask or MASKS[0])


def problems(recipe: Recipe, task: Task) -> list[Problem]:
    """Settings of `augment` that would make the labels of the recipe's task wrong."""
    settings, found = recipe.augment, []
    if not settings.active or task.varies == "text":
        return []
    if settings.paraphrase is not None:
        reason = f"labels of {task.name} are about places in the text, which another text has not"
        found.append(Problem("augment.paraphrase", settings.paraphrase, reason, "remove it", code="unsupported"))
    for name in ("swap", "drop") if task.varies == "words" else ():
        if share := settings.noise[name]:
            reason = f"labels of {task.name} are about words in their order"
            found.append(Problem(f"augment.{name}", share, reason, "write 0; use typo or mask", code="unsupported"))
    if task.varies == "nothing" and settings.copies:
        reason = f"labels of {task.name} are about places in the text, which noise moves"
        found.append(Problem("augment.copies", settings.copies, reason, "write 0", code="unsupported"))
    return found


def copies(
    row: Record,
    content: int,
    settings: Augment,
    noise: Noise,
    varies: Variation,
    rewritten: Sequence[str],
    allowed: Callable[[Record], bool],
) -> list[Copy]:
    """The copies of a training row whose content hashes to `content`; equal rows have equal copies.

    `rewritten`: texts that a model has made of the row. `varies`: what noise may change without making the task's
    labels wrong. `allowed` says whether a copy may be used.
    """
    seen = {(row.text, row.pair)}
    found: list[Copy] = []
    for number, text in enumerate(rewritten):
        _add(row._replace(text=text), _key(content, "rewritten", number), seen, allowed, found)
    most = len(found) + settings.copies
    for number in range(TRIES * settings.copies):
        if len(found) == most:
            break
        copy = _noisy(row, content, noise, varies, settings.seed, number)
        _add(copy, _key(content, f"noise {settings.seed}", number), seen, allowed, found)
    return found


def _add(
    copy: Record, key: int, seen: set[tuple[str, str | None]], allowed: Callable[[Record], bool], found: list[Copy]
) -> None:
    texts = (copy.text, copy.pair)
    if texts not in seen and copy.text.strip() and allowed(copy):
        seen.add(texts)
        found.append((copy, key))


def _noisy(row: Record, content: int, noise: Noise, varies: Variation, seed: int, number: int) -> Record:
    if varies == "words":
        return row._replace(text=" ".join(noisy_tokens(row.text.split(" "), noise, seed, number, content)))
    text = noisy(row.text, noise, seed, number, content)
    pair = None if row.pair is None else noisy(row.pair, noise, seed, number, content ^ SECOND_TEXT)
    return row._replace(text=text, pair=pair)


def _key(content: int, kind: str, number: int) -> int:
    digest = hashlib.blake2b(f"{content} {kind} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
