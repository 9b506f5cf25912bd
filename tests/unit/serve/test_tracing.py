"""Spans as a collector of OpenTelemetry receives them, over HTTP."""

import asyncio
import gzip
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from rtrain.config import ServeConfig
from rtrain.inference.predictor import Predictor
from serve.app import ModelApp, build_app
from serve.grpc import INFER_ROUTE
from serve.model import ModelService
from serve.observability import tracing
from serve.registry import ModelSlot
from tests.support.refusals import refused_with
from tests.support.serving import TEXT, client
from tests.unit.serve.test_grpc import asking, question

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

HANGS_S = 4.0


class Collector:
    """Receives spans."""

    def __init__(self) -> None:
        self.received: list[ExportTraceServiceRequest] = []
        self.answers = threading.Event()
        """Whether it answers; otherwise it receives data, and stays silent for a while."""
        self.answers.set()
        received, answers = self.received, self.answers

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                received.append(ExportTraceServiceRequest.FromString(body))
                answers.wait(HANGS_S)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    @property
    def spans(self) -> dict[str, Any]:
        return {
            span.name: span
            for request in self.received
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def test_a_request_is_a_span_of_its_client_s_trace_with_its_parts(predictor: Predictor, collector: Collector) -> None:
    app = build_app(predictor, ServeConfig(traces=collector.address))
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}

    async def main() -> None:
        async with client(app) as session:
            assert (await session.post("/predict", json={"inputs": TEXT}, headers=headers)).status_code == 200

    asyncio.run(main())
    app.service.close()
    spans = collector.spans
    assert set(spans) == {"POST /predict", "tokenize", "engine", "decode"}
    request = spans["POST /predict"]
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    for part in ("tokenize", "engine", "decode"):
        assert (spans[part].trace_id, spans[part].parent_span_id) == (request.trace_id, request.span_id)
        assert request.start_time_unix_nano <= spans[part].start_time_unix_nano <= spans[part].end_time_unix_nano
    attributes = {
        attribute.key: attribute.value.string_value or attribute.value.int_value for attribute in request.attributes
    }
    assert attributes == {
        "http.request.method": "POST",
        "http.route": "/predict",
        "http.response.status_code": 200,
        "rtrain.request_id": "mine",
        "rtrain.inputs": 1,
        "rtrain.tokens": len(predictor.encode([TEXT])[0].ids),
        "rtrain.truncated_inputs": 0,
    }
    assert TEXT.encode() not in b"".join(request.SerializeToString() for request in collector.received)
    [resource] = {
        resource_span.resource.SerializeToString()
        for sent in collector.received
        for resource_span in sent.resource_spans
    }
    assert predictor.artifact.version.encode() in resource


def test_a_request_over_grpc_is_a_span_of_its_client_s_trace_too(predictor: Predictor, collector: Collector) -> None:
    async def main() -> None:
        async with asking(ModelService(predictor, ServeConfig(traces=collector.address))) as stub:
            await stub.ModelInfer(question(TEXT), metadata=(("traceparent", f"00-{TRACE}-{PARENT}-01"),))

    asyncio.run(main())
    spans = collector.spans
    request = spans.pop(f"POST {INFER_ROUTE}")
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    assert {name: span.parent_span_id for name, span in spans.items()} == dict.fromkeys(
        ("tokenize", "engine", "decode"), request.span_id
    )


def test_no_request_waits_for_the_last_spans_of_a_version_that_has_ended(
    predictor: Predictor, collector: Collector
) -> None:
    collector.answers.clear()

    async def make(folder: Path) -> ModelApp:
        return build_app(predictor, ServeConfig(traces=collector.address))

    async def main() -> float:
        versions = ModelSlot(make)
        await versions.switch_to("first")
        async with client(versions) as session:
            await session.post("/predict", json={"inputs": TEXT})
            began = time.monotonic()
            await versions.switch_to("second")
            assert (await session.post("/predict", json={"inputs": TEXT})).status_code == 200
            elapsed = time.monotonic() - began
        collector.answers.set()
        versions.close()
        return elapsed

    assert asyncio.run(main()) < HANGS_S / 2


def test_traces_that_cannot_be_sent_are_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused_with("invalid_value"):
        tracing.check_tracing(ServeConfig(traces="127.0.0.1:4318"))
    monkeypatch.setattr(tracing, "LIBRARIES", ("opentelemetry.sdk", "opentelemetry.nowhere.at_all"))
    with refused_with("not_installed"):
        tracing.check_tracing(ServeConfig(traces="http://127.0.0.1:4318/v1/traces"))
    tracing.check_tracing(ServeConfig())


FOREIGN_TRACER_SCRIPT = """
import asyncio
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
kept = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(kept))
trace.set_tracer_provider(provider)
from rtrain.config import ServeConfig
from serve.middleware import AccessLog, RequestMiddleware, RequestRecorder
from serve.observability.tracing import Tracer
from serve.openapi import ApiRoute
from serve.replies import json_reply
from starlette.routing import Router
async def there(request):
    return json_reply("text")
recorder = RequestRecorder(lambda *counts: None, Tracer(), AccessLog(None))
app = RequestMiddleware(Router([ApiRoute("GET", "/there", there)]), ServeConfig(), None, recorder)
async def receive():
    return {"type": "http.request", "body": b""}
async def send(message):
    pass
scope = {"type": "http", "method": "GET", "path": "/there", "headers": [], "query_string": b"", "root_path": ""}
asyncio.run(app(scope, receive, send))
print([span.name for span in kept.get_finished_spans()])
"""
