"""Parts that the peers' programs share: the training's settings, the options, the rows, and the file of results."""

import argparse
import csv
import json
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MICRO_BATCH_SIZE = 32
"""Rows of a pass (forward and backward) of one process."""
PROCESSES = 2
LEARNING_RATE = 2e-4
WEIGHT_DECAY = 0.01
CLIP_NORM = 1.0
WARMUP = 0.1
"""Share of the updates over which the learning rate rises; afterwards it falls, to 0 at the last update."""
MAX_TOKENS = 64


def parser(program: str, about: str) -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog=f"python -m benchmarks.peers.{program}", description=about)
    arguments.add_argument("--model", type=Path, required=True, help="a Transformers folder")
    arguments.add_argument("--rows", type=Path, required=True, help="csv with the columns text and label")
    arguments.add_argument("--out", type=Path, required=True, help="file for the measurements")
    arguments.add_argument("--passes", type=int, default=1, help="passes of a process between two exchanges")
    arguments.add_argument("--seed", type=int, default=0)
    return arguments


def read(path: Path) -> tuple[list[str], list[str]]:
    """Texts and labels."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [row["text"] for row in rows], [row["label"] for row in rows]


def rank() -> int:
    """The process's rank, as torchrun sets it."""
    return int(os.environ.get("RANK", "0"))


def network(folder: Path, labels: int) -> Any:
    """The encoder with a new head, as Transformers makes it."""
    import torch
    import transformers

    return transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=labels, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )


def optimizer(model: Any, updates: int) -> tuple[Any, Any]:
    """Fused AdamW, which HF Trainer takes by itself, and the schedule."""
    import torch
    import transformers

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    return optimizer, transformers.get_linear_schedule_with_warmup(optimizer, math.ceil(WARMUP * updates), updates)


def train_step(model: Any, batch: Mapping[str, Any], optimizer: Any, schedule: Any) -> Any:
    """Train on one batch in bf16, as PyTorch's guides show; returns the loss."""
    import torch

    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return loss.detach()


def last_quarter(losses: Sequence[float]) -> float:
    """The mean loss of the last quarter of the updates (or passes); of at least one."""
    return statistics.fmean(losses[-max(1, len(losses) // 4) :])


class Watch:
    """Clock from the begin of the first update, when its rows are there, to the end of the last."""

    def __init__(self) -> None:
        self.started_at: float | None = None
        self.ended_at = 0.0

    def begin(self) -> None:
        """To be called before each update; the first call starts the clock."""
        if self.started_at is None:
            self.started_at = time.perf_counter()

    def end(self) -> None:
        """To be called after each update; the last call stops the clock."""
        self.ended_at = time.perf_counter()

    @property
    def seconds(self) -> float:
        assert self.started_at is not None, "no update was made"
        return self.ended_at - self.started_at


def write(out: Path, *, rows: int, seconds: float, updates: int, loss: float) -> None:
    """Write the file of results. `rows`: rows of all processes; `loss`: see `last_quarter`."""
    document = {"rows": rows, "seconds": seconds, "updates": updates, "loss": loss}
    out.write_text(json.dumps(document) + "\n", encoding="utf-8")
