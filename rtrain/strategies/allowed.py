"""What no strategy can do, or not with a given model. Pure, but for the model's config.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rtrain import documents
from rtrain.config import Recipe, Train
from rtrain.errors import Problem
from rtrain.network import cuts
from rtrain.strategies import schedules

HEADS, INNER = ("num_attention_heads", "n_heads"), ("intermediate_size", "hidden_dim")
"""Names by which configurations call the number of heads, and the inner size of a feed-forward layer."""


def problems(recipe: Recipe, model: Path) -> list[Problem]:
    """Settings that contradict each other, or the model in a folder."""
    train = recipe.train
    asked = [f"train.shard={train.shard}"] if train.shard > 1 else []
    asked += [f"train.tensor={train.tensor}"] if train.tensor > 1 else []
    asked += [f"train.pipeline={train.pipeline}"] if train.pipeline > 1 else []
    if not asked:
        reason, fix = "tokens are cut between the workers of a replica, which train.tensor=1 has one of", "write false"
        return [Problem("train.sequence", True, reason, f"{fix}, or train.tensor=2")] if train.sequence else []
    found, fix = [], f"leave out {' and '.join(asked)}"
    if train.gradient_compression != "none":
        reason = f"with {' and '.join(asked)} gradients are sent as they are"
        found.append(Problem("train.gradient_compression", train.gradient_compression, reason, f"write none, or {fix}"))
    if train.balance != "off":
        reason = f"with {' and '.join(asked)} workers make equally many passes, or the same"
        found.append(Problem("train.balance", train.balance, reason, f"write off, or {fix}"))
    if train.transport == "shared_memory":
        reason = f"with {' and '.join(asked)} the process group sends what is exchanged"
        found.append(Problem("train.transport", train.transport, reason, f"write auto, or {fix}"))
    if train.pipeline > 1:
        return found + schedules.problems(recipe, model)
    if train.tensor == 1:
        return found + problems(recipe.model_copy(update={"train": train.model_copy(update={"shard": 0})}), model)
    if train.shard == 1:
        reason = f"with {asked[-1]} the optimizer's state is shared as its weights are"
        found.append(Problem("train.shard", 1, reason, "write 0, 2 or 3"))
    if train.min_workers is not None:
        reason = f"with {asked[-1]} workers come and go in groups"
        found.append(Problem("train.min_workers", train.min_workers, reason, "leave it out, or write train.tensor=1"))
    if recipe.distill.relations:
        reason = f"with {asked[-1]} no worker has all of the student's heads"
        found.append(Problem("distill.relations", recipe.distill.relations, reason, "write 0, or train.tensor=1"))
    if recipe.distill.quantization_aware:
        reason = f"with {asked[-1]} no worker has the whole of a layer that rounds"
        found.append(Problem("distill.quantization_aware", True, reason, "write false, or train.tensor=1"))
    if recipe.distill.hidden and train.sequence:
        reason = "with train.sequence=true no worker has all of the student's tokens"
        found.append(Problem("distill.hidden", recipe.distill.hidden, reason, "write 0, or train.sequence=false"))
    config = documents.read(model / "config.json")
    return found + _of_tensor(train.tensor, train.workers, config) + _of_both(train, config)


def _of_tensor(tensor: int, workers: int, config: Mapping[str, Any]) -> list[Problem]:
    kind = config.get("model_type")
    if kind not in cuts.CUTS:
        reason = f"layers of the type {kind} are not cut, only those of {', '.join(cuts.CUTS)}"
        return [Problem("train.tensor", tensor, reason, "write 1")]
    numbers = {f"train.workers={workers}": workers}
    for what, names in (("attention heads", HEADS), ("numbers of a feed-forward layer", INNER)):
        numbers |= {f"the model's {config[name]} {what}": config[name] for name in names if name in config}
    wrong = [what for what, number in numbers.items() if number % tensor]
    if not wrong:
        return []
    able = [one for one in range(1, workers + 1) if not any(number % one for number in numbers.values())]
    fix = f"write {' or '.join(map(str, able))}"
    return [Problem("train.tensor", tensor, f"it does not divide {' nor '.join(wrong)}", fix)]


def _of_both(train: Train, config: Mapping[str, Any]) -> list[Problem]:
    """What replicas cannot share of layers that are cut by parts of their outputs (`Cut.several`)."""
    kind, replicas = str(config.get("model_type")), train.replicas
    if train.shard < 2 or replicas == 1 or kind not in cuts.CUTS or not cuts.CUTS[kind].several:
        return []
    fix = "write 0, or train.tensor=1"
    if config.get("attention_bias") or config.get("mlp_bias"):
        return [Problem("train.shard", train.shard, f"with train.tensor biases of {kind} are not shared", fix)]
    if (width := config["hidden_size"]) % replicas:
        reason = f"with train.tensor {replicas} replicas share the model's width of {width}, which they do not divide"
        return [Problem("train.shard", train.shard, reason, fix)]
    return []
