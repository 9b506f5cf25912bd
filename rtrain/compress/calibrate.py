"""The int8 graph of a float artefact: exported, checked against PyTorch, calibrated on training rows; operations that
change too many answers go back to float."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rtrain.compress import fallback
from rtrain.compress.exporters import check
from rtrain.compress.exporters.base import Export, Exported, Quantized, Sample
from rtrain.compress.exporters.check import SPLIT
from rtrain.config.recipe import Quantize
from rtrain.core import engines
from rtrain.core.errors import UserError
from rtrain.core.ragged import Ints, padded
from rtrain.data.store.store import Store
from rtrain.evaluation import latency
from rtrain.inference import artifact, predictor as inference_predictor, score
from rtrain.models import position_embeddings, vocab_trimming

PRICE_SECONDS = 2.0
"""About how long it is measured what operations in float cost."""


@dataclass(frozen=True)
class Job:
    """A float artefact, the rows that it was trained on, and where its int8 graph goes."""

    folder: Path
    made: artifact.Artifact
    store: Store
    settings: Quantize
    draft: Path
    threads: int

    @cached_property
    def entry(self) -> engines.Entry:
        return engines.get(self.settings.engine)

    @cached_property
    def rows(self) -> Ints:
        """Positions of the training rows that calibrate, evenly spread over the index."""
        return check.evenly(self.store.rows(SPLIT), self.settings.calibration_rows)

    def answered_by(self, engine: inference_predictor.Engine) -> inference_predictor.Predictor:
        """The artefact with another engine under it."""
        return inference_predictor.Predictor(self.folder, self.made, engine=engine)

    def samples(self, names: frozenset[str], pad_id: int) -> Iterator[Sample]:
        """The calibrating rows one at a time, so that padding sets no scale."""
        for position in self.rows:
            arrays = padded(self.store.read(SPLIT, np.array([position])), pad_id)
            yield {name: value for name, value in arrays.items() if name in names}

    def write(self, graph: Quantized) -> float:
        """Write the graph as it is now into the draft; returns its megabytes."""
        graph.write(self.draft / self.entry.files[0])
        return artifact.size_mb(self.draft, self.settings.engine)


def write(job: Job, say: Callable[[str, str], None]) -> dict[str, Any]:
    """Write the int8 graph into the draft; what a report says of it. `say` takes what is being done, and a word for it.

    Raises `UserError` where the exported graph does not answer as PyTorch does.
    """
    assert job.entry.quantizer is not None  # the setting is one of engines.quantized()
    export: Export = engines.named(job.entry.quantizer)
    engine = inference_predictor.Torch(job.folder, job.made, None)
    network = job.answered_by(engine)
    samples = list(job.samples(engine.accepted, network.pad_id))
    say("exporting the model", "export")
    with position_embeddings.shortened(engine.network, job.made.max_tokens):
        exported = _exported(export, engine.network, samples[0])
    float_one = job.answered_by(exported.answering(job.threads))
    report: dict[str, Any] = {"export": asdict(check.check(float_one, network, job.store))}
    if job.settings.kind == "weights":
        graph = exported.weights_only()
    else:
        say(f"measuring scales on {len(samples):,} training rows", "scales")
        graph = exported.calibrated(samples, job.settings.overflow_fix)
    if job.settings.table == "int4":
        graph.narrow(vocab_trimming.lines(job.folder))
    if job.settings.flips is not None:
        say(f"trying each of {len(graph.operations)} operations in float", "fallback")
        report["fallback"] = _fall_back(job, graph, float_one, job.settings.flips)
    job.write(graph)
    return report


def _exported(export: Export, network: Any, sample: Sample) -> Exported:
    """The float graph. Raises `UserError` for an architecture that the engine's exporter cannot trace."""
    try:
        return export(network, sample)
    except (UserError, MemoryError):
        raise
    except Exception as error:
        kind, reason = network.config.model_type, (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"quantize: {kind} cannot be exported as a graph ({reason[:200]}); serve its float artefact, or train an "
            "encoder such as bert or roberta",
            code="unsupported",
        ) from error


def _fall_back(
    job: Job, graph: Quantized, float_one: inference_predictor.Predictor, most_flips: float
) -> dict[str, Any]:
    """Revert what must go back to float; what that is, and what it costs."""
    started = time.perf_counter()

    targets = job.store.targets(SPLIT, job.rows)

    def answers(predictor: inference_predictor.Predictor) -> fallback.Decided:
        found = score.on_split(predictor, job.store, SPLIT, job.rows)
        return fallback.decided(predictor.task, predictor.head, found, targets)

    expected = answers(float_one)

    def measure(operations: frozenset[str]) -> fallback.Apart:
        graph.revert(operations)
        return fallback.apart(answers(job.answered_by(graph.answering(job.threads))), expected)

    found = fallback.search(graph.operations, measure, most_flips)
    report = {
        "rows": len(job.rows),
        "operations": len(graph.operations),
        "reverted": list(found.reverted),
        "flips_before": found.before.flips,
        "flips": found.after.flips,
        "most_flips": most_flips,
        "reached": found.after.flips <= most_flips,
        "distance_before": found.before.distance,
        "distance": found.after.distance,
        "sensitivity": found.sensitivity,
    }
    graph.revert(())
    if found.reverted:
        report |= _price(job, graph, found.reverted)
    return {**report, "seconds": round(time.perf_counter() - started, 2)}


def _price(job: Job, graph: Quantized, reverted: tuple[str, ...]) -> dict[str, Any]:
    """Megabytes and milliseconds with all operations in int8 and with these in float; the graph is left so."""
    sizes, sides = [], []
    for operations in ((), reverted):
        graph.revert(operations)
        sizes.append(job.write(graph))
        sides.append(job.answered_by(graph.answering(job.threads)))
    base, candidate = sides
    tokens = [job.store.read(SPLIT, np.array([position])) for position in job.rows]
    speeds = latency.measure(
        lambda row: base.run_tokens(tokens[row]),
        lambda row: candidate.run_tokens(tokens[row]),
        latency.chosen(job.store.column(SPLIT, "length")[job.rows].tolist()),
        PRICE_SECONDS,
    )
    return {
        "megabytes_added": round(sizes[1] - sizes[0], 3) + 0.0,
        "latency": [
            {"bucket": one.bucket, "int8_ms": round(one.base_p50, 3), "ms": round(one.p50, 3)} for one in speeds
        ],
    }
