"""Parallel layouts of a model on a run's workers: constraints, strategies, and layouts by cost."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rtrain.config import Recipe, TrainConfig
from rtrain.core import json_files
from rtrain.core.errors import Problem
from rtrain.models import tp_plan, unpadded
from rtrain.models.device import DeviceChoice
from rtrain.parallel import mesh, pipeline
from rtrain.parallel.base import EventLogger, Strategy, ignore_event
from rtrain.parallel.context import ContextParallelStrategy
from rtrain.parallel.ddp import DDPStrategy
from rtrain.parallel.mesh import ModelParallelStrategy
from rtrain.parallel.pipeline import PipelineStrategy
from rtrain.parallel.watchdog import Watchdog
from rtrain.parallel.zero import ShardedOptimizerStrategy

if TYPE_CHECKING:
    import torch

STRATEGIES: Final[Mapping[str, str]] = {
    "ddp": "each worker has all weights, gradients and moments",
    "zero1": "each worker has the moments of its share of the weights",
    "zero2": "each worker has the moments and gradients of its share of the weights",
    "zero3": "each worker has the moments, gradients and weights of its share, and gathers those of layer after layer",
}
"""Descriptions of `train.zero_stage`, by strategy name."""
STRATEGY_NAMES: Final = tuple(STRATEGIES)
LAYER_COUNT_KEYS = ("num_hidden_layers", "n_layers")
HEAD_COUNT_KEYS, INNER_SIZE_KEYS = ("num_attention_heads", "n_heads"), ("intermediate_size", "hidden_dim")
"""Configuration keys of the numbers of encoder layers and heads, and of the inner size of a feed-forward layer."""


def is_model_parallel(train: TrainConfig, workers: int) -> bool:
    """Whether no worker has the full network. It is then sharded in CPU memory and moved to the device in parts."""
    is_sharded = train.zero_stage > 1 and workers > train.workers_per_replica
    return train.pipeline_parallel_size > 1 or train.tensor_parallel_size > 1 or is_sharded


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

    if is_model_parallel(train, dist.get_world_size() if dist.is_initialized() else 1):
        model_strategy = PipelineStrategy if train.pipeline_parallel_size > 1 else ModelParallelStrategy
        return model_strategy(network, train, watchdog, log_event, device)
    if train.context_parallel_size > 1:
        return ContextParallelStrategy(network, train, watchdog, log_event)
    data_strategy = ShardedOptimizerStrategy if train.zero_stage else DDPStrategy
    return data_strategy(network, watchdog, log_event, compression=train.gradient_compression)


# --------------------------------------------------------------------------------------------------- layouts by cost


@dataclass(frozen=True)
class ParallelLayout:
    """A parallel layout; the fields have the names of the settings."""

    zero_stage: int = 0
    tensor_parallel_size: int = 1
    gradient_checkpointing: bool = False
    pipeline_parallel_size: int = 1

    @property
    def workers_per_replica(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def strategy(self) -> str:
        """The sharding between replicas: one of `STRATEGIES`."""
        return STRATEGY_NAMES[self.zero_stage]

    @property
    def settings(self) -> dict[str, Any]:
        """The recipe settings of the layout, by dotted name."""
        return {
            "train.zero_stage": self.zero_stage,
            **{f"train.{name}": size for name, size in self._split_sizes.items()},
            "train.gradient_checkpointing": self.gradient_checkpointing,
        }

    @property
    def _split_sizes(self) -> dict[str, int]:
        return {name: size for name in (mesh.TENSOR, mesh.PIPELINE) if (size := getattr(self, name)) > 1}

    def __str__(self) -> str:
        split_text = "".join(f" and {name}={size}" for name, size in self._split_sizes.items())
        recompute_text = " with recomputed layers" if self.gradient_checkpointing else ""
        return f"zero_stage={self.zero_stage}{split_text}{recompute_text}"

    def apply_to(self, train: TrainConfig, workers: int) -> TrainConfig:
        """The section with these settings, for `workers` workers."""
        min_workers = None if train.min_workers is None else min(train.min_workers, workers)
        return train.model_copy(
            update={**vars(self), "strategy": "manual", "workers": workers, "min_workers": min_workers}
        )


def merge_layouts(layouts: Sequence[ParallelLayout]) -> ParallelLayout:
    """The layout that takes no more memory than any of these: the largest sharding, with recomputed layers if any has
    them."""
    return ParallelLayout(
        max(layout.zero_stage for layout in layouts),
        max(layout.tensor_parallel_size for layout in layouts),
        any(layout.gradient_checkpointing for layout in layouts),
    )


def layout_from_config(train: TrainConfig, workers: int) -> ParallelLayout:
    return ParallelLayout(
        train.zero_stage if workers > 1 else 0,
        train.tensor_parallel_size,
        train.gradient_checkpointing,
        train.pipeline_parallel_size,
    )


def should_trim_malloc(train: TrainConfig) -> bool:
    """Whether a step allocates blocks of many sizes, as gathered weights, sharded layers and recomputed layers do. A
    worker then returns freed memory (`env.trim_malloc`), which would otherwise fragment."""
    is_split = train.tensor_parallel_size > 1 or train.pipeline_parallel_size > 1 or train.gradient_checkpointing
    return is_split or (train.zero_stage > 1 and train.workers > 1)


def iter_layouts(workers: int) -> Iterator[ParallelLayout]:
    """Iterate over layouts by cost. ZeRO stages 2 and 3 add a collective to each micro-batch, recomputed layers a third
    of a forward and backward pass, tensor parallelism collectives within each layer. A pipeline is used only if a
    recipe requests it."""
    zero_stages = range(len(STRATEGY_NAMES)) if workers > 1 else (0,)
    for recomputes in (False, True):
        yield from (ParallelLayout(shard, gradient_checkpointing=recomputes) for shard in zero_stages)
    for tensor_parallel_size in range(2, workers + 1):
        if workers % tensor_parallel_size == 0:
            for recomputes in (False, True):
                yield from (
                    ParallelLayout(shard, tensor_parallel_size, recomputes)
                    for shard in ((0, 3) if workers > tensor_parallel_size else (0,))
                )


def iter_valid_layouts(recipe: Recipe, folder: Path, workers: int) -> Iterator[ParallelLayout]:
    """Layouts of `iter_layouts` that the recipe and the model in `folder` allow. All recompute layers if the recipe
    says so."""
    for layout in iter_layouts(workers):
        candidate = recipe.model_copy(update={"train": layout.apply_to(recipe.train, workers)})
        is_allowed_recompute = layout.gradient_checkpointing or not recipe.train.gradient_checkpointing
        if is_allowed_recompute and not check_parallelism(candidate, folder):
            yield layout


def start_from(layout: ParallelLayout, layouts: Iterator[ParallelLayout]) -> Iterator[ParallelLayout]:
    """`layout`, and the layouts after it."""
    yield layout
    all_layouts = list(layouts)
    yield from all_layouts[all_layouts.index(layout) + 1 :] if layout in all_layouts else all_layouts


# -------------------------------------------------------------------------------------------------------- constraints


def check_parallelism(recipe: Recipe, model: Path) -> list[Problem]:
    """Conflicts between settings, or with the model in a folder."""
    train = recipe.train
    zero_settings = [f"train.zero_stage={train.zero_stage}"] if train.zero_stage > 1 else []
    sizes = {name: getattr(train, name) for name in (mesh.TENSOR, mesh.PIPELINE, mesh.CONTEXT)}
    split_settings = [f"train.{name}={size}" for name, size in sizes.items() if size > 1]
    problems = []
    if train.sequence_parallel and train.tensor_parallel_size == 1:
        reason = "tokens are cut between the workers of a replica, which train.tensor_parallel_size=1 has one of"
        fix = "write false, or train.tensor_parallel_size=2"
        problems.append(Problem("train.sequence_parallel", True, reason, fix, code="conflicting_settings"))
    if settings_text := " and ".join(zero_settings + split_settings):
        for name, default, reason in (
            ("gradient_compression", "none", "gradients are not compressed"),
            ("load_balancing", "off", "workers compute equally many micro-batches"),
        ):
            if (value := getattr(train, name)) != default:
                reason, fix = f"with {settings_text} {reason}", f"write {default}, or leave out {settings_text}"
                problems.append(Problem(f"train.{name}", value, reason, fix, code="conflicting_settings"))
    if not split_settings:
        return problems
    config = json_files.load_json_object(model / "config.json")
    replica_text = " and ".join(split_settings)
    problems += _check_replicas(recipe, replica_text)
    if min(sizes[mesh.TENSOR], sizes[mesh.PIPELINE]) > 1 and train.workers % train.workers_per_replica:
        reason = f"{train.workers_per_replica} workers share a replica ({replica_text})"
        fix = f"write a multiple of {train.workers_per_replica}"
        problems.append(Problem("train.workers", train.workers, reason, fix, code="not_divisible"))
    if train.context_parallel_size > 1:
        other_settings = [setting for setting in zero_settings + split_settings if mesh.CONTEXT not in setting]
        return problems + _check_context_parallel(train, config, " and ".join(other_settings))
    if train.tensor_parallel_size > 1:
        problems += _check_tensor_parallel(train, config) + _check_fused_outputs(train, config)
    return problems + (_check_pipeline(train, config) if train.pipeline_parallel_size > 1 else [])


def check_devices(recipe: Recipe, device_choice: DeviceChoice, model: Path) -> list[Problem]:
    """Problems of the available devices, e.g. layers sharded for four workers on three GPUs."""
    train = recipe.train.model_copy(update={"workers": device_choice.workers})
    if train == recipe.train:
        return []
    note = f" ({device_choice.message})" if device_choice.message else ""
    problems = check_parallelism(recipe.model_copy(update={"train": train}), model)
    return [replace(problem, reason=f"{problem.reason}{note}") for problem in problems]


def _check_replicas(recipe: Recipe, settings_text: str) -> list[Problem]:
    """Conflicts of replicas on several workers, which the settings in `settings_text` request."""
    train, distill, problems = recipe.train, recipe.distill, list[Problem]()
    uses_pipeline, uses_context = train.pipeline_parallel_size > 1, train.context_parallel_size > 1
    axis = mesh.PIPELINE if uses_pipeline else mesh.CONTEXT if uses_context else mesh.TENSOR
    parts = {mesh.PIPELINE: "layers", mesh.CONTEXT: "tokens", mesh.TENSOR: "heads"}[axis]
    disable_setting = f"train.{axis}=1"

    def refuse(name: str, value: Any, reason: str, fix: str) -> None:
        problems.append(Problem(name, value, f"with {settings_text} {reason}", fix, code="conflicting_settings"))

    if train.zero_stage == 1:
        refuse("train.zero_stage", 1, "the optimizer's state is shared as its weights are", "write 0, 2 or 3")
    if train.min_workers is not None:
        fix = f"leave it out, or write {disable_setting}"
        refuse("train.min_workers", train.min_workers, "workers come and go in groups", fix)
    if uses_pipeline and train.sequence_parallel:
        fix = f"write false, or {disable_setting}"
        refuse("train.sequence_parallel", True, "tokens are not cut between stages", fix)
    if uses_pipeline and recipe.model.freeze != "none":
        reason = "stages before the last one would have nothing to train"
        refuse("model.freeze", recipe.model.freeze, reason, f"write none, or {disable_setting}")
    if weight := distill.relation_loss_weight:
        reason = f"no worker has all of the student's {parts}"
        refuse("distill.relation_loss_weight", weight, reason, f"write 0, or {disable_setting}")
    splits_hidden = uses_pipeline or uses_context
    if (weight := distill.hidden_loss_weight) and (splits_hidden or train.sequence_parallel):
        reason = f"no worker has all of the student's {parts if splits_hidden else 'tokens'}"
        fix = f"write 0, or {disable_setting if splits_hidden else 'train.sequence_parallel=false'}"
        refuse("distill.hidden_loss_weight", weight, reason, fix)
    return problems


def _check_context_parallel(train: TrainConfig, config: Mapping[str, Any], other_settings: str) -> list[Problem]:
    field, size, problems = "train.context_parallel_size", train.context_parallel_size, []
    if other_settings:
        reason = f"with {other_settings} tokens are not cut as well"
        fix = f"write 1, or leave out {other_settings}"
        problems.append(Problem(field, size, reason, fix, code="conflicting_settings"))
    if (model_type := config.get("model_type")) not in unpadded.FIRST_POSITION:
        reason = f"{model_type} computes padding, and tokens are cut of {', '.join(unpadded.FIRST_POSITION)} alone"
        problems.append(Problem(field, size, reason, "write 1", code="unsupported_model"))
    numbers = {} if other_settings else {f"train.workers={train.workers}": train.workers}
    return problems + _check_divisible(field, size, numbers | _count_heads(config), train)


def _check_tensor_parallel(train: TrainConfig, config: Mapping[str, Any]) -> list[Problem]:
    field, size = "train.tensor_parallel_size", train.tensor_parallel_size
    if (model_type := config.get("model_type")) not in tp_plan.TP_PLANS:
        reason = f"layers of the type {model_type} are not cut, only those of {', '.join(tp_plan.TP_PLANS)}"
        return [Problem(field, size, reason, "write 1", code="unsupported_model")]
    numbers = {f"train.workers={train.workers}": train.workers} if train.pipeline_parallel_size == 1 else {}
    inner_sizes = {
        f"the model's {config[name]} numbers of a feed-forward layer": config[name]
        for name in INNER_SIZE_KEYS
        if name in config
    }
    return _check_divisible(field, size, numbers | _count_heads(config) | inner_sizes, train)


def _count_heads(config: Mapping[str, Any]) -> dict[str, int]:
    return {f"the model's {config[name]} attention heads": config[name] for name in HEAD_COUNT_KEYS if name in config}


def _check_divisible(field: str, value: int, numbers: Mapping[str, int], train: TrainConfig) -> list[Problem]:
    undivided = [description for description, number in numbers.items() if number % value]
    divisors = [
        divisor for divisor in range(1, train.workers + 1) if not any(number % divisor for number in numbers.values())
    ]
    reason, fix = f"it does not divide {' nor '.join(undivided)}", f"write {' or '.join(map(str, divisors))}"
    return [Problem(field, value, reason, fix, code="not_divisible")] if undivided else []


def _check_fused_outputs(train: TrainConfig, config: Mapping[str, Any]) -> list[Problem]:
    """Problems of sharding weights between replicas if their outputs are fused (`TPPlan.fused_outputs`)."""
    model_type, replicas = str(config.get("model_type")), train.num_replicas
    plan = tp_plan.TP_PLANS.get(model_type)
    if train.zero_stage < 2 or replicas == 1 or plan is None or not plan.fused_outputs:
        return []
    if config.get("attention_bias") or config.get("mlp_bias"):
        reason, code = f"with train.tensor_parallel_size biases of {model_type} are not shared", "unsupported_model"
    elif (width := config["hidden_size"]) % replicas:
        reason = (
            f"with train.tensor_parallel_size {replicas} replicas share the model's width of {width}, which "
            "they do not divide"
        )
        code = "not_divisible"
    else:
        return []
    fix = "write 0, or train.tensor_parallel_size=1"
    return [Problem("train.zero_stage", train.zero_stage, reason, fix, code=code)]


def _check_pipeline(train: TrainConfig, config: Mapping[str, Any]) -> list[Problem]:
    field, num_stages = "train.pipeline_parallel_size", train.pipeline_parallel_size
    parts_per_worker = pipeline.SCHEDULES[train.pipeline_schedule].parts_per_worker
    if (model_type := config.get("model_type")) not in tp_plan.TP_PLANS:
        reason = f"models of the type {model_type} are not cut into stages, only those of {', '.join(tp_plan.TP_PLANS)}"
        return [Problem(field, num_stages, reason, "write 1", code="unsupported_model")]
    problems = []
    if train.tensor_parallel_size == 1 and train.workers % num_stages:
        divisors = [divisor for divisor in range(1, train.workers + 1) if train.workers % divisor == 0]
        fix = f"write {' or '.join(map(str, divisors))}, or train.workers={num_stages}"
        reason = f"it does not divide train.workers={train.workers}"
        problems.append(Problem(field, num_stages, reason, fix, code="not_divisible"))
    num_layers = next((config[name] for name in LAYER_COUNT_KEYS if name in config), None)
    if num_layers is not None and num_layers < num_stages * parts_per_worker:
        parts_text = f"{parts_per_worker} parts each" if parts_per_worker > 1 else "a layer each"
        alternative = ", or train.pipeline_schedule=1f1b" if num_layers >= num_stages else ""
        fix = f"write {max(1, num_layers // parts_per_worker)} or less{alternative}"
        reason = f"the model's {num_layers} layers are not enough for {num_stages} stages of {parts_text}"
        problems.append(Problem(field, num_stages, reason, fix, code="too_few_layers"))
    return problems
