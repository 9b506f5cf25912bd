"""Fewer rows of a published set: the same ones in each call. The rows of other splits stay as they are."""

import csv
import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Item = TypeVar("Item")


def arguments(given: list[str], rows: int, folder: Path, option: str = "--data") -> list[str]:
    """`given`, the arguments of `rtrain train`, with so many rows of the file that `option` names, by default the
    training rows; the new file is written in `folder`.

    A file of fewer rows is taken as it is. Questions are taken passage by passage, until there are so many.
    """
    place = given.index(option) + 1
    source = given[place]
    thin = next(thin for suffix, thin in FORMATS.items() if source.endswith(suffix))
    found = list(given)
    found[place] = str(thin(source, rows, folder))
    return found


def drawn(items: list[Item], rows: int) -> list[Item]:
    """`rows` of the items, in their own order."""
    if rows >= len(items):
        return items
    chosen = sorted(random.Random(0).sample(range(len(items)), rows))
    return [items[place] for place in chosen]


def _csv(source: str, rows: int, folder: Path) -> Path:
    out = folder / Path(source).name
    with Path(source).open(encoding="utf-8", newline="") as read, out.open("w", encoding="utf-8", newline="") as write:
        lines = list(csv.reader(read))
        csv.writer(write).writerows([lines[0], *drawn(lines[1:], rows)])
    return out


def _jsonl(source: str, rows: int, folder: Path) -> Path:
    """Rows that name another split than `train` all stay."""
    lines = Path(source).read_text(encoding="utf-8").splitlines(keepends=True)
    train = [line for line in lines if json.loads(line).get("split", "train") == "train"]
    kept = set(drawn(train, rows)).union(set(lines) - set(train))
    out = folder / f"few-{Path(source).name}"
    out.write_text("".join(line for line in lines if line in kept), encoding="utf-8")
    return out


def _conll(source: str, rows: int, folder: Path) -> Path:
    sentences = Path(source).read_text(encoding="utf-8").strip("\n").split("\n\n")
    out = folder / Path(source).name
    out.write_text("\n\n".join(drawn(sentences, rows)) + "\n", encoding="utf-8")
    return out


def _squad(source: str, rows: int, folder: Path) -> Path:
    """`source` is a pattern of files."""
    paragraphs: list[dict[str, Any]] = []
    for path in sorted(Path(source).parent.glob(Path(source).name)):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            paragraphs += [one for article in json.load(file)["data"] for one in article["paragraphs"]]
    random.Random(0).shuffle(paragraphs)
    kept: list[dict[str, Any]] = []
    questions = 0
    for one in paragraphs:
        if questions >= rows:
            break
        kept.append(one)
        questions += len(one["qas"])
    out = folder / "few.json"
    # A title each: rows of one title are never parted, and one for all would leave no validation row.
    titled = [{"title": str(number), "paragraphs": [one]} for number, one in enumerate(kept)]
    out.write_text(json.dumps({"data": titled}), encoding="utf-8")
    return out


FORMATS: dict[str, Callable[[str, int, Path], Path]] = {
    ".csv": _csv,
    ".jsonl": _jsonl,
    ".tsv": _conll,
    ".json.gz": _squad,
}
