"""What an endpoint counts of itself, for Prometheus; `sums` joins models and replicas."""

import functools
from collections import Counter as Counted
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import GaugeMetricFamily

from rtrain.core.ragged import Encoded, Floats
from rtrain.inference import drift_baseline
from rtrain.inference.predictor import Predictor
from serve.batching.batcher import Batcher
from serve.observability.drift import Drift

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SECONDS_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 2.0, 4.0, 8.0, 16.0)
WATCHED_ROWS = 64
"""Answers whose drift is computed at a time: one by one it would cost each request a tenth of a millisecond."""


class Watch:
    """The drift of a replica's input and answers. Nothing is watched of an artefact that has no reference."""

    def __init__(self, predictor: Predictor):
        self._task, self._head = predictor.task, predictor.head
        self._unknown_id = drift_baseline.unknown_id(predictor.tokenizer)
        known = predictor.artifact.reference
        self._drift = Drift(known) if known else None
        self._outputs: list[Floats] = []
        self._encoded: list[Encoded] = []

    def observe(self, outputs: Sequence[Floats], encoded: Sequence[Encoded]) -> None:
        if self._drift is None:
            return
        self._outputs += outputs
        self._encoded += encoded
        if len(self._encoded) >= WATCHED_ROWS:
            self._catch_up(self._drift)

    def status(self) -> dict[str, Any] | None:
        """As on /metrics; None where nothing is watched."""
        if self._drift is None:
            return None
        self._catch_up(self._drift)
        distances = self._drift.distances()
        return {"distance": distances, "alarm": self._drift.is_alarming(distances), "rows": self._drift.rows}

    def collect(self) -> Iterator[Metric]:
        status = self.status()
        if status is None:
            return
        distance = GaugeMetricFamily(
            "rtrain_drift_distance",
            "Population stability index of the last 1,000 rows against the validation rows.",
            labels=["feature"],
        )
        for feature, value in status["distance"].items():
            distance.add_metric([feature], value)
        alarm = "1 while a distance other than that of labels is 0.25 or more, by 200 rows or more."
        yield from (distance, GaugeMetricFamily("rtrain_drift_alarm", alarm, value=status["alarm"]))

    def _catch_up(self, drift: Drift) -> None:
        outputs, encoded, self._outputs, self._encoded = self._outputs, self._encoded, [], []
        if encoded:
            drift.observe(drift_baseline.of_answers(self._task, self._head, outputs, encoded, self._unknown_id))


class Requests:
    """How many requests were answered and how fast, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "rtrain_requests", "Requests by route and status.", ["route", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "rtrain_request_seconds", "Time to answer.", ["route"], buckets=SECONDS_BUCKETS, registry=self.registry
        )
        # Looked up once: that takes longer than to count. There are as many as routes and statuses of ours.
        self._labelled = functools.cache(
            lambda route, status: (self.requests.labels(route, str(status)), self.seconds.labels(route))
        )

    def count(self, route: str, status: int, seconds: float) -> None:
        """A request has ended."""
        requests, took = self._labelled(route, status)
        requests.inc()
        took.observe(seconds)


class Telemetry(Requests):
    """The metrics of one model in one replica, whatever versions of it there are."""

    def __init__(self) -> None:
        super().__init__()
        counter = functools.partial(Counter, registry=self.registry)
        histogram = functools.partial(Histogram, registry=self.registry)
        self.versions = counter("rtrain_version_requests", "Requests by version of the model.", ["version", "status"])
        self._version = functools.cache(lambda version, status: self.versions.labels(version, str(status)))
        self.rows = counter("rtrain_rows", "Texts answered.")
        self.engine_seconds = counter("rtrain_engine_seconds", "Time in engine calls.")
        self.engine_tokens = counter("rtrain_engine_tokens", "Tokens in engine calls, padding included.")
        self.batch_rows = histogram("rtrain_batch_rows", "Texts of an engine call.", buckets=BATCH_BUCKETS)
        self.explained = histogram("rtrain_explain_seconds", "Time to explain a text.", buckets=SECONDS_BUCKETS)
        self.shadow = counter("rtrain_shadow_texts", "Texts answered by a candidate too, unseen.", ["result"])
        for result in ("same", "other", "failed"):
            self.shadow.labels(result)  # there from the start, as 0
        gauge = functools.partial(Gauge, registry=self.registry)
        self._watched: list[tuple[Batcher, Watch]] = []
        gauge("rtrain_queue_rows", "Texts that wait for the engine.").set_function(
            lambda: sum(batcher.waiting for batcher, _ in self._watched)
        )
        gauge("rtrain_queue_tokens", "Tokens that wait for the engine.").set_function(
            lambda: sum(batcher.waiting_tokens for batcher, _ in self._watched)
        )
        self.registry.register(self)

    def answered(self, version: str, route: str, status: int, seconds: float) -> None:
        """A request of that version has ended (`count`)."""
        self._version(version, status).inc()
        self.count(route, status, seconds)

    def on_call(self, rows: int, tokens: int, seconds: float) -> None:
        """An engine call has ended."""
        self.batch_rows.observe(rows)
        self.engine_tokens.inc(tokens)
        self.engine_seconds.inc(seconds)

    def watch(self, batcher: Batcher, drift: Watch) -> None:
        """Add what is asked of a version whenever somebody reads the metrics. Drift is that of the oldest version."""
        self._watched.append((batcher, drift))

    def forget(self, batcher: Batcher) -> None:
        """A version has ended."""
        self._watched = [pair for pair in self._watched if pair[0] is not batcher]

    def collect(self) -> Iterator[Metric]:
        """As prometheus_client asks for metrics that are computed when they are read."""
        for _, drift in self._watched[:1]:
            yield from drift.collect()

    def totals(self) -> dict[str, Any]:
        """Since the replica's start: requests by status, and texts."""
        requests: Counted[str] = Counted()
        for family in self.requests.collect():
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    requests[sample.labels["status"]] += int(sample.value)
        texts = next(sample.value for family in self.rows.collect() for sample in family.samples)
        return {"requests": dict(requests), "texts": int(texts)}
