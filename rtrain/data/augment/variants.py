"""Copies of training rows: which there are, what they are called, and which are refused. Pure; the texts themselves are
made by `augment` (noise) and `rewriting` (models).

A copy belongs to the training rows because its row does, whatever its own text would hash to; and it is left out where
that text would hash to another split, so that no copy can be equal to a row that is evaluated. It keeps its row's
label, line, slices and group.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rtrain.config import Augment, Recipe
from rtrain.data.augment.noise import Noise, noisy, noisy_tokens
from rtrain.data.records import Record
from rtrain.errors import ConfigError, Problem
from rtrain.tasks.base import Task, Variation

if TYPE_CHECKING:
    import tokenizers

MASKS = ("[MASK]", "<mask>")
TRIES = 4
"""Draws for each copy that is wanted: some change nothing, repeat another, or are refused."""
SECOND_TEXT = 1 << 63
"""Makes of a row's key that of its second text, whose noise is its own."""

Copy = tuple[Record, int]
"""A row, and the hash that takes the place of its content's: of its row's and its own number."""


def noise_of(settings: Augment, tokenizer: "tokenizers.Tokenizer") -> Noise:
    """With the tokenizer's own mask token."""
    mask = next((token for token in MASKS if tokenizer.token_to_id(token) is not None), None)
    if settings.mask and mask is None:
        reason = f"the model's tokenizer has no mask token ({' or '.join(MASKS)})"
        raise ConfigError([Problem("augment.mask", settings.mask, reason, "write 0; use typo, swap or drop")])
    return Noise(**settings.noise, mask_token=mask or MASKS[0])


def problems(recipe: Recipe, task: Task) -> list[Problem]:
    """What the task's labels do not allow."""
    settings, found = recipe.augment, []
    if not settings.active or task.varies == "text":
        return []
    if settings.paraphrase is not None:
        reason = f"labels of {task.name} are about places in the text, which another text has not"
        found.append(Problem("augment.paraphrase", settings.paraphrase, reason, "remove it"))
    for name in ("swap", "drop") if task.varies == "words" else ():
        if share := settings.noise[name]:
            reason = f"labels of {task.name} are about words in their order"
            found.append(Problem(f"augment.{name}", share, reason, "write 0; use typo or mask"))
    if task.varies == "nothing" and settings.copies:
        reason = f"labels of {task.name} are about places in the text, which noise moves"
        found.append(Problem("augment.copies", settings.copies, reason, "write 0"))
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
    """The copies of a training row whose content hashes to `content`; equal rows have equal copies."""
    seen = {(row.text, row.pair)}
    found: list[Copy] = []
    for number, text in enumerate(rewritten):
        _keep(row._replace(text=text), _key(content, "rewritten", number), seen, allowed, found)
    most = len(found) + settings.copies
    for number in range(TRIES * settings.copies):
        if len(found) == most:
            break
        copy = _noisy(row, content, noise, varies, settings.seed, number)
        _keep(copy, _key(content, f"noise {settings.seed}", number), seen, allowed, found)
    return found


def _keep(
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
