"""A teacher's answers to all training rows of a store: computed once by a Ray Data job, kept beside the rows by the
teacher's version, and read by every student, trial, seed and resume."""

import errno
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from rtrain import ray_internals
from rtrain.config import Model
from rtrain.core import atomic_write, env, events
from rtrain.core.errors import UserError, quoted
from rtrain.core.ragged import IGNORED, Floats, Head, Int32s, Ints, Outputs, batches
from rtrain.data.store.store import Store, open_store
from rtrain.inference import artifact
from rtrain.metrics.entities import of_tokens
from rtrain.models import builder, pooling, vocab_trimming
from rtrain.tasks import base
from rtrain.trainer.step import forward

if TYPE_CHECKING:
    import torch

OnEvent = Callable[[dict[str, Any]], None]
TEACHER_ROWS = 64
"""Rows of one pass of the teacher."""
TEACHER_TOKENS = 1 << 14
"""Tokens of one pass of the teacher. Rows of similar length share a pass: without this limit the last passes would
hold 64 of the longest rows."""
BLOCK_ROWS = 1024
"""Rows that one data task answers."""
MEAN_LINES = 1 << 16
"""Lines of outputs of which the mean is taken at a time."""
SHOWN = 3
"""Labels that are named where the rows' are not the teacher's."""
PRECISION = "fp32"
"""Number format of the answers, whatever the student's: they are kept under the teacher's version alone, and students
on other machines, or in another format, learn the same ones."""
TAGS = "tags"
"""Output of the tasks that answer each word, at its first token."""
TEACHER_CPUS = 1
"""Threads of one teacher process."""


class Asked(NamedTuple):
    """A teacher, and whether its student has its tokenizer, whole or trimmed."""

    folder: Path
    made: artifact.Artifact
    alike: bool


def teach_together(
    teachers: Sequence[Asked],
    name: str,
    store: Store,
    weights: Path,
    other: Callable[[Path], Store],
    on_event: OnEvent = lambda event: None,
) -> None:
    """Have each teacher answer the training rows of `store`, as `teach` does, and keep the mean of their outputs under
    `name`, which of one teacher is its version."""
    if store.teacher_file(name).is_file():
        return
    for one in teachers:
        teach(one.folder, one.made, store, weights, other, alike=one.alike, on_event=on_event)
    if len(teachers) > 1:
        average(store, [one.made.version for one in teachers], name)


def average(store: Store, versions: Sequence[str], name: str) -> None:
    """Keep the mean of several teachers' outputs as those of `name`.

    Before they are softened: the mean of logits is, but for what softmax takes away, the geometric mean of the softened
    answers, whatever the temperature, so that it is kept once for all students.
    """
    known = [store.teacher(version) for version in versions]
    with _written(store.teacher_file(name), known[0].shape) as found:
        for first in range(0, len(found), MEAN_LINES):
            part = slice(first, first + MEAN_LINES)
            found[part] = np.mean([one[part] for one in known], axis=0, dtype=np.float64)


def teach(
    folder: Path,
    made: artifact.Artifact,
    store: Store,
    weights: Path,
    other: Callable[[Path], Store],
    *,
    alike: bool,
    on_event: OnEvent = lambda event: None,
) -> None:
    """Have the teacher of `folder` answer the training rows of `store`; see `rtrain.data.store.builder.Taught`.

    `alike`: the student that the rows are tokenised for, as `weights` reads them, has the teacher's tokenizer, whole or
    trimmed. The teacher answers the rows as its own tokenizer reads them, and its answers are carried over by row id,
    tags by their words; `other` makes the store of these rows. Where answers are places in the student's tokens, the
    teacher reads these. Raises `UserError` where the rows have other labels than the teacher.
    """
    if store.teacher_file(made.version).is_file():
        return
    if store.manifest.labels != made.labels:
        counts = f"{len(store.manifest.labels)} labels, and the teacher {folder} was trained on {len(made.labels)}"
        only = [quoted(one) for one in store.manifest.labels if one not in made.labels][:SHOWN]
        lacking = [quoted(one) for one in made.labels if one not in store.manifest.labels][:SHOWN]
        names = [f"{of} alone: {', '.join(found)}" for of, found in (("rows", only), ("teacher", lacking)) if found]
        told = f" ({'; '.join(names)})" if names else ", in another order"
        raise UserError(
            f"data.path: these rows have {counts}{told}; a student learns rows with the same labels",
            code="other_labels",
        )
    on_event(events.doing(f"the teacher answers {store.rows('train'):,} rows", "teacher"))
    task, trimmed = base.get(made.task), vocab_trimming.read(weights)
    if alike and (trimmed is None or (task.by_token and task.output != TAGS)):
        ensure_answers(store, folder, made, trimmed)
        return
    own = other(folder)
    ensure_answers(own, folder, made)
    carry(own, store, made.version, by_word=task.output == TAGS)


def carry(source: Store, target: Store, version: str, *, by_word: bool = False) -> None:
    """Give a store the answers, one for each row, that another store has for the same rows; with `by_word`, one for
    each token that has a target, which is the first one of a word. Raises `UserError` where that one lacks a row."""
    known, wanted = (store.column("train", "row_id") for store in (source, target))
    order = np.argsort(known, kind="stable")
    places = order[np.minimum(np.searchsorted(known[order], wanted), len(known) - 1)]
    answered: Any = slice(None)
    same = np.array_equal(known[places], wanted)
    if same and by_word:
        targets, theirs = (of_tokens(store.targets("train")) for store in (target, source))
        tokens = source.token_places(places)
        answered, there = targets.values != IGNORED, theirs.values[tokens] != IGNORED
        same = np.array_equal(_in_rows(answered, targets.counts), _in_rows(there, theirs.counts[places]))
        places = tokens[there]
    if not same:
        raise UserError(
            f"{source.folder} and {target.folder} hold other rows; remove both and start again", code="other_rows"
        )
    answers = source.teacher(version)
    lines = target.manifest.tokens["train"] if by_word else len(wanted)
    with _written(target.teacher_file(version), (lines, answers.shape[1])) as written:
        written[answered] = answers[places]


def _in_rows(chosen: npt.NDArray[np.bool_], counts: Int32s) -> Ints:
    """How many values of each row are chosen; `counts`: how many it has."""
    before = np.concatenate([[0], np.cumsum(chosen, dtype=np.int64)])
    ends = before[np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])]
    found: Ints = ends[1:] - ends[:-1]
    return found


def ensure_answers(
    store: Store, folder: Path, teacher: artifact.Artifact, trimmed: vocab_trimming.Trimmed | None = None
) -> bool:
    """Logits of all training rows by the teacher, kept in the store; returns whether they had to be computed.

    A store of `trimmed` pieces is read by their numbers in the teacher's vocabulary, which is whole.
    """
    import ray
    import ray.data

    final = store.teacher_file(teacher.version)
    if final.is_file():
        return False
    # Every row is about to be read. A damaged store is refused here: from a data task it would come as a traceback.
    store.check(size_only=False)
    rows = store.rows("train")
    nodes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    blocks = max(env.cores(), math.ceil(rows / BLOCK_ROWS))
    ray_internals.without_data_actors()
    dataset = ray.data.range(rows, override_num_blocks=blocks).map_batches(
        partial(
            answer_rows,
            store=store.folder,
            folder=folder,
            ids=None if trimmed is None else vocab_trimming.old_ids(trimmed.kept),
        ),
        batch_size=TEACHER_ROWS,
        num_cpus=logical_cpus(nodes, env.cores()),
    )
    # A line for each row, or for each of its tokens.
    by_token = base.get(teacher.task).by_token
    shape = (store.manifest.tokens["train"] if by_token else rows, len(teacher.labels))
    seen = 0
    with _written(final, shape) as logits:
        for batch in dataset.iter_batches(batch_size=None, batch_format="numpy"):
            answers = [np.asarray(row).reshape(-1, shape[1]) for row in batch["logits"]]
            positions = batch["position"]
            logits[store.token_places(positions) if by_token else positions] = np.concatenate(answers)
            seen += len(batch["position"])
        if seen != rows:
            raise RuntimeError(f"the teacher answered {seen} of {rows} rows")
    return True


@contextmanager
def _written(final: Path, shape: tuple[int, int]) -> Iterator["np.memmap[Any, Any]"]:
    """An array on the disk that has the name `final` once the block has ended. Where the block fails, nothing is left;
    what a killed process has left goes too.

    Raises `UserError` where the disk has no room, before anything is computed: an array that is written page by page
    would end the process by a signal.
    """
    atomic_write.sweep(final)
    draft = atomic_write.Draft(final)
    try:
        path = draft.folder / final.name
        found = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
        _hold_room(path)
        yield found
        found.flush()
        atomic_write.sync(path)
        path.rename(final)
        atomic_write.sync(final.parent)
    finally:
        shutil.rmtree(draft.folder, ignore_errors=True)
        draft.release()


def _hold_room(path: Path) -> None:
    """Take the room on the disk that a file says it has."""
    size = path.stat().st_size
    try:
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"the teacher's answers take {size / 1e6:,.0f} MB, and {path.parent.parent} has no room", code="disk_full"
        ) from None


def logical_cpus(nodes: Sequence[float], cores: int) -> float:
    """What a process of one thread asks Ray for; `nodes`: the logical CPUs of each node, `cores`: of this machine.

    A private Ray counts more CPUs than its machine has (`rtrain.cluster.connection`). Nodes that others started count
    their own, and they may have more than the machine that asks.
    """
    return max(1.0, nodes[0] / cores) if len(nodes) == 1 else 1.0


def answer_rows(batch: dict[str, Any], store: Path, folder: Path, ids: Ints | None = None) -> dict[str, Any]:
    """A data task: outputs for the rows at places `id` of the length order, with their positions in the index; numbers
    on the scale of these rows."""
    import torch

    opened, order, made, network = _teacher(store, folder)
    positions, task, pad_id = order[batch["id"]], base.get(made.task), builder.pad_id(folder)
    head, lengths = Head(made.labels, made.facts), opened.column("train", "length")[positions]
    # As an array of arrays: rows of several tokens have several answers.
    answers = np.empty(len(positions), dtype=object)
    for places in batches(lengths, np.arange(len(positions)), TEACHER_ROWS, TEACHER_TOKENS):
        tokens = opened.read("train", positions[places])
        if ids is not None:
            tokens = replace(tokens, ids=ids[tokens.ids].astype(np.int32))
        with torch.inference_mode():
            logits = forward(network, tokens, pad_id, PRECISION, task.wanted(tokens, head)).float().numpy()
        outputs = rescaled(task.outputs(logits, tokens, head), made.facts, opened.manifest.facts)
        answers[places] = [np.ascontiguousarray(row).ravel() for row in outputs]
    return {"position": positions, "logits": answers}


def rescaled(outputs: Outputs, teacher: Mapping[str, Any], rows: Mapping[str, Any]) -> Outputs:
    """A teacher's outputs as a model of these rows would put them; `teacher` and `rows`: facts of their heads.

    A number is put in spreads from the mean of the rows that a model was trained on. Where those of the teacher are
    others, as of another split, its 0 would be learned as another number. Outputs of other kinds stay as they are.
    """
    scales = [(facts["mean"], facts["std"]) for facts in (teacher, rows) if "std" in facts]
    if len(set(scales)) < 2:
        return outputs
    (mean, std), (own_mean, own_std) = scales
    found: Floats = ((np.asarray(outputs, dtype=np.float64) * std + mean - own_mean) / own_std).astype(np.float32)
    return found


@lru_cache(maxsize=1)
def _teacher(store: Path, folder: Path) -> tuple[Store, Ints, artifact.Artifact, "torch.nn.Module"]:
    """Loaded once per process: data tasks of one pass reuse their processes."""
    import torch

    torch.set_num_threads(TEACHER_CPUS)
    opened, made = open_store(store), artifact.read(folder, verify=False)
    # Neighbours in length share a pass; the data set counts places in this order.
    order = np.argsort(opened.column("train", "length"), kind="stable")
    chosen = Model(pooling=made.facts.get(pooling.FACT, "own"))
    network = builder.build(folder, base.get(made.task), made.labels, seed=0, chosen=chosen)
    builder.attend(network, training=False)
    return opened, order, made, cast("torch.nn.Module", network).eval()
