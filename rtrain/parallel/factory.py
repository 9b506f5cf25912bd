"""Which strategy a run's settings ask for."""

from typing import TYPE_CHECKING, Any

from rtrain.config import Train
from rtrain.parallel import dtensor_utils
from rtrain.parallel.base import Exchange
from rtrain.parallel.context import Context
from rtrain.parallel.data_parallel import Say, unsaid
from rtrain.parallel.ddp import Replicated
from rtrain.parallel.fsdp import Fully
from rtrain.parallel.pipeline import Pipeline, PipelineInShares
from rtrain.parallel.tensor import Cut
from rtrain.parallel.watchdog import Watch
from rtrain.parallel.zero import OptimizerShares

if TYPE_CHECKING:
    import torch


def in_parts(train: Train, workers: int) -> bool:
    """Whether no worker has all of the network, which is then cut where it was read and put on its device in parts."""
    return train.pipeline > 1 or train.tensor > 1 or (train.shard > 1 and workers > train.within)


def build(
    network: "torch.nn.Module",
    train: Train,
    watch: Watch | None = None,
    say: Say = unsaid,
    *,
    device: "torch.device | None" = None,
) -> Exchange:
    """The exchange of a network. Called on every worker. `device`: where the network is to compute, if not where it is;
    of a network that is not `in_parts` it is."""
    import torch.distributed as dist

    workers = dist.get_world_size() if dist.is_initialized() else 1
    if not in_parts(train, workers):
        if train.context > 1:
            return Context(network, watch, say, context=train.context)
        kind = OptimizerShares if train.shard else Replicated
        return kind(network, watch, say, compressed=train.gradient_compression)
    cut: dict[str, Any] = {"tensor": train.tensor, "sequence": train.sequence, "device": device}
    shared = train.shard > 1 and workers > train.within
    if shared:
        cut["weights"] = train.shard == 3
    made: Exchange
    if train.pipeline > 1:
        staged = PipelineInShares if shared else Pipeline
        made = staged(network, watch, say, pipeline=train.pipeline, schedule=train.schedule, **cut)
    else:
        made = (Fully if shared else Cut)(network, watch, say, **cut)
    if device is not None and not shared:  # `fully_shard` has put shares where they belong
        dtensor_utils.move(network, device)
    return made
