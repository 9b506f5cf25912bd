"""A script: the memory of a worker's process, measured. Prints JSON: bytes of its peak over those before the model, and
of a process without one.

    python -m tests.forecasting FOLDER SETTINGS         (JSON: task, lengths, precision, workers, shard, ...)
"""

import datetime
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtrain.config import Train
from rtrain.core import env
from rtrain.parallel import layout

if TYPE_CHECKING:
    import torch

UPDATES = 3
TINY = "tiny"


def status(name: str) -> int:
    """A figure of this process, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, name
    return int(found[1]) * 1024


def main(folder: Path, settings: dict[str, Any]) -> None:
    env.prepare()
    os.environ["OMP_NUM_THREADS"] = "1"
    from tests.tiny import make_encoder

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
        found = [worker.result() for worker in done]
    sys.stdout.write(json.dumps(max(found, key=lambda one: one["peak"])))


def _worker(rank: int, store: str, folder: Path, settings: dict[str, Any]) -> dict[str, int]:
    import torch.distributed as dist

    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=settings["workers"], timeout=limit)
    found = measured(folder, settings)
    dist.destroy_process_group()
    return found


def measured(folder: Path, settings: dict[str, Any]) -> dict[str, int]:
    # Every library that is loaded late is there after this.
    _train(folder / TINY, {**settings, "lengths": [8, 8]}, 2)
    env.give_memory_back()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    with env.freed_goes_back(layout.gives_back(_settings_of(settings))):
        _train(folder, settings, UPDATES)
        return {"peak": status("VmHWM") - before, "process": before}


def _settings_of(settings: dict[str, Any]) -> Train:
    told = {name: settings[name] for name in ("shard", "tensor") if name in settings}
    again = settings.get("recomputed", False)
    return Train(**told, gradient_checkpointing=again, workers=settings["workers"])


def _train(folder: Path, settings: dict[str, Any], updates: int) -> None:
    import numpy as np
    import torch

    from rtrain.config import Model, Recipe
    from rtrain.core.ragged import single
    from rtrain.models import builder
    from rtrain.parallel import factory
    from rtrain.tasks import base
    from rtrain.trainer import optimizers, step

    torch.set_num_threads(1)
    task = base.get(settings["task"])
    labels = tuple("abcdefgh"[: settings.get("outputs", 2)])
    chosen, train = Model(**settings.get("model", {})), _settings_of(settings)
    network = builder.build(folder, task, labels if settings["task"] != "masked_lm" else (), 0, chosen)
    if train.gradient_checkpointing:
        builder.keep_inputs_alone(network)
    network.train()
    exchange = factory.build(network, train)
    optimizer = optimizers.of_run(exchange, Recipe(name="a", task=settings["task"], train=train))
    lengths = np.asarray(settings["lengths"], dtype=np.int32)
    vocabulary = network.config.vocab_size

    class Loss:
        parts = 1

        def counts(self, tokens: Any) -> list[int]:
            return [len(tokens.ids) if task.by_token else len(tokens.lengths)]

        def wanted(self, tokens: Any) -> Any:
            return np.arange(0, len(tokens.ids), 7) if task.packs else None

        def __call__(self, logits: "torch.Tensor", tokens: Any) -> "torch.Tensor":
            zeros = torch.zeros(logits.shape[:-1], dtype=torch.int64).flatten()
            return torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), zeros, reduction="sum")[None]

    for update in range(updates):
        passes = []
        for number in range(settings.get("passes", 1)):
            drawn = np.random.default_rng([update, number])
            ids = drawn.integers(5, vocabulary, int(lengths.sum())).astype(np.int32)
            row_ids = np.arange(len(lengths), dtype=np.uint64)
            passes.append(single(ids, lengths, lengths, np.zeros(len(lengths)), row_ids))
        step.run_update(
            exchange, optimizer, Loss(), passes, pad_id=0, precision=settings.get("precision", "fp32"), clip_norm=1.0
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
