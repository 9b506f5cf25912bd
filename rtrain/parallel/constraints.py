"""What no strategy can do, or not with a given model. Pure, but for the model's config.json."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rtrain.config import Recipe, Train
from rtrain.core import json_files
from rtrain.core.errors import Problem
from rtrain.models import tp_plan, unpadded
from rtrain.models.device import Choice
from rtrain.parallel import pipeline_schedules

HEADS, INNER = ("num_attention_heads", "n_heads"), ("intermediate_size", "hidden_dim")
"""Names by which configurations call the number of heads, and the inner size of a feed-forward layer."""


def problems(recipe: Recipe, model: Path) -> list[Problem]:
    """Settings that contradict each other, or the model in a folder."""
    train = recipe.train
    shared = [f"train.shard={train.shard}"] if train.shard > 1 else []
    along = ("tensor", "pipeline", "context")
    within = [f"train.{name}={getattr(train, name)}" for name in along if getattr(train, name) > 1]
    found = []
    if train.sequence and train.tensor == 1:
        reason = "tokens are cut between the workers of a replica, which train.tensor=1 has one of"
        fix = "write false, or train.tensor=2"
        found.append(Problem("train.sequence", True, reason, fix, code="conflicting_settings"))
    if shared or within:
        asked, fix = f"with {' and '.join(shared + within)}", f"leave out {' and '.join(shared + within)}"
        for name, neutral, reason in (
            ("gradient_compression", "none", "gradients are sent as they are"),
            ("balance", "off", "workers make equally many passes, or the same"),
        ):
            if (value := getattr(train, name)) != neutral:
                write = f"write {neutral}, or {fix}"
                found.append(Problem(f"train.{name}", value, f"{asked} {reason}", write, code="conflicting_settings"))
    if not within:
        return found
    config = json_files.read(model / "config.json")
    found += _of_replicas(recipe, " and ".join(within))
    if train.tensor > 1 and train.pipeline > 1 and train.workers % train.within:
        reason = f"{train.within} workers share a replica ({' and '.join(within)})"
        fix = f"write a multiple of {train.within}"
        found.append(Problem("train.workers", train.workers, reason, fix, code="not_divisible"))
    if train.context > 1:
        return found + _of_context(train, config, [one for one in shared + within if "context" not in one])
    if train.tensor > 1:
        found += _of_tensor(train, config) + _of_several(train, config)
    return found + (pipeline_schedules.problems(train, config) if train.pipeline > 1 else [])


def of_devices(recipe: Recipe, found: Choice, model: Path) -> list[Problem]:
    """What the devices that were found cannot do: layers that are cut for four workers, say, where there are three
    GPUs."""
    train = recipe.train.model_copy(update={"workers": found.workers})
    if train == recipe.train:
        return []
    wrong = problems(recipe.model_copy(update={"train": train}), model)
    return [replace(one, reason=f"{one.reason} ({found.why})" if found.why else one.reason) for one in wrong]


def _of_replicas(recipe: Recipe, within: str) -> list[Problem]:
    """What does not go with replicas on several workers each, as the settings `within` ask for."""
    train, distill, found = recipe.train, recipe.distill, list[Problem]()
    staged, strewn = train.pipeline > 1, train.context > 1
    along = "pipeline" if staged else "context" if strewn else "tensor"
    one, parts = f"train.{along}=1", {"pipeline": "layers", "context": "tokens", "tensor": "heads"}[along]

    def refuse(name: str, value: Any, reason: str, fix: str) -> None:
        found.append(Problem(name, value, f"with {within} {reason}", fix, code="conflicting_settings"))

    if train.shard == 1:
        refuse("train.shard", 1, "the optimizer's state is shared as its weights are", "write 0, 2 or 3")
    if train.min_workers is not None:
        refuse("train.min_workers", train.min_workers, "workers come and go in groups", f"leave it out, or write {one}")
    if staged and train.sequence:
        refuse("train.sequence", True, "tokens are not cut between stages", f"write false, or {one}")
    if staged and recipe.model.freeze != "none":
        reason = "stages before the last one would have nothing to train"
        refuse("model.freeze", recipe.model.freeze, reason, f"write none, or {one}")
    if distill.relations:
        reason = f"no worker has all of the student's {parts}"
        refuse("distill.relations", distill.relations, reason, f"write 0, or {one}")
    if distill.hidden and (staged or strewn or train.sequence):
        what, other = (parts, one) if staged or strewn else ("tokens", "train.sequence=false")
        refuse("distill.hidden", distill.hidden, f"no worker has all of the student's {what}", f"write 0, or {other}")
    return found


def _of_context(train: Train, config: Mapping[str, Any], others: list[str]) -> list[Problem]:
    kind, context, found = config.get("model_type"), train.context, []
    if others:
        reason = f"with {' and '.join(others)} tokens are not cut as well"
        fix = f"write 1, or leave out {' and '.join(others)}"
        found.append(Problem("train.context", context, reason, fix, code="conflicting_settings"))
    if kind not in unpadded.FIRST_POSITION:
        reason = f"{kind} computes padding, and tokens are cut of {', '.join(unpadded.FIRST_POSITION)} alone"
        found.append(Problem("train.context", context, reason, "write 1", code="unsupported_model"))
    numbers = {} if others else {f"train.workers={train.workers}": train.workers}
    numbers |= {f"the model's {config[name]} attention heads": config[name] for name in HEADS if name in config}
    if any(number % context for number in numbers.values()):
        found.append(_undivided("train.context", context, numbers, train))
    return found


def _undivided(name: str, value: int, numbers: Mapping[str, int], train: Train) -> Problem:
    """What is said of a value that does not divide some of the numbers, by what they are called."""
    wrong = [what for what, number in numbers.items() if number % value]
    able = [one for one in range(1, train.workers + 1) if not any(number % one for number in numbers.values())]
    reason, fix = f"it does not divide {' nor '.join(wrong)}", f"write {' or '.join(map(str, able))}"
    return Problem(name, value, reason, fix, code="not_divisible")


def _of_tensor(train: Train, config: Mapping[str, Any]) -> list[Problem]:
    kind, tensor = config.get("model_type"), train.tensor
    if kind not in tp_plan.CUTS:
        reason = f"layers of the type {kind} are not cut, only those of {', '.join(tp_plan.CUTS)}"
        return [Problem("train.tensor", tensor, reason, "write 1", code="unsupported_model")]
    numbers = {f"train.workers={train.workers}": train.workers} if train.pipeline == 1 else {}
    for what, names in (("attention heads", HEADS), ("numbers of a feed-forward layer", INNER)):
        numbers |= {f"the model's {config[name]} {what}": config[name] for name in names if name in config}
    if not any(number % tensor for number in numbers.values()):
        return []
    return [_undivided("train.tensor", tensor, numbers, train)]


def _of_several(train: Train, config: Mapping[str, Any]) -> list[Problem]:
    """What replicas cannot share of layers that are cut by parts of their outputs (`Cut.several`)."""
    kind, replicas = str(config.get("model_type")), train.replicas
    if train.shard < 2 or replicas == 1 or kind not in tp_plan.CUTS or not tp_plan.CUTS[kind].several:
        return []
    fix = "write 0, or train.tensor=1"
    if config.get("attention_bias") or config.get("mlp_bias"):
        reason = f"with train.tensor biases of {kind} are not shared"
        return [Problem("train.shard", train.shard, reason, fix, code="unsupported_model")]
    if (width := config["hidden_size"]) % replicas:
        reason = f"with train.tensor {replicas} replicas share the model's width of {width}, which they do not divide"
        return [Problem("train.shard", train.shard, reason, fix, code="not_divisible")]
    return []
