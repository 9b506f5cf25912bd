"""Pipeline parallelism by torch.distributed.pipelining: each worker of a replica has some of its layers.

All workers of a replica read its rows, so each knows the size of every micro-batch, and the last one its targets.
Stages send hidden states forward and their gradients backward.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rtrain.core.ragged import TokenBatch
from rtrain.models import dropout, unpadded
from rtrain.models.forward import logits_of
from rtrain.parallel import dtensor_utils, mesh, pipeline_schedules
from rtrain.parallel.base import MicroBatchRunnerProtocol
from rtrain.parallel.data_parallel import EventLogger, ignore_event
from rtrain.parallel.fsdp import FSDPStrategy
from rtrain.parallel.pipeline_stages import PipelineStages
from rtrain.parallel.tensor import TensorParallelStrategy
from rtrain.parallel.timeline import BACKWARD, COMM_WAIT, FORWARD, OPTIMIZER
from rtrain.parallel.watchdog import Watchdog

if TYPE_CHECKING:
    import torch

MICRO_BATCHES_PER_STAGE = 4
"""Micro-batches of a step per stage, so that the pipeline bubble hardly matters (Huang et al. 2019,
arXiv:1811.06965)."""
SHAPE_LENGTH = 4
"""Length of the shape header of logits: the number of dimensions, and these."""


class PipelineStrategy(TensorParallelStrategy):
    """One stage of `pipeline_parallel_size` on each worker of a replica, with one or more parts of the layers
    (`pipeline_schedule`); or on several workers, which shard its layers."""

    def __init__(
        self,
        module: "torch.nn.Module",
        watchdog: Watchdog | None = None,
        log_event: EventLogger = ignore_event,
        *,
        pipeline_parallel_size: int,
        pipeline_schedule: str = "1f1b",
        **options: Any,
    ):
        """`pipeline_schedule`: a key of `pipeline_schedules.SCHEDULES`; `options`: options of the base classes."""
        self._num_stages, self._schedule = pipeline_parallel_size, pipeline_schedules.SCHEDULES[pipeline_schedule]
        super().__init__(module, watchdog, log_event, pipeline_parallel_size=pipeline_parallel_size, **options)
        self.min_micro_batches = MICRO_BATCHES_PER_STAGE * pipeline_parallel_size

    def drop_absent_layers(self, module: Any) -> None:
        self._pipeline_group, self._stage_rank = (
            self._mesh.get_group(mesh.PIPELINE),
            self._mesh.get_local_rank(mesh.PIPELINE),
        )
        num_parts = self._num_stages * self._schedule.parts_per_worker
        self._parts = PipelineStages(module, num_parts, range(self._stage_rank, num_parts, self._num_stages))
        self._tied_group = mesh.first_and_last_group(self._mesh) if self._parts.has_shared_weights else None
        module.forward = self._forward_stages

    # ------------------------------------------------------------------------------------------------------ a step

    def run_micro_batches(
        self, micro_batches: Sequence[TokenBatch], runner: MicroBatchRunnerProtocol, measure_noise: bool = False
    ) -> None:
        import torch
        import torch.distributed as dist

        with self.timeline.span(OPTIMIZER):
            self.begin_step(measure_noise)
        padded = self.pad_with_idle(micro_batches, runner)
        numbers = torch.arange(len(padded))
        with self.micro_batch(is_last=True):
            try:
                self.make_schedule(padded, runner).step(
                    *([numbers] if self._stage_rank == 0 else []), number=numbers, target=numbers, return_outputs=False
                )
            except RuntimeError as error:  # torch wraps the exception of a forward pass
                raise error.__cause__ or error from None
            with self.timeline.span(COMM_WAIT):
                for gradient in (weight.grad for weight in self._parts.shared_parameters):
                    assert gradient is not None
                    dist.all_reduce(dtensor_utils.local_tensor(gradient), group=self._tied_group)
        with self.timeline.span(COMM_WAIT):
            dist.broadcast(runner.loss_sums, group=self._pipeline_group, group_src=self._num_stages - 1)

    def pad_with_idle(
        self, micro_batches: Sequence[TokenBatch], runner: MicroBatchRunnerProtocol
    ) -> Sequence[TokenBatch]:
        return [
            *micro_batches,
            *[runner.idle_tokens]
            * (self._schedule.count_micro_batches(len(micro_batches), self._num_stages) - len(micro_batches)),
        ]

    def make_schedule(self, micro_batches: Sequence[TokenBatch], runner: MicroBatchRunnerProtocol) -> Any:
        """torch's schedule of these micro-batches. All send tensors of the largest micro-batch's size, since torch
        needs the shapes before it receives."""
        import torch

        # Masks do not depend on the order of micro-batches in the schedule.
        seed, last_part = torch.initial_seed(), self._parts.num_parts - 1
        max_tokens = max(unpadded.count_computed_tokens(self.module, tokens.window_lengths) for tokens in micro_batches)

        def compute(part: int, received: "torch.Tensor", number: "torch.Tensor") -> "torch.Tensor":
            tokens = micro_batches[int(number)]
            torch.manual_seed(dropout.derive_seed(seed, part, int(number)))
            with self._parts.select_part(part, self.prepare_input(received) if part else None):
                output = runner.compute_logits(self.model, tokens)
            if part == last_part:
                return runner.compute_loss(output, tokens)
            return torch.nn.functional.pad(output, (0, 0, 0, max_tokens - len(output)))

        hidden = torch.empty(max_tokens, self._parts.width, dtype=self._parts.dtype, device="meta", requires_grad=True)
        loss = torch.empty((), dtype=self._parts.dtype, device="meta", requires_grad=True)
        stages = [
            _stage_class()(
                self,
                compute,
                part,
                input_args=hidden if part else torch.empty(1, dtype=torch.int64, device="meta"),
                output_args=loss if part == last_part else hidden,
            )
            for part in self._parts.local_parts
        ]
        return pipeline_schedules.make_schedule(self._schedule, stages, len(micro_batches))

    def prepare_input(self, received: "torch.Tensor") -> "torch.Tensor":
        """Convert the previous stage's output to this stage's input."""
        return received

    def gradients(self) -> "list[torch.Tensor]":
        """Gradients of this worker; weights shared by two stages count for the first one."""
        duplicates = set() if self._stage_rank == 0 else set(self._parts.shared_parameters)
        return [
            parameter.grad
            for parameter in self.module.parameters()
            if parameter.grad is not None and parameter not in duplicates
        ]

    def gradient_norm(self) -> "torch.Tensor":
        import torch
        import torch.distributed as dist

        local_norm = super().gradient_norm()
        norms = [torch.empty_like(local_norm) for _ in range(self._num_stages)]
        with self.timeline.span(COMM_WAIT):
            dist.all_gather(norms, local_norm, group=self._pipeline_group)
        return torch.nn.utils.get_total_norm(norms)

    @property
    def supports_noise_scale(self) -> bool:
        return False

    # --------------------------------------------------------------------------------------------- outside of steps

    def gather_full_tensors(self, tensors: "Mapping[str, torch.Tensor]") -> "Iterator[tuple[str, torch.Tensor]]":
        return dtensor_utils.gather_to_rank_zero(
            {name: tensor for name, tensor in tensors.items() if dtensor_utils.is_materialized(tensor)}, self.watchdog
        )

    def _forward_stages(self, **inputs: Any) -> Any:
        """The network's `forward`. In a step it computes the current part. Otherwise the parts compute one after
        another, each on its worker, and all workers of the replica receive the logits."""
        import torch
        import torch.distributed as dist

        parts = self._parts
        if parts.is_active:
            return parts.compute(**inputs)
        logits: torch.Tensor | None = None
        for part in parts.local_parts:
            received = None
            if part:
                received = torch.empty(inputs["input_ids"].numel(), parts.width, dtype=parts.dtype, device=parts.device)
                dist.recv(received, group=self._pipeline_group, group_src=(part - 1) % self._num_stages)
            with parts.select_part(part, received):
                logits = logits_of(parts.compute(**inputs)).to(parts.dtype).contiguous()
            if part < parts.num_parts - 1:
                dist.send(logits, group=self._pipeline_group, group_dst=(part + 1) % self._num_stages)
                logits = None
        return SimpleNamespace(logits=self._broadcast_logits(logits))

    def _broadcast_logits(self, logits: "torch.Tensor | None") -> "torch.Tensor":
        """The last stage's logits, on every worker of the replica."""
        import torch
        import torch.distributed as dist

        shape = torch.zeros(SHAPE_LENGTH, dtype=torch.int64, device=self._parts.device)
        if logits is not None:
            shape[: logits.dim() + 1] = torch.tensor([logits.dim(), *logits.shape])
        dist.broadcast(shape, group=self._pipeline_group, group_src=self._num_stages - 1)
        num_dims, *sizes = shape.tolist()
        if logits is None:
            logits = torch.empty(sizes[:num_dims], dtype=self._parts.dtype, device=self._parts.device)
        dist.broadcast(logits, group=self._pipeline_group, group_src=self._num_stages - 1)
        return logits


class FSDPPipelineStrategy(PipelineStrategy, FSDPStrategy):
    """Replicas of pipelines that shard each stage's weights, gradients and moments. Every micro-batch gathers the
    layers of its stage, so all replicas compute equally many."""

    def pad_with_idle(
        self, micro_batches: Sequence[TokenBatch], runner: MicroBatchRunnerProtocol
    ) -> Sequence[TokenBatch]:
        num_micro_batches = self._schedule.count_micro_batches(
            self.max_over_replicas(len(micro_batches)), self._num_stages
        )
        return [*micro_batches, *[runner.idle_tokens] * (num_micro_batches - len(micro_batches))]


@cache
def _stage_class() -> type[Any]:
    import torch
    from torch.distributed.pipelining import PipelineStage

    class StageModule(torch.nn.Module):
        """A stage's module for torch, without parameters, so that `scale_grads` divides none."""

        def __init__(self, network: torch.nn.Module, compute: Any):
            super().__init__()
            self.network, self._compute = network, compute

        def forward(self, received: torch.Tensor, number: torch.Tensor) -> Any:
            return self._compute(received, number)

    class TimedStage(PipelineStage):
        """A part of the network in a step, with a span and a heartbeat for each micro-batch."""

        def __init__(self, strategy: PipelineStrategy, compute: Any, part: int, **options: Any):
            self._strategy = strategy
            parts = strategy._parts
            module = StageModule(strategy.module, lambda *given: compute(part, *given))
            super().__init__(module, part, parts.num_parts, parts.device, group=strategy._pipeline_group, **options)

        def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
            self._strategy.watchdog.start_micro_batch()
            with self._strategy.timeline.span(FORWARD):
                return super().forward_one_chunk(*args, **kwargs)

        def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
            self._strategy.watchdog.start_micro_batch()
            with self._strategy.timeline.span(BACKWARD):
                return super().backward_one_chunk(*args, **kwargs)

    return TimedStage
