"""Teacher -> student with fewer layers: the same loop on the same rows, with the teacher's answers in the loss."""

import math
import re
import shutil
import uuid
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rtrain import artifact, config as configuration, env, pooling
from rtrain.config import Config, Model
from rtrain.data.store import Store, open_store
from rtrain.errors import ConfigError, Problem, UserError
from rtrain.tasks import base
from rtrain.tasks.batch import Ints, spread
from rtrain.training import driver, model, precision, runs
from rtrain.training.step import forward
from rtrain.training.worker import TOKENIZER_FILES

if TYPE_CHECKING:
    import torch

TEACHER_ROWS = 64
"""Rows of one pass of the teacher."""
BLOCK_ROWS = 1024
"""Rows that one data task answers."""
TEACHER_CPUS = 1
"""Threads of one teacher process."""


def run(
    config: Config,
    teacher_run: Path,
    folder: Path,
    reuse: runs.Reuse = "refuse",
    on_event: driver.OnEvent | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Distil the artefact of `teacher_run` into a new run at `folder`; returns the run's folder and its summary."""
    teacher = artifact.read(teacher_run / "artifact")
    if teacher.engine != "torch":
        raise UserError(f"{teacher_run / 'artifact'} is quantized; distil its float parent")
    if not teacher.labels:
        raise UserError(
            f"{teacher_run / 'artifact'} answers with the words of a vocabulary ({teacher.task}), which a student is "
            "not taught; distil the model that was tuned from it"
        )
    source, _ = driver.check(config)
    if (folder / runs.CONFIG).is_file() and reuse == "refuse":
        raise UserError(f"--out: {folder} holds a run already; write --new or another --out")
    # Beside the run, not in it: the run folder is made by driver.prepare once nothing is wrong.
    start = student_start(teacher_run / "artifact", config.recipe.distill.layers, folder.parent / ".students")
    student = configuration.with_overrides(
        config,
        {
            "model.name": str(start),
            "train.epochs": config.recipe.distill.epochs,
            "optim.lr": config.recipe.distill.lr,
            "distill.teacher": teacher.version,
        },
    )
    prepared = driver.prepare(student, folder, reuse, source=source)
    # The teacher answers on processors, wherever the student is trained.
    wanted, native = config.recipe.train.precision, precision.of_processor()
    decided = precision.resolve("auto" if precision.problems(wanted, native) else wanted, native)
    ensure_answers(prepared.store, teacher_run / "artifact", teacher, decided)
    return prepared.run, driver.fit(prepared, on_event=on_event)


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
    """Evenly spaced, the last one included: 3 of 6 are 1, 3, 5 (counted from 0)."""
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


def ensure_answers(store: Store, folder: Path, teacher: artifact.Artifact, decided: str) -> bool:
    """Logits of all training rows by the teacher, kept in the store; returns whether they had to be computed."""
    import ray
    import ray.data

    final = store.teacher_file(teacher.version)
    if final.is_file():
        return False
    store.check(size_only=False)  # every row is about to be read; out of a data task the refusal comes as a traceback
    rows = store.rows("train")
    # A local Ray counts more logical CPUs than the machine has; a teacher uses a real one.
    logical_per_real = ray.cluster_resources()["CPU"] / (env.cores() * len(ray.nodes()))
    blocks = max(env.cores(), math.ceil(rows / BLOCK_ROWS))
    dataset = ray.data.range(rows, override_num_blocks=blocks).map_batches(
        partial(_answer, store=store.folder, folder=folder, precision=decided),
        batch_size=TEACHER_ROWS,
        num_cpus=max(1.0, logical_per_real),
    )
    draft = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}")
    # A line for each row, or for each of its tokens.
    lengths = store.column("train", "length") if base.get(teacher.task).by_token else np.ones(rows, dtype=np.int32)
    shape = (int(lengths.sum()), len(teacher.labels))
    logits = np.lib.format.open_memmap(draft, mode="w+", dtype=np.float32, shape=shape)
    seen = 0
    for batch in dataset.iter_batches(batch_size=None, batch_format="numpy"):
        answers = [np.asarray(row).reshape(-1, shape[1]) for row in batch["logits"]]
        logits[spread(lengths, batch["position"])] = np.concatenate(answers)
        seen += len(batch["position"])
    logits.flush()
    if seen != rows:
        draft.unlink()
        raise RuntimeError(f"the teacher answered {seen} of {rows} rows")
    draft.rename(final)
    return True


def _answer(batch: dict[str, Any], store: Path, folder: Path, precision: str) -> dict[str, Any]:
    """A data task: outputs for the rows at places `id` of the length order, with their positions in the index."""
    import torch

    opened, order, made, network = _teacher(store, folder)
    positions, task, pad_id = order[batch["id"]], base.get(made.task), model.pad_id(folder)
    tokens, head = opened.read("train", positions), base.Head(made.labels, made.facts)
    with torch.inference_mode():
        logits = forward(network, tokens, pad_id, precision, task.wanted(tokens, head)).float().numpy()
    outputs = task.outputs(logits, tokens, head)
    # As an array of arrays: rows of several tokens have several answers.
    answers = np.empty(len(positions), dtype=object)
    answers[:] = [np.ascontiguousarray(row).ravel() for row in outputs]
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
