"""The orders in which passes go through the stages of a pipeline, and what no pipeline can do. Pure, but for the
model's config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtrain import documents
from rtrain.config import Recipe, Train
from rtrain.errors import Problem
from rtrain.network import cuts

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


def problems(recipe: Recipe, model: Path) -> list[Problem]:
    """Settings that contradict `train.pipeline` of more than one stage, or the model in a folder."""
    train, distill = recipe.train, recipe.distill
    with_it = f"with train.pipeline={train.pipeline}"
    found = []
    for name, value, neutral, reason in (
        ("train.tensor", train.tensor, 1, "layers are not cut as well"),
        ("train.shard", train.shard, 0, "what a stage keeps is not shared once more"),
        ("train.sequence", train.sequence, False, "tokens are not cut"),
        ("train.min_workers", train.min_workers, None, "workers come and go in groups"),
        ("distill.relations", distill.relations, 0, "no worker has all of the student's layers"),
        ("distill.hidden", distill.hidden, 0, "no worker has all of the student's layers"),
        ("distill.quantization_aware", distill.quantization_aware, False, "no worker has all of the layers that round"),
        ("model.freeze", recipe.model.freeze, "none", "stages before the last one would have nothing to train"),
    ):
        if value != neutral:
            written = "leave it out" if neutral is None else f"write {str(neutral).lower()}"
            found.append(Problem(name, value, f"{with_it} {reason}", f"{written}, or train.pipeline=1"))
    config = documents.read(model / "config.json")
    return found + _of_stages(train, config)


def _of_stages(train: Train, config: Mapping[str, Any]) -> list[Problem]:
    stages, schedule = train.pipeline, SCHEDULES[train.schedule]
    kind = config.get("model_type")
    if kind not in cuts.CUTS:
        reason = f"models of the type {kind} are not cut into stages, only those of {', '.join(cuts.CUTS)}"
        return [Problem("train.pipeline", stages, reason, "write 1")]
    found = []
    if train.workers % stages:
        able = [one for one in range(1, train.workers + 1) if train.workers % one == 0]
        fix = f"write {' or '.join(map(str, able))}, or train.workers={stages}"
        found.append(Problem("train.pipeline", stages, f"it does not divide train.workers={train.workers}", fix))
    layers = next((config[name] for name in LAYERS if name in config), None)
    if layers is not None and layers < stages * schedule.parts:
        each = f"{schedule.parts} parts each" if schedule.parts > 1 else "a layer each"
        others = ", or train.schedule=1f1b" if layers >= stages else ""
        fix = f"write {max(1, layers // schedule.parts)} or less{others}"
        reason = f"the model's {layers} layers are not enough for {stages} stages of {each}"
        found.append(Problem("train.pipeline", stages, reason, fix))
    return found
