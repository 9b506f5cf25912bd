"""Constraints of strategies and models. Pure, except for reading config.json."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rtrain.config import Recipe, TrainConfig
from rtrain.core import json_files
from rtrain.core.errors import Problem
from rtrain.models import tp_plan, unpadded
from rtrain.models.device import DeviceChoice
from rtrain.parallel import pipeline_schedules

HEAD_COUNT_KEYS, INNER_SIZE_KEYS = ("num_attention_heads", "n_heads"), ("intermediate_size", "hidden_dim")
"""Configuration keys of the number of heads and of the inner size of a feed-forward layer."""


def check_parallelism(recipe: Recipe, model: Path) -> list[Problem]:
    """Conflicts between settings, or with the model in a folder."""
    train = recipe.train
    sharding_settings = [f"train.zero_stage={train.zero_stage}"] if train.zero_stage > 1 else []
    axes = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    parallel_settings = [f"train.{name}={getattr(train, name)}" for name in axes if getattr(train, name) > 1]
    problems = []
    if train.sequence_parallel and train.tensor_parallel_size == 1:
        reason = "tokens are cut between the workers of a replica, which train.tensor_parallel_size=1 has one of"
        fix = "write false, or train.tensor_parallel_size=2"
        problems.append(Problem("train.sequence_parallel", True, reason, fix, code="conflicting_settings"))
    if sharding_settings or parallel_settings:
        conflict, fix = (
            f"with {' and '.join(sharding_settings + parallel_settings)}",
            f"leave out {' and '.join(sharding_settings + parallel_settings)}",
        )
        for name, default, reason in (
            ("gradient_compression", "none", "gradients are not compressed"),
            ("load_balancing", "off", "workers compute equally many micro-batches"),
        ):
            if (value := getattr(train, name)) != default:
                write = f"write {default}, or {fix}"
                problems.append(
                    Problem(f"train.{name}", value, f"{conflict} {reason}", write, code="conflicting_settings")
                )
    if not parallel_settings:
        return problems
    config = json_files.load_json_object(model / "config.json")
    problems += _check_replicas(recipe, " and ".join(parallel_settings))
    if (
        train.tensor_parallel_size > 1
        and train.pipeline_parallel_size > 1
        and train.workers % train.workers_per_replica
    ):
        reason = f"{train.workers_per_replica} workers share a replica ({' and '.join(parallel_settings)})"
        fix = f"write a multiple of {train.workers_per_replica}"
        problems.append(Problem("train.workers", train.workers, reason, fix, code="not_divisible"))
    if train.context_parallel_size > 1:
        return problems + _check_context_parallel(
            train,
            config,
            [setting for setting in sharding_settings + parallel_settings if "context_parallel_size" not in setting],
        )
    if train.tensor_parallel_size > 1:
        problems += _check_tensor_parallel(train, config) + _check_fused_outputs(train, config)
    return problems + (pipeline_schedules.check_pipeline(train, config) if train.pipeline_parallel_size > 1 else [])


def check_devices(recipe: Recipe, device_choice: DeviceChoice, model: Path) -> list[Problem]:
    """Problems of the available devices, e.g. layers sharded for four workers on three GPUs."""
    train = recipe.train.model_copy(update={"workers": device_choice.workers})
    if train == recipe.train:
        return []
    problems = check_parallelism(recipe.model_copy(update={"train": train}), model)
    return [
        replace(
            problem, reason=f"{problem.reason} ({device_choice.message})" if device_choice.message else problem.reason
        )
        for problem in problems
    ]


def _check_replicas(recipe: Recipe, settings_text: str) -> list[Problem]:
    """Conflicts of replicas on several workers, which the settings in `settings_text` request."""
    train, distill, problems = recipe.train, recipe.distill, list[Problem]()
    uses_pipeline, uses_context = train.pipeline_parallel_size > 1, train.context_parallel_size > 1
    axis = (
        "pipeline_parallel_size"
        if uses_pipeline
        else "context_parallel_size"
        if uses_context
        else "tensor_parallel_size"
    )
    disable_setting, parts = (
        f"train.{axis}=1",
        {"pipeline_parallel_size": "layers", "context_parallel_size": "tokens", "tensor_parallel_size": "heads"}[axis],
    )

    def refuse(name: str, value: Any, reason: str, fix: str) -> None:
        problems.append(Problem(name, value, f"with {settings_text} {reason}", fix, code="conflicting_settings"))

    if train.zero_stage == 1:
        refuse("train.zero_stage", 1, "the optimizer's state is shared as its weights are", "write 0, 2 or 3")
    if train.min_workers is not None:
        refuse(
            "train.min_workers",
            train.min_workers,
            "workers come and go in groups",
            f"leave it out, or write {disable_setting}",
        )
    if uses_pipeline and train.sequence_parallel:
        refuse(
            "train.sequence_parallel", True, "tokens are not cut between stages", f"write false, or {disable_setting}"
        )
    if uses_pipeline and recipe.model.freeze != "none":
        reason = "stages before the last one would have nothing to train"
        refuse("model.freeze", recipe.model.freeze, reason, f"write none, or {disable_setting}")
    if distill.relation_loss_weight:
        reason = f"no worker has all of the student's {parts}"
        refuse("distill.relation_loss_weight", distill.relation_loss_weight, reason, f"write 0, or {disable_setting}")
    if distill.hidden_loss_weight and (uses_pipeline or uses_context or train.sequence_parallel):
        missing_part, alternative = (
            (parts, disable_setting) if uses_pipeline or uses_context else ("tokens", "train.sequence_parallel=false")
        )
        refuse(
            "distill.hidden_loss_weight",
            distill.hidden_loss_weight,
            f"no worker has all of the student's {missing_part}",
            f"write 0, or {alternative}",
        )
    return problems


def _check_context_parallel(train: TrainConfig, config: Mapping[str, Any], other_settings: list[str]) -> list[Problem]:
    model_type, context_parallel_size, problems = config.get("model_type"), train.context_parallel_size, []
    if other_settings:
        reason = f"with {' and '.join(other_settings)} tokens are not cut as well"
        fix = f"write 1, or leave out {' and '.join(other_settings)}"
        problems.append(
            Problem("train.context_parallel_size", context_parallel_size, reason, fix, code="conflicting_settings")
        )
    if model_type not in unpadded.FIRST_POSITION:
        reason = f"{model_type} computes padding, and tokens are cut of {', '.join(unpadded.FIRST_POSITION)} alone"
        problems.append(
            Problem("train.context_parallel_size", context_parallel_size, reason, "write 1", code="unsupported_model")
        )
    numbers = {} if other_settings else {f"train.workers={train.workers}": train.workers}
    numbers |= {
        f"the model's {config[name]} attention heads": config[name] for name in HEAD_COUNT_KEYS if name in config
    }
    if any(number % context_parallel_size for number in numbers.values()):
        problems.append(_not_divisible("train.context_parallel_size", context_parallel_size, numbers, train))
    return problems


def _not_divisible(name: str, value: int, numbers: Mapping[str, int], train: TrainConfig) -> Problem:
    """The problem of a value that does not divide some of the numbers, by their descriptions."""
    undivided = [what for what, number in numbers.items() if number % value]
    divisors = [
        divisor for divisor in range(1, train.workers + 1) if not any(number % divisor for number in numbers.values())
    ]
    reason, fix = f"it does not divide {' nor '.join(undivided)}", f"write {' or '.join(map(str, divisors))}"
    return Problem(name, value, reason, fix, code="not_divisible")


def _check_tensor_parallel(train: TrainConfig, config: Mapping[str, Any]) -> list[Problem]:
    model_type, tensor_parallel_size = config.get("model_type"), train.tensor_parallel_size
    if model_type not in tp_plan.TP_PLANS:
        reason = f"layers of the type {model_type} are not cut, only those of {', '.join(tp_plan.TP_PLANS)}"
        return [
            Problem("train.tensor_parallel_size", tensor_parallel_size, reason, "write 1", code="unsupported_model")
        ]
    numbers = {f"train.workers={train.workers}": train.workers} if train.pipeline_parallel_size == 1 else {}
    for label, names in (("attention heads", HEAD_COUNT_KEYS), ("numbers of a feed-forward layer", INNER_SIZE_KEYS)):
        numbers |= {f"the model's {config[name]} {label}": config[name] for name in names if name in config}
    if not any(number % tensor_parallel_size for number in numbers.values()):
        return []
    return [_not_divisible("train.tensor_parallel_size", tensor_parallel_size, numbers, train)]


def _check_fused_outputs(train: TrainConfig, config: Mapping[str, Any]) -> list[Problem]:
    """Problems of sharding weights between replicas if their outputs are fused
    (`TensorParallelStrategy.fused_outputs`)."""
    model_type, replicas = str(config.get("model_type")), train.num_replicas
    if (
        train.zero_stage < 2
        or replicas == 1
        or model_type not in tp_plan.TP_PLANS
        or not tp_plan.TP_PLANS[model_type].fused_outputs
    ):
        return []
    fix = "write 0, or train.tensor_parallel_size=1"
    if config.get("attention_bias") or config.get("mlp_bias"):
        reason = f"with train.tensor_parallel_size biases of {model_type} are not shared"
        return [Problem("train.zero_stage", train.zero_stage, reason, fix, code="unsupported_model")]
    if (width := config["hidden_size"]) % replicas:
        reason = (
            f"with train.tensor_parallel_size {replicas} replicas share the model's width of {width}, which "
            "they do not divide"
        )
        return [Problem("train.zero_stage", train.zero_stage, reason, fix, code="not_divisible")]
    return []
