"""All that is known of runs beside each other: what `rtrain compare` prints, and its page shows."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rtrain.evaluation import candidates as named, compare_summary, differences, pairing, settings_diff, training_curves
from rtrain.evaluation.candidates import Side
from rtrain.evaluation.differences import Measured
from rtrain.evaluation.settings_diff import Settings
from rtrain.evaluation.training_curves import Cost, Curves

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Compared:
    """Several models. What needs each row's answer is in `measured`; where it is None, `lacking` says why."""

    sides: tuple[Side, ...]
    settings: Settings
    measured: Measured | None
    lacking: str
    curves: tuple[Curves, ...]
    costs: tuple[Cost, ...]

    @property
    def verdict(self) -> str:
        """The outcome in one sentence."""
        if self.measured is None:
            return f"not told apart: {self.lacking}"
        return compare_summary.of_all(self.measured)


def compare(folders: Sequence[Path]) -> Compared:
    """Read the runs in these folders, and ask their artefacts where answers are missing.

    Raises `UserError` where they cannot be compared at all; see `sides.find` and `answers.paired`.
    """
    sides = named.find(folders)
    paired = pairing.paired(sides)
    found = None if isinstance(paired, str) else differences.measure(sides, paired)
    return Compared(
        sides=tuple(sides),
        settings=settings_diff.of(sides),
        measured=found,
        lacking=paired if isinstance(paired, str) else "",
        curves=tuple(
            training_curves.curves(side.run, side.config.recipe.rows_per_update, side.output) for side in sides
        ),
        costs=tuple(training_curves.cost(side) for side in sides),
    )


def document(found: Compared) -> dict[str, Any]:
    """As JSON; docs/compare.md describes it."""
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": found.verdict,
        "sides": [_side(side) for side in found.sides],
        "settings": asdict(found.settings),
        "rows": None if found.measured is None else _measured(found.measured),
        "lacking": found.lacking or None,
        "training": [
            {"side": side.letter, "cost": asdict(cost), "curves": asdict(curves)}
            for side, cost, curves in zip(found.sides, found.costs, found.curves, strict=True)
        ],
    }


def _side(side: Side) -> dict[str, Any]:
    return {
        "side": side.letter,
        "name": side.name,
        "run": str(side.run),
        "artifact": str(side.folder),
        "version": None if side.made is None else side.made.version,
        "task": side.config.recipe.task,
        "recipe": side.config.recipe.name,
        "identity": side.config.recipe.identity(),
    }


def _measured(found: Measured) -> dict[str, Any]:
    return {
        "split": found.split,
        "common": found.rows,
        "of": list(found.of),
        "left_out": found.left_out,
        "against": [
            {
                "side": one.side.letter,
                "headline": {**asdict(one.headline), "verdict": one.headline.verdict},
                "scores": [asdict(score) for score in one.scores],
                "mcnemar": None if one.mcnemar is None else asdict(one.mcnemar),
                "slices": [{**asdict(slice_), "verdict": slice_.verdict} for slice_ in one.slices],
                "classes": list(one.classes),
                "rows": [asdict(kind) for kind in one.kinds],
            }
            for one in found.against
        ],
    }
