"""A replica on several workers, each of which has some of its layers: a pipeline, by torch.distributed.pipelining.

All workers of a replica read its rows, so each knows how large every pass is, and the last one its targets. What goes
from stage to stage is hidden vectors, and their gradients the other way.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rtrain.core.ragged import Tokens
from rtrain.models import dropout, unpadded
from rtrain.models.forward import logits_of
from rtrain.parallel import dtensor_utils, mesh, pipeline_schedules
from rtrain.parallel.base import Work
from rtrain.parallel.data_parallel import Say, unsaid
from rtrain.parallel.fsdp import Fully
from rtrain.parallel.pipeline_stages import Staged
from rtrain.parallel.tensor import Cut
from rtrain.parallel.timeline import BACKWARD, FORWARD, OPTIMIZER, WAITS
from rtrain.parallel.watchdog import Watch

if TYPE_CHECKING:
    import torch

FILLING = 4
"""Passes of an update for each stage with which it hardly matters that stages wait for its first and after its last
one (Huang et al. 2019, arXiv:1811.06965)."""
DIMENSIONS = 4
"""Numbers that tell the shape of logits: how many dimensions there are, and these."""


class Pipeline(Cut):
    """One stage of `pipeline` on each worker of a replica, with one part of the layers or several (`schedule`); or on
    several workers, across which its layers are cut."""

    def __init__(
        self,
        module: "torch.nn.Module",
        watch: Watch | None = None,
        say: Say = unsaid,
        *,
        pipeline: int,
        schedule: str = "1f1b",
        **others: Any,
    ):
        """`schedule`: one of `schedules.SCHEDULES`; `others`: as the classes have them that this one builds on."""
        self._stages, self._order = pipeline, pipeline_schedules.SCHEDULES[schedule]
        super().__init__(module, watch, say, pipeline=pipeline, **others)
        self.passes = FILLING * pipeline

    def leave(self, module: Any) -> None:
        self._line, self._stage = self._grid.get_group(mesh.PIPELINE), self._grid.get_local_rank(mesh.PIPELINE)
        parts = self._stages * self._order.parts
        self._staged = Staged(module, parts, range(self._stage, parts, self._stages))
        self._ends = mesh.ends(self._grid) if self._staged.shares else None
        module.forward = self._relayed

    # ------------------------------------------------------------------------------------------------------ an update

    def run(self, passes: Sequence[Tokens], work: Work, measures: bool = False) -> None:
        import torch
        import torch.distributed as dist

        with self.timeline.during(OPTIMIZER):
            self.begin(measures)
        every = self.filled(passes, work)
        numbers = torch.arange(len(every))
        with self.during(last=True):
            try:
                self.schedule(every, work).step(
                    *([numbers] if self._stage == 0 else []), number=numbers, target=numbers, return_outputs=False
                )
            except RuntimeError as error:  # torch's, around whatever a forward pass raised
                raise error.__cause__ or error from None
            with self.timeline.during(WAITS):
                for gradient in (weight.grad for weight in self._staged.shared):
                    assert gradient is not None
                    dist.all_reduce(dtensor_utils.local(gradient), group=self._ends)
        with self.timeline.during(WAITS):
            dist.broadcast(work.sums, group=self._line, group_src=self._stages - 1)

    def filled(self, passes: Sequence[Tokens], work: Work) -> Sequence[Tokens]:
        return [*passes, *[work.idle] * (self._order.passes(len(passes), self._stages) - len(passes))]

    def schedule(self, passes: Sequence[Tokens], work: Work) -> Any:
        """torch's schedule of these passes. All send as many vectors as the largest has, which torch wants to know
        before it receives any."""
        import torch

        # Masks do not depend on the order in which the schedule makes passes.
        seed, last = torch.initial_seed(), self._staged.parts - 1
        most = max(unpadded.computed(self.module, tokens.lengths) for tokens in passes)

        def compute(part: int, received: "torch.Tensor", number: "torch.Tensor") -> "torch.Tensor":
            tokens = passes[int(number)]
            torch.manual_seed(dropout.seed_of(seed, part, int(number)))
            with self._staged.at(part, self.entered(received) if part else None):
                answer = work.answer(self.model, tokens)
            if part == last:
                return work.loss(answer, tokens)
            return torch.nn.functional.pad(answer, (0, 0, 0, most - len(answer)))

        hidden = torch.empty(most, self._staged.width, dtype=self._staged.dtype, device="meta", requires_grad=True)
        loss = torch.empty((), dtype=self._staged.dtype, device="meta", requires_grad=True)
        stages = [
            _stage_class()(
                self,
                compute,
                part,
                input_args=hidden if part else torch.empty(1, dtype=torch.int64, device="meta"),
                output_args=loss if part == last else hidden,
            )
            for part in self._staged.own
        ]
        return pipeline_schedules.made(self._order, stages, len(passes))

    def entered(self, received: "torch.Tensor") -> "torch.Tensor":
        """What came from the stage before, as this one computes with it."""
        return received

    def gradients(self) -> "list[torch.Tensor]":
        """Weights of two stages are the first one's."""
        others = set() if self._stage == 0 else set(self._staged.shared)
        return [one.grad for one in self.module.parameters() if one.grad is not None and one not in others]

    def norm(self) -> "torch.Tensor":
        import torch
        import torch.distributed as dist

        own = super().norm()
        norms = [torch.empty_like(own) for _ in range(self._stages)]
        with self.timeline.during(WAITS):
            dist.all_gather(norms, own, group=self._line)
        return torch.nn.utils.get_total_norm(norms)

    @property
    def tells_noise(self) -> bool:
        return False

    # --------------------------------------------------------------------------------------------- outside of updates

    def whole(self, tensors: "Mapping[str, torch.Tensor]") -> "Iterator[tuple[str, torch.Tensor]]":
        return dtensor_utils.from_holders(
            {name: one for name, one in tensors.items() if dtensor_utils.here(one)}, self.watch
        )

    def _relayed(self, **inputs: Any) -> Any:
        """The network's `forward`. In an update it computes the part at work; else its parts compute one after another,
        each on its worker, and all workers of the replica get the logits."""
        import torch
        import torch.distributed as dist

        staged = self._staged
        if staged.working:
            return staged.compute(**inputs)
        logits: torch.Tensor | None = None
        for part in staged.own:
            received = None
            if part:
                received = torch.empty(
                    inputs["input_ids"].numel(), staged.width, dtype=staged.dtype, device=staged.device
                )
                dist.recv(received, group=self._line, group_src=(part - 1) % self._stages)
            with staged.at(part, received):
                logits = logits_of(staged.compute(**inputs)).to(staged.dtype).contiguous()
            if part < staged.parts - 1:
                dist.send(logits, group=self._line, group_dst=(part + 1) % self._stages)
                logits = None
        return SimpleNamespace(logits=self._from_last(logits))

    def _from_last(self, logits: "torch.Tensor | None") -> "torch.Tensor":
        """The last stage's logits, on every worker of the replica."""
        import torch
        import torch.distributed as dist

        shape = torch.zeros(DIMENSIONS, dtype=torch.int64, device=self._staged.device)
        if logits is not None:
            shape[: logits.dim() + 1] = torch.tensor([logits.dim(), *logits.shape])
        dist.broadcast(shape, group=self._line, group_src=self._stages - 1)
        count, *sizes = shape.tolist()
        if logits is None:
            logits = torch.empty(sizes[:count], dtype=self._staged.dtype, device=self._staged.device)
        dist.broadcast(logits, group=self._line, group_src=self._stages - 1)
        return logits


class PipelineInShares(Pipeline, Fully):
    """Replicas of pipelines that share each stage's weights, gradients and moments. Every pass gathers the layers of
    its stage, so that all replicas make equally many."""

    def filled(self, passes: Sequence[Tokens], work: Work) -> Sequence[Tokens]:
        number = self._order.passes(self.most(len(passes)), self._stages)
        return [*passes, *[work.idle] * (number - len(passes))]


@cache
def _stage_class() -> type[Any]:
    import torch
    from torch.distributed.pipelining import PipelineStage

    class Part(torch.nn.Module):
        """What torch takes for the module of a stage: its weights are those that `scale_grads` would divide."""

        def __init__(self, network: torch.nn.Module, compute: Any):
            super().__init__()
            self.network, self._compute = network, compute

        def forward(self, received: torch.Tensor, number: torch.Tensor) -> Any:
            return self._compute(received, number)

    class Stage(PipelineStage):
        """A part of the network in one update, with a span and a sign of life for each pass."""

        def __init__(self, pipeline: Pipeline, compute: Any, part: int, **described: Any):
            self._pipeline = pipeline
            staged = pipeline._staged
            module = Part(pipeline.module, lambda *given: compute(part, *given))
            super().__init__(module, part, staged.parts, staged.device, group=pipeline._line, **described)

        def forward_one_chunk(self, *given: Any, **named: Any) -> Any:
            self._pipeline.watch.passes()
            with self._pipeline.timeline.during(FORWARD):
                return super().forward_one_chunk(*given, **named)

        def backward_one_chunk(self, *given: Any, **named: Any) -> Any:
            self._pipeline.watch.passes()
            with self._pipeline.timeline.during(BACKWARD):
                return super().backward_one_chunk(*given, **named)

    return Stage
