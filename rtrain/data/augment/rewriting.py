"""Training texts rewritten by a model: a stage of Ray Data before tokenization.

<store>/rewritten/<file>-<chunk>.arrow     content (u64), texts (list of strings)

A chunk holds the same texts for any number of processes. A paraphrase can still depend on the other texts of its batch,
so the store keeps the rewritten texts.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from rtrain import ray_internals
from rtrain.config import AugmentConfig
from rtrain.data.augment import paraphrase
from rtrain.data.store.store import map_table, write_table

FOLDER = "rewritten"
CHUNK_SIZE = 64
"""Texts that a model is given in one call."""

TextIterator = Callable[[dict[str, Any]], Iterable[tuple[int, str]]]
"""Maps a task of `read_tasks.plan_tasks` to the (content hash, text) of each training row of its file."""


class RewriteActor:
    """A Ray actor that loads the models once. A call with a chunk writes the chunk's file, and returns counts."""

    def __init__(self, settings: AugmentConfig, folder: Path):
        self._folder = folder
        self._to_pivot = (
            None
            if settings.back_translation_model is None
            else paraphrase.load_rewriter(settings.back_translation_model)
        )
        self._rewriter = paraphrase.load_rewriter(
            settings.paraphrase or "", prefix=settings.prefix, num_variants=settings.variants
        )

    def __call__(self, chunk: dict[str, Any]) -> dict[str, Any]:
        texts = [str(text) for text in chunk["texts"]]
        variants = (
            paraphrase.paraphrase_texts(self._rewriter, texts)
            if self._to_pivot is None
            else paraphrase.back_translate(self._to_pivot, self._rewriter, texts)
        )
        write_chunk(self._folder, chunk, variants)
        return {"rows": len(texts), "texts": sum(map(len, variants))}


def iter_chunks(task: dict[str, Any], texts: TextIterator) -> Iterator[dict[str, Any]]:
    """The texts of a file, `CHUNK_SIZE` at a time."""
    rows = iter(texts(task))
    for number in itertools.count():
        part = list(itertools.islice(rows, CHUNK_SIZE))
        if not part:
            return
        content, chunk_texts = zip(*part, strict=True)
        # The hashes go as text, since Ray would turn integers beyond 2^63 into an array of floats.
        keys = [str(key) for key in content]
        yield {"file": task["number"], "chunk": number, "content": keys, "texts": list(chunk_texts)}


def rewrite_texts(tasks: list[dict[str, Any]], texts: TextIterator, settings: AugmentConfig, folder: Path) -> None:
    """Write the chunks of all files under `folder`, with as many processes as there are free CPUs."""
    import ray.data

    ray_internals.disable_data_actors()
    (folder / FOLDER).mkdir()
    dataset = ray.data.from_items(tasks, override_num_blocks=len(tasks)).flat_map(partial(iter_chunks, texts=texts))
    pool = ray.data.ActorPoolStrategy(min_size=1, max_size=64)
    arguments = {"settings": settings, "folder": folder}
    rewriter: Any = RewriteActor  # Ray's annotation leaves out classes
    dataset.map(rewriter, fn_constructor_kwargs=arguments, compute=pool).materialize()


def write_chunk(folder: Path, chunk: dict[str, Any], texts: list[list[str]]) -> None:
    """Write the file of a chunk; `texts` are the new texts for each of its rows."""
    content = pa.array([int(key) for key in chunk["content"]], pa.uint64())
    table = pa.table({"content": content, "texts": pa.array(texts, pa.list_(pa.string()))})
    write_table(folder / FOLDER / f"{chunk['file']:06d}-{chunk['chunk']:06d}.arrow", table)


def read_rewritten(folder: Path, task_number: int) -> dict[int, list[str]]:
    """The rewritten texts of a file's rows, by the hash of the row's content; or an empty mapping."""
    variants_by_hash: dict[int, list[str]] = {}
    for path in sorted((folder / FOLDER).glob(f"{task_number:06d}-*.arrow")):
        table = map_table(path)
        variants_by_hash.update(zip(table["content"].to_pylist(), table["texts"].to_pylist(), strict=True))
    return variants_by_hash
