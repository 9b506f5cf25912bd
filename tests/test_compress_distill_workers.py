"""A student that learns inside its teacher, on two workers: the weights of one, and a map that both exchange."""

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from rtrain.config import load
from rtrain.core.ragged import Tokens
from rtrain.data.order import deal
from rtrain.models import auxiliary_params
from rtrain.parallel import dtensor_utils, factory
from rtrain.trainer import optimizers, step
from tests.test_compress_distill_losses import BOTH, rows_of, student_of
from tests.workers import joined, run

SHARDS = (0, 2, 3)
"""Values of `train.shard`."""
UPDATES = ((7, 3, 11, 3, 5), (4,), (2, 9, 6))
"""Lengths of the rows of each update; the second has one row, so that one worker is idle."""


def _trained(folder: Path, world: int, rank: int, shard: int = 0) -> None:
    """Train, and write what the weights have become."""
    student, _, loss = student_of(folder, "bert", **BOTH)
    recipe = load("intent", {"train.shard": shard, "optim.lr": 1e-2}).recipe
    exchange = factory.build(student, recipe.train)
    optimizer = optimizers.of_run(exchange, recipe)
    for lengths in UPDATES:
        rows: Tokens = rows_of(lengths)
        passes = [rows.pick(chosen) for chosen in deal(rows.lengths, world, rank, 2)]
        step.run_update(exchange, optimizer, loss, passes, pad_id=0, precision="fp64", clip_norm=1.0)
    weights = {name: dtensor_utils.full(value).contiguous() for name, value in student.state_dict().items()}
    save_file(weights, folder / f"{world}-{rank}-{shard}")


def _worker(rank: int, folder: Path) -> None:
    joined(rank, 2, folder)
    try:
        for shard in SHARDS:
            _trained(folder, 2, rank, shard)
    finally:
        dist.destroy_process_group()


def test_two_workers_end_with_the_weights_of_one(tmp_path: Path) -> None:
    student, _, _ = student_of(tmp_path, "bert", **BOTH)  # writes both models
    before = {name: value.clone() for name, value in student.state_dict().items()}
    _trained(tmp_path, 1, 0)
    run(_worker, (tmp_path,), 2)
    alone = load_file(tmp_path / "1-0-0")
    moved = torch.cat([(alone[name] - before[name]).flatten() for name in alone])
    for shard in SHARDS:
        first, second = (load_file(tmp_path / f"2-{rank}-{shard}") for rank in (0, 1))
        assert all(torch.equal(first[name], second[name]) for name in first)
        apart = torch.cat([(alone[name] - first[name]).flatten() for name in alone])
        assert apart.norm() <= 1e-8 * moved.norm()
    learned = f"{auxiliary_params.NAME}.weight"
    assert not torch.equal(alone[learned], before[learned])
