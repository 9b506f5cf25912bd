"""The gate: measure a candidate beside its base on this machine, decide, and write the verdict into the artefact.

The document that `run` returns, and that artifact.json keeps as `gate`:
{"schema_version", "verdict", "reasons", "findings": [{"word", "text"}], "version": of the candidate, "against":
{"name", "version", "folder"}, "student", "rows", "source", "headline", "scores": [difference], "mcnemar", "slices",
"classes": [`rtrain.metrics.per_class`], "latency": [speed by bucket], "megabytes", "base_megabytes", "memory_mb",
"base_memory_mb", "read_otherwise", "unknown_labels", "trained_on", "limits", "host", "made", "seconds",
"rivals": [`rtrain.evaluation.baseline_comparison.Rival`]}.
"""

import platform
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import rtrain
from rtrain import config as configuration
from rtrain.config import Data, Gate
from rtrain.core import env, events
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.core.ragged import Ints
from rtrain.core.run_folder import Run
from rtrain.data import row_reader
from rtrain.data.store.store import Store
from rtrain.evaluation import baseline_comparison as plain, decision, gate_rows, latency, memory_footprint
from rtrain.evaluation.decision import Measured, Word
from rtrain.evaluation.gate_rows import Answers, Both, Judged, Reading, Unequal
from rtrain.inference import artifact, score
from rtrain.inference.artifact import Artifact, ArtifactError
from rtrain.inference.predictor import Predictor
from rtrain.models import int8_support
from rtrain.report.row_predictions import SPLITS
from rtrain.runs import run_folders

SCHEMA_VERSION = 1
NO_RECIPE = "intent"
"""The recipe whose limits hold for an artefact outside of its run."""
Say = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Sides:
    candidate: Path
    base: Path
    rows: Store | Data
    """A run's token store, whose test rows are taken (or its validation rows, where it has no test rows), or a file."""
    trained: Store | None = None
    """The rows that the base was trained on: the plain models are too."""
    threads: int = 1
    """Threads of each engine: as many as serve it."""
    known: Answers | None = None
    """The base's and the candidate's answers to all test rows of the store, where somebody has asked already."""
    among: tuple[str, Ints] | None = None
    """A split of the store and positions in it, in place of its test rows."""
    timed: bool = True
    """Whether latency is measured. Not of two models that are computed alike: a ratio would be the machine's."""
    further: tuple[Store, ...] = ()
    """Where the rows are a store's: others with the same rows, as one of the sides has read them. Where they are a
    file's: the stores that the sides were trained from, as far as they are still there."""


def default_base(candidate: Path) -> Path | None:
    """The float artefact of the run that a candidate lies in; None where that is the candidate, or there is none."""
    float_one = Run(candidate.parent).artifact
    return float_one if float_one != candidate and (float_one / artifact.NAME).is_file() else None


def find(candidate: Path, base: Path, overrides: Mapping[str, Any]) -> tuple[Sides, Gate]:
    """What is set beside what, on which rows, by which limits. `overrides` are dotted settings: `data.path` is a file
    of rows, `gate.*` the limits; all else is that of the candidate's run, or of its base's."""
    run = next((run for run in (Run(candidate.parent), Run(base.parent)) if run.exists), None)
    settings = {name: value for name, value in overrides.items() if not name.startswith("data.")}
    chosen = configuration.load(NO_RECIPE, settings) if run is None else run_folders.stored(run.folder, settings)
    base_made = artifact.read(base)
    own = score.trained_from(candidate, artifact.read(candidate))
    theirs = score.trained_from(base, base_made, beside=own)
    stores = [store for store in (theirs, own) if store is not None]
    of_rows = {name: value for name, value in overrides.items() if name.startswith("data.")}
    if "data.path" in of_rows:
        rows: Any = score.settings_for_scores(base_made, of_rows)
        row_reader.inspect(rows)  # before two models are loaded for them
    elif of_rows:
        fix = "write --data with a file of rows, or leave it out"
        raise ConfigError(
            [
                Problem(
                    min(of_rows), None, "says how a file is read, and none is named", fix, code="conflicting_settings"
                )
            ]
        )
    elif not stores:
        reason = "neither lies in a run whose token store is still there"
        raise UserError(
            f"no rows to judge {candidate} and {base} on: {reason}; write --data with a file of rows", code="no_rows"
        )
    else:
        rows = stores[0]
    threads = chosen.deploy.serve.threads
    further = tuple(store for store in stores if store is not rows)
    return Sides(candidate, base, rows, theirs, threads, further=further), chosen.recipe.gate


def run(
    sides: Sides,
    settings: Gate,
    *,
    thorough: bool = False,
    fits: bool = False,
    on_event: Say = lambda event: None,
) -> dict[str, Any]:
    """Measure and decide; returns the document above. Nothing is written.

    `thorough`: memory is measured too. `fits`: plain models are trained where the run's report has not measured them on
    these rows. A candidate that cannot be asked is refused; a base that cannot be asked is the caller's mistake, and
    raises `UserError`.
    """
    started = time.perf_counter()
    if sides.candidate.resolve() == sides.base.resolve():
        raise UserError(
            f"{sides.candidate} is both candidate and base; name the artefact that it is to replace", code="named_twice"
        )
    made, base_made = artifact.read(sides.candidate), artifact.read(sides.base)
    student = base_made.version != "" and made.lineage.get("teacher") == base_made.version
    allowed = decision.limits(settings, student)
    with _torch_threads():
        both, judged, fault = _answers(sides, on_event)
        speeds: list[decision.Speed] = []
        if both is not None and sides.timed:
            on_event(events.doing("measuring latency beside the base's", "latency"))
            asked = latency.chosen(both.lengths.tolist())
            every = [row for positions in asked.values() for row in positions]
            speeds = latency.measure(both.base.asker(every), both.candidate.asker(every), asked, settings.seconds)
        rivals: list[dict[str, Any]] = []
        if both is not None:
            on_event(events.doing("asking plain models the same rows", "rivals"))
            rivals = plain.measure(both, sides.trained, sides.base, _of_report(sides, both), fits=fits)
    memory: list[float | None] = [None, None]
    if (thorough or settings.memory_mb is not None) and not fault:
        on_event(events.doing("measuring memory", "memory"))
        memory = [memory_footprint.memory_mb(folder, sides.threads) for folder in (sides.candidate, sides.base)]
    measured = Measured(
        judged.headline,
        judged.flipped,
        judged.right,
        judged.slices,
        tuple(speeds),
        memory_footprint.files_mb(sides.candidate),
        memory[0],
        (fault,) if fault else (),
        judged.unscored,
        _inherited(base_made),
    )
    told = decision.decide(measured, allowed)
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": told.word,
        "reasons": list(told.reasons),
        "findings": [asdict(one) for one in told.findings],
        "version": made.version,
        "against": {"name": base_made.name, "version": base_made.version, "folder": str(sides.base.absolute())},
        "student": student,
        "rows": 0 if both is None else len(both.lengths),
        "source": "" if both is None else both.source,
        "headline": None if judged.headline is None else asdict(judged.headline),
        "scores": [asdict(one) for one in judged.scores],
        "mcnemar": None if judged.flipped is None else asdict(judged.flipped),
        "slices": [asdict(one) for one in judged.slices],
        "classes": list(judged.classes),
        "latency": [asdict(one) for one in speeds],
        "megabytes": round(measured.megabytes, 2),
        "base_megabytes": round(memory_footprint.files_mb(sides.base), 2),
        "memory_mb": memory[0],
        "base_memory_mb": memory[1],
        "read_otherwise": 0 if both is None else both.otherwise,
        "unknown_labels": 0 if both is None else int(both.base.unknown.sum()),
        "trained_on": 0 if both is None else both.trained_on,
        "limits": asdict(allowed),
        "host": host(sides.threads),
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(time.perf_counter() - started, 1),
        "rivals": rivals,
    }


def _answers(sides: Sides, on_event: Say) -> tuple[Both | None, Judged, str]:
    """(both sides' answers, what they are worth, why the candidate cannot be asked)."""
    nothing = Judged(None, (), None, 0, ())
    base = Predictor.load(sides.base, sides.threads)
    try:
        candidate = Predictor.load(sides.candidate, sides.threads)
    except ArtifactError as error:
        return None, nothing, str(error)
    try:
        if isinstance(sides.rows, Data):
            on_event(events.doing("both models answer the rows of the file", "answers"))
            both = gate_rows.of_file(base, candidate, sides.rows, sides.further)
        else:
            split = next((name for name in SPLITS if sides.rows.rows(name)), None)
            positions = None
            if sides.among is not None:
                split, positions = sides.among
            if split is None:
                unscored = "the run has no test rows and no validation rows; name rows by --data"
                return None, Judged(None, (), None, 0, (), unscored), ""
            count = sides.rows.rows(split) if positions is None else len(positions)
            on_event(events.doing(f"both models answer {count:,} {split} rows", "answers"))
            readings = Reading.of(sides.base, base.artifact), Reading.of(sides.candidate, candidate.artifact)
            known = sides.known if split == "test" else None
            stores = (sides.rows, *sides.further)
            both = gate_rows.of_store(base, candidate, stores, split, readings, known, positions)
    except Unequal as error:
        return None, nothing, str(error)
    return both, gate_rows.judge(both), ""


def _of_report(sides: Sides, both: Both) -> Mapping[str, plain.Rival]:
    """What the report of a run has measured of plain models, where all rows of one of its splits are asked: of sides
    that read texts otherwise, some rows may have been left out."""
    if isinstance(sides.rows, Data) or sides.among is not None:
        return {}
    split = next(name for name in SPLITS if sides.rows.rows(name))
    if len(both.lengths) != sides.rows.rows(split):
        return {}
    return plain.of_report(sides.rows, split, (sides.candidate, sides.base))


def _inherited(base: Artifact) -> tuple[Word, str] | None:
    """The verdict on a base that was refused, or that was made smaller itself: what is as good as a bad one is bad."""
    if (refused := artifact.refusal(base.gate, base.version)) is not None:
        return "refuse", f"its base has the verdict refuse: {refused}"
    if not artifact.is_compressed(base):
        return None  # it had nothing to be worse than
    if base.gate is None or base.gate.get("version") != base.version:
        return "hold", "its base was made smaller too, and no gate has looked at that one"
    if base.gate.get("verdict") == "promote":
        return None
    return "hold", f"its base has the verdict hold: {'; '.join(base.gate.get('reasons', ()))}"


def host(threads: int) -> dict[str, Any]:
    """The machine that a verdict holds for."""
    return {
        "name": platform.node(),
        "processor": platform.machine(),
        "int8": list(int8_support.of_processor().instructions),
        "cores": env.cores(),
        "threads": threads,
        "python": platform.python_version(),
        "rtrain": rtrain.__version__,
    }


@contextmanager
def _torch_threads() -> Iterator[None]:
    """The engine of a float model sets torch's threads for the whole process: afterwards they are as they were."""
    torch = sys.modules.get("torch")
    before = None if torch is None else torch.get_num_threads()
    try:
        yield
    finally:
        if torch is not None and before is not None:
            torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------------------- the artefact


def record(folder: Path, document: dict[str, Any]) -> Artifact:
    """Write the verdict into a published artefact, which is replaced as a whole: its files are linked, not copied."""
    folder = folder.resolve()  # a link may be on another file system than what it names
    draft = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    try:
        shutil.copytree(folder, draft, copy_function=_link)
        made = artifact.judged(draft, document)
        artifact.publish(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return made


def _link(source: str, target: str) -> None:
    """Link a file, or copy it where the file system has no links; those that will be rewritten are copied."""
    if Path(source).name not in artifact.REWRITTEN:
        try:
            Path(target).hardlink_to(source)
            return
        except OSError:
            pass
    shutil.copy2(source, target)
