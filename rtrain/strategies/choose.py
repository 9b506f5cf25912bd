"""Which strategy a run's settings ask for."""

from typing import TYPE_CHECKING

from rtrain.config import Train
from rtrain.exchange.alive import Watch
from rtrain.exchange.exchange import Exchange
from rtrain.exchange.replicas import Say, unsaid
from rtrain.exchange.replicated import Replicated
from rtrain.strategies.shares import OptimizerShares

if TYPE_CHECKING:
    import torch

WHOLE = (Replicated, OptimizerShares)
"""By `train.shard`, where every worker has the whole model."""


def build(
    network: "torch.nn.Module",
    train: Train,
    watch: Watch | None = None,
    say: Say = unsaid,
    *,
    touched_rows: bool = True,
) -> Exchange:
    """The exchange of a network, which is on its device. Called on every worker."""
    by, compressed = train.transport, train.gradient_compression
    return WHOLE[train.shard](network, watch, say, touched_rows=touched_rows, by=by, compressed=compressed)
