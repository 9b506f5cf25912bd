"""What an endpoint counts of itself, for Prometheus. A replica's exposition is added to those of the others."""

import functools

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from serve.batcher import Batcher

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SECONDS_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 2.0, 4.0, 8.0, 16.0)


class Telemetry:
    """The metrics of one replica, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = functools.partial(Counter, registry=self.registry)
        histogram = functools.partial(Histogram, registry=self.registry)
        self.requests = counter("rtrain_requests", "Requests by route and status.", ["route", "status"])
        self.seconds = histogram("rtrain_request_seconds", "Time to answer.", ["route"], buckets=SECONDS_BUCKETS)
        self.rows = counter("rtrain_rows", "Texts answered.")
        self.engine_seconds = counter("rtrain_engine_seconds", "Time in engine calls.")
        self.engine_tokens = counter("rtrain_engine_tokens", "Tokens in engine calls, padding included.")
        self.batch_rows = histogram("rtrain_batch_rows", "Texts of an engine call.", buckets=BATCH_BUCKETS)
        self.explained = histogram("rtrain_explain_seconds", "Time to explain a text.", buckets=SECONDS_BUCKETS)

    def on_call(self, rows: int, tokens: int, seconds: float) -> None:
        """An engine call has ended."""
        self.batch_rows.observe(rows)
        self.engine_tokens.inc(tokens)
        self.engine_seconds.inc(seconds)

    def watch(self, batcher: Batcher) -> None:
        """Add what is asked of the batcher whenever somebody reads the metrics."""
        gauge = functools.partial(Gauge, registry=self.registry)
        gauge("rtrain_queue_rows", "Texts that wait for the engine.").set_function(lambda: batcher.waiting)
        gauge("rtrain_queue_tokens", "Tokens that wait for the engine.").set_function(lambda: batcher.waiting_tokens)

    def exposition(self) -> str:
        return prometheus_client.generate_latest(self.registry).decode()
