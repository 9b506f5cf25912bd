"""The orders in which passes go through the stages of a pipeline, and what no pipeline can do. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rtrain.config import Train
from rtrain.core.errors import Problem
from rtrain.models import tp_plan

if TYPE_CHECKING:
    from torch.distributed.pipelining import schedules

LAYERS = ("num_hidden_layers", "n_layers")
"""Names by which configurations call the number of encoder layers."""


@dataclass(frozen=True)
class Schedule:
    """By a class of torch.distributed.pipelining."""

    kind: str
    """The class's name."""
    parts: int = 1
    """Parts of the network that each worker has."""
    fills: bool = True
    """Whether each update needs as many passes as there are stages, or a multiple of them; else any number will do."""

    def passes(self, made: int, stages: int) -> int:
        """How many passes an update has, of which `made` have rows."""
        if not self.fills:
            return max(1, made)
        return max(stages, made) if self.parts == 1 else -(-max(1, made) // stages) * stages


SCHEDULES: Mapping[str, Schedule] = {
    # Huang et al. 2019, arXiv:1811.06965
    "gpipe": Schedule("ScheduleGPipe", fills=False),
    # Narayanan et al. 2019, arXiv:1806.03377; 2021, arXiv:2104.04473
    "1f1b": Schedule("Schedule1F1B"),
    "interleaved": Schedule("ScheduleInterleaved1F1B", parts=2),
}
"""By `train.schedule`."""


def made(schedule: Schedule, stages: list[Any], passes: int) -> "schedules.PipelineScheduleSingle":
    """torch's schedule of an update, for a worker's `stages`, of which the last one computes the loss."""
    from torch.distributed import pipelining

    kind = getattr(pipelining, schedule.kind)
    # Losses are sums: torch would divide the gradient by the number of passes.
    found: schedules.PipelineScheduleSingle = kind(
        stages if schedule.parts > 1 else stages[0], passes, loss_fn=_same, scale_grads=False
    )
    return found


def _same(loss: Any, _: Any) -> Any:
    return loss


def problems(train: Train, config: Mapping[str, Any]) -> list[Problem]:
    """What is in the way of `train.pipeline` of more than one stage, for a model with these settings (config.json)."""
    stages, schedule = train.pipeline, SCHEDULES[train.schedule]
    kind = config.get("model_type")
    if kind not in tp_plan.CUTS:
        reason = f"models of the type {kind} are not cut into stages, only those of {', '.join(tp_plan.CUTS)}"
        return [Problem("train.pipeline", stages, reason, "write 1", code="unsupported_model")]
    found = []
    if train.tensor == 1 and train.workers % stages:
        able = [one for one in range(1, train.workers + 1) if train.workers % one == 0]
        fix = f"write {' or '.join(map(str, able))}, or train.workers={stages}"
        reason = f"it does not divide train.workers={train.workers}"
        found.append(Problem("train.pipeline", stages, reason, fix, code="not_divisible"))
    layers = next((config[name] for name in LAYERS if name in config), None)
    if layers is not None and layers < stages * schedule.parts:
        each = f"{schedule.parts} parts each" if schedule.parts > 1 else "a layer each"
        others = ", or train.schedule=1f1b" if layers >= stages else ""
        fix = f"write {max(1, layers // schedule.parts)} or less{others}"
        reason = f"the model's {layers} layers are not enough for {stages} stages of {each}"
        found.append(Problem("train.pipeline", stages, reason, fix, code="too_few_layers"))
    return found
