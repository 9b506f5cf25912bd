"""The gate: measure a candidate against its baseline on this machine, decide, write the verdict into the artifact.

`run_gate` returns this document, and artifact.json stores it as `gate`:
{"schema_version", "verdict", "reasons", "findings": [{"decision", "text"}], "version": of the candidate, "baseline":
{"name", "version", "folder"}, "is_student", "rows", "source", "headline", "scores": [difference], "mcnemar", "slices",
"classes": [`rtrain.metrics.per_class`], "latency": [speed by bucket], "megabytes", "baseline_megabytes", "memory_mb",
"baseline_memory_mb", "differing_rows", "unknown_labels", "excluded_rows", "limits", "host", "created_at", "seconds",
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
from rtrain.config import DataConfig, GateConfig
from rtrain.core import env, events
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.core.ragged import Ints
from rtrain.core.run_folder import Run
from rtrain.data import row_reader
from rtrain.data.store.store import Store
from rtrain.evaluation import baseline_comparison, decision, gate_rows, latency, memory_footprint
from rtrain.evaluation.decision import Decision, GateMeasurements
from rtrain.evaluation.gate_rows import AnswerPair, CachedAnswers, CandidateScores, IncomparableModels, TokenizationSpec
from rtrain.inference import artifact, score
from rtrain.inference.artifact import Artifact, ArtifactError
from rtrain.inference.predictor import Predictor
from rtrain.models import int8_support
from rtrain.report.row_predictions import SPLITS
from rtrain.runs import run_folders

SCHEMA_VERSION = 2
DEFAULT_RECIPE = "intent"
"""The recipe whose limits apply to an artifact outside of its run."""
OnEvent = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class GateRequest:
    candidate: Path
    baseline: Path
    rows: Store | DataConfig
    """Rows to predict: a token store (its test rows, or its validation rows if it has no test rows) or a file."""
    training_store: Store | None = None
    """Training rows of the baseline; the reference models are trained on them too."""
    threads: int = 1
    """Threads of each engine, as in serving."""
    cached_answers: CachedAnswers | None = None
    """Known answers of baseline and candidate to all test rows of the store."""
    subset: tuple[str, Ints] | None = None
    """A split of the store and positions in it; replaces the test rows."""
    measures_latency: bool = True
    """Whether to measure latency. For models of the same cost the ratio would be noise of the machine."""
    extra_stores: tuple[Store, ...] = ()
    """With a store as `rows`: stores of the same rows with another tokenizer. With a file: the training stores of both
    models, if they still exist."""


def find_default_baseline(candidate: Path) -> Path | None:
    """Find the float artifact of the candidate's run; None if it is the candidate or missing."""
    float_artifact = Run(candidate.parent).artifact
    return float_artifact if float_artifact != candidate and (float_artifact / artifact.FILE_NAME).is_file() else None


def prepare_request(candidate: Path, baseline: Path, overrides: Mapping[str, Any]) -> tuple[GateRequest, GateConfig]:
    """Resolve both artifacts, the rows and the limits.

    `overrides` are dotted settings: `data.path` is a file of rows, `gate.*` the limits. Other settings come from the
    run of the candidate, or of the baseline.
    """
    run = next((run for run in (Run(candidate.parent), Run(baseline.parent)) if run.exists), None)
    settings = {name: value for name, value in overrides.items() if not name.startswith("data.")}
    config = (
        configuration.load_config(DEFAULT_RECIPE, settings)
        if run is None
        else run_folders.load_config(run.folder, settings)
    )
    baseline_metadata = artifact.read_artifact(baseline)
    candidate_store = score.find_training_store(candidate, artifact.read_artifact(candidate))
    baseline_store = score.find_training_store(baseline, baseline_metadata, sibling_store=candidate_store)
    stores = [store for store in (baseline_store, candidate_store) if store is not None]
    data_settings = {name: value for name, value in overrides.items() if name.startswith("data.")}
    if "data.path" in data_settings:
        rows: Any = score.resolve_scoring_settings(baseline_metadata, data_settings)
        row_reader.inspect_source(rows)  # before two models are loaded
    elif data_settings:
        fix = "write --data with a file of rows, or leave it out"
        raise ConfigError(
            [
                Problem(
                    min(data_settings),
                    None,
                    "sets how a file is read, but there is no file",
                    fix,
                    code="conflicting_settings",
                )
            ]
        )
    elif not stores:
        reason = "neither has a run with a token store"
        raise UserError(
            f"no rows for {candidate} and {baseline}: {reason}; write --data with a file of rows",
            code="no_rows",
        )
    else:
        rows = stores[0]
    threads = config.deploy.serve.threads
    extra_stores = tuple(store for store in stores if store is not rows)
    return GateRequest(
        candidate, baseline, rows, baseline_store, threads, extra_stores=extra_stores
    ), config.recipe.gate


def run_gate(
    request: GateRequest,
    settings: GateConfig,
    *,
    measures_memory: bool = False,
    trains_rivals: bool = False,
    on_event: OnEvent = lambda event: None,
) -> dict[str, Any]:
    """Measure and decide; returns the document above and writes nothing.

    A candidate that cannot be loaded or compared is refused.

    Args:
        measures_memory: measure memory also without a limit.
        trains_rivals: train the reference models that the run's report has not measured on these rows.

    Raises:
        UserError: the baseline cannot be loaded.
    """
    started_at = time.perf_counter()
    if request.candidate.resolve() == request.baseline.resolve():
        raise UserError(
            f"{request.candidate} is both candidate and baseline; name the artifact that it will replace",
            code="duplicate_name",
        )
    metadata, baseline_metadata = artifact.read_artifact(request.candidate), artifact.read_artifact(request.baseline)
    is_student = baseline_metadata.version != "" and metadata.lineage.get("teacher") == baseline_metadata.version
    limits = decision.make_limits(settings, is_student)
    with _restore_torch_threads():
        pair, scores, rejection_reason = _collect_answers(request, on_event)
        speeds: list[decision.LatencyComparison] = []
        if pair is not None and request.measures_latency:
            on_event(events.make_phase_event("measuring the latency of both models", "latency"))
            latency_rows = latency.choose_rows(pair.lengths.tolist())
            timed_rows = [row for positions in latency_rows.values() for row in positions]
            speeds = latency.measure_latency(
                pair.baseline.make_row_answerer(timed_rows),
                pair.candidate.make_row_answerer(timed_rows),
                latency_rows,
                settings.latency_seconds,
            )
        rivals: list[dict[str, Any]] = []
        if pair is not None:
            on_event(events.make_phase_event("measuring reference models on the same rows", "rivals"))
            rivals = baseline_comparison.measure_rivals(
                pair,
                request.training_store,
                request.baseline,
                _read_reported_rivals(request, pair),
                trains_rivals=trains_rivals,
            )
    memory: list[float | None] = [None, None]
    if (measures_memory or settings.max_memory_mb is not None) and not rejection_reason:
        on_event(events.make_phase_event("measuring memory", "memory"))
        memory = [
            memory_footprint.measure_memory_mb(folder, request.threads)
            for folder in (request.candidate, request.baseline)
        ]
    measurements = GateMeasurements(
        scores.headline,
        scores.mcnemar,
        scores.baseline_correct,
        scores.slices,
        tuple(speeds),
        memory_footprint.measure_files_mb(request.candidate),
        memory[0],
        (rejection_reason,) if rejection_reason else (),
        scores.unscored_reason,
        _inherit_verdict(baseline_metadata),
    )
    verdict = decision.decide(measurements, limits)
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": verdict.decision,
        "reasons": list(verdict.reasons),
        "findings": [asdict(finding) for finding in verdict.findings],
        "version": metadata.version,
        "baseline": {
            "name": baseline_metadata.name,
            "version": baseline_metadata.version,
            "folder": str(request.baseline.absolute()),
        },
        "is_student": is_student,
        "rows": 0 if pair is None else len(pair.lengths),
        "source": "" if pair is None else pair.source,
        "headline": None if scores.headline is None else asdict(scores.headline),
        "scores": [asdict(difference) for difference in scores.scores],
        "mcnemar": None if scores.mcnemar is None else asdict(scores.mcnemar),
        "slices": [asdict(slice_difference) for slice_difference in scores.slices],
        "classes": list(scores.classes),
        "latency": [asdict(speed) for speed in speeds],
        "megabytes": round(measurements.megabytes, 2),
        "baseline_megabytes": round(memory_footprint.measure_files_mb(request.baseline), 2),
        "memory_mb": memory[0],
        "baseline_memory_mb": memory[1],
        "differing_rows": 0 if pair is None else pair.differing_rows,
        "unknown_labels": 0 if pair is None else int(pair.baseline.has_unknown_label.sum()),
        "excluded_rows": 0 if pair is None else pair.excluded_rows,
        "limits": asdict(limits),
        "host": describe_host(request.threads),
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(time.perf_counter() - started_at, 1),
        "rivals": rivals,
    }


def _collect_answers(request: GateRequest, on_event: OnEvent) -> tuple[AnswerPair | None, CandidateScores, str]:
    """Predict and score the rows: (answers of both, their scores, why the candidate is rejected)."""
    no_scores = CandidateScores(None, (), None, 0, ())
    baseline = Predictor.load(request.baseline, request.threads)
    try:
        candidate = Predictor.load(request.candidate, request.threads)
    except ArtifactError as error:
        return None, no_scores, str(error)
    try:
        if isinstance(request.rows, DataConfig):
            on_event(events.make_phase_event("both models predict the rows of the file", "answers"))
            pair = gate_rows.answer_file(baseline, candidate, request.rows, request.extra_stores)
        else:
            split = next((name for name in SPLITS if request.rows.num_rows(name)), None)
            positions = None
            if request.subset is not None:
                split, positions = request.subset
            if split is None:
                unscored = "the run has neither test rows nor validation rows; write --data with a file of rows"
                return None, CandidateScores(None, (), None, 0, (), unscored), ""
            count = request.rows.num_rows(split) if positions is None else len(positions)
            on_event(events.make_phase_event(f"both models predict {count:,} {split} rows", "answers"))
            tokenizations = (
                TokenizationSpec.from_artifact(request.baseline, baseline.artifact),
                TokenizationSpec.from_artifact(request.candidate, candidate.artifact),
            )
            cached_answers = request.cached_answers if split == "test" else None
            stores = (request.rows, *request.extra_stores)
            pair = gate_rows.answer_store(baseline, candidate, stores, split, tokenizations, cached_answers, positions)
    except IncomparableModels as error:
        return None, no_scores, str(error)
    return pair, gate_rows.score_candidate(pair), ""


def _read_reported_rivals(request: GateRequest, pair: AnswerPair) -> Mapping[str, baseline_comparison.Rival]:
    """Read the reference models of a run's report, if the gate uses all rows of a split.

    Models with different tokenizers may have only part of the rows.
    """
    if isinstance(request.rows, DataConfig) or request.subset is not None:
        return {}
    split = next(name for name in SPLITS if request.rows.num_rows(name))
    if len(pair.lengths) != request.rows.num_rows(split):
        return {}
    return baseline_comparison.read_reported_rivals(request.rows, split, (request.candidate, request.baseline))


def _inherit_verdict(baseline: Artifact) -> tuple[Decision, str] | None:
    """Inherit the verdict of a compressed or refused baseline: equal quality is not enough then."""
    if (rejection_reason := artifact.rejection_reason(baseline.gate, baseline.version)) is not None:
        return "refuse", f"its baseline has the verdict refuse: {rejection_reason}"
    if not artifact.is_compressed(baseline):
        return None  # an original model needs no gate
    if baseline.gate is None or baseline.gate.get("version") != baseline.version:
        return "hold", "its baseline is compressed too and was not gated"
    if baseline.gate.get("verdict") == "promote":
        return None
    return "hold", f"its baseline has the verdict hold: {'; '.join(baseline.gate.get('reasons', ()))}"


def describe_host(threads: int) -> dict[str, Any]:
    """Describe this machine; a verdict holds for one machine."""
    return {
        "name": platform.node(),
        "processor": platform.machine(),
        "int8": list(int8_support.detect_int8().instructions),
        "cores": env.available_cores(),
        "threads": threads,
        "python": platform.python_version(),
        "rtrain": rtrain.__version__,
    }


@contextmanager
def _restore_torch_threads() -> Iterator[None]:
    """Restore torch's thread count: a float engine sets it for the whole process."""
    torch = sys.modules.get("torch")
    thread_count = None if torch is None else torch.get_num_threads()
    try:
        yield
    finally:
        if torch is not None and thread_count is not None:
            torch.set_num_threads(thread_count)


# ------------------------------------------------------------------------------------------------------- the artifact


def record_verdict(folder: Path, document: dict[str, Any]) -> Artifact:
    """Write the verdict into a published artifact. The folder is replaced as a whole, with hard links to its files."""
    folder = folder.resolve()  # a symlink may be on another file system than its target
    draft = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    try:
        shutil.copytree(folder, draft, copy_function=_link)
        metadata = artifact.write_gate_verdict(draft, document)
        artifact.publish_artifact(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return metadata


def _link(source: str, target: str) -> None:
    """Hard-link a file. Copy it if it will be rewritten or if the file system has no hard links."""
    if Path(source).name not in artifact.FILES_REWRITTEN_BY_GATE:
        try:
            Path(target).hardlink_to(source)
            return
        except OSError:
            pass
    shutil.copy2(source, target)
