"""The rows that all sides of `benchmarks.train` train on: csv files with the columns text and label."""

import csv
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

TEST_ROWS = 64
"""Test rows. A run ends with a score on them, outside of every clock, so few are enough."""
EQUAL_WORDS = 30
"""Words of each row where all rows have equal lengths: with the two tokens around a text they make 32 tokens."""
CLASSES = 8

Row = tuple[str, str]


class Files(NamedTuple):
    train: Path
    test: Path


def write(path: Path, rows: Iterable[Row]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(("text", "label"))
        lines.writerows(rows)
    return path


def read(path: Path, label: str = "category") -> list[Row]:
    """Rows of a file of banking77, or of a file by `write`, whose labels are in another column."""
    with path.open(encoding="utf-8", newline="") as file:
        return [(row["text"], row[label]) for row in csv.DictReader(file)]


def sample(source: Path, folder: Path, count: int) -> Files:
    """`count` rows of `source`, the same in every call, and a few other rows that have labels of the first."""
    rows = list(dict.fromkeys(read(source)))
    if len(rows) < count + TEST_ROWS:
        raise SystemExit(f"--rows {count}: {source} has {len(rows)} rows; {TEST_ROWS} of them are kept as a test")
    random.Random(0).shuffle(rows)
    labels = {label for _, label in rows[:count]}
    other_rows = [row for row in rows[count:] if row[1] in labels]
    return Files(write(folder / "rows.csv", rows[:count]), write(folder / "test.csv", other_rows[:TEST_ROWS]))


def equal(words: list[str], folder: Path, count: int) -> Files:
    """Rows of `EQUAL_WORDS` words each, so that padding costs no side anything. No two rows are alike.

    Each class has its own word, which stands at three places of a row.
    """
    draw = random.Random(0)
    names, other_words = words[:CLASSES], words[CLASSES:]
    rows: dict[str, str] = {}
    while len(rows) < count + TEST_ROWS:
        label = draw.choice(names)
        text = [label] * 3 + draw.choices(other_words, k=EQUAL_WORDS - 3)
        draw.shuffle(text)
        rows[" ".join(text)] = label
    items = list(rows.items())
    return Files(
        write(folder / "equal.csv", items[:count]), write(folder / "equal-test.csv", items[count : count + TEST_ROWS])
    )


def whole_words(model: Path) -> list[str]:
    """Words that are one token of the model's vocabulary, in the order of their token ids."""
    vocabulary: dict[str, int] = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    words = (word for word in sorted(vocabulary, key=lambda word: vocabulary[word]))
    return [word for word in words if word.isascii() and word.isalpha() and word.islower() and len(word) > 3]
