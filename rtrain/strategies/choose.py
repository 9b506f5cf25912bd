"""Which strategy a run's settings ask for."""

from typing import TYPE_CHECKING, Any

from rtrain.config import Train
from rtrain.exchange.alive import Watch
from rtrain.exchange.exchange import Exchange
from rtrain.exchange.replicas import Say, unsaid
from rtrain.exchange.replicated import Replicated
from rtrain.strategies.context import Context
from rtrain.strategies.cut import Cut
from rtrain.strategies.fully import Fully
from rtrain.strategies.pipeline import Pipeline, PipelineInShares
from rtrain.strategies.shares import OptimizerShares

if TYPE_CHECKING:
    import torch


def build(
    network: "torch.nn.Module",
    train: Train,
    watch: Watch | None = None,
    say: Say = unsaid,
    *,
    touched_rows: bool = True,
) -> Exchange:
    """The exchange of a network, which is on its device. Called on every worker."""
    import torch.distributed as dist

    workers = dist.get_world_size() if dist.is_initialized() else 1
    if train.context > 1:
        return Context(network, watch, say, context=train.context)
    shared = train.shard > 1 and workers > train.within
    within: dict[str, Any] = {"tensor": train.tensor, "sequence": train.sequence}
    if shared:
        within["weights"] = train.shard == 3
    if train.pipeline > 1:
        staged = PipelineInShares if shared else Pipeline
        return staged(network, watch, say, pipeline=train.pipeline, schedule=train.schedule, **within)
    if shared or train.tensor > 1:
        return (Fully if shared else Cut)(network, watch, say, **within)
    kind = OptimizerShares if train.shard else Replicated
    by, compressed = train.transport, train.gradient_compression
    return kind(network, watch, say, touched_rows=touched_rows, by=by, compressed=compressed)
