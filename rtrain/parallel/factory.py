"""Selection of a strategy by the settings of a run."""

from typing import TYPE_CHECKING, Any

from rtrain.config import TrainConfig
from rtrain.parallel import dtensor_utils
from rtrain.parallel.base import Strategy
from rtrain.parallel.context import ContextParallelStrategy
from rtrain.parallel.data_parallel import EventLogger, ignore_event
from rtrain.parallel.ddp import DDPStrategy
from rtrain.parallel.fsdp import FSDPStrategy
from rtrain.parallel.pipeline import FSDPPipelineStrategy, PipelineStrategy
from rtrain.parallel.tensor import TensorParallelStrategy
from rtrain.parallel.watchdog import Watchdog
from rtrain.parallel.zero import ShardedOptimizerStrategy

if TYPE_CHECKING:
    import torch


def is_model_parallel(train: TrainConfig, workers: int) -> bool:
    """Whether no worker has the full network. It is then sharded in CPU memory and moved to the device in parts."""
    return (
        train.pipeline_parallel_size > 1
        or train.tensor_parallel_size > 1
        or (train.zero_stage > 1 and workers > train.workers_per_replica)
    )


def build_strategy(
    network: "torch.nn.Module",
    train: TrainConfig,
    watchdog: Watchdog | None = None,
    log_event: EventLogger = ignore_event,
    *,
    device: "torch.device | None" = None,
) -> Strategy:
    """Build the strategy of a network. Called on every worker. `device`: the training device, if the network is not on
    it yet; networks that are not `is_model_parallel` are."""
    import torch.distributed as dist

    workers = dist.get_world_size() if dist.is_initialized() else 1
    if not is_model_parallel(train, workers):
        if train.context_parallel_size > 1:
            return ContextParallelStrategy(
                network, watchdog, log_event, context_parallel_size=train.context_parallel_size
            )
        strategy_class = ShardedOptimizerStrategy if train.zero_stage else DDPStrategy
        return strategy_class(network, watchdog, log_event, compression=train.gradient_compression)
    options: dict[str, Any] = {
        "tensor_parallel_size": train.tensor_parallel_size,
        "sequence_parallel": train.sequence_parallel,
        "device": device,
    }
    is_sharded = train.zero_stage > 1 and workers > train.workers_per_replica
    if is_sharded:
        options["shard_weights"] = train.zero_stage == 3
    strategy: Strategy
    if train.pipeline_parallel_size > 1:
        pipeline_class = FSDPPipelineStrategy if is_sharded else PipelineStrategy
        strategy = pipeline_class(
            network,
            watchdog,
            log_event,
            pipeline_parallel_size=train.pipeline_parallel_size,
            pipeline_schedule=train.pipeline_schedule,
            **options,
        )
    else:
        strategy = (FSDPStrategy if is_sharded else TensorParallelStrategy)(network, watchdog, log_event, **options)
    if device is not None and not is_sharded:  # `fully_shard` has moved the shards
        dtensor_utils.move_module(network, device)
    return strategy
