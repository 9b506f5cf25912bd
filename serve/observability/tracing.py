"""Spans of requests, where `serve.traces` names a collector of OpenTelemetry. Without, nothing of it is imported.

A request is one span, in the trace that its `traceparent` header names (W3C Trace Context), with a child for each of
its parts. A span has numbers and names of ours; no text, and no header, is in it.
"""

import contextlib
import importlib.util
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from rtrain.config import Serve
from rtrain.core.errors import ConfigError, Problem
from rtrain.inference.artifact import Artifact

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

LIBRARIES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


class Spans(Protocol):
    def request(self, headers: Mapping[bytes, bytes]) -> AbstractContextManager["Span"]:
        """The span of a request, of which these headers may name the trace."""
        ...

    def part(self, name: str) -> AbstractContextManager[object]:
        """The span of a part of the request that this task answers."""
        ...

    def close(self, wait: bool = True) -> None:
        """Send what is left; it may take half a minute where the collector does not answer."""
        ...


class Span(Protocol):
    trace: str | None
    """Number of its trace, in hexadecimal digits."""

    def end(self, name: str, attributes: Mapping[str, str | int | float]) -> None:
        """What is known when the request was answered."""
        ...


def spans(settings: Serve, made: Artifact | None) -> Spans:
    """Those of a model, or of what is no model's. Raises `ConfigError` where `serve.traces` is set and OpenTelemetry is
    not installed."""
    if settings.traces is None:
        return NoSpans()
    check(settings)
    return OpenTelemetry(settings.traces, made)


def check(settings: Serve) -> None:
    """`ConfigError` where traces are asked for that cannot be sent."""
    if settings.traces is None:
        return
    if not settings.traces.startswith(("http://", "https://")):
        fix = "write e.g. http://127.0.0.1:4318/v1/traces"
        raise ConfigError(
            [Problem("serve.traces", settings.traces, "no address of a collector over HTTP", fix, code="malformed")]
        )
    try:
        absent = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    except ModuleNotFoundError:  # of a parent package
        absent = list(LIBRARIES)
    if absent:
        reason = "traces need OpenTelemetry, which is not installed"
        raise ConfigError(
            [Problem("serve.traces", settings.traces, reason, "pip install 'rtrain[traces]'", code="not_installed")]
        )


class NoSpans:
    """Costs nothing."""

    trace: str | None = None

    def __init__(self) -> None:
        self._own = contextlib.nullcontext(self)

    def request(self, headers: Mapping[bytes, bytes]) -> AbstractContextManager["Span"]:
        return self._own

    def part(self, name: str) -> AbstractContextManager[object]:
        return self._own

    def end(self, name: str, attributes: Mapping[str, str | int | float]) -> None:
        pass

    def close(self, wait: bool = True) -> None:
        pass


class OpenTelemetry:
    """Its own provider: what other programs of the process trace is not ours. OTEL_TRACES_SAMPLER is obeyed."""

    def __init__(self, address: str, made: Artifact | None):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        model = {"rtrain.model": made.name, "rtrain.version": made.version} if made else {}
        named = {"service.name": "rtrain", **model}
        self._provider = TracerProvider(resource=Resource.create(named))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=address)))
        self._tracer = self._provider.get_tracer("rtrain")
        self._propagator = TraceContextTextMapPropagator()

    @contextlib.contextmanager
    def request(self, headers: Mapping[bytes, bytes]) -> Iterator["Span"]:
        from opentelemetry.trace import SpanKind

        context = self._propagator.extract({name.decode(): value.decode("latin-1") for name, value in headers.items()})
        with self._tracer.start_as_current_span(
            "request", context, SpanKind.SERVER, record_exception=False, set_status_on_exception=False
        ) as span:
            yield _Span(span)  # type: ignore[arg-type]

    def part(self, name: str) -> AbstractContextManager[object]:
        return self._tracer.start_as_current_span(name, record_exception=False, set_status_on_exception=False)

    def close(self, wait: bool = True) -> None:
        thread = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        thread.start()
        if wait:
            thread.join()


class _Span:
    def __init__(self, span: "ReadableSpan"):
        self._span = span
        context = span.get_span_context()
        self.trace: str | None = format(context.trace_id, "032x") if context else None

    def end(self, name: str, attributes: Mapping[str, str | int | float]) -> None:
        self._span.update_name(name)  # type: ignore[attr-defined]
        self._span.set_attributes(attributes)  # type: ignore[attr-defined]
