"""A script: the memory of a worker's process, measured. Prints JSON: bytes of its peak over those before the model, and
of a process without one.

    python -m tests.support.forecasting FOLDER SETTINGS   (JSON: task, lengths, workers, zero_stage, ...)
"""

import datetime
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtrain.config import TrainConfig
from rtrain.core import env
from rtrain.parallel import layout

if TYPE_CHECKING:
    import torch

UPDATES = 3
TINY = "tiny"


def status(name: str) -> int:
    """A figure of this process, in bytes."""
    actual = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert actual, name
    return int(actual[1]) * 1024


def main(folder: Path, settings: dict[str, Any]) -> None:
    env.set_env_defaults()
    os.environ["OMP_NUM_THREADS"] = "1"
    from tests.support.tiny import make_encoder

    make_encoder(folder / TINY)  # here: of several workers, Transformers has only the first write anything
    if settings["workers"] == 1:
        sys.stdout.write(json.dumps(measured(folder, settings)))
        return
    import multiprocessing
    from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait

    store = f"file://{folder}/store-{os.getpid()}"
    with ProcessPoolExecutor(settings["workers"], multiprocessing.get_context("spawn")) as pool:
        started = [pool.submit(_worker, rank, store, folder, settings) for rank in range(settings["workers"])]
        done, _ = wait(started, return_when=FIRST_EXCEPTION)
        actual = [worker.result() for worker in done]
    sys.stdout.write(json.dumps(max(actual, key=lambda one: one["peak"])))


def _worker(rank: int, store: str, folder: Path, settings: dict[str, Any]) -> dict[str, int]:
    import torch.distributed as dist

    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=settings["workers"], timeout=limit)
    actual = measured(folder, settings)
    dist.destroy_process_group()
    return actual


def measured(folder: Path, settings: dict[str, Any]) -> dict[str, int]:
    # Every library that is loaded late is there after this.
    _train(folder / TINY, {**settings, "lengths": [8, 8]}, 2)
    env.release_freed_memory()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    with env.trim_malloc(layout.should_trim_malloc(_settings_of(settings))):
        _train(folder, settings, UPDATES)
        return {"peak": status("VmHWM") - before, "process": before}


def _settings_of(settings: dict[str, Any]) -> TrainConfig:
    output = {name: settings[name] for name in ("zero_stage", "tensor_parallel_size") if name in settings}
    repeated = settings.get("recomputed", False)
    return TrainConfig(**output, gradient_checkpointing=repeated, workers=settings["workers"])


def _train(folder: Path, settings: dict[str, Any], updates: int) -> None:
    import numpy as np
    import torch

    from rtrain.config import ModelConfig, Recipe
    from rtrain.core.ragged import single_window_batch
    from rtrain.models import builder
    from rtrain.parallel import layout
    from rtrain.tasks import base
    from rtrain.trainer import optimizers, step

    torch.set_num_threads(1)
    task = base.get_task(settings["task"])
    labels = tuple("abcdefgh"[: settings.get("outputs", 2)])
    options, train = ModelConfig(**settings.get("model", {})), _settings_of(settings)
    network = builder.build_network(folder, task, labels if settings["task"] != "masked_lm" else (), 0, options)
    if train.gradient_checkpointing:
        builder.enable_activation_checkpointing(network)
    network.train()
    exchange = layout.build_strategy(network, train)
    optimizer = optimizers.build_run_optimizer(exchange, Recipe(name="a", task=settings["task"], train=train))
    lengths = np.asarray(settings["lengths"], dtype=np.int32)
    vocabulary = network.config.vocab_size

    class Loss:
        num_parts = 1

        def count_targets(self, tokens: Any) -> list[int]:
            return [len(tokens.ids) if task.is_token_level else len(tokens.window_lengths)]

        def logit_positions(self, tokens: Any) -> Any:
            return np.arange(0, len(tokens.ids), 7) if task.packs_text else None

        def __call__(self, logits: "torch.Tensor", tokens: Any) -> "torch.Tensor":
            zeros = torch.zeros(logits.shape[:-1], dtype=torch.int64).flatten()
            return torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), zeros, reduction="sum")[None]

    for update in range(updates):
        passes = []
        for number in range(settings.get("passes", 1)):
            drawn = np.random.default_rng([update, number])
            ids = drawn.integers(5, vocabulary, int(lengths.sum())).astype(np.int32)
            row_ids = np.arange(len(lengths), dtype=np.uint64)
            passes.append(single_window_batch(ids, lengths, lengths, np.zeros(len(lengths)), row_ids))
        step.StepRunner(
            exchange, optimizer, Loss(), pad_id=0, precision=settings.get("precision", "fp32"), max_grad_norm=1.0
        ).run_step(passes)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
