"""The int8 graph of a float artifact: exported, checked against PyTorch, calibrated on training rows.

Operations that change too many answers are reverted to float. The graph is calibrated once: reverting an operation
removes its quantizers.

Tracing records what Python did with one sample. Branches for other lengths and dynamic shapes are lost without a
warning, so the exported graph is compared with PyTorch's model on real rows of every length.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rtrain.compress.exporters.base import ExportedGraph, ExportFunction, QuantizedGraph, Sample
from rtrain.config.recipe import QuantizeConfig
from rtrain.core import engines
from rtrain.core.errors import UserError
from rtrain.core.ragged import Floats, Head, Int32s, Ints, RaggedArray, pad_batch
from rtrain.data.store.store import Store
from rtrain.evaluation import latency
from rtrain.evaluation.latency import BUCKETS, bucket_name
from rtrain.inference import artifact, score
from rtrain.inference.predictor import Engine, Predictor, TorchEngine
from rtrain.inference.score import PredictedRows
from rtrain.models import long_texts, vocab_trimming
from rtrain.tasks.base import Task

SPLIT = "train"
LATENCY_SECONDS = 2.0
"""Seconds for measuring the latency cost of float operations."""
MIN_NUMBER_CHANGE = 0.05
"""Least difference of a numeric answer that counts as a change, in standard deviations of the targets."""
TOLERANCE = 1e-4
"""Largest allowed logit difference. Both compute in fp32 with different orders of summation: 1e-5 with MiniLM."""
ROWS_PER_BUCKET = 8
"""Rows per length bucket: one alone, the others in one batch."""


@dataclass(frozen=True)
class QuantizationJob:
    """A float artifact, its training rows, and the folder of the int8 graph."""

    folder: Path
    metadata: artifact.Artifact
    store: Store
    settings: QuantizeConfig
    draft: Path
    threads: int

    @cached_property
    def entry(self) -> engines.EngineSpec:
        return engines.get_engine(self.settings.engine)

    @cached_property
    def calibration_rows(self) -> Ints:
        """Positions of the calibration rows, spread evenly over the training rows."""
        return spread_evenly(self.store.num_rows(SPLIT), self.settings.calibration_rows)

    def make_predictor(self, engine: Engine) -> Predictor:
        """Make a predictor of the artifact with another engine."""
        return Predictor(self.folder, self.metadata, engine=engine)

    def iter_samples(self, names: frozenset[str], pad_id: int) -> Iterator[Sample]:
        """Yield calibration rows one at a time, so that padding does not affect the scales."""
        for position in self.calibration_rows:
            arrays = pad_batch(self.store.read_tokens(SPLIT, np.array([position])), pad_id)
            yield {name: value for name, value in arrays.items() if name in names}

    def write_graph(self, graph: QuantizedGraph) -> float:
        """Write the current graph into the draft; returns its megabytes."""
        graph.write(self.draft / self.entry.files[0])
        return artifact.model_size_mb(self.draft, self.settings.engine)


def quantize_graph(job: QuantizationJob, on_progress: Callable[[str, str], None]) -> dict[str, Any]:
    """Write the int8 graph into the draft; returns its fields of the report.

    `on_progress` takes a message and the name of the phase. Raises `UserError` if the exported graph's logits differ
    from PyTorch's.
    """
    assert job.entry.quantizer is not None  # the setting is one of `engines.list_quantized_engines()`
    export: ExportFunction = engines.import_object(job.entry.quantizer)
    engine = TorchEngine(job.folder, job.metadata, None)
    network = job.make_predictor(engine)
    samples = list(job.iter_samples(engine.forward_args, network.pad_id))
    on_progress("exporting the model", "export")
    with long_texts.truncate_positions(engine.network, job.metadata.max_tokens):
        exported = _export_graph(export, engine.network, samples[0])
    float_predictor = job.make_predictor(exported.load_engine(job.threads))
    report: dict[str, Any] = {"export": asdict(check_export(float_predictor, network, job.store))}
    if job.settings.kind == "weights":
        graph = exported.quantize_weights()
    else:
        on_progress(f"measuring scales on {len(samples):,} training rows", "scales")
        graph = exported.calibrate(samples, job.settings.overflow_fix)
    if job.settings.embedding_dtype == "int4":
        graph.quantize_embedding_int4(vocab_trimming.embedding_rows(job.folder))
    if job.settings.max_changed_predictions is not None:
        on_progress(f"trying each of {len(graph.operations)} operations in float", "fallback")
        report["fallback"] = _revert_operations(job, graph, float_predictor, job.settings.max_changed_predictions)
    job.write_graph(graph)
    return report


def _export_graph(export: ExportFunction, network: Any, sample: Sample) -> ExportedGraph:
    try:
        return export(network, sample)
    except (UserError, MemoryError):
        raise
    except Exception as error:
        kind, reason = network.config.model_type, (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"quantize: {kind} cannot be exported as a graph ({reason[:200]}); serve its float artifact, or train an "
            "encoder such as bert or roberta",
            code="unsupported",
        ) from error


# -------------------------------------------------------------------------------------------------- operations in float


def _revert_operations(
    job: QuantizationJob, graph: QuantizedGraph, float_predictor: Predictor, max_changed_share: float
) -> dict[str, Any]:
    """Revert operations to float until few enough answers change; returns the report of the fall-back."""
    started_at = time.perf_counter()
    targets = job.store.targets(SPLIT, job.calibration_rows)

    def collect_answers(predictor: Predictor) -> GraphAnswers:
        answered = score.predict_split(predictor, job.store, SPLIT, job.calibration_rows)
        return collect_graph_answers(predictor.task, predictor.head, answered, targets)

    expected = collect_answers(float_predictor)

    def measure(operations: frozenset[str]) -> AnswerDifference:
        graph.revert(operations)
        return measure_difference(collect_answers(job.make_predictor(graph.load_engine(job.threads))), expected)

    result = search_operations(graph.operations, measure, max_changed_share)
    before, after = result.original_difference, result.final_difference
    report = {
        "rows": len(job.calibration_rows),
        "operations": len(graph.operations),
        "reverted": list(result.reverted),
        "changed_share_before": before.changed_share,
        "changed_share": after.changed_share,
        "max_changed_share": max_changed_share,
        "is_within_limit": after.changed_share <= max_changed_share,
        "distance_before": before.distance,
        "distance": after.distance,
        "sensitivity": result.sensitivity,
    }
    graph.revert(())
    if result.reverted:
        report |= _measure_fallback_cost(job, graph, result.reverted)
    return {**report, "seconds": round(time.perf_counter() - started_at, 2)}


def _measure_fallback_cost(job: QuantizationJob, graph: QuantizedGraph, reverted: tuple[str, ...]) -> dict[str, Any]:
    """Measure size and latency with all operations in int8, then with these in float. The graph keeps the latter
    state."""
    sizes, predictors = [], []
    for operations in ((), reverted):
        graph.revert(operations)
        sizes.append(job.write_graph(graph))
        predictors.append(job.make_predictor(graph.load_engine(job.threads)))
    baseline, candidate = predictors
    tokens = [job.store.read_tokens(SPLIT, np.array([position])) for position in job.calibration_rows]
    speeds = latency.measure_latency(
        lambda row: baseline.run_tokens(tokens[row]),
        lambda row: candidate.run_tokens(tokens[row]),
        latency.choose_rows(job.store.column(SPLIT, "length")[job.calibration_rows].tolist()),
        LATENCY_SECONDS,
    )
    return {
        "megabytes_added": round(sizes[1] - sizes[0], 3) + 0.0,
        "latency": [
            {"bucket": speed.bucket, "int8_ms": round(speed.baseline_p50, 3), "ms": round(speed.p50, 3)}
            for speed in speeds
        ],
    }


@dataclass(frozen=True)
class AnswerDifference:
    """Difference of a graph's answers from the float model's, on the same rows."""

    changed_share: float
    """Share of changed answers (see the function `changed_share`)."""
    distance: float
    """Root mean square difference of the logits."""


@dataclass(frozen=True)
class FallbackResult:
    reverted: tuple[str, ...]
    """Operations in float, the most sensitive first."""
    original_difference: AnswerDifference
    final_difference: AnswerDifference
    sensitivity: dict[str, float]
    """Operation -> remaining distance with this operation alone in float; the most sensitive first. Empty if no
    operation had to be reverted."""


OperationMeasure = Callable[[frozenset[str]], AnswerDifference]
"""Measures the graph with the given operations in float."""


def search_operations(operations: Sequence[str], measure: OperationMeasure, max_changed_share: float) -> FallbackResult:
    """Find a small set of float operations with at most `max_changed_share` changed answers.

    Each operation is tried alone in float and ranked by the remaining distance. Bisection finds the shortest sufficient
    prefix of the ranking. Operations that this prefix does not need are removed again. If all operations in float are
    not sufficient, all are returned.
    """
    cached_measure = cache(measure)
    original_difference = cached_measure(frozenset())
    if original_difference.changed_share <= max_changed_share or not operations:
        return FallbackResult((), original_difference, original_difference, {})
    distances = {name: cached_measure(frozenset({name})).distance for name in operations}
    ranking = sorted(operations, key=lambda name: distances[name])

    def is_sufficient(names: Sequence[str]) -> bool:
        return cached_measure(frozenset(names)).changed_share <= max_changed_share

    reverted = ranking[: _find_shortest(len(ranking), lambda count: is_sufficient(ranking[:count]))]
    for name in reversed(reverted):
        smaller_set = [operation for operation in reverted if operation != name]
        if smaller_set and is_sufficient(smaller_set):
            reverted = smaller_set
    sensitivity = {name: distances[name] for name in ranking}
    return FallbackResult(tuple(reverted), original_difference, cached_measure(frozenset(reverted)), sensitivity)


def _find_shortest(max_count: int, is_sufficient: Callable[[int], bool]) -> int:
    """Find the least sufficient count from 1 to `max_count`; `is_sufficient` is monotone, `max_count` is not tested.

    Counts are doubled first: small counts are common, so this needs fewer measurements than bisection of the range.
    """
    low, high = 0, 1
    while high < max_count and not is_sufficient(high):
        low, high = high, min(2 * high, max_count)
    while high - low > 1:
        midpoint = (low + high) // 2
        low, high = (low, midpoint) if is_sufficient(midpoint) else (midpoint, high)
    return high


@dataclass(frozen=True)
class GraphAnswers:
    outputs: Sequence[Floats]
    answers: Sequence[Any]
    """Decoded outputs, comparable between graphs; numbers are in standard deviations of the targets."""


def collect_graph_answers(task: Task, head: Head, answered: PredictedRows, targets: RaggedArray) -> GraphAnswers:
    """Decode a graph's outputs with the head's thresholds: one answer per row, per word (tags) or per masked token."""
    outputs, kind = answered.outputs, task.output
    if kind == "number":
        return GraphAnswers(outputs, [float(output.item()) for output in outputs])
    if kind == "tokens":
        return GraphAnswers(outputs, [int(guess) for output in outputs for guess in output.argmax(-1)])
    predictions = task.explain_rows(answered.row_results, targets, head).prediction
    return GraphAnswers(outputs, [tag for row in predictions for tag in row] if kind == "tags" else predictions)


def measure_difference(actual: GraphAnswers, expected_answers: GraphAnswers) -> AnswerDifference:
    """Compare two graphs' answers to the same rows."""
    pairs = zip(actual.outputs, expected_answers.outputs, strict=True)
    squares = [np.square(logits - expected_logits).ravel() for logits, expected_logits in pairs]
    distance = float(np.sqrt(np.concatenate(squares).mean())) if squares else 0.0
    return AnswerDifference(changed_share(actual.answers, expected_answers.answers), distance)


def changed_share(left: Sequence[Any], right: Sequence[Any]) -> float:
    """Share of answers that differ; numbers differ from `MIN_NUMBER_CHANGE` on."""
    is_changed = [
        not abs(one - other) <= MIN_NUMBER_CHANGE if isinstance(one, float) else one != other
        for one, other in zip(left, right, strict=True)
    ]
    return float(np.mean(is_changed)) if is_changed else 0.0


# ------------------------------------------------------------------------------------------------ the exported graph


@dataclass(frozen=True)
class ExportCheck:
    max_difference: float
    """Largest logit difference."""
    bucket: str
    """Length bucket of the largest difference."""
    rows: int
    buckets: int


def check_export(graph: Predictor, network: Predictor, store: Store) -> ExportCheck:
    """Compare the logits of both. Raises `UserError` if a logit differs by more than `TOLERANCE` or is not finite."""
    differences, rows = {}, 0
    for name, positions in group_by_length(store.column(SPLIT, "length")):
        rows += len(positions)
        differences[name] = max(
            _max_difference(graph, network, store, part) for part in (positions[:1], positions[1:]) if len(part)
        )
    worst = max(differences, key=lambda name: differences[name])
    if differences[worst] > TOLERANCE:
        raise UserError(
            f"the exported graph differs from the PyTorch model: logits of training rows of {worst} differ "
            f"by {differences[worst]:.3g}, more than {TOLERANCE:g}, so the model was not quantized. Try another "
            "version of transformers, openvino or onnx",
            code="export_mismatch",
        )
    return ExportCheck(differences[worst], worst, rows, len(differences))


def group_by_length(lengths: Int32s, max_rows: int = ROWS_PER_BUCKET) -> Iterator[tuple[str, Ints]]:
    """Yield (bucket name, positions of at most `max_rows` rows, the shortest first) for each length bucket."""
    bucket_indices = np.searchsorted(BUCKETS, lengths)
    for bucket_index in np.unique(bucket_indices):
        rows = np.flatnonzero(bucket_indices == bucket_index)
        rows = rows[np.argsort(lengths[rows], kind="stable")]
        yield bucket_name(int(lengths[rows[0]])), rows[spread_evenly(len(rows), max_rows)]


def spread_evenly(count: int, max_count: int) -> Ints:
    """At most `max_count` positions in [0, count), evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(max_count, count)).astype(np.int64))


def _max_difference(graph: Predictor, network: Predictor, store: Store, rows: Ints) -> float:
    """Largest logit difference of these rows in one batch; infinity if a logit is not finite."""
    tokens = network.task.prepare(store.read_tokens(SPLIT, rows), network.head, 0, 0)
    difference = float(np.abs(graph.run_tokens(tokens) - network.run_tokens(tokens)).max(initial=0.0))
    return difference if np.isfinite(difference) else float("inf")
