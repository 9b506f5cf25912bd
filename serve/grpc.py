"""The Open Inference Protocol over gRPC, with the `ModelService`, batcher, limits and errors of the HTTP application.

Messages and servicer come from Triton's client (the extra `grpc`). Methods of KServe or Triton that this endpoint
lacks, e.g. loading models and shared memory, are answered UNIMPLEMENTED.
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
from rtrain.config import ServeConfig
from serve.app import ModelProvider
from serve.ingress import tls
from serve.middleware import REQUEST_ID_PATTERN, RequestContext, version_headers
from serve.observability import tracing
from serve.schemas import open_inference, predict
from serve.schemas.predict import RequestError

if TYPE_CHECKING:
    from serve.auth import api_keys
    from serve.model import ModelService

logger = logging.getLogger(__name__)

GRPC_CODES = {
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
SERVICE_PREFIX = "/inference.GRPCInferenceService/"
INFER_ROUTE = f"{SERVICE_PREFIX}ModelInfer"
"""Its name in the metrics."""
OVERHEAD_BYTES = 100_000
"""Limit for a message without its texts: names, shapes and lengths. `serve.max_body_bytes` limits the texts."""
MAX_STREAMS = 128
"""Calls of one connection at a time; a client keeps further calls until one ends. HTTP/2 recommends 100 or more."""
PUBLIC_METHODS = frozenset({f"{SERVICE_PREFIX}ServerLive", f"{SERVICE_PREFIX}ServerReady"})
"""Calls that need no key."""


@asynccontextmanager
async def serve_grpc(
    provider: ModelProvider,
    settings: ServeConfig,
    port: int,
    authenticator: "api_keys.Authenticator | None" = None,
    is_port_shared: bool = True,
) -> AsyncIterator[int]:
    """Listen while the context is open; gives the port. At its end requests in progress are answered first.
    `authenticator` asks for keys, in the metadata `authorization`; with a certificate clients encrypt.
    `is_port_shared`: replicas listen at the same port, among which the system deals connections.

    Raises RuntimeError where the port is in use.
    """
    host = settings.host
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", settings.max_body_bytes + OVERHEAD_BYTES),
            ("grpc.so_reuseport", int(is_port_shared)),
            ("grpc.max_concurrent_streams", MAX_STREAMS),
            ("grpc.max_connection_idle_ms", 1000 * settings.keep_alive_s),
        ],
        interceptors=[AuthInterceptor(provider, settings, authenticator)],
        # As many as reach the HTTP application; more are answered RESOURCE_EXHAUSTED.
        maximum_concurrent_rpcs=(settings.max_queued_inputs + 2 * settings.max_batch_size) * len(provider.model_names),
    )
    interface.add_GRPCInferenceServiceServicer_to_server(Servicer(provider, authenticator), server)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if settings.tls_cert is not None and settings.tls_key is not None:
        bound = server.add_secure_port(address, _make_credentials(settings.tls_cert, settings.tls_key))
    else:
        bound = server.add_insecure_port(address)
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(settings.request_timeout_s)


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # it has no types
    """Refuses a call before its message is read, as HTTP refuses a request before its body: a call that sends nothing
    holds one of the server's `maximum_concurrent_rpcs`. A call without a right key ends at once. A call of a known
    client ends where its message takes longer than the deadline. A call that needs no key is answered unread."""

    def __init__(self, provider: ModelProvider, settings: ServeConfig, authenticator: "api_keys.Authenticator | None"):
        self._provider, self._settings, self._authenticator = provider, settings, authenticator

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        started_at, error = time.monotonic(), None
        handler = await continuation(details)
        if self._authenticator is not None and details.method not in PUBLIC_METHODS:
            try:
                self._authenticator.authenticate("predict", _read_authorization(details.invocation_metadata))
            except RequestError as refusal:
                error = refusal
        if error is None and not inspect.iscoroutinefunction(getattr(handler, "unary_unary", None)):
            return None  # unknown method: gRPC answers UNIMPLEMENTED

        async def answer_call(requests: AsyncIterator[Any], context: Any) -> Any:
            if details.method in PUBLIC_METHODS:
                return await handler.unary_unary(None, context)
            rejection = error
            if rejection is None:
                try:
                    async with asyncio.timeout(self._settings.request_timeout_s):
                        request = await anext(requests)
                except TimeoutError:
                    rejection = RequestError(408, "the deadline passed before the message had arrived")
                except StopAsyncIteration:
                    rejection = RequestError(400, "the call has no message")
            if rejection is not None:
                # A name that is no call's is the client's, and may be another one each time.
                _count_refused(self._provider, details.method if handler else "other", "", rejection, started_at)
                await _abort_call(context, rejection)
            return await handler.unary_unary(request, context)

        if handler is None:
            return grpc.stream_unary_rpc_method_handler(answer_call)
        return grpc.stream_unary_rpc_method_handler(
            answer_call, handler.request_deserializer, handler.response_serializer
        )


def _read_authorization(metadata: Any) -> list[bytes]:
    return [value.encode("latin-1", "replace") for name, value in metadata or () if name == "authorization"]


def _count_refused(provider: ModelProvider, route: str, model: str, error: RequestError, started_at: float) -> None:
    """Count and log a call that was refused, unless it names none of several models."""
    with contextlib.suppress(RequestError), provider.service_for(model, None) as service:
        request_context = _make_context(route)
        request_context.status = error.status
        _record_response(service, request_context, time.monotonic() - started_at, tracing.RequestSpan())


def _make_credentials(tls_cert: str, tls_key: str) -> grpc.ServerCredentials:
    """Those of the certificate as its files are when a client connects."""
    certificate_files = tls.CertificateFiles(tls_cert, tls_key)

    def make_configuration(pair: tls.CertificatePair) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(pair.key, pair.certificate)])

    def fetch_renewed() -> grpc.ServerCertificateConfiguration | None:
        pair = certificate_files.read_renewed()
        return None if pair is None else make_configuration(pair)

    return grpc.dynamic_ssl_server_credentials(make_configuration(certificate_files.read()), fetch_renewed)


class Servicer(interface.GRPCInferenceServiceServicer):  # type: ignore[misc]  # it has no types
    """Whether it lives and is ready it tells without a key, as over HTTP."""

    def __init__(self, provider: ModelProvider, authenticator: "api_keys.Authenticator | None"):
        self._provider, self._authenticator = provider, authenticator

    async def _authorize(self, context: Any, call: str, model: str | None = None) -> "api_keys.ApiKey | None":
        """The key of a call, to that model where it is for one; None where none is asked for. Who is refused is counted
        and logged, but for who names none of several models."""
        if self._authenticator is None:
            return None
        started_at = time.monotonic()
        try:
            return await self._authenticator.authorize(
                "predict", _read_authorization(context.invocation_metadata()), model
            )
        except RequestError as error:
            _count_refused(self._provider, f"{SERVICE_PREFIX}{call}", model or "", error, started_at)
            await _abort_call(context, error)

    @asynccontextmanager
    async def _open_service(self, context: Any, model: str, version: str | None) -> AsyncIterator["ModelService"]:
        with ExitStack() as stack:
            try:
                service = stack.enter_context(self._provider.service_for(model, version))
            except RequestError as error:
                await _abort_call(context, error)
            yield service

    @asynccontextmanager
    async def _open_target(self, context: Any, call: str, request: Any) -> AsyncIterator["ModelService"]:
        """The service of a call that runs no inference; ends a call without a right key, or to another model."""
        await self._authorize(context, call, request.name)
        async with self._open_service(context, request.name, request.version or None) as service:
            try:
                service.check_target(request.name, request.version)
            except RequestError as error:
                await _abort_call(context, error)
            yield service

    async def ServerLive(self, request: Any, context: Any) -> Any:
        return messages.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return messages.ServerReadyResponse(ready=self._provider.is_ready)

    async def ModelReady(self, request: Any, context: Any) -> Any:
        async with self._open_target(context, "ModelReady", request) as service:
            return messages.ModelReadyResponse(ready=service.is_ready)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        await self._authorize(context, "ServerMetadata")
        return messages.ServerMetadataResponse(name="rtrain", version=rtrain.__version__)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        async with self._open_target(context, "ModelMetadata", request) as service:
            return messages.ModelMetadataResponse(**service.metadata())

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        key = await self._authorize(context, "RepositoryIndex")
        models = self._provider.list_models(request.ready, key.models if key else None)
        return messages.RepositoryIndexResponse(models=models)

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        """The best label of each text. Tensors are answered in their raw form, which every client reads."""
        key = await self._authorize(context, "ModelInfer", request.model_name)
        request_context = _make_context(INFER_ROUTE, request.id, key)
        metadata = {name.encode(): value for name, value in context.invocation_metadata()}
        trace_headers = {name: metadata[name].encode() for name in (b"traceparent", b"tracestate") if name in metadata}
        async with self._open_service(context, request.model_name, request.model_version) as service:
            with service.tracer.request_span(trace_headers) as span:
                started_at = time.monotonic()
                try:
                    reply = await _infer(service, request, context.time_remaining(), request_context)
                    context.set_trailing_metadata(tuple(version_headers(service.predictor).items()))
                    request_context.status = 200
                    return reply
                except RequestError as error:
                    request_context.status = error.status
                    await _abort_call(context, error)
                except Exception:
                    request_context.status = 500
                    logger.exception("unexpected error in a request over gRPC")
                    await _abort_call(context, RequestError(500, "internal error; the server's log has the cause"))
                finally:
                    is_canary_sample = not request.model_version
                    _record_response(service, request_context, time.monotonic() - started_at, span, is_canary_sample)


async def _infer(
    service: "ModelService", request: Any, remaining_s: float | None, request_context: RequestContext
) -> Any:
    deadline_s = service.settings.request_timeout_s
    deadline = asyncio.get_running_loop().time() + min(deadline_s, deadline_s if remaining_s is None else remaining_s)
    service.check_target(request.model_name, request.model_version)
    reply = await service.infer(*_parse_request(request), deadline, request_context)
    truncated_inputs, outputs = request_context.truncated_inputs, reply.pop("outputs")
    return messages.ModelInferResponse(
        **reply,
        outputs=[{name: tensor[name] for name in ("name", "datatype", "shape")} for tensor in outputs],
        raw_output_contents=[_raw_contents(tensor) for tensor in outputs],
        parameters={"truncated_inputs": messages.InferParameter(int64_param=truncated_inputs)}
        if truncated_inputs
        else {},
    )


def _make_context(route: str, request_id: str = "", key: "api_keys.ApiKey | None" = None) -> RequestContext:
    """`request_id`: the client's id of its request; a missing or invalid id is replaced by a generated one."""
    is_valid = REQUEST_ID_PATTERN.fullmatch(request_id)
    return RequestContext(request_id if is_valid else secrets.token_hex(16), route=route, key=key)


def _record_response(
    service: "ModelService",
    request_context: RequestContext,
    seconds: float,
    span: tracing.RequestSpan,
    is_canary_sample: bool = True,
) -> None:
    """Count, trace and log a finished request; `is_canary_sample`: see `ModelService.record_response`."""
    service.record_response(request_context.route, request_context.status, seconds, is_canary_sample)
    service.recorder.log(request_context, span, seconds)


def _parse_request(message: Any) -> tuple[open_inference.InferRequest, bytes]:
    """The same question as over HTTP: its description, checked by the same parser, and its texts in binary form."""
    inline = [open_inference.pack_texts(tensor.contents.bytes_contents) for tensor in message.inputs]
    raw = list(message.raw_input_contents) or inline
    if len(raw) != len(message.inputs):
        raise RequestError(422, f"{len(raw)} raw contents for {len(message.inputs)} tensors", "raw_input_contents")
    document: dict[str, Any] = {
        "inputs": [
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": list(tensor.shape),
                "parameters": {"binary_data_size": len(part)},
            }
            for tensor, part in zip(message.inputs, raw, strict=True)
        ],
        "outputs": [{"name": output.name} for output in message.outputs],
        "parameters": {name: _parameter_value(parameter) for name, parameter in message.parameters.items()},
    }
    if message.id:
        document["id"] = message.id
    return predict.parse_request(open_inference.InferRequest, json.dumps(document).encode()), b"".join(raw)


def _parameter_value(parameter: Any) -> Any:
    """Whatever kind it is of; None where it has none."""
    kind = parameter.WhichOneof("parameter_choice")
    return getattr(parameter, kind) if kind else None


def _raw_contents(tensor: dict[str, Any]) -> bytes:
    if tensor["datatype"] == "BYTES":
        return open_inference.pack_texts(text.encode() for text in tensor["data"])
    return np.asarray(tensor["data"], dtype="<f4").tobytes()


async def _abort_call(context: Any, error: RequestError) -> NoReturn:
    """End the call with the error's code; headers such as retry-after become trailing metadata."""
    await context.abort(GRPC_CODES[error.status], error.single_line, tuple(error.headers.items()))
    raise AssertionError("abort has raised")
