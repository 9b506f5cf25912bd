"""Whether a run resumes bit for bit: 40 updates in one start are compared with 40 updates in two starts. The first
start is killed after the checkpoint at update 20."""

import json
import multiprocessing
import os
import shutil
import signal
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu import trainings
from benchmarks.gpu.bench import Bench

if TYPE_CHECKING:
    from rtrain.data.stream import WorkerBatch

UPDATES, KILLED_AT, BEYOND = 40, 20, 23
"""The process is killed in the midst of update 23 (`BEYOND`), when the checkpoint at 20 is complete."""
ATTENTION: Mapping[str, float | None] = {"dropout": None, "no_dropout": 0.0}
"""Dropout of attention weights: the model's own, and none. A GPU takes a different kernel for each."""
RESULT_FILE = "said.json"


def run(bench: Bench) -> None:
    rates = ATTENTION if bench.gpu else {"dropout": None}
    for name, rate in rates.items():
        for deterministic in (False, True):
            key = f"{name}{'.deterministic' if deterministic else ''}"
            with bench.report.attempt(key):
                _compare(bench, key, rate, deterministic)


def _compare(bench: Bench, key: str, rate: float | None, deterministic: bool) -> None:
    root = bench.scratch / "resume" / key
    shutil.rmtree(root, ignore_errors=True)
    settings = _settings(bench, rate)
    _start(bench, root / "straight", settings, deterministic)
    code = _start(bench, root / "resumed", settings, deterministic, kill=True)
    if code != -signal.SIGKILL:
        raise RuntimeError(f"the process that was to be killed ended with {code}")
    _start(bench, root / "resumed", settings, deterministic)
    result = json.loads((root / "resumed" / RESULT_FILE).read_text(encoding="utf-8"))
    ends = [root / name / "checkpoints" / f"step-{UPDATES:08d}" for name in ("straight", "resumed")]
    other, total, largest = differing(*ends)
    about = {"of": total, "first": other[:3], "largest_difference": largest, "resumed_from": result["from"]}
    about |= {"said": result["warnings"], "updates": UPDATES, "precision": result["precision"]}
    equal = not other and result["from"] == KILLED_AT
    bench.report.line(f"bit_for_bit.{key}", equal, **about)
    # The same update of the same weights is computed twice in one process. If the two differ, no checkpoint is to
    # blame.
    bench.report.line(
        f"repeated.{key}",
        len(result["repeated"]),
        "tensors of a gradient differ",
        maximum=0,
        first=result["repeated"][:3],
    )
    shutil.rmtree(root)


def _settings(bench: Bench, rate: float | None) -> dict[str, Any]:
    rows = bench.store("banking77").num_rows("train")
    per_update = min(64, rows // 4)
    epochs = -(-UPDATES // -(-rows // per_update))
    return {
        "model.attention_dropout": rate,
        "train.global_batch_size": per_update,
        "train.epochs": epochs,
        "train.save_every": KILLED_AT,
        "train.evaluate_every": KILLED_AT,
        "train.keep_checkpoints": 9,
        "train.log_every": 1,
    }


def _start(bench: Bench, folder: Path, settings: dict[str, Any], deterministic: bool, kill: bool = False) -> int:
    """One start of the run in a process of its own; returns its exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    context: Any = multiprocessing.get_context("spawn")
    process = context.Process(target=_train, args=(bench, folder, settings, deterministic, kill))
    process.start()
    process.join()
    if not kill and process.exitcode:
        wrong = folder / "error.txt"
        raise RuntimeError(wrong.read_text(encoding="utf-8") if wrong.is_file() else f"ended with {process.exitcode}")
    return int(process.exitcode or 0)


def _train(bench: Bench, folder: Path, settings: dict[str, Any], deterministic: bool, kill: bool) -> None:
    import torch

    from rtrain.checkpoint import format as checkpoint_format

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS needs it to add in a fixed order
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    checkpoint = checkpoint_format.checkpoint_path(folder / "checkpoints", KILLED_AT)

    def killed(stream: trainings.Stream) -> trainings.Stream:
        def updates(first: int, stop: int) -> Iterator["WorkerBatch"]:
            for update in stream(first, stop):
                while kill and update.step == BEYOND:
                    if checkpoint_format.is_complete(checkpoint):
                        os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(0.01)
                yield update

        return updates

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ran = trainings.start(bench, folder, settings, stop=UPDATES, wrap=killed)
            repeated = _repeated(ran)
        warnings_text = sorted(
            {str(warning.message).splitlines()[0] for warning in caught if "determinis" in str(warning.message)}
        )
        result = {"from": ran.reporter.events_of("started")[0]["step"], "warnings": warnings_text, "repeated": repeated}
        result["precision"] = ran.job.precision
        (folder / RESULT_FILE).write_text(json.dumps(result), encoding="utf-8")
    except Exception as error:
        (folder / "error.txt").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        raise


def _repeated(ran: trainings.Ran) -> list[str]:
    """The tensors of an update's gradient that differ when it is computed again, with the same dropout."""
    import torch

    from rtrain.trainer import batch_size

    job, gradients = ran.job, list[dict[str, torch.Tensor]]()
    tokens = job.store.read_tokens("train", job.order.positions(0))
    for _ in range(2):
        torch.manual_seed(1)
        ran.network.train().zero_grad(set_to_none=True)
        batch_size.forward_backward(ran.network, job.loss, tokens, job.pad_id, job.precision)
        parameters = ran.network.named_parameters()
        gradients.append({name: parameter.grad.clone() for name, parameter in parameters if parameter.grad is not None})
    return [name for name, value in gradients[0].items() if not torch.equal(value, gradients[1][name])]


def differing(mine: Path, theirs: Path) -> tuple[list[str], int, float]:
    """(tensors that differ in some bit, number of tensors, largest difference) of the weights and optimizer states."""
    import numpy as np
    from safetensors.numpy import load_file

    other, total, largest = [], 0, 0.0
    for name in ("model.safetensors", "optim.safetensors"):
        left, right = (load_file(folder / name) for folder in (mine, theirs))
        if left.keys() != right.keys():
            raise RuntimeError(f"{name} holds other tensors")
        for key, value in left.items():
            total += 1
            if value.tobytes() != right[key].tobytes():
                other.append(key)
                largest = max(largest, float(np.abs(value.astype(np.float64) - right[key]).max()))
    return other, total, largest
