"""The int8 graph of a float artifact: exported, checked against PyTorch, calibrated on training rows.

Operations that change too many answers are reverted to float."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rtrain.compress import fallback
from rtrain.compress.exporters import check
from rtrain.compress.exporters.base import ExportedGraph, ExportFunction, QuantizedGraph, Sample
from rtrain.compress.exporters.check import SPLIT
from rtrain.config.recipe import QuantizeConfig
from rtrain.core import engines
from rtrain.core.errors import UserError
from rtrain.core.ragged import Ints, pad_batch
from rtrain.data.store.store import Store
from rtrain.evaluation import latency
from rtrain.inference import artifact, predictor as inference_predictor, score
from rtrain.models import position_embeddings, vocab_trimming

LATENCY_SECONDS = 2.0
"""Seconds for measuring the latency cost of float operations."""


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
        return check.spread_evenly(self.store.num_rows(SPLIT), self.settings.calibration_rows)

    def make_predictor(self, engine: inference_predictor.Engine) -> inference_predictor.Predictor:
        """Make a predictor of the artifact with another engine."""
        return inference_predictor.Predictor(self.folder, self.metadata, engine=engine)

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
    engine = inference_predictor.TorchEngine(job.folder, job.metadata, None)
    network = job.make_predictor(engine)
    samples = list(job.iter_samples(engine.forward_args, network.pad_id))
    on_progress("exporting the model", "export")
    with position_embeddings.truncate_positions(engine.network, job.metadata.max_tokens):
        exported = _export_graph(export, engine.network, samples[0])
    float_predictor = job.make_predictor(exported.load_engine(job.threads))
    report: dict[str, Any] = {"export": asdict(check.check_export(float_predictor, network, job.store))}
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
    """Export the float graph. Raises `UserError` for an architecture that the engine's exporter cannot trace."""
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


def _revert_operations(
    job: QuantizationJob,
    graph: QuantizedGraph,
    float_predictor: inference_predictor.Predictor,
    max_changed_share: float,
) -> dict[str, Any]:
    """Revert operations to float until few enough answers change; returns the report of the fall-back."""
    started_at = time.perf_counter()

    targets = job.store.targets(SPLIT, job.calibration_rows)

    def collect_answers(predictor: inference_predictor.Predictor) -> fallback.GraphAnswers:
        answered = score.predict_split(predictor, job.store, SPLIT, job.calibration_rows)
        return fallback.collect_graph_answers(predictor.task, predictor.head, answered, targets)

    expected = collect_answers(float_predictor)

    def measure(operations: frozenset[str]) -> fallback.AnswerDifference:
        graph.revert(operations)
        return fallback.measure_difference(
            collect_answers(job.make_predictor(graph.load_engine(job.threads))), expected
        )

    fallback_result = fallback.search_operations(graph.operations, measure, max_changed_share)
    report = {
        "rows": len(job.calibration_rows),
        "operations": len(graph.operations),
        "reverted": list(fallback_result.reverted),
        "changed_share_before": fallback_result.original_difference.changed_share,
        "changed_share": fallback_result.final_difference.changed_share,
        "max_changed_share": max_changed_share,
        "is_within_limit": fallback_result.final_difference.changed_share <= max_changed_share,
        "distance_before": fallback_result.original_difference.distance,
        "distance": fallback_result.final_difference.distance,
        "sensitivity": fallback_result.sensitivity,
    }
    graph.revert(())
    if fallback_result.reverted:
        report |= _measure_fallback_cost(job, graph, fallback_result.reverted)
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
            {
                "bucket": latency_comparison.bucket,
                "int8_ms": round(latency_comparison.baseline_p50, 3),
                "ms": round(latency_comparison.p50, 3),
            }
            for latency_comparison in speeds
        ],
    }
