"""The embedded demo data set: short customer-service messages in four languages, made by a phrase grammar.

A grammar needs no license and no download, and holds no private text. The same seed gives the same bytes on every
machine, so scores can be compared between machines.

The phrase tables lie in ``phrases/<language>.yaml``. For each intent they hold two separate lists of core templates,
one for each split: test messages say the same things in other words, so a model that only memorizes words scores lower.
Side remarks about another intent make the task hard for models that count words.
``tests/unit/data/test_synthetic.py`` pins how hard the result is for a linear TF-IDF model.
"""

from __future__ import annotations

import csv
import io
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Final, Literal, TypeVar

import yaml

Split = Literal["train", "test"]
T = TypeVar("T")

LANGUAGES: Final = ("en", "es", "de", "fr")
INTENTS: Final[tuple[str, ...]] = (
    "cancel_order",
    "cancel_subscription",
    "card_declined",
    "change_address",
    "change_plan",
    "damaged_item",
    "delete_account",
    "duplicate_charge",
    "exchange_item",
    "invoice_request",
    "late_delivery",
    "missing_item",
    "promo_code",
    "refund_request",
    "reset_password",
    "stock_question",
    "track_order",
    "verification_code",
)
SENTIMENTS: Final = ("negative", "neutral", "positive")
COLUMNS: Final = ("text", "intent", "sentiment", "language")

ROWS: Final[Mapping[Split, Mapping[str, int]]] = {
    "train": {"en": 2160, "es": 1080, "de": 1080, "fr": 1080},
    "test": {"en": 400, "es": 200, "de": 200, "fr": 200},
}
SENTIMENT_WEIGHTS: Final = (0.31, 0.45, 0.24)
IMBALANCE: Final = 0.25  # an intent's share of a language differs from the even share by at most this part of it

# A message voices a feeling or makes an aside, seldom both: that keeps it short.
ASIDE_RATES: Final[Mapping[str, float]] = {"negative": 0.07, "neutral": 0.52, "positive": 0.07}
GREETING_RATE: Final = 0.10
COURTESY_RATE: Final = 0.10
TYPO_RATE: Final = 0.11
SECOND_TYPO_RATE: Final = 0.2  # of the messages that already have one
LOWER_RATE: Final = 0.15
PLAIN_LETTERS_RATE: Final = 0.10  # typed without accents or inverted marks
NO_FINAL_MARK_RATE: Final = 0.3
MAX_TRIES: Final = 400

_SLOT = re.compile(r"<([a-z]+)>")
_CHOICE = re.compile(r"\(([^()]*)\)")
_WORD = re.compile(r"[^\W\d_]{4,}")
_PLAIN = str.maketrans({**dict(zip("áàâäéèêëíîïóôöúùûüñç", "aaaaeeeeiiiooouuuunc", strict=True)), "¿": "", "¡": ""})
_QWERTY = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_KEYBOARDS: Final[Mapping[str, tuple[str, ...]]] = {
    "en": _QWERTY,
    "es": _QWERTY,
    "de": ("qwertzuiop", "asdfghjkl", "yxcvbnm"),
    "fr": ("azertyuiop", "qsdfghjklm", "wxcvbn"),
}


@dataclass(frozen=True)
class Message:
    """One row of the data set."""

    text: str
    intent: str
    sentiment: str
    language: str


@dataclass(frozen=True)
class Grammar:
    """The phrase tables of one language, read once and never changed."""

    slots: Mapping[str, Sequence[str]]
    greetings: Sequence[str]
    courtesies: Sequence[str]
    sentiments: Mapping[str, Mapping[str, Sequence[str]]]
    asides: Mapping[Split, Sequence[str]]
    topics: Mapping[str, Mapping[Split, str]]
    intents: Mapping[str, Mapping[Split, Sequence[str]]]

    def sentiment_phrases(self, sentiment: str, split: Split) -> list[str]:
        """The phrases that voice a sentiment in a split: most are in both, so that the column can be learned."""
        table = self.sentiments.get(sentiment, {})
        return [*table.get("both", ()), *table.get(split, ())]


@cache
def load_grammar(language: str) -> Grammar:
    """The phrase tables of a language; they travel inside the package, so no path has to be configured."""
    source = resources.files(__package__).joinpath("phrases", f"{language}.yaml")
    return Grammar(**yaml.safe_load(source.read_text(encoding="utf-8")))


def core_templates(language: str, intent: str, split: Split) -> tuple[str, ...]:
    """The core templates of an intent in one split, unexpanded."""
    return tuple(load_grammar(language).intents[intent][split])


def generate(seed: int = 0) -> tuple[list[Message], list[Message]]:
    """The two splits (train, test). No text occurs twice, whatever its case, neither in a split nor between them."""
    used_texts: set[str] = set()  # used for membership only, so that its order never reaches the output
    test = _generate_split("test", seed, used_texts)
    train = _generate_split("train", seed, used_texts)
    return train, test


def write_csv_files(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write ``train.csv`` and ``test.csv`` into the folder; the same seed gives the same bytes everywhere."""
    folder.mkdir(parents=True, exist_ok=True)
    train, test = generate(seed)
    paths = (folder / "train.csv", folder / "test.csv")
    for path, messages in zip(paths, (train, test), strict=True):
        path.write_bytes(_format_csv(messages).encode("utf-8"))  # bytes: no platform changes the line ends
    return paths


def _format_csv(messages: Sequence[Message]) -> str:
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows((m.text, m.intent, m.sentiment, m.language) for m in messages)
    return buffer.getvalue()


def _generate_split(split: Split, seed: int, used_texts: set[str]) -> list[Message]:
    messages: list[Message] = []
    for language in LANGUAGES:
        sizes = _draw_sizes(ROWS[split][language], random.Random(f"{seed}/{split}/{language}/sizes"))
        for intent, size in zip(INTENTS, sizes, strict=True):
            # Each cell draws from its own stream, so that editing one intent's phrases leaves the other cells
            # unchanged.
            rng = random.Random(f"{seed}/{split}/{language}/{intent}")
            messages.extend(_generate_messages(rng, split, language, intent, size, used_texts))
    return _shuffle(random.Random(f"{seed}/{split}/order"), messages)


def _draw_sizes(total: int, rng: random.Random) -> list[int]:
    """How many rows each intent gets: about the even share, uneven as in a real inbox, with `total` as their sum."""
    weights = [1 + IMBALANCE * (2 * rng.random() - 1) for _ in INTENTS]
    exact = [total * weight / sum(weights) for weight in weights]
    sizes = [int(share) for share in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda i: sizes[i] - exact[i])
    for i in by_remainder[: total - sum(sizes)]:
        sizes[i] += 1
    return sizes


def _generate_messages(
    rng: random.Random, split: Split, language: str, intent: str, size: int, used_texts: set[str]
) -> Iterator[Message]:
    """The messages of one intent in one language, each template used about equally often."""
    templates = core_templates(language, intent, split)
    order: list[str] = []
    while len(order) < size:
        order.extend(_shuffle(rng, templates))
    for template in order[:size]:
        for _ in range(MAX_TRIES):
            sentiment = _pick_weighted(rng, SENTIMENTS, SENTIMENT_WEIGHTS)
            text = _compose(rng, split, language, intent, template, sentiment)
            if text.casefold() not in used_texts:
                break
        else:
            raise ValueError(f"the phrase tables are too small for {size} {language} {intent} messages: {template!r}")
        used_texts.add(text.casefold())
        yield Message(text, intent, sentiment, language)


def _compose(rng: random.Random, split: Split, language: str, intent: str, template: str, sentiment: str) -> str:
    """A whole message: the core, the phrases around it, and the slips of careless typing."""
    tables = load_grammar(language)
    core = _fill_template(rng, tables, template)
    parts = [core if core.endswith("?") else core + "."]
    if rng.random() < ASIDE_RATES[sentiment]:  # in place of greeting and courtesy, which keeps the message short
        parts.insert(0, _compose_aside(rng, tables, split, intent) + ".")
    else:
        if rng.random() < COURTESY_RATE:
            parts.append(_pick(rng, tables.courtesies) + ".")
        if rng.random() < GREETING_RATE:
            parts[0] = f"{_pick(rng, tables.greetings)}, {parts[0]}"
    feelings = tables.sentiment_phrases(sentiment, split)
    if feelings:
        mark = "!" if rng.random() < 0.35 else "."
        position = 0 if rng.random() < 0.4 else len(parts)
        parts.insert(position, _pick(rng, feelings) + mark)
    return _add_slips(rng, " ".join(_capitalize(part) for part in parts), language)


def _compose_aside(rng: random.Random, tables: Grammar, split: Split, intent: str) -> str:
    """A remark that some other matter is settled: word counts alone cannot tell it from the request."""
    topic = _pick(rng, [topic[split] for name, topic in tables.topics.items() if name != intent])
    return _pick(rng, tables.asides[split]).replace("<topic>", topic)


def _fill_template(rng: random.Random, tables: Grammar, template: str) -> str:
    """A template with every choice made and every slot filled."""
    expanded_text = _CHOICE.sub(lambda match: _pick(rng, match[1].split("|")), template)
    return " ".join(_SLOT.sub(lambda match: _pick(rng, tables.slots[match[1]]), expanded_text).split())


def _capitalize(text: str) -> str:
    """The text with its first letter raised, also behind an inverted mark. `str.capitalize` would lower German nouns
    and product codes."""
    position = 1 if text[:1] in "¿¡" else 0
    return text[:position] + text[position : position + 1].upper() + text[position + 1 :]


def _add_slips(rng: random.Random, text: str, language: str) -> str:
    """The message as hurried typing leaves it: with typos, without a final mark, capitals or accents."""
    if rng.random() < TYPO_RATE:
        for _ in range(2 if rng.random() < SECOND_TYPO_RATE else 1):
            text = _add_typo(rng, text, language)
    if rng.random() < NO_FINAL_MARK_RATE:
        text = text.rstrip(".!?")
    if rng.random() < LOWER_RATE:
        text = text.lower()
    if rng.random() < PLAIN_LETTERS_RATE:
        text = text.translate(_PLAIN)
    return text


def _add_typo(rng: random.Random, text: str, language: str) -> str:
    """One slip in a word of four letters or more; the first letter stays, as it mostly does in real typing."""
    words = list(_WORD.finditer(text))
    if not words:
        return text
    word = _pick(rng, words)
    index = word.start() + 1 + int(rng.random() * (len(word[0]) - 2))
    head, letter, after, tail = text[:index], text[index], text[index + 1], text[index + 2 :]
    kind = _pick(rng, ("neighbor", "swap", "drop", "double"))
    if kind == "neighbor":
        return head + _pick_neighbor_key(rng, letter, language) + after + tail
    if kind == "swap":
        return head + after + letter + tail
    if kind == "drop":
        return head + after + tail
    return head + letter + letter + after + tail


def _pick_neighbor_key(rng: random.Random, letter: str, language: str) -> str:
    """The letter of an adjacent key on the language's keyboard. An accented letter has no plain key, and
    stays."""
    for row in _KEYBOARDS[language]:
        column = row.find(letter.lower())
        if column >= 0:
            return _pick(rng, [row[i] for i in (column - 1, column + 1) if 0 <= i < len(row)])
    return letter


# random.Random promises the same random() for the same seed in every Python version, but not the same choice() or
# shuffle(). So the three helpers below use random() alone.


def _pick(rng: random.Random, options: Sequence[T]) -> T:
    return options[int(rng.random() * len(options))]


def _shuffle(rng: random.Random, items: Sequence[T]) -> list[T]:
    keys = [rng.random() for _ in items]
    return [items[i] for i in sorted(range(len(items)), key=keys.__getitem__)]


def _pick_weighted(rng: random.Random, options: Sequence[T], weights: Sequence[float]) -> T:
    point = rng.random() * sum(weights)
    for option, weight in zip(options, weights, strict=True):
        point -= weight
        if point < 0:
            return option
    return options[-1]
