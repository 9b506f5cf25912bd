"""Where the gate finds its rows and its limits, from the folders of candidate and base."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rtrain import artifact, config as configuration, score
from rtrain.config import Gate
from rtrain.data import records
from rtrain.errors import ConfigError, Problem, UserError
from rtrain.gate.gate import Sides
from rtrain.run import Run
from rtrain.runs import opening

NO_RECIPE = "intent"
"""The recipe whose limits hold for an artefact outside of its run."""


def default_base(candidate: Path) -> Path | None:
    """The float artefact of the run that a candidate lies in; None where that is the candidate, or there is none."""
    float_one = Run(candidate.parent).artifact
    return float_one if float_one != candidate and (float_one / artifact.NAME).is_file() else None


def find(candidate: Path, base: Path, overrides: Mapping[str, Any]) -> tuple[Sides, Gate]:
    """What is set beside what, on which rows, by which limits. `overrides` are dotted settings: `data.path` is a file
    of rows, `gate.*` the limits; all else is that of the candidate's run, or of its base's."""
    run = next((run for run in (Run(candidate.parent), Run(base.parent)) if run.exists), None)
    settings = {name: value for name, value in overrides.items() if not name.startswith("data.")}
    chosen = configuration.load(NO_RECIPE, settings) if run is None else opening.stored(run.folder, settings)
    base_made = artifact.read(base)
    own = score.trained_from(candidate, artifact.read(candidate))
    theirs = score.trained_from(base, base_made, beside=own)
    stores = [store for store in (theirs, own) if store is not None]
    of_rows = {name: value for name, value in overrides.items() if name.startswith("data.")}
    if "data.path" in of_rows:
        rows: Any = score.settings_for_scores(base_made, of_rows)
        records.inspect(rows)  # before two models are loaded for them
    elif of_rows:
        fix = "write --data with a file of rows, or leave it out"
        raise ConfigError([Problem(min(of_rows), None, "says how a file is read, and none is named", fix)])
    elif not stores:
        reason = "neither lies in a run whose token store is still there"
        raise UserError(f"no rows to judge {candidate} and {base} on: {reason}; write --data with a file of rows")
    else:
        rows = stores[0]
    threads = chosen.deploy.serve.threads
    further = tuple(store for store in stores if store is not rows)
    return Sides(candidate, base, rows, theirs, threads, further=further), chosen.recipe.gate
