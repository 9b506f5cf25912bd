"""Teacher -> student with fewer layers: the same loop on the same rows, with the teacher's answers in the loss."""

import math
import re
import shutil
import uuid
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rtrain import artifact, config as configuration, engines, env, events
from rtrain.batch import Head, Ints, batches
from rtrain.config import Config, Model
from rtrain.data.stores.store import Store, open_store
from rtrain.errors import ConfigError, Problem, UserError
from rtrain.gate import gate
from rtrain.network import model, pooling, precision, trimming
from rtrain.runs import driver, opening, preparing
from rtrain.runs.worker import TOKENIZER_FILES
from rtrain.tasks import base
from rtrain.training.step import forward

if TYPE_CHECKING:
    import torch

DERIVED = ("model.name", "train.epochs", "optim.lr", "distill.teacher")
"""Settings of a student that follow from its teacher and from its other settings."""
TEACHER_ROWS = 64
"""Rows of one pass of the teacher."""
TEACHER_TOKENS = 1 << 14
"""Tokens of one pass of the teacher. Rows of similar length share a pass: without this limit the last passes would
hold 64 of the longest rows."""
BLOCK_ROWS = 1024
"""Rows that one data task answers."""
TEACHER_CPUS = 1
"""Threads of one teacher process."""


def run(
    config: Config,
    teacher_run: Path,
    folder: Path,
    reuse: opening.Reuse = "refuse",
    on_event: driver.OnEvent | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Distil the artefact of `teacher_run` into a new run at `folder`; returns the run's folder and its summary.

    A student that has come to its end is gated against its teacher; the document is the summary's `gate`.
    """
    teacher = artifact.read(teacher_run / "artifact")
    if not engines.get(teacher.engine).gradients:
        raise UserError(f"{teacher_run / 'artifact'} is quantized; distil its float parent")
    if not teacher.labels:
        raise UserError(
            f"{teacher_run / 'artifact'} answers with the words of a vocabulary ({teacher.task}), which a student is "
            "not taught; distil the model that was tuned from it"
        )
    config = settled(config, folder, reuse)
    # The teacher's head was trained on this pooling, and the student starts with that head.
    pooled, asked = teacher.facts.get(pooling.FACT, "own"), config.recipe.model.pooling
    if asked not in ("auto", pooled):
        fix = f"write {pooled}, or leave it out"
        raise ConfigError([Problem("model.pooling", asked, f"the teacher was trained with {pooled}", fix)])
    source = None
    if reuse != "resume":
        source, _ = preparing.check(config, folder.parent, labels=False)  # the teacher's, as it read them
        opening.choose(folder, config, reuse)
    # Beside the run, not in it: the run folder is made by preparing.prepare once nothing is wrong.
    start = student_start(teacher_run / "artifact", config.recipe.distill.layers, folder.parent / ".students")
    values = (str(start), config.recipe.distill.epochs, config.recipe.distill.lr, teacher.version)
    derived = dict(zip(DERIVED, values, strict=True))
    student = configuration.with_overrides(config, {**derived, "model.pooling": pooled})
    say = on_event or (lambda event: None)
    say(events.doing("reading the rows", "rows"))
    prepared = preparing.prepare(student, folder, reuse, source=source)
    # The teacher answers on processors, wherever the student is trained.
    wanted, native = config.recipe.train.precision, precision.of_processor()
    decided = precision.resolve("auto" if precision.problems(wanted, native) else wanted, native)
    say(events.doing(f"the teacher answers {prepared.store.rows('train'):,} rows", "teacher"))
    ensure_answers(prepared.store, teacher_run / "artifact", teacher, decided, trimming.read(prepared.model))
    summary = driver.fit(prepared, on_event=on_event)
    if prepared.run.finished:
        sides = gate.Sides(
            prepared.run.artifact,
            teacher_run / "artifact",
            prepared.store,
            prepared.store,
            student.deploy.serve.threads,
        )
        summary["gate"] = gate.run(sides, student.recipe.gate, on_event=say)
        gate.record(prepared.run.artifact, summary["gate"])
    return prepared.run.folder, summary


def settled(config: Config, folder: Path, reuse: opening.Reuse) -> Config:
    """What to distil by: `config`, or a resumed student's own configuration with what `config` names."""
    if reuse != "resume":
        return config
    return preparing.chosen(replace(config, named=config.named.difference(DERIVED)), folder, reuse)[1]


# ------------------------------------------------------------------------------------------------ the student's start


def student_start(teacher: Path, layers: int, root: Path) -> Path:
    """A Transformers folder with every n-th layer of the teacher and all of its other weights, addressed by both."""
    import json

    from safetensors.torch import load_file, save_file

    document = json.loads((teacher / "config.json").read_text())
    counted = next((name for name in ("num_hidden_layers", "n_layers") if name in document), None)
    if counted is None:
        raise UserError(f"{teacher}: its config.json does not count its layers, so none can be left out")
    depth = int(document[counted])
    if layers >= depth:
        problem = Problem("distill.layers", layers, f"the teacher has {depth} layers", f"write {depth - 1} or less")
        raise ConfigError([problem])
    final = root / f"{artifact.read(teacher, verify=False).version}-{layers}"
    if (final / "config.json").is_file():
        return final
    draft = root / f".{final.name}.{uuid.uuid4().hex[:8]}"
    draft.mkdir(parents=True)
    save_file(
        keep_layers(load_file(teacher / "model.safetensors"), chosen_layers(depth, layers)),
        draft / "model.safetensors",
        {"format": "pt"},
    )
    (draft / "config.json").write_text(json.dumps({**document, counted: layers}, indent=1))
    for name in TOKENIZER_FILES:
        if (teacher / name).is_file():
            shutil.copyfile(teacher / name, draft / name)
    draft.rename(final)
    return final


def chosen_layers(depth: int, layers: int) -> list[int]:
    """Evenly spaced layers, counted from 0, with the last one included: 3 of 6 are 1, 3, 5."""
    return [math.ceil(depth * (place + 1) / layers) - 1 for place in range(layers)]


def keep_layers(weights: dict[str, "torch.Tensor"], chosen: list[int]) -> dict[str, "torch.Tensor"]:
    """Weights of the chosen encoder layers, renumbered, with everything that is not a layer's."""
    kept = {}
    for name, value in weights.items():
        match = re.search(r"\.layers?\.(\d+)\.", name)
        if match is None:
            kept[name] = value
        elif int(match[1]) in chosen:
            number = chosen.index(int(match[1]))
            kept[name[: match.start(1)] + str(number) + name[match.end(1) :]] = value
    return kept


# ------------------------------------------------------------------------------------------------ the teacher's answers


def ensure_answers(
    store: Store, folder: Path, teacher: artifact.Artifact, decided: str, trimmed: trimming.Trimmed | None = None
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
    # A local Ray counts more logical CPUs than the machine has; each teacher process uses a real one.
    logical_per_real = ray.cluster_resources()["CPU"] / (env.cores() * len(ray.nodes()))
    blocks = max(env.cores(), math.ceil(rows / BLOCK_ROWS))
    dataset = ray.data.range(rows, override_num_blocks=blocks).map_batches(
        partial(
            _answer,
            store=store.folder,
            folder=folder,
            precision=decided,
            ids=None if trimmed is None else trimming.old_ids(trimmed.kept),
        ),
        batch_size=TEACHER_ROWS,
        num_cpus=max(1.0, logical_per_real),
    )
    draft = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}")
    # A line for each row, or for each of its tokens.
    by_token = base.get(teacher.task).by_token
    shape = (store.manifest.tokens["train"] if by_token else rows, len(teacher.labels))
    logits = np.lib.format.open_memmap(draft, mode="w+", dtype=np.float32, shape=shape)
    seen = 0
    for batch in dataset.iter_batches(batch_size=None, batch_format="numpy"):
        answers = [np.asarray(row).reshape(-1, shape[1]) for row in batch["logits"]]
        positions = batch["position"]
        logits[store.token_places(positions) if by_token else positions] = np.concatenate(answers)
        seen += len(batch["position"])
    logits.flush()
    if seen != rows:
        draft.unlink()
        raise RuntimeError(f"the teacher answered {seen} of {rows} rows")
    draft.rename(final)
    return True


def _answer(
    batch: dict[str, Any], store: Path, folder: Path, precision: str, ids: Ints | None = None
) -> dict[str, Any]:
    """A data task: outputs for the rows at places `id` of the length order, with their positions in the index."""
    import torch

    opened, order, made, network = _teacher(store, folder)
    positions, task, pad_id = order[batch["id"]], base.get(made.task), model.pad_id(folder)
    head, lengths = Head(made.labels, made.facts), opened.column("train", "length")[positions]
    # As an array of arrays: rows of several tokens have several answers.
    answers = np.empty(len(positions), dtype=object)
    for places in batches(lengths, np.arange(len(positions)), TEACHER_ROWS, TEACHER_TOKENS):
        tokens = opened.read("train", positions[places])
        if ids is not None:
            tokens = replace(tokens, ids=ids[tokens.ids].astype(np.int32))
        with torch.inference_mode():
            logits = forward(network, tokens, pad_id, precision, task.wanted(tokens, head)).float().numpy()
        answers[places] = [np.ascontiguousarray(row).ravel() for row in task.outputs(logits, tokens, head)]
    return {"position": positions, "logits": answers}


@lru_cache(maxsize=1)
def _teacher(store: Path, folder: Path) -> tuple[Store, Ints, artifact.Artifact, "torch.nn.Module"]:
    """Loaded once per process: data tasks of one pass reuse their processes."""
    import torch

    torch.set_num_threads(TEACHER_CPUS)
    opened, made = open_store(store), artifact.read(folder, verify=False)
    # Neighbours in length share a pass; the data set counts places in this order.
    order = np.argsort(opened.column("train", "length"), kind="stable")
    chosen = Model(pooling=made.facts.get(pooling.FACT, "own"))
    network = model.build(folder, base.get(made.task), made.labels, seed=0, chosen=chosen)
    model.attend(network, training=False)
    return opened, order, made, cast("torch.nn.Module", network).eval()
