"""The section `tune`: the search space, the budget, the objective and the finals of a search."""

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from rtrain.config.data import ConfigSection, PositiveInt


class Range(ConfigSection):
    """A range of numbers that a search may try for a setting."""

    low: Annotated[float, Field(allow_inf_nan=False)]
    high: Annotated[float, Field(allow_inf_nan=False)]
    log: bool = False
    """Sample uniformly in the logarithm."""


def _validate_domain(value: Any) -> Any:
    """Raise one error about ranges and choices, in place of one for each type of the union."""
    if isinstance(value, dict) and (unknown := value.keys() - Range.model_fields.keys()):
        message = "a range has the keys low, high and log; unknown: {unknown}"
        raise PydanticCustomError("range", message, {"unknown": ", ".join(sorted(map(str, unknown)))})
    if not isinstance(value, Range | dict | list | tuple):
        raise PydanticCustomError("range", "neither a range, with low and high, nor a list of choices")
    return value


def _domain_tag(value: Any) -> str:
    return "choices" if isinstance(value, list | tuple) else "range"


SearchDomain = Annotated[
    Annotated[Range, Tag("range")] | Annotated[tuple[Any, ...], Tag("choices")],
    Discriminator(_domain_tag),
    BeforeValidator(_validate_domain),
]
"""Values that a search may try for a setting: a range of numbers, or choices."""


DEFAULT_SPACE: Final[dict[str, SearchDomain]] = {
    "optim.lr": Range(low=5e-5, high=1e-3, log=True),
    "train.aggregation_frequency": (1, 2, 4, 8),
}


class TuneConfig(ConfigSection):
    space: dict[str, SearchDomain] = DEFAULT_SPACE
    """Search space by dotted name of the setting: a range, e.g. {optim.lr: {low: 5.0e-5, high: 1.0e-3, log: true}}, or
    a list of choices. Only settings are allowed that change a run's weights and neither its rows nor its budget: all of
    `optim`, some of `train`, of `model` and of `data`; another setting is refused with the reason."""
    study: Literal["aggregation"] | None = None
    """A study in place of a search: `aggregation` trains with aggregation frequencies 1, 2, 10 and 100 (or the list in
    `space`), each with AdamW, AdamW under the linear rule and RAdam, and writes a table of scores and times."""
    points_to_evaluate: tuple[dict[str, Any], ...] = ()
    """Settings to try right after trial 0, the unchanged recipe, e.g. [{optim.lr: 1.0e-4}]: settings that `space` may
    contain, also outside its ranges."""
    sampler: Literal["auto", "gp", "tpe", "random", "grid"] = "auto"
    """Sampler of settings after the first few, which are spread over the space: a Gaussian process (`gp`) or
    tree-structured Parzen estimators (`tpe`), both from Optuna (the extra `tune`); `auto` is `gp` for up to 50
    trials."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "sqrt"
    """How a searched learning rate, which holds for the recipe's global_batch_size, is scaled to trials with another
    (`optim.lr_scaling`); with `sqrt`, `optim.beta2_scaling` follows the rows too."""
    trials: PositiveInt | None = None
    """Most trials, including trial 0. Default: as many as the budget allows."""
    budget_full_runs: Annotated[float, Field(gt=0)] = 8.0
    """Budget of the search without the finals: the rows of this many full runs."""
    budget_rows: PositiveInt | None = None
    """The same as a number of rows trained on, in place of budget_full_runs."""
    max_minutes: Annotated[float, Field(gt=0)] | None = None
    """Minutes after which no further trial starts."""
    max_cost: Annotated[float, Field(gt=0)] | None = None
    """Cost after which no further trial starts; it needs tune.worker_cost_per_hour, or `worker` in the file
    `cluster.prices`."""
    worker_cost_per_hour: Annotated[float, Field(gt=0)] | None = None
    """Price of an hour of one worker. Default: the price of `worker` in the file `cluster.prices` at the start of a run
    or a search."""
    min_resource_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of a run's rows after which trials are first compared (successive halving): the better half continues to
    twice the rows, and so on. The others are paused, and may be resumed."""
    objective: Literal["score", "time_to_target", "pareto"] = "score"
    """Objective of the search: the best validation score; the least seconds of training to `target`; or the Pareto
    front of score and `cost`, from which the cheapest trial within the spread of the best score is taken."""
    cost: Literal["training", "latency", "bytes"] = "training"
    """Second objective of `pareto`: seconds of training or, in a search of students (`rtrain distill --search`), the
    cost of inference: milliseconds for one text of 32 tokens, with PyTorch on one thread, or megabytes of weights."""
    target: float | None = None
    """Validation score to be reached in the least time, for the objective `time_to_target`."""
    holdout_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of the validation rows kept from the rungs (holdout rows); the finals decide by them."""
    final_budget_rows: Annotated[int, Field(ge=0)] | None = None
    """Rows of the finals, where the two best trials and trial 0 are trained to their ends, and again with other seeds,
    until one is clearly best. Default: the rows of 4 full runs. The three are trained to their ends in any case."""
    max_concurrent_trials: PositiveInt | None = None
    """Trials that run at a time; each has train.workers workers. Default: as many as fit on the cluster."""
