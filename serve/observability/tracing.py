"""Spans of requests, where `serve.traces` names a collector of OpenTelemetry. Without, nothing of it is imported.

A request is one span, in the trace that its `traceparent` header names (W3C Trace Context), with a child for each of
its parts. A span has numbers and names of ours; no text, and no header, is in it.
"""

import contextlib
import importlib.util
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from rtrain.config import ServeConfig
from rtrain.core.errors import ConfigError, Problem
from rtrain.inference.artifact import Artifact

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

LIBRARIES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


class RequestSpan:
    """Span of a request; this one is not exported."""

    trace_id: str | None = None
    """Number of its trace, in hexadecimal digits."""

    def end(self, name: str, attributes: Mapping[str, str | int | float]) -> None:
        """Set name and attributes at the end of the request."""


class Tracer:
    """Starts spans; this one, for an endpoint without `serve.traces`, exports none."""

    _span = contextlib.nullcontext(RequestSpan())

    def request_span(self, headers: Mapping[bytes, bytes]) -> AbstractContextManager[RequestSpan]:
        """Start the span of a request; these headers may name its trace."""
        return self._span

    def child_span(self, name: str) -> AbstractContextManager[object]:
        """Start the span of a part of the request that this task answers."""
        return self._span

    def close(self, wait: bool = True) -> None:
        """Send remaining spans; takes up to half a minute if the collector does not answer."""


def make_tracer(settings: ServeConfig, artifact: Artifact | None) -> Tracer:
    """Tracer of a model, or of an application of several models. Raises `ConfigError` if `serve.traces` is set and
    OpenTelemetry is not installed."""
    if settings.traces is None:
        return Tracer()
    check_tracing(settings)
    return OpenTelemetryTracer(settings.traces, artifact)


def check_tracing(settings: ServeConfig) -> None:
    """`ConfigError` where traces are asked for that cannot be sent."""
    if settings.traces is None:
        return
    if not settings.traces.startswith(("http://", "https://")):
        fix = "write e.g. http://127.0.0.1:4318/v1/traces"
        raise ConfigError(
            [Problem("serve.traces", settings.traces, "no address of a collector over HTTP", fix, code="invalid_value")]
        )
    try:
        missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    except ModuleNotFoundError:  # of a parent package
        missing = list(LIBRARIES)
    if missing:
        reason = "traces need OpenTelemetry, which is not installed"
        raise ConfigError(
            [Problem("serve.traces", settings.traces, reason, "pip install 'rtrain[traces]'", code="not_installed")]
        )


class OpenTelemetryTracer(Tracer):
    """Build a separate provider, so that other tracing in the process is not exported. Respects OTEL_TRACES_SAMPLER."""

    def __init__(self, address: str, artifact: Artifact | None):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        model = {"rtrain.model": artifact.name, "rtrain.version": artifact.version} if artifact else {}
        resource_attributes = {"service.name": "rtrain", **model}
        self._provider = TracerProvider(resource=Resource.create(resource_attributes))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=address)))
        self._tracer = self._provider.get_tracer("rtrain")
        self._propagator = TraceContextTextMapPropagator()

    @contextlib.contextmanager
    def request_span(self, headers: Mapping[bytes, bytes]) -> Iterator[RequestSpan]:
        from opentelemetry.trace import SpanKind

        context = self._propagator.extract({name.decode(): value.decode("latin-1") for name, value in headers.items()})
        with self._tracer.start_as_current_span(
            "request", context, SpanKind.SERVER, record_exception=False, set_status_on_exception=False
        ) as span:
            yield _OpenTelemetrySpan(span)  # type: ignore[arg-type]

    def child_span(self, name: str) -> AbstractContextManager[object]:
        return self._tracer.start_as_current_span(name, record_exception=False, set_status_on_exception=False)

    def close(self, wait: bool = True) -> None:
        thread = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        thread.start()
        if wait:
            thread.join()


class _OpenTelemetrySpan(RequestSpan):
    def __init__(self, span: "ReadableSpan"):
        self._span = span
        context = span.get_span_context()
        self.trace_id = format(context.trace_id, "032x") if context else None

    def end(self, name: str, attributes: Mapping[str, str | int | float]) -> None:
        self._span.update_name(name)  # type: ignore[attr-defined]
        self._span.set_attributes(attributes)  # type: ignore[attr-defined]
