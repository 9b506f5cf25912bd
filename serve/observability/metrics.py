"""Prometheus metrics of an endpoint, merged over models and replicas, and the drift of its inputs."""

import functools
import re
from collections import Counter as Counted, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from rtrain.core.ragged import EncodedRow, Floats
from rtrain.inference import drift_baseline
from rtrain.inference.drift_baseline import DriftFeatures
from rtrain.inference.predictor import Predictor
from serve.batching.batcher import Batcher

ALARM_FEATURES = ("tokens", "unknown", "score")
"""Histograms that can raise the alarm."""
ALARM_DISTANCE = 0.25
MIN_ROWS = 200
"""Rows of the window, and validation rows, below which there is no alarm."""
WINDOW_ROWS = 1000
"""Rows over which distances are measured."""
MIN_BIN_ROWS = 0.5
"""Rows of a bin, where there are fewer: an empty one would be endlessly far."""
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SECONDS_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 2.0, 4.0, 8.0, 16.0)
DRIFT_BATCH_ROWS = 64
"""Answers whose drift is computed at a time: one by one it would cost each request a tenth of a millisecond."""


class DriftDetector:
    """Distance of the last requests from the validation rows: the population stability index of each histogram.

    An index up to 0.1 is small by convention, and 0.25 or more is large. Its expectation by chance is (bins - 1) x (1 /
    window + 1 / validation rows), so both sides need enough rows. Labels raise no alarm: a new mix of questions is not
    unknown input.
    """

    def __init__(self, document: Mapping[str, Any]):
        """`document`: from `rtrain.inference.drift_baseline.build_split_baseline`."""
        self._counts = {name: np.array(document[name]["counts"]) for name in ALARM_FEATURES if name in document}
        self._edges = {name: document[name]["edges"] for name in self._counts}
        self._labels: Mapping[str, int] = document.get("labels", {})
        self._bins: dict[str, deque[int]] = {name: deque(maxlen=WINDOW_ROWS) for name in self._counts}
        self._recent_labels: deque[list[str]] = deque(maxlen=WINDOW_ROWS)
        self.rows = 0

    def observe(self, features: DriftFeatures) -> None:
        """Rows of requests, in their order."""
        for name, values in features.numeric_features().items():
            if name in self._counts:
                self._bins[name].extend(
                    drift_baseline.assign_bins(values[~np.isnan(values)], self._edges[name]).tolist()
                )
        if features.labels is not None and self._labels:
            self._recent_labels.extend(features.labels)
        self.rows += len(features.tokens)

    def distances(self) -> dict[str, float]:
        """The index of each histogram over the last `WINDOW_ROWS` rows."""
        distances = {
            name: stability_index(counts, np.bincount(self._bins[name], minlength=len(counts)))
            for name, counts in self._counts.items()
            if self._bins[name]
        }
        if self._recent_labels:
            recent_counts = Counted(label for row in self._recent_labels for label in row)
            names = sorted({*self._labels, *recent_counts})
            label_counts = [np.array([side.get(name, 0) for name in names]) for side in (self._labels, recent_counts)]
            distances["labels"] = stability_index(*label_counts)
        return distances

    def has_alarm(self, distances: Mapping[str, float]) -> bool:
        """Whether one of these distances, but that of labels, is large and rests on enough rows."""
        return any(
            distances.get(name, 0.0) >= ALARM_DISTANCE and min(len(self._bins[name]), int(counts.sum())) >= MIN_ROWS
            for name, counts in self._counts.items()
        )


class DriftMonitor:
    """The drift of a replica's input and answers. Nothing is watched of an artifact that has no reference."""

    def __init__(self, predictor: Predictor):
        self._task, self._head = predictor.task, predictor.head
        self._unknown_id = drift_baseline.find_unknown_id(predictor.tokenizer)
        reference_features = predictor.artifact.drift_baseline
        self._detector = DriftDetector(reference_features) if reference_features else None
        self._pending_outputs: list[Floats] = []
        self._pending_encoded: list[EncodedRow] = []

    def observe(self, outputs: Sequence[Floats], encoded: Sequence[EncodedRow]) -> None:
        if self._detector is None:
            return
        self._pending_outputs += outputs
        self._pending_encoded += encoded
        if len(self._pending_encoded) >= DRIFT_BATCH_ROWS:
            self._observe_pending(self._detector)

    def status(self) -> dict[str, Any] | None:
        """As on /metrics; None where nothing is watched."""
        if self._detector is None:
            return None
        self._observe_pending(self._detector)
        distances = self._detector.distances()
        return {"distances": distances, "alarm": self._detector.has_alarm(distances), "rows": self._detector.rows}

    def collect(self) -> Iterator[Metric]:
        status = self.status()
        if status is None:
            return
        distance = GaugeMetricFamily(
            "rtrain_drift_distance",
            "Population stability index of the last 1,000 rows against the validation rows.",
            labels=["feature"],
        )
        for feature, value in status["distances"].items():
            distance.add_metric([feature], value)
        alarm = "1 while a distance other than that of labels is 0.25 or more, by 200 rows or more."
        yield from (distance, GaugeMetricFamily("rtrain_drift_alarm", alarm, value=status["alarm"]))

    def _observe_pending(self, detector: DriftDetector) -> None:
        outputs = self._pending_outputs
        encoded = self._pending_encoded
        self._pending_outputs = []
        self._pending_encoded = []
        if encoded:
            detector.observe(
                drift_baseline.compute_request_features(self._task, self._head, outputs, encoded, self._unknown_id)
            )


def stability_index(reference_counts: npt.NDArray[Any], counts: npt.NDArray[Any]) -> float:
    """Sum over bins of (q - p) ln(q / p)."""
    sides = (np.maximum(side, MIN_BIN_ROWS) for side in (reference_counts, counts))
    p, q = (side / side.sum() for side in sides)
    return float(((q - p) * np.log(q / p)).sum())


class RequestMetrics:
    """How many requests were answered and how fast, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "rtrain_requests", "Requests by route and status.", ["route", "status"], registry=self.registry
        )
        self.durations = Histogram(
            "rtrain_request_duration_seconds",
            "Time to answer.",
            ["route"],
            buckets=SECONDS_BUCKETS,
            registry=self.registry,
        )
        # Looked up once: that takes longer than to count. There are as many as routes and statuses of ours.
        self._labeled_metrics = functools.cache(
            lambda route, status: (self.requests.labels(route, str(status)), self.durations.labels(route))
        )

    def count_request(self, route: str, status: int, seconds: float) -> None:
        """A request has ended."""
        requests, duration = self._labeled_metrics(route, status)
        requests.inc()
        duration.observe(seconds)


class Telemetry(RequestMetrics):
    """The metrics of one model in one replica, whatever versions of it there are."""

    def __init__(self) -> None:
        super().__init__()
        counter = functools.partial(Counter, registry=self.registry)
        histogram = functools.partial(Histogram, registry=self.registry)
        self.version_requests = counter(
            "rtrain_version_requests", "Requests by version of the model.", ["version", "status"]
        )
        self._version_counter = functools.cache(
            lambda version, status: self.version_requests.labels(version, str(status))
        )
        self.inputs = counter("rtrain_inputs", "Texts answered.")
        self.engine_seconds = counter("rtrain_engine_seconds", "Time in engine calls.")
        self.engine_tokens = counter("rtrain_engine_tokens", "Tokens in engine calls, padding included.")
        self.batch_rows = histogram("rtrain_batch_size", "Texts of an engine call.", buckets=BATCH_BUCKETS)
        self.explain_seconds = histogram("rtrain_explain_seconds", "Time to explain a text.", buckets=SECONDS_BUCKETS)
        self.shadow_texts = counter("rtrain_shadow_inputs", "Texts answered by a candidate too, unseen.", ["result"])
        for result in ("same", "different", "failed"):
            self.shadow_texts.labels(result)  # there from the start, as 0
        gauge = functools.partial(Gauge, registry=self.registry)
        self._sources: list[tuple[Batcher, DriftMonitor]] = []
        gauge("rtrain_queued_inputs", "Texts that wait for the engine.").set_function(
            lambda: sum(batcher.queued_rows for batcher, _ in self._sources)
        )
        gauge("rtrain_queued_tokens", "Tokens that wait for the engine.").set_function(
            lambda: sum(batcher.queued_tokens for batcher, _ in self._sources)
        )
        self.registry.register(self)

    def record_response(self, version: str, route: str, status: int, seconds: float) -> None:
        """A request of that version has ended (`count_request`)."""
        self._version_counter(version, status).inc()
        self.count_request(route, status, seconds)

    def on_call(self, rows: int, tokens: int, seconds: float) -> None:
        """An engine call has ended."""
        self.batch_rows.observe(rows)
        self.engine_tokens.inc(tokens)
        self.engine_seconds.inc(seconds)

    def register(self, batcher: Batcher, drift_monitor: DriftMonitor) -> None:
        """Add a version whose state is read at each scrape. Drift is that of the oldest version."""
        self._sources.append((batcher, drift_monitor))

    def unregister(self, batcher: Batcher) -> None:
        """A version has ended."""
        self._sources = [pair for pair in self._sources if pair[0] is not batcher]

    def collect(self) -> Iterator[Metric]:
        """As prometheus_client asks for metrics that are computed when they are read."""
        for _, drift_monitor in self._sources[:1]:
            yield from drift_monitor.collect()

    def totals(self) -> dict[str, Any]:
        """Since the replica's start: requests by status, and texts."""
        requests: Counted[str] = Counted()
        for family in self.requests.collect():
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    requests[sample.labels["status"]] += int(sample.value)
        texts = next(sample.value for family in self.inputs.collect() for sample in family.samples)
        return {"requests": dict(requests), "inputs": int(texts)}


class MergedRegistry(NamedTuple):
    """Several registries as one, whose samples say by the label `model` whose they are."""

    registries: Mapping[str, CollectorRegistry]
    """Registries by model name; empty for metrics of no model."""

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for model, registry in self.registries.items():
            label = {"model": model} if model else {}
            for family in registry.collect():
                plain = Metric(family.name, family.documentation, family.type, family.unit)
                samples = [sample._replace(labels={**sample.labels, **label}) for sample in family.samples]
                families.setdefault(family.name, plain).samples += samples
        return iter(families.values())


def render_metrics(registries: Mapping[str, CollectorRegistry]) -> str:
    """Prometheus' text form."""
    return prometheus_client.generate_latest(MergedRegistry(registries)).decode()


class _MetricFamilies(NamedTuple):
    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families


def merge_expositions(expositions: Mapping[str, str]) -> str:
    """One exposition of several replicas', each by its name, which the label `replica` of its samples has. A sum over
    replicas would fall when one ends, which Prometheus takes for a reset of the whole counter."""
    families: dict[str, Metric] = {}
    for replica, text in expositions.items():
        for family in text_string_to_metric_families(text):
            if family.name.endswith("_created"):
                continue
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            samples = (sample._replace(labels={**sample.labels, "replica": replica}) for sample in family.samples)
            merged.samples += samples
    return prometheus_client.generate_latest(_MetricFamilies(list(families.values()))).decode()


def add_proxy_errors(text: str, header: str) -> str:
    """Metrics text plus HAProxy's own errors. `header`: value of `haproxy.PROXY_ERRORS_HEADER`; a client may have sent
    it if there is no HAProxy. Without valid counts the text is unchanged."""
    matches = re.findall(r"\b(\d{3})=(\d{1,15})\b", header)
    if not matches:
        return text
    family = CounterMetricFamily(
        "rtrain_haproxy_errors", "Errors that HAProxy answered itself, since it began.", labels=["status"]
    )
    for status, count in matches:
        family.add_metric([status], int(count))
    return text + prometheus_client.generate_latest(_MetricFamilies([family])).decode()
