"""The Open Inference Protocol over gRPC, beside the HTTP application: the same `Service`, batcher, limits and errors.

The messages and the interface of the servicer are those that Triton's client ships (the extra `grpc`). What a service
of KServe's or Triton's has and this one lacks, e.g. loading models and shared memory, is answered UNIMPLEMENTED.
"""

import asyncio
import contextlib
import inspect
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as messages, service_pb2_grpc as interface

import rtrain
from rtrain.config import Serve
from serve.app_base import Desk
from serve.ingress import tls
from serve.observability import tracing
from serve.request_context import CLIENT_GONE, REQUEST_ID, Record, model_of, parts_of, tell
from serve.schemas import open_inference, predict
from serve.schemas.predict import RequestError

if TYPE_CHECKING:
    from serve.auth import api_keys
    from serve.model import Service

logger = logging.getLogger(__name__)

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""For the statuses of `RequestError`."""
CALLS = "/inference.GRPCInferenceService/"
ROUTE = f"{CALLS}ModelInfer"
"""Its name in the metrics."""
OVERHEAD_BYTES = 100_000
"""What a message has beside its texts: names, shapes and lengths. `serve.max_body_bytes` bounds the texts."""
MAX_STREAMS = 128
"""Calls of one connection at a time; a client keeps further calls until one ends. HTTP/2 recommends 100 or more."""
OPEN = frozenset({f"{CALLS}ServerLive", f"{CALLS}ServerReady"})
"""Calls that need no key."""


@asynccontextmanager
async def serving(
    desk: Desk,
    settings: Serve,
    port: int,
    door: "api_keys.Door | None" = None,
    models: int = 1,
    shared: bool = True,
) -> AsyncIterator[int]:
    """Listen while the context is open; gives the port. At its end requests in progress are answered first. `door` asks
    for keys, in the metadata `authorization`; with a certificate clients encrypt. `models`: how many answer.
    `shared`: replicas listen at the same port, among which the system deals connections.

    Raises RuntimeError where the port is in use.
    """
    host = settings.host
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", settings.max_body_bytes + OVERHEAD_BYTES),
            ("grpc.so_reuseport", int(shared)),
            ("grpc.max_concurrent_streams", MAX_STREAMS),
            ("grpc.max_connection_idle_ms", 1000 * settings.keep_alive_s),
        ],
        interceptors=[Admission(desk, settings, door)],
        # As many as reach the HTTP application; more are answered RESOURCE_EXHAUSTED.
        maximum_concurrent_rpcs=(settings.max_queue_rows + 2 * settings.max_batch_rows) * models,
    )
    interface.add_GRPCInferenceServiceServicer_to_server(Servicer(desk, door), server)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if settings.tls_cert is not None and settings.tls_key is not None:
        bound = server.add_secure_port(address, _credentials(settings.tls_cert, settings.tls_key))
    else:
        bound = server.add_insecure_port(address)
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(settings.deadline_s)


class Admission(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # it has no types
    """Refuses a call before its message is read, as HTTP refuses a request before its body: a call that sends nothing
    holds one of the server's `maximum_concurrent_rpcs`. A call without a right key ends at once. A call of a known
    client ends where its message takes longer than the deadline. A call that needs no key is answered unread."""

    def __init__(self, desk: Desk, settings: Serve, door: "api_keys.Door | None"):
        self._desk, self._settings, self._door = desk, settings, door

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        began, error = time.monotonic(), None
        handler = await continuation(details)
        if self._door is not None and details.method not in OPEN:
            try:
                self._door.identify("predict", _authorization(details.invocation_metadata))
            except RequestError as refusal:
                error = refusal
        if error is None and not inspect.iscoroutinefunction(getattr(handler, "unary_unary", None)):
            return None  # no such call, or one that the servicer has not: gRPC answers UNIMPLEMENTED

        async def answer(requests: AsyncIterator[Any], context: Any) -> Any:
            if details.method in OPEN:
                return await handler.unary_unary(None, context)
            refusal = error
            if refusal is None:
                try:
                    async with asyncio.timeout(self._settings.deadline_s):
                        request = await anext(requests)
                except TimeoutError:
                    refusal = RequestError(408, "the deadline passed before the message had arrived")
                except StopAsyncIteration:
                    refusal = RequestError(400, "the call has no message")
            if refusal is not None:
                # A name that is no call's is the client's, and may be another one each time.
                _count_refused(self._desk, details.method if handler else "other", "", refusal, began)
                await _abort(context, refusal)
            return await handler.unary_unary(request, context)

        if handler is None:
            return grpc.stream_unary_rpc_method_handler(answer)
        return grpc.stream_unary_rpc_method_handler(answer, handler.request_deserializer, handler.response_serializer)


def _authorization(metadata: Any) -> list[bytes]:
    return [value.encode("latin-1", "replace") for name, value in metadata or () if name == "authorization"]


def _count_refused(desk: Desk, route: str, model: str, error: RequestError, began: float) -> None:
    """Count and log a call that was refused, unless it names none of several models."""
    with contextlib.suppress(RequestError, RuntimeError), desk.answering(model, None) as service:
        _tell(service, route, _record(""), "", error.status, began, tracing.NoSpans())


def _credentials(tls_cert: str, tls_key: str) -> grpc.ServerCredentials:
    """Those of the certificate as its files are when a client connects."""
    files = tls.CertificateFiles(tls_cert, tls_key)

    def configured(pair: tls.Pair) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(pair.key, pair.certificate)])

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        pair = files.renewed()
        return None if pair is None else configured(pair)

    return grpc.dynamic_ssl_server_credentials(configured(files.read()), renewed)


class Servicer(interface.GRPCInferenceServiceServicer):  # type: ignore[misc]  # it has no types
    """Whether it lives and is ready it tells without a key, as over HTTP."""

    def __init__(self, desk: Desk, door: "api_keys.Door | None"):
        self._desk, self._door = desk, door

    async def _admitted(self, context: Any, call: str, model: str | None = None) -> "api_keys.Key | None":
        """The key of a call, to that model where it is for one; None where none is asked for. Who is refused is counted
        and logged, but for who names none of several models."""
        if self._door is None:
            return None
        began = time.monotonic()
        try:
            return await self._door.admit("predict", _authorization(context.invocation_metadata()), model)
        except RequestError as error:
            _count_refused(self._desk, f"{CALLS}{call}", model or "", error, began)
            await _abort(context, error)

    @asynccontextmanager
    async def _service(self, context: Any, model: str, version: str | None) -> AsyncIterator["Service"]:
        with ExitStack() as stack:
            try:
                service = stack.enter_context(self._desk.answering(model, version))
            except RequestError as error:
                await _abort(context, error)
            yield service

    async def ServerLive(self, request: Any, context: Any) -> Any:
        return messages.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return messages.ServerReadyResponse(ready=self._desk.ready)

    async def ModelReady(self, request: Any, context: Any) -> Any:
        await self._admitted(context, "ModelReady", request.name)
        async with self._service(context, request.name, request.version or None) as service:
            await _named(service, request, context)
            return messages.ModelReadyResponse(ready=service.ready)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        await self._admitted(context, "ServerMetadata")
        return messages.ServerMetadataResponse(name="rtrain", version=rtrain.__version__)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        await self._admitted(context, "ModelMetadata", request.name)
        async with self._service(context, request.name, request.version or None) as service:
            await _named(service, request, context)
            return messages.ModelMetadataResponse(**service.metadata())

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        key = await self._admitted(context, "RepositoryIndex")
        found = self._desk.index(request.ready, key.models if key else None)
        return messages.RepositoryIndexResponse(models=found)

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        """The best label of each text. Tensors are answered in their raw form, which every client reads."""
        key = await self._admitted(context, "ModelInfer", request.model_name)
        client, record = key.name if key else "", _record(request.id)
        sent = {name.encode(): value for name, value in context.invocation_metadata()}
        traced = {name: sent[name].encode() for name in (b"traceparent", b"tracestate") if name in sent}
        async with self._service(context, request.model_name, request.model_version) as service:
            with service.spans.request(traced) as span:
                began, status = time.monotonic(), CLIENT_GONE
                try:
                    reply = await _infer(service, request, context.time_remaining(), client, record)
                    context.set_trailing_metadata(tuple(parts_of(service.predictor).items()))
                    status = 200
                    return reply
                except RequestError as error:
                    status = error.status
                    await _abort(context, error)
                except Exception:
                    status = 500
                    logger.exception("unexpected error in a request over gRPC")
                    await _abort(context, RequestError(500, "internal error; the server's log has the cause"))
                finally:
                    _tell(service, ROUTE, record, client, status, began, span, judged=not request.model_version)


async def _infer(service: "Service", request: Any, remaining_s: float | None, client: str, record: Record) -> Any:
    deadline_s = service.settings.deadline_s
    deadline = asyncio.get_running_loop().time() + min(deadline_s, deadline_s if remaining_s is None else remaining_s)
    service.named(request.model_name, request.model_version)
    reply, cut = await service.infer(*_asked(request), deadline, record, client)
    outputs = reply.pop("outputs")
    return messages.ModelInferResponse(
        **reply,
        outputs=[{name: tensor[name] for name in ("name", "datatype", "shape")} for tensor in outputs],
        raw_output_contents=[_raw(tensor) for tensor in outputs],
        parameters={"truncated_inputs": messages.InferParameter(int64_param=cut)} if cut else {},
    )


def _record(name: str) -> Record:
    """`name`: the client's for its request; in place of what is none, and may be anything, it gets one of ours."""
    return Record(name if REQUEST_ID.fullmatch(name.encode()) else secrets.token_hex(16))


def _tell(
    service: "Service",
    route: str,
    record: Record,
    client: str,
    status: int,
    began: float,
    span: tracing.Span,
    judged: bool = True,
) -> None:
    """Count, trace and log a request that has ended; `judged` as `Service.answered` has it."""
    seconds = time.monotonic() - began
    service.answered(route, status, seconds, judged)
    made = service.predictor.artifact
    tell(record, client, "POST", route, status, seconds, span, service.access_log, model_of(made))


async def _named(service: "Service", request: Any, context: Any) -> None:
    try:
        service.named(request.name, request.version)
    except RequestError as error:
        await _abort(context, error)


def _asked(request: Any) -> tuple[open_inference.InferRequest, bytes]:
    """The same question as over HTTP: its description, checked by the same parser, and its texts in binary form."""
    inline = [open_inference.packed(tensor.contents.bytes_contents) for tensor in request.inputs]
    raw = list(request.raw_input_contents) or inline
    if len(raw) != len(request.inputs):
        raise RequestError(422, f"{len(raw)} raw contents for {len(request.inputs)} tensors", "raw_input_contents")
    document: dict[str, Any] = {
        "inputs": [
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": list(tensor.shape),
                "parameters": {"binary_data_size": len(part)},
            }
            for tensor, part in zip(request.inputs, raw, strict=True)
        ],
        "outputs": [{"name": output.name} for output in request.outputs],
        "parameters": {name: _value(one) for name, one in request.parameters.items()},
    }
    if request.id:
        document["id"] = request.id
    return predict.parse(open_inference.InferRequest, json.dumps(document).encode()), b"".join(raw)


def _value(parameter: Any) -> Any:
    """Whatever kind it is of; None where it has none."""
    kind = parameter.WhichOneof("parameter_choice")
    return getattr(parameter, kind) if kind else None


def _raw(tensor: dict[str, Any]) -> bytes:
    if tensor["datatype"] == "BYTES":
        return open_inference.packed(text.encode() for text in tensor["data"])
    return np.asarray(tensor["data"], dtype="<f4").tobytes()


async def _abort(context: Any, error: RequestError) -> NoReturn:
    """End the call with the error's code; what HTTP says in headers, e.g. retry-after, is said in trailing metadata."""
    await context.abort(CODES[error.status], error.line, tuple(error.headers.items()))
    raise AssertionError("abort has raised")
