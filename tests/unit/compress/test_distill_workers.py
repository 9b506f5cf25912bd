"""A student that learns inside its teacher, on two workers: the weights of one, and a map that both exchange."""

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from rtrain.config import load_config
from rtrain.core.ragged import TokenBatch
from rtrain.data.order import assign_micro_batches
from rtrain.models import network_parts
from rtrain.parallel import dtensor_utils, layout
from rtrain.trainer import optimizers, step
from tests.support.workers import joined, run
from tests.unit.compress.test_distill_losses import BOTH, rows_of, student_of

SHARDS = (0, 2, 3)
"""Values of `train.zero_stage`."""
UPDATES = ((7, 3, 11, 3, 5), (4,), (2, 9, 6))
"""Lengths of the rows of each update; the second has one row, so that one worker is idle."""


def _trained(folder: Path, world: int, rank: int, shard: int = 0) -> None:
    """Train, and write the weights."""
    student, _, loss = student_of(folder, "bert", **BOTH)
    recipe = load_config("intent", {"train.zero_stage": shard, "optim.lr": 1e-2}).recipe
    exchange = layout.build_strategy(student, recipe.train)
    optimizer = optimizers.build_run_optimizer(exchange, recipe)
    for lengths in UPDATES:
        rows: TokenBatch = rows_of(lengths)
        passes = [rows.take(config) for config in assign_micro_batches(rows.window_lengths, world, rank, 2)]
        step.StepRunner(exchange, optimizer, loss, pad_id=0, precision="fp64", max_grad_norm=1.0).run_step(passes)
    weights = {name: dtensor_utils.full_tensor(value).contiguous() for name, value in student.state_dict().items()}
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
    single = load_file(tmp_path / "1-0-0")
    changed = torch.cat([(single[name] - before[name]).flatten() for name in single])
    for shard in SHARDS:
        first, second = (load_file(tmp_path / f"2-{rank}-{shard}") for rank in (0, 1))
        assert all(torch.equal(first[name], second[name]) for name in first)
        separate = torch.cat([(single[name] - first[name]).flatten() for name in single])
        assert separate.norm() <= 1e-8 * changed.norm()
    learned = f"{network_parts.MODULE_NAME}.weight"
    assert not torch.equal(single[learned], before[learned])
