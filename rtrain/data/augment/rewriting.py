"""Training texts written anew by a model, as a stage of Ray Data before the rows become tokens.

<store>/rewritten/<piece>-<chunk>.arrow     content (u64), texts (list of strings)

A chunk holds the same texts for any number of processes. Still, a text's paraphrase can depend on the texts that it is
decoded with, so the store keeps what was made.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from rtrain import ray_internals
from rtrain.config import Augment
from rtrain.data.augment import paraphrase
from rtrain.data.store.store import map_table, write_table

FOLDER = "rewritten"
CHUNK = 64
"""Texts that a model is given in one call."""

Texts = Callable[[dict[str, Any]], Iterable[tuple[int, str]]]
"""Gives for a piece (a task of `pieces.tasks`) the (hash of the content, text) of each training row."""


class Rewriter:
    """A Ray actor that loads the models once. A call with a chunk writes the chunk's file, and returns counts."""

    def __init__(self, settings: Augment, folder: Path):
        self._folder = folder
        self._there = None if settings.pivot is None else paraphrase.load(settings.pivot)
        self._back = paraphrase.load(settings.paraphrase or "", prefix=settings.prefix, count=settings.variants)

    def __call__(self, chunk: dict[str, Any]) -> dict[str, Any]:
        texts = [str(text) for text in chunk["texts"]]
        found = (
            paraphrase.paraphrases(self._back, texts)
            if self._there is None
            else paraphrase.back_translations(self._there, self._back, texts)
        )
        write(self._folder, chunk, found)
        return {"rows": len(texts), "texts": sum(map(len, found))}


def chunks(piece: dict[str, Any], texts: Texts) -> Iterator[dict[str, Any]]:
    """The texts of a piece, `CHUNK` at a time."""
    rows = iter(texts(piece))
    for number in itertools.count():
        part = list(itertools.islice(rows, CHUNK))
        if not part:
            return
        content, written = zip(*part, strict=True)
        # The hashes go as text, since Ray would turn integers beyond 2^63 into an array of floats.
        keys = [str(key) for key in content]
        yield {"piece": piece["number"], "chunk": number, "content": keys, "texts": list(written)}


def run(pieces: list[dict[str, Any]], texts: Texts, settings: Augment, folder: Path) -> None:
    """Write the files of all pieces under `folder`, with as many processes as there are free CPUs."""
    import ray.data

    ray_internals.without_data_actors()
    (folder / FOLDER).mkdir()
    dataset = ray.data.from_items(pieces, override_num_blocks=len(pieces)).flat_map(partial(chunks, texts=texts))
    pool = ray.data.ActorPoolStrategy(min_size=1, max_size=64)
    arguments = {"settings": settings, "folder": folder}
    rewriter: Any = Rewriter  # Ray's annotation leaves out classes
    dataset.map(rewriter, fn_constructor_kwargs=arguments, compute=pool).materialize()


def write(folder: Path, chunk: dict[str, Any], texts: list[list[str]]) -> None:
    """Write the file of a chunk; `texts` are the new texts for each of its rows."""
    content = pa.array([int(key) for key in chunk["content"]], pa.uint64())
    table = pa.table({"content": content, "texts": pa.array(texts, pa.list_(pa.string()))})
    write_table(folder / FOLDER / f"{chunk['piece']:06d}-{chunk['chunk']:06d}.arrow", table)


def read(folder: Path, piece: int) -> dict[int, list[str]]:
    """The new texts for a piece's rows, by the hash of the row's content; empty if none were made."""
    found: dict[int, list[str]] = {}
    for path in sorted((folder / FOLDER).glob(f"{piece:06d}-*.arrow")):
        table = map_table(path)
        found.update(zip(table["content"].to_pylist(), table["texts"].to_pylist(), strict=True))
    return found
