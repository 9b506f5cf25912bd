"""The end of a drill of workers that share a model: from the checkpoint of their last update, the run goes on in
another layout, and the control in its own. Both see the same rows, and part no further than rounding.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rtrain import config as configuration, documents
from rtrain.checkpoints import checkpoint
from rtrain.config import Recipe, Train
from rtrain.network.model import DROPOUTS
from rtrain.proof import ledger
from rtrain.proof.plan import PLAIN
from rtrain.run import Run
from rtrain.runs import driver, preparing
from rtrain.strategies import allowed

LAYOUTS: tuple[dict[str, Any], ...] = ({"pipeline": 2}, {"tensor": 2}, {"shard": 3}, {"shard": 0})
"""The first is taken that is another than the run's, and is possible."""
ROUNDING = {"fp32": 0.02}
"""How far weights may part, of the distance moved since the change, by precision: Adam amplifies rounding where the
true gradient is zero. (Two layouts in fp32 parted by 0.003 over four updates.)"""
HALF = 0.2
"""The same in half precision."""


@dataclass(frozen=True)
class Changed:
    """What a change of layout has come to."""

    name: str
    resumed_from: int
    updates: int
    """After the change."""
    order_identical: bool
    weights_ratio: float
    """|difference from the control| / |distance moved since the change|, over all tensors jointly."""
    allowed: float | None
    """The most that this may be; None where the model drops activations, which it does by other masks in another
    layout."""

    @property
    def passed(self) -> bool:
        near = self.allowed is None or self.weights_ratio <= self.allowed
        return self.order_identical and near and math.isfinite(self.weights_ratio)

    def to_document(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed, "text": self.text()}

    def text(self) -> str:
        rows = "the same rows" if self.order_identical else "OTHER ROWS"
        limit = "any: masks of dropout are others" if self.allowed is None else f"{self.allowed:g}"
        return (
            f"{self.name}, from {self.resumed_from}: {self.updates} updates by {rows}; weights apart by "
            f"{self.weights_ratio:.1e} of the distance moved ({limit} allowed){'' if self.passed else '   FAILED'}"
        )


def chosen(recipe: Recipe, weights: Path) -> dict[str, Any] | None:
    """The settings of another layout for a run whose workers share its model, which is in the folder `weights`; None
    where they do not, or where there is none."""
    train = recipe.train
    if train.within == 1 and train.shard < 2:
        return None
    for layout in LAYOUTS:
        other = train.model_copy(update={**PLAIN, "min_workers": None, **layout})
        alike = all(getattr(other, name) == getattr(train, name) for name in ("shard", "tensor", "pipeline", "context"))
        if not alike and not allowed.problems(recipe.model_copy(update={"train": other}), weights):
            return {**PLAIN, "min_workers": None, **layout}
    return None


def run(
    control: preparing.Prepared, drilled: preparing.Prepared, layout: Mapping[str, Any], at: int, more: int
) -> Changed:
    """Let both runs, which have made `at` updates, make as many `more`, the drilled one in another layout."""
    root = drilled.store.folder.parents[1]
    settings = {f"train.{name}": value for name, value in layout.items()}
    for prepared, changes in ((control, {}), (drilled, settings)):
        config = configuration.with_overrides(prepared.config, changes)
        driver.fit(preparing.prepare(config, prepared.run.folder, "resume", root), until=at + more)
    digests = [ledger.check(one.run).order_digest for one in (control, drilled)]
    started = [event["update"] for event in drilled.run.events("started")]
    named = {name: value for name, value in layout.items() if value != Train.model_fields[name].default}
    return Changed(
        name="next layout: " + (", ".join(f"{name}={value}" for name, value in named.items()) or "whole models"),
        resumed_from=started[-1],
        updates=more,
        order_identical=digests[0] == digests[1],
        weights_ratio=_apart(control.run, drilled.run, at, at + more),
        allowed=None if drops(drilled.config.recipe, drilled.model) else _allowed(drilled.run),
    )


def drops(recipe: Recipe, weights: Path) -> bool:
    """Whether the model in a folder drops activations when it is trained by a recipe."""
    known = documents.read(weights / "config.json")
    for setting, (_, names) in DROPOUTS.items():
        if (asked := getattr(recipe.model, setting)) is not None:
            known |= {name: asked for name in names if name in known}
    rates = [value for name, value in known.items() if "dropout" in name and isinstance(value, int | float)]
    return any(rate > 0 for rate in rates)


def _allowed(run: Run) -> float:
    [precision] = {event["precision"] for event in run.events("started")}
    return ROUNDING.get(precision, HALF)


def _apart(control: Run, drilled: Run, before: int, after: int) -> float:
    from safetensors.torch import load_file

    def weights(run: Run, update: int) -> Any:
        return load_file(checkpoint.path_of(run.checkpoints, update) / "model.safetensors")

    start, alone, found = weights(control, before), weights(control, after), weights(drilled, after)
    apart = sum(float((found[name] - value).double().norm()) ** 2 for name, value in alone.items())
    moved = sum(float((value - start[name]).double().norm()) ** 2 for name, value in alone.items())
    return math.sqrt(apart / moved) if moved else math.inf
