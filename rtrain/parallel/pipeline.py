"""Pipeline parallelism by torch.distributed.pipelining: each worker of a replica has some of its layers.

All workers of a replica read its rows, so each knows the size of every micro-batch, and the last one its targets.
Stages send hidden states forward and their gradients backward.

The first part begins with the embeddings, the last one ends with the head. Weights of other workers are on the meta
device: their names, shapes and order stay as in the full network, because optimizers, checkpoints and artifacts
need them.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rtrain.config import TrainConfig
from rtrain.core.ragged import TokenBatch
from rtrain.models import dropout, network_parts, unpadded
from rtrain.models.network_parts import logits_of
from rtrain.parallel import dtensor_utils, mesh
from rtrain.parallel.base import EventLogger, MicroBatchRunnerProtocol, ignore_event
from rtrain.parallel.mesh import ModelParallelStrategy
from rtrain.parallel.profiler import BACKWARD, COMM_WAIT, FORWARD
from rtrain.parallel.watchdog import Watchdog

if TYPE_CHECKING:
    import torch
    from torch.distributed.pipelining import schedules

MICRO_BATCHES_PER_STAGE = 4
"""Micro-batches of a step per stage, so that the pipeline bubble hardly matters (Huang et al. 2019,
arXiv:1811.06965)."""
SHAPE_LENGTH = 4
"""Length of the shape header of logits: the number of dimensions, and these."""
EMBEDDING_NAMES = ("embeddings", "embeddings_project")
"""Names of an encoder's modules before its layers; ELECTRA has both."""


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule by a class of torch.distributed.pipelining."""

    class_name: str
    """Name of the class."""
    parts_per_worker: int = 1
    """Parts of the network on each worker."""
    needs_full_rounds: bool = True
    """Whether each step needs a multiple of the number of stages as micro-batches."""

    def count_micro_batches(self, num_filled: int, num_stages: int) -> int:
        """Number of micro-batches of a step with `num_filled` nonempty ones."""
        if not self.needs_full_rounds:
            return max(1, num_filled)
        return (
            max(num_stages, num_filled)
            if self.parts_per_worker == 1
            else -(-max(1, num_filled) // num_stages) * num_stages
        )


SCHEDULES: Mapping[str, PipelineSchedule] = {
    # Huang et al. 2019, arXiv:1811.06965
    "gpipe": PipelineSchedule("ScheduleGPipe", needs_full_rounds=False),
    # Narayanan et al. 2019, arXiv:1806.03377; 2021, arXiv:2104.04473
    "1f1b": PipelineSchedule("Schedule1F1B"),
    "interleaved": PipelineSchedule("ScheduleInterleaved1F1B", parts_per_worker=2),
}
"""By `train.pipeline_schedule`."""


class PipelineStrategy(ModelParallelStrategy):
    """One stage of `pipeline_parallel_size` on each worker of a replica, with one or more parts of the layers
    (`pipeline_schedule`); or on several workers, which shard its layers."""

    def __init__(
        self,
        module: "torch.nn.Module",
        train: TrainConfig,
        watchdog: Watchdog | None = None,
        log_event: EventLogger = ignore_event,
        device: "torch.device | None" = None,
    ):
        self._num_stages, self._schedule = train.pipeline_parallel_size, SCHEDULES[train.pipeline_schedule]
        super().__init__(module, train, watchdog, log_event, device)
        self.min_micro_batches = MICRO_BATCHES_PER_STAGE * self._num_stages

    def drop_absent_layers(self, module: Any) -> None:
        self._pipeline_group = self._mesh.get_group(mesh.PIPELINE)
        self._stage_rank = self._mesh.get_local_rank(mesh.PIPELINE)
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

        padded = self.start_step(micro_batches, runner, measure_noise)
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

    def count_micro_batches(self, num_filled: int) -> int:
        return self._schedule.count_micro_batches(self.max_in_lockstep(num_filled), self._num_stages)

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
        return make_schedule(self._schedule, stages, len(micro_batches))

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


def layer_ranges(num_layers: int, num_parts: int) -> list[range]:
    """The layers of each part. The first parts have fewer layers if the split is uneven: they also keep the embeddings
    and the most micro-batches at a time."""
    return [range(*ends) for ends in pairwise(num_layers * part // num_parts for part in range(num_parts + 1))]


class PipelineStages:
    """A worker's parts of a network, which is changed in place."""

    def __init__(self, network: Any, num_parts: int, local_parts: Collection[int]):
        """`local_parts`: the parts that this worker keeps, of `num_parts`."""
        self.network, self.num_parts, self.local_parts = network, num_parts, sorted(local_parts)
        self.width: int = network.config.hidden_size
        self._current_part: int | None = None
        self._received: torch.Tensor | None = None
        self._network_forward = network.forward
        """The network's original `forward`."""
        parts_by_module = _parts_by_module(network, num_parts)
        parts_by_parameter = _parts_by_parameter(network, parts_by_module, last_part=num_parts - 1)
        local_parameters = {
            parameter: found for parameter, found in parts_by_parameter.items() if found & set(local_parts)
        }
        _move_others_to_meta(network, local_parameters)
        dtensor_utils.copy_from_file(network)
        shared = {parameter for parameter, found in local_parameters.items() if len(found) > 1}
        self._shared_names = [name for name, parameter in network.named_parameters() if parameter in shared]
        self.has_shared_weights = any(len(found) > 1 for found in parts_by_parameter.values())
        """Whether there are such weights, on this worker or others."""
        encoder = network.base_model
        encoder.embeddings.forward = partial(self._embed_or_receive, encoder.embeddings.forward)
        for module in {*encoder.children(), *_encoder_layers(network)} - {encoder.embeddings}:
            # Modules without weights are needed by every part, e.g. ModernBERT's rotary positions.
            if (part := parts_by_module.get(module)) is not None and any(True for _ in module.parameters()):
                module.forward = partial(self._skip_other_parts, module.forward, part)

    @property
    def shared_parameters(self) -> "list[torch.nn.Parameter]":
        """Weights of this worker that the first and the last part share: word embeddings of a tied head."""
        return [self.network.get_parameter(name) for name in self._shared_names]

    @property
    def device(self) -> "torch.device":
        return dtensor_utils.module_device(self.network)

    @property
    def dtype(self) -> "torch.dtype":
        """The dtype that parts send to each other."""
        dtype: torch.dtype = next(
            parameter.dtype for parameter in self.network.parameters() if dtensor_utils.is_materialized(parameter)
        )
        return dtype

    @contextlib.contextmanager
    def select_part(self, part: int, received: "torch.Tensor | None") -> Iterator[None]:
        """Make `compute` compute this part inside the block. `received`: the previous part's output, [tokens or more,
        width]."""
        self._current_part, self._received = part, received
        try:
            yield
        finally:
            # Recomputed layers of the backward pass belong to this part, whichever part is current then.
            self._current_part = self._received = None

    def compute(self, **inputs: Any) -> Any:
        """Compute the current part: the network's output for the last part, otherwise hidden states as logits [tokens,
        width], including padding."""
        from transformers.modeling_outputs import TokenClassifierOutput

        if self._current_part == self.num_parts - 1:
            return self._network_forward(**inputs)
        # Not by a call: hooks would convert the last layer's outputs to the head's inputs.
        hidden = self.network.base_model.forward(**inputs).last_hidden_state
        # A form in which `fully_shard` finds the tensor; it gathers weights before the tensor's gradient.
        return TokenClassifierOutput(logits=hidden.flatten(0, 1).to(self.dtype))

    @property
    def is_active(self) -> bool:
        return self._current_part is not None

    def _embed_or_receive(self, embed: Any, *args: Any, **kwargs: Any) -> Any:
        if self._received is None:
            return embed(*args, **kwargs)
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        return self._received[: ids.numel()].view(*ids.shape, -1)

    def _skip_other_parts(self, forward: Any, part: int, values: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(values, *args, **kwargs) if self._current_part in (None, part) else values


def _encoder_layers(network: Any) -> "torch.nn.ModuleList":
    layers = network_parts.find_layers(network.base_model)
    assert layers is not None  # `layout` has checked the architectures
    return layers


def _parts_by_module(network: Any, num_parts: int) -> "dict[torch.nn.Module, int]":
    """The part of each module whose weights all belong to one part; weights of other modules belong to the last
    part."""
    encoder, layers = network.base_model, _encoder_layers(network)
    parts_by_module: dict[torch.nn.Module, int] = {}
    for part, numbers in enumerate(layer_ranges(len(layers), num_parts)):
        for number in numbers:
            parts_by_module |= dict.fromkeys(layers[number].modules(), part)
    for name, module in encoder.named_children():
        if not any(submodule is layers for submodule in module.modules()):
            parts_by_module |= dict.fromkeys(module.modules(), 0 if name in EMBEDDING_NAMES else num_parts - 1)
    return parts_by_module


def _parts_by_parameter(
    network: "torch.nn.Module", parts_by_module: "Mapping[torch.nn.Module, int]", last_part: int
) -> "dict[torch.nn.Parameter, set[int]]":
    """The parts of each weight; a tied weight has two."""
    parts_by_parameter: dict[torch.nn.Parameter, set[int]] = {}
    for module in network.modules():
        for parameter in module.parameters(recurse=False):
            parts_by_parameter.setdefault(parameter, set()).add(parts_by_module.get(module, last_part))
    return parts_by_parameter


def _move_others_to_meta(network: "torch.nn.Module", local_parameters: "Collection[torch.nn.Parameter]") -> None:
    import torch

    absent: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in local_parameters:
                if parameter not in absent:
                    absent[parameter] = torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                module.register_parameter(name, absent[parameter])


def make_schedule(
    schedule: PipelineSchedule, stages: list[Any], num_micro_batches: int
) -> "schedules.PipelineScheduleSingle":
    """torch's schedule of a step, for a worker's stages; the last stage computes the loss."""
    from torch.distributed import pipelining

    schedule_class = getattr(pipelining, schedule.class_name)
    # Losses are sums, and torch would divide the gradient by the number of micro-batches.
    torch_schedule: schedules.PipelineScheduleSingle = schedule_class(
        stages if schedule.parts_per_worker > 1 else stages[0],
        num_micro_batches,
        loss_fn=_identity_loss,
        scale_grads=False,
    )
    return torch_schedule


def _identity_loss(loss: Any, _: Any) -> Any:
    return loss
