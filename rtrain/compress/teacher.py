"""A teacher's logits for all training rows of a token store.

One Ray Data job computes them. They are stored beside the rows under the teacher's version. Every student, trial, seed
and resume reads the same file."""

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
from rtrain.config import ModelConfig
from rtrain.core import atomic_write, env, events
from rtrain.core.errors import UserError, quote_value
from rtrain.core.ragged import IGNORE_INDEX, Floats, Head, Int32s, Ints, Outputs, iter_batches
from rtrain.data.store.store import Store, open_store
from rtrain.inference import artifact
from rtrain.metrics.entities import select_token_targets
from rtrain.models import builder, pooling, vocab_trimming
from rtrain.tasks import base
from rtrain.trainer.step import forward

if TYPE_CHECKING:
    import torch

OnEvent = Callable[[dict[str, Any]], None]
TEACHER_BATCH_ROWS = 64
"""Rows of one forward batch of the teacher."""
TEACHER_BATCH_TOKENS = 1 << 14
"""Tokens of one forward batch of the teacher. Rows of similar length share a batch. Without this limit the last batches
would hold 64 of the longest rows."""
BLOCK_ROWS = 1024
"""Rows per data task."""
MEAN_CHUNK_ROWS = 1 << 16
"""Lines of outputs averaged at a time."""
MAX_SHOWN_LABELS = 3
"""Labels that an error names if rows and teacher differ."""
PRECISION = "fp32"
"""Number format of the logits, whatever the student's. They are stored under the teacher's version alone: students on
other machines, or in another format, learn from the same logits."""
TAGS = "tags"
"""Output of the tasks that label each word, at its first token."""
TEACHER_THREADS = 1
"""Threads of one teacher process."""


class TeacherQuery(NamedTuple):
    """A teacher. `shares_tokenizer`: its student has the same tokenizer, whole or trimmed."""

    folder: Path
    metadata: artifact.Artifact
    shares_tokenizer: bool


def answer_with_all_teachers(
    teachers: Sequence[TeacherQuery],
    name: str,
    store: Store,
    weights: Path,
    open_teacher_store: Callable[[Path], Store],
    on_event: OnEvent = lambda event: None,
) -> None:
    """Run each teacher on the training rows of `store` (`answer_with_teacher`); store the mean of their outputs as
    `name`.

    `name` of a single teacher is its version.
    """
    if store.teacher_file(name).is_file():
        return
    for teacher in teachers:
        answer_with_teacher(teacher, store, weights, open_teacher_store, on_event)
    if len(teachers) > 1:
        average_answers(store, [query.metadata.version for query in teachers], name)


def average_answers(store: Store, versions: Sequence[str], name: str) -> None:
    """Store the mean of several teachers' outputs as `name`.

    The mean is taken before the softmax: up to a constant that softmax removes, the mean of logits is the geometric
    mean of the softened probabilities at any temperature. One file therefore serves all students.
    """
    teacher_outputs = [store.open_teacher_logits(version) for version in versions]
    with _open_draft_array(store.teacher_file(name), teacher_outputs[0].shape) as mean_outputs:
        for start_row in range(0, len(mean_outputs), MEAN_CHUNK_ROWS):
            chunk = slice(start_row, start_row + MEAN_CHUNK_ROWS)
            mean_outputs[chunk] = np.mean([outputs[chunk] for outputs in teacher_outputs], axis=0, dtype=np.float64)


def answer_with_teacher(
    teacher: TeacherQuery,
    store: Store,
    weights: Path,
    open_teacher_store: Callable[[Path], Store],
    on_event: OnEvent = lambda event: None,
) -> None:
    """Compute the teacher's logits for the training rows of `store`; see `rtrain.data.store.builder.TeacherPass`.

    With another tokenizer, the teacher reads the rows of `open_teacher_store(folder)`, and its logits are matched to
    `store` by row id (tags: by word). If answers are positions in the student's tokens, the teacher reads those tokens.

    Args:
        weights: the model folder whose tokenizer made `store`.

    Raises:
        UserError: the labels of the rows differ from the teacher's.
    """
    folder, metadata = teacher.folder, teacher.metadata
    if store.teacher_file(metadata.version).is_file():
        return
    if store.manifest.labels != metadata.labels:
        raise _label_mismatch(teacher, store.manifest.labels)
    on_event(events.make_phase_event(f"the teacher answers {store.num_rows('train'):,} rows", "teacher"))
    task, trimmed = base.get_task(metadata.task), vocab_trimming.read_trimmed(weights)
    if teacher.shares_tokenizer and (trimmed is None or (task.is_token_level and task.output != TAGS)):
        ensure_answers(store, folder, metadata, trimmed)
        return
    teacher_store = open_teacher_store(folder)
    ensure_answers(teacher_store, folder, metadata)
    copy_answers(teacher_store, store, metadata.version, by_word=task.output == TAGS)


def _label_mismatch(teacher: TeacherQuery, row_labels: Sequence[str]) -> UserError:
    labels = teacher.metadata.labels
    differences = {"rows": [label for label in row_labels if label not in labels]}
    differences["teacher"] = [label for label in labels if label not in row_labels]
    notes = [
        f"{owner} alone: {', '.join(map(quote_value, names[:MAX_SHOWN_LABELS]))}"
        for owner, names in differences.items()
        if names
    ]
    note = f" ({'; '.join(notes)})" if notes else ", in another order"
    return UserError(
        f"data.path: these rows have {len(row_labels)} labels, and the teacher {teacher.folder} was trained on "
        f"{len(labels)}{note}; a student learns rows with the same labels",
        code="label_mismatch",
    )


def copy_answers(source: Store, target: Store, version: str, *, by_word: bool = False) -> None:
    """Copy a teacher's logits from one store to another store of the same rows.

    `by_word`: one line for each token with a target, i.e. for the first token of each word. Raises `UserError` if
    `source` lacks a row.
    """
    source_ids, target_ids = (store.column("train", "row_id") for store in (source, target))
    order = np.argsort(source_ids, kind="stable")
    places = order[np.minimum(np.searchsorted(source_ids[order], target_ids), len(source_ids) - 1)]
    target_mask: Any = slice(None)
    is_same = np.array_equal(source_ids[places], target_ids)
    if is_same and by_word:
        targets, source_targets = (select_token_targets(store.targets("train")) for store in (target, source))
        tokens = source.token_offsets(places)
        target_mask, source_mask = targets.values != IGNORE_INDEX, source_targets.values[tokens] != IGNORE_INDEX
        is_same = np.array_equal(
            _count_per_row(target_mask, targets.counts), _count_per_row(source_mask, source_targets.counts[places])
        )
        places = tokens[source_mask]
    if not is_same:
        raise UserError(
            f"{source.folder} and {target.folder} hold other rows; remove both and start again", code="row_mismatch"
        )
    answers = source.open_teacher_logits(version)
    lines = target.manifest.tokens["train"] if by_word else len(target_ids)
    with _open_draft_array(target.teacher_file(version), (lines, answers.shape[1])) as target_answers:
        target_answers[target_mask] = answers[places]


def _count_per_row(mask: npt.NDArray[np.bool_], row_lengths: Int32s) -> Ints:
    cumulative = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
    ends = cumulative[np.concatenate([[0], np.cumsum(row_lengths, dtype=np.int64)])]
    row_counts: Ints = ends[1:] - ends[:-1]
    return row_counts


def ensure_answers(
    store: Store, folder: Path, teacher: artifact.Artifact, trimmed: vocab_trimming.TrimmedVocabulary | None = None
) -> bool:
    """Compute the teacher's logits of all training rows, unless the store has them; returns whether it computed them.

    `trimmed`: the store has token ids of this trimmed vocabulary; they are mapped to ids of the teacher's vocabulary.
    """
    import ray
    import ray.data

    final = store.teacher_file(teacher.version)
    if final.is_file():
        return False
    # Data tasks would report a damaged store as a traceback, so check it here.
    store.check(size_only=False)
    rows = store.num_rows("train")
    nodes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    blocks = max(env.available_cores(), math.ceil(rows / BLOCK_ROWS))
    ray_internals.disable_data_actors()
    dataset = ray.data.range(rows, override_num_blocks=blocks).map_batches(
        partial(
            answer_rows,
            store=store.folder,
            folder=folder,
            ids=None if trimmed is None else vocab_trimming.original_ids(trimmed.kept_ids),
        ),
        batch_size=TEACHER_BATCH_ROWS,
        num_cpus=logical_cpus(nodes, env.available_cores()),
    )
    # One line per row, or per token.
    by_token = base.get_task(teacher.task).is_token_level
    shape = (store.manifest.tokens["train"] if by_token else rows, len(teacher.labels))
    answered_rows = 0
    with _open_draft_array(final, shape) as logits:
        for batch in dataset.iter_batches(batch_size=None, batch_format="numpy"):
            answers = [np.asarray(row).reshape(-1, shape[1]) for row in batch["logits"]]
            positions = batch["position"]
            logits[store.token_offsets(positions) if by_token else positions] = np.concatenate(answers)
            answered_rows += len(batch["position"])
        if answered_rows != rows:
            raise RuntimeError(f"the teacher answered {answered_rows} of {rows} rows")
    return True


@contextmanager
def _open_draft_array(final: Path, shape: tuple[int, int]) -> Iterator["np.memmap[Any, Any]"]:
    """Open an array on disk that gets the name `final` when the block ends.

    A failed block leaves no file. Drafts of killed processes are removed. Raises `UserError` on a full disk before
    anything is computed: a memory-mapped write to a full disk kills the process by a signal.
    """
    atomic_write.remove_stale_drafts(final)
    draft = atomic_write.Draft(final)
    try:
        path = draft.folder / final.name
        array = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
        _reserve_disk_space(path)
        yield array
        array.flush()
        atomic_write.sync(path)
        path.rename(final)
        atomic_write.sync(final.parent)
    finally:
        shutil.rmtree(draft.folder, ignore_errors=True)
        draft.release()


def _reserve_disk_space(path: Path) -> None:
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
    """Logical CPUs that a single-threaded process requests from Ray.

    A private Ray counts more CPUs than its machine has (`rtrain.cluster.connection`). Nodes of a shared cluster count
    their real CPUs.

    Args:
        nodes: logical CPUs of each node.
        cores: cores of this machine.
    """
    return max(1.0, nodes[0] / cores) if len(nodes) == 1 else 1.0


def answer_rows(batch: dict[str, Any], store: Path, folder: Path, ids: Ints | None = None) -> dict[str, Any]:
    """Data task: logits of the rows at places `id` of the length order, and their positions in the index.

    Numbers are on the scale of these rows.
    """
    import torch

    opened_store, order, metadata, network = _load_teacher(store, folder)
    positions, task, pad_id = order[batch["id"]], base.get_task(metadata.task), builder.pad_id(folder)
    head, lengths = Head(metadata.labels, metadata.facts), opened_store.column("train", "length")[positions]
    # An array of arrays, since rows have different numbers of tokens.
    answers = np.empty(len(positions), dtype=object)
    for places in iter_batches(lengths, np.arange(len(positions)), TEACHER_BATCH_ROWS, TEACHER_BATCH_TOKENS):
        tokens = opened_store.read_tokens("train", positions[places])
        if ids is not None:
            tokens = replace(tokens, ids=ids[tokens.ids].astype(np.int32))
        with torch.inference_mode():
            logits = forward(network, tokens, pad_id, PRECISION, task.logit_positions(tokens, head)).float().numpy()
        outputs = rescale_outputs(task.row_outputs(logits, tokens, head), metadata.facts, opened_store.manifest.facts)
        answers[places] = [np.ascontiguousarray(row).ravel() for row in outputs]
    return {"position": positions, "logits": answers}


def rescale_outputs(outputs: Outputs, teacher: Mapping[str, Any], rows: Mapping[str, Any]) -> Outputs:
    """Convert a teacher's outputs to the scale of these rows; `teacher` and `rows`: facts of their heads.

    Numbers are standardized by the mean and standard deviation of a model's training rows. A teacher that was trained
    on other rows has another scale. Other kinds of output are returned unchanged.
    """
    scales = [(facts["mean"], facts["std"]) for facts in (teacher, rows) if "std" in facts]
    if len(set(scales)) < 2:
        return outputs
    (mean, std), (own_mean, own_std) = scales
    rescaled_outputs: Floats = ((np.asarray(outputs, dtype=np.float64) * std + mean - own_mean) / own_std).astype(
        np.float32
    )
    return rescaled_outputs


@lru_cache(maxsize=1)
def _load_teacher(store: Path, folder: Path) -> tuple[Store, Ints, artifact.Artifact, "torch.nn.Module"]:
    """Load store and teacher once per process: data tasks of one job reuse their processes."""
    import torch

    torch.set_num_threads(TEACHER_THREADS)
    opened_store, metadata = open_store(store), artifact.read_artifact(folder, verify=False)
    # Rows of similar length share a batch; the dataset counts places in this order.
    order = np.argsort(opened_store.column("train", "length"), kind="stable")
    model_config = ModelConfig(pooling=metadata.facts.get(pooling.FACT, "own"))
    network = builder.build_network(
        folder, base.get_task(metadata.task), metadata.labels, seed=0, model_config=model_config
    )
    builder.select_attention(network, training=False)
    return opened_store, order, metadata, cast("torch.nn.Module", network).eval()
