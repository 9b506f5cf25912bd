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
from rtrain.core.ragged import Head, Ints
from rtrain.core.run_folder import Run
from rtrain.data import row_reader
from rtrain.data.store.store import Store
from rtrain.evaluation import baseline_comparison, decision, latency, pairing, significance
from rtrain.evaluation.decision import Decision, GateMeasurements
from rtrain.evaluation.pairing import AnswerPair, CachedAnswers, IncomparableModels, ModelAnswers
from rtrain.evaluation.row_scores import select_scores
from rtrain.evaluation.significance import PairedScores, RowScores
from rtrain.inference import artifact, score
from rtrain.inference.artifact import Artifact, ArtifactError
from rtrain.inference.predictor import Predictor
from rtrain.metrics import operating_points, per_class
from rtrain.metrics.bootstrap import SumMetric
from rtrain.metrics.classes import ACCURACY_WITH_ABSTENTIONS
from rtrain.metrics.registry import get_metric
from rtrain.models import precision
from rtrain.report.collect import SPLITS
from rtrain.runs import run_folders
from rtrain.tasks import base

SCHEMA_VERSION = 2
DEFAULT_RECIPE = "intent"
"""The recipe whose limits apply to an artifact outside of its run."""
NO_ROWS = "the run has neither test rows nor validation rows; write --data with a file of rows"
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
    data_settings = {name: value for name, value in overrides.items() if name.startswith("data.")}
    settings = {name: value for name, value in overrides.items() if name not in data_settings}
    run = next((run for run in (Run(candidate.parent), Run(baseline.parent)) if run.exists), None)
    config = (
        configuration.load_config(DEFAULT_RECIPE, settings)
        if run is None
        else run_folders.load_config(run.folder, settings)
    )
    baseline_metadata = artifact.read_artifact(baseline)
    candidate_store = score.find_training_store(candidate, artifact.read_artifact(candidate))
    baseline_store = score.find_training_store(baseline, baseline_metadata, sibling_store=candidate_store)
    stores = [store for store in (baseline_store, candidate_store) if store is not None]
    rows: Store | DataConfig
    if "data.path" in data_settings:
        rows = score.resolve_scoring_settings(baseline_metadata, data_settings)
        row_reader.inspect_source(rows)  # before two models are loaded
    elif data_settings:
        reason = "sets how a file is read, but there is no file"
        fix = "write --data with a file of rows, or leave it out"
        raise ConfigError([Problem(min(data_settings), None, reason, fix, code="conflicting_settings")])
    elif not stores:
        raise UserError(
            f"no rows for {candidate} and {baseline}: neither has a run with a token store; write --data with a file "
            "of rows",
            code="no_rows",
        )
    else:
        rows = stores[0]
    extra_stores = tuple(store for store in stores if store is not rows)
    request = GateRequest(
        candidate, baseline, rows, baseline_store, config.deploy.serve.threads, extra_stores=extra_stores
    )
    return request, config.recipe.gate


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
    check_floors(settings, metadata)
    is_student = baseline_metadata.version != "" and metadata.lineage.get("teacher") == baseline_metadata.version
    limits = decision.make_limits(settings, is_student)
    pair, rejection_reason, unscored_reason = None, "", ""
    scores, speeds, rivals = PairedScores(), list[latency.LatencyComparison](), list[dict[str, Any]]()
    with _restore_torch_threads():
        baseline = Predictor.load(request.baseline, request.threads)
        try:
            pair = _answer_rows(request, baseline, on_event)
        except (ArtifactError, IncomparableModels) as error:
            rejection_reason = str(error)
        else:
            unscored_reason = NO_ROWS if pair is None else ""
        if pair is not None:
            scores, unscored_reason = score_pair(pair)
            if request.measures_latency:
                on_event(events.make_phase_event("measuring the latency of both models", "latency"))
                speeds = _measure_latency(pair, settings.latency_seconds)
            on_event(events.make_phase_event("measuring reference models on the same rows", "rivals"))
            reported_rivals = _read_reported_rivals(request, pair)
            rivals = baseline_comparison.measure_rivals(pair, request.training_store, reported_rivals, trains_rivals)
    memory: list[float | None] = [None, None]
    if (measures_memory or settings.max_memory_mb is not None) and not rejection_reason:
        on_event(events.make_phase_event("measuring memory", "memory"))
        memory = [
            latency.measure_memory_mb(folder, request.threads) for folder in (request.candidate, request.baseline)
        ]
    megabytes = latency.measure_files_mb(request.candidate)
    inherited_verdict = _inherit_verdict(baseline_metadata)
    measurements = GateMeasurements(
        scores, tuple(speeds), megabytes, memory[0], rejection_reason, unscored_reason, inherited_verdict
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
        "megabytes": round(megabytes, 2),
        "baseline_megabytes": round(latency.measure_files_mb(request.baseline), 2),
        "memory_mb": memory[0],
        "baseline_memory_mb": memory[1],
        "differing_rows": 0 if pair is None else pair.differing_rows,
        "unknown_labels": 0 if pair is None else int(pair.baseline.has_unknown_label.sum()),
        "excluded_rows": 0 if pair is None else pair.excluded_rows,
        "limits": {name: value for name, value in asdict(limits).items() if value != {}},
        "host": describe_host(request.threads),
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(time.perf_counter() - started_at, 1),
        "rivals": rivals,
    }


def check_floors(settings: GateConfig, candidate: Artifact) -> None:
    """Raise `ConfigError` for a floor of a label that the candidate lacks."""
    output = base.get_task(candidate.task).output
    labels = operating_points.list_labels(output, Head(candidate.labels, candidate.facts))
    requests = [("gate.min_recall", label) for label in settings.min_recall]
    requests += [("gate.min_precision", label) for label in settings.min_precision]
    label_problems = (operating_points.find_label_problem(*request, labels) for request in requests)
    problems = [problem for problem in label_problems if problem is not None]
    if problems:
        raise ConfigError(problems)


def _answer_rows(request: GateRequest, baseline: Predictor, on_event: OnEvent) -> AnswerPair | None:
    """Predict the rows with both models; None if the run has no rows.

    Raises `ArtifactError` or `IncomparableModels` for a candidate to refuse.
    """
    candidate = Predictor.load(request.candidate, request.threads)
    if isinstance(request.rows, DataConfig):
        on_event(events.make_phase_event("both models predict the rows of the file", "answers"))
        return pairing.answer_file(baseline, candidate, request.rows, request.extra_stores)
    if request.subset is not None:
        split, positions = request.subset
        count = len(positions)
    elif any(map(request.rows.num_rows, SPLITS)):
        split, positions = _first_split(request.rows), None
        count = request.rows.num_rows(split)
    else:
        return None
    on_event(events.make_phase_event(f"both models predict {count:,} {split} rows", "answers"))
    cached_answers = request.cached_answers if split == "test" else None
    stores = (request.rows, *request.extra_stores)
    return pairing.answer_store(baseline, candidate, stores, split, cached_answers, positions)


def _first_split(store: Store) -> str:
    return next(name for name in SPLITS if store.num_rows(name))


def score_pair(pair: AnswerPair) -> tuple[PairedScores, str]:
    """Score both models' answers: (scores, why there is no headline)."""
    output = pair.baseline.predictor.task.output
    metric, models = get_metric(output), (pair.baseline, pair.candidate)
    sums = [metric.make_sum_metric(model.answers.row_results, model.targets, model.head) for model in models]
    # If both models reject out-of-scope rows, score the rows that McNemar's test counts.
    rejects_rows = all(ACCURACY_WITH_ABSTENTIONS in model_sums.scores() for model_sums in sums)
    headline = ACCURACY_WITH_ABSTENTIONS if rejects_rows else metric.headline

    def score_model(model: ModelAnswers, model_sums: SumMetric) -> RowScores:
        answers = model.answers.row_results, model.targets, model.head
        return RowScores(
            model_sums,
            headline,
            is_correct=metric.mark_correct(*answers) & ~model.has_unknown_label if metric.mark_correct else None,
            slice_scores=select_scores(model_sums, (headline,)),
            classes=per_class.collect_classes(metric.build_tables(*answers)) if metric.build_tables else (),
        )

    columns = {name: [value or "" for value in values] for name, values in pair.columns.items()}
    first, other = map(score_model, models, sums)
    scores = significance.compare_models(output, first, other, columns, pair.lengths)
    return scores, f"{headline} is not finite" if scores.headline is None else ""


def _measure_latency(pair: AnswerPair, seconds: float) -> list[latency.LatencyComparison]:
    rows = latency.choose_rows(pair.lengths.tolist())
    timed_rows = [row for positions in rows.values() for row in positions]
    baseline, candidate = (model.make_row_answerer(timed_rows) for model in (pair.baseline, pair.candidate))
    return latency.measure_latency(baseline, candidate, rows, seconds)


def _read_reported_rivals(request: GateRequest, pair: AnswerPair) -> Mapping[str, baseline_comparison.Rival]:
    """Read the reference models of a run's report, if the gate uses all rows of a split.

    Models with different tokenizers may have only part of the rows.
    """
    if isinstance(request.rows, DataConfig) or request.subset is not None:
        return {}
    split = _first_split(request.rows)
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
        "int8": list(precision.detect_int8().instructions),
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
