"""Conflicts among the settings of a recipe."""

from rtrain.config.data import (
    conflict_problem,
    find_augment_problems,
    find_data_problems,
    missing_problem,
    out_of_range_problem,
)
from rtrain.config.recipe import ADAM_BETAS, LAYOUT_SETTINGS, Recipe, TrainConfig
from rtrain.core.errors import Problem


def find_recipe_problems(recipe: Recipe) -> list[Problem]:
    """Return every conflict."""
    train = recipe.train
    problems = []
    if train.global_batch_size and train.aggregation_frequency:
        problems.append(
            conflict_problem(
                "train.global_batch_size",
                train.global_batch_size,
                f"train.aggregation_frequency={train.aggregation_frequency} sets it too",
                "write one of the two and set the other to null",
            )
        )
    if train.strategy == "auto":
        reason, fix = "train.strategy=auto chooses it", "leave it out, or write train.strategy=manual"
        layout_settings = {name: getattr(train, name) for name in LAYOUT_SETTINGS}
        changed_settings = {
            name: value for name, value in layout_settings.items() if value != TrainConfig.model_fields[name].default
        }
        problems += [conflict_problem(f"train.{name}", value, reason, fix) for name, value in changed_settings.items()]
    if train.min_workers is not None and train.min_workers > train.workers:
        fix = f"write {train.workers} or less, or leave it out"
        problems.append(
            conflict_problem("train.min_workers", train.min_workers, f"above train.workers={train.workers}", fix)
        )
    if train.gpus_per_worker < 1 and train.workers > 1:
        reason = f"NCCL takes no two of the {train.workers} workers on one GPU"
        fix = "write train.workers=1, or train.gpus_per_worker=1"
        problems.append(conflict_problem("train.gpus_per_worker", train.gpus_per_worker, reason, fix))
    if recipe.global_batch_size < train.num_replicas:
        unit = "workers" if train.workers_per_replica == 1 else f"replicas of {train.workers_per_replica} workers each"
        problems.append(
            out_of_range_problem(
                "train.global_batch_size",
                recipe.global_batch_size,
                f"fewer rows than the {train.num_replicas} {unit} that share them",
                f"write {train.num_replicas} or more, or fewer train.workers",
            )
        )
    if recipe.distill.teacher and recipe.model.freeze != "none":
        reason = "a student learns in its encoder layers"
        problems.append(conflict_problem("model.freeze", recipe.model.freeze, reason, "add --set model.freeze=none"))
    if recipe.distill.student is not None and recipe.distill.width is not None:
        reason = f"distill.student={recipe.distill.student} has its own width"
        problems.append(conflict_problem("distill.width", recipe.distill.width, reason, "name one of the two"))
    if recipe.quantize.kind == "weights" and recipe.quantize.max_changed_predictions is not None:
        reason = "with quantize.kind=weights every operation computes in float already"
        problems.append(
            conflict_problem(
                "quantize.max_changed_predictions",
                recipe.quantize.max_changed_predictions,
                reason,
                "write null, or leave it out",
            )
        )
    return (
        problems
        + _find_scaling_problems(recipe)
        + find_data_problems(recipe.data)
        + find_augment_problems(recipe.augment)
    )


def _find_scaling_problems(recipe: Recipe) -> list[Problem]:
    optim, global_batch_size = recipe.optim, recipe.global_batch_size
    requirements = [
        f"optim.{name}={value} needs the global_batch_size at which {condition}"
        for name, value, condition in (
            ("lr_scaling", optim.lr_scaling, f"optim.lr={optim.lr:g} holds"),
            ("beta2_scaling", optim.beta2_scaling, f"beta2={ADAM_BETAS[1]:g} holds"),
        )
        if value != "none"
    ]
    if requirements and optim.lr_reference_batch_size is None:
        fix = f"write that number of rows ({global_batch_size} for this recipe)"
        return [missing_problem("optim.lr_reference_batch_size", None, " and ".join(requirements), fix)]
    if recipe.peak_lr >= 1:
        reason = (
            f"scaled from {optim.lr_reference_batch_size} to {global_batch_size} rows per step it is "
            f"{recipe.peak_lr:g}, not less than 1"
        )
        return [out_of_range_problem("optim.lr", optim.lr, reason, "write a lower one, or fewer rows per step")]
    return []
