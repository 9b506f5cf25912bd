"""Pipeline schedules, and constraints of pipelines. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rtrain.config import TrainConfig
from rtrain.core.errors import Problem
from rtrain.models import tp_plan

if TYPE_CHECKING:
    from torch.distributed.pipelining import schedules

LAYER_COUNT_KEYS = ("num_hidden_layers", "n_layers")
"""Configuration keys of the number of encoder layers."""


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


def check_pipeline(train: TrainConfig, config: Mapping[str, Any]) -> list[Problem]:
    """Problems of `train.pipeline_parallel_size` above 1 for a model with these settings (config.json)."""
    num_stages, schedule = train.pipeline_parallel_size, SCHEDULES[train.pipeline_schedule]
    model_type = config.get("model_type")
    if model_type not in tp_plan.TP_PLANS:
        reason = f"models of the type {model_type} are not cut into stages, only those of {', '.join(tp_plan.TP_PLANS)}"
        return [Problem("train.pipeline_parallel_size", num_stages, reason, "write 1", code="unsupported_model")]
    problems = []
    if train.tensor_parallel_size == 1 and train.workers % num_stages:
        divisors = [divisor for divisor in range(1, train.workers + 1) if train.workers % divisor == 0]
        fix = f"write {' or '.join(map(str, divisors))}, or train.workers={num_stages}"
        reason = f"it does not divide train.workers={train.workers}"
        problems.append(Problem("train.pipeline_parallel_size", num_stages, reason, fix, code="not_divisible"))
    num_layers = next((config[name] for name in LAYER_COUNT_KEYS if name in config), None)
    if num_layers is not None and num_layers < num_stages * schedule.parts_per_worker:
        parts_text = f"{schedule.parts_per_worker} parts each" if schedule.parts_per_worker > 1 else "a layer each"
        alternative = ", or train.pipeline_schedule=1f1b" if num_layers >= num_stages else ""
        fix = f"write {max(1, num_layers // schedule.parts_per_worker)} or less{alternative}"
        reason = f"the model's {num_layers} layers are not enough for {num_stages} stages of {parts_text}"
        problems.append(Problem("train.pipeline_parallel_size", num_stages, reason, fix, code="too_few_layers"))
    return problems
