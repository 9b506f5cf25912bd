"""Steps of one worker over the same rows in other micro-batches: the loss and the gradients must not change."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rtrain.config import DistillConfig
from rtrain.core.ragged import Head, TokenBatch
from rtrain.parallel.ddp import DDPStrategy
from rtrain.tasks.base import Task
from rtrain.trainer import losses, step


def assert_same_step(
    task: Task, head: Head, network: Any, tokens: TokenBatch, partitions: Sequence[Sequence[list[int]]]
) -> float:
    """Run a step for each partition of the rows into micro-batches; returns the loss of all. The network is in fp64."""
    loss = losses.make_loss(task, DistillConfig(), head)
    steps = []
    for partition in partitions:
        optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
        micro_batches = [tokens.take(rows) for rows in partition]
        result = step.StepRunner(DDPStrategy(network), optimizer, loss, pad_id=0).run_step(micro_batches)
        steps.append((result.loss, {name: p.grad.clone() for name, p in network.named_parameters()}))
    first_loss, first_gradients = steps[0]
    for value, gradients in steps[1:]:
        assert value == pytest.approx(first_loss, rel=1e-12)
        for name, gradient in gradients.items():
            assert (gradient - first_gradients[name]).abs().max() < 1e-12, name
    return first_loss
