"""Settings of a recipe that are valid alone and impossible together."""

from rtrain.config.data import augment_contradictions, conflict, data_contradictions, missing, out_of_range
from rtrain.config.recipe import BETAS, LAID_OUT, Recipe, Train
from rtrain.core.errors import Problem


def of_recipe(recipe: Recipe) -> list[Problem]:
    """All of them."""
    train = recipe.train
    problems = []
    if train.rows_per_update and train.aggregation_frequency:
        problems.append(
            conflict(
                "train.rows_per_update",
                train.rows_per_update,
                f"train.aggregation_frequency={train.aggregation_frequency} sets it too",
                "give one of the two and set the other to null",
            )
        )
    if train.strategy == "auto":
        reason, fix = "train.strategy=auto chooses it", "leave it out, or write train.strategy=manual"
        chosen = {name: getattr(train, name) for name in LAID_OUT}
        asked = {name: value for name, value in chosen.items() if value != Train.model_fields[name].default}
        problems += [conflict(f"train.{name}", value, reason, fix) for name, value in asked.items()]
    if train.min_workers is not None and train.min_workers > train.workers:
        fix = f"write {train.workers} or less, or leave it out"
        problems.append(conflict("train.min_workers", train.min_workers, f"above train.workers={train.workers}", fix))
    if train.gpus_per_worker < 1 and train.workers > 1:
        reason = f"NCCL takes no two of the {train.workers} workers on one GPU"
        fix = "write train.workers=1, or train.gpus_per_worker=1"
        problems.append(conflict("train.gpus_per_worker", train.gpus_per_worker, reason, fix))
    if recipe.rows_per_update < train.replicas:
        what = "workers" if train.within == 1 else f"replicas of {train.within} workers each"
        problems.append(
            out_of_range(
                "train.rows_per_update",
                recipe.rows_per_update,
                f"fewer rows than the {train.replicas} {what} that share them",
                f"write {train.replicas} or more, or fewer train.workers",
            )
        )
    if recipe.distill.teacher and recipe.model.freeze != "none":
        reason = "a student of fewer layers learns its teacher's answers in those layers"
        problems.append(conflict("model.freeze", recipe.model.freeze, reason, "add --set model.freeze=none"))
    if recipe.distill.student is not None and recipe.distill.width is not None:
        reason = f"distill.student={recipe.distill.student} has a width of its own"
        problems.append(conflict("distill.width", recipe.distill.width, reason, "name one of the two"))
    if recipe.quantize.kind == "weights" and recipe.quantize.flips is not None:
        reason = "with quantize.kind=weights every operation computes in float already"
        problems.append(conflict("quantize.flips", recipe.quantize.flips, reason, "write null, or leave it out"))
    return problems + _of_rates(recipe) + data_contradictions(recipe.data) + augment_contradictions(recipe.augment)


def _of_rates(recipe: Recipe) -> list[Problem]:
    optim, rows = recipe.optim, recipe.rows_per_update
    asking = [
        f"optim.{name}={value} asks at which rows_per_update {what}"
        for name, value, what in (
            ("lr_scaling", optim.lr_scaling, f"optim.lr={optim.lr:g} holds"),
            ("beta2_scaling", optim.beta2_scaling, f"beta2={BETAS[1]:g} holds"),
        )
        if value != "none"
    ]
    if asking and optim.lr_rows is None:
        fix = f"write that number of rows ({rows} for this recipe as it is)"
        return [missing("optim.lr_rows", None, " and ".join(asking), fix)]
    if recipe.peak_lr >= 1:
        reason = f"scaled from {optim.lr_rows} to {rows} rows per update it is {recipe.peak_lr:g}, not less than 1"
        return [out_of_range("optim.lr", optim.lr, reason, "write a lower one, or fewer rows per update")]
    return []
