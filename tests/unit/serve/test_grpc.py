"""The endpoint over gRPC under pressure: deadlines, a full queue, clients that leave, errors, the end."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.grpc import service_pb2 as messages, service_pb2_grpc as interface

from rtrain.config import ServeConfig
from rtrain.inference.predictor import Predictor
from serve import middleware
from serve.auth import api_keys
from serve.grpc import INFER_ROUTE, serve_grpc
from serve.model import ModelService
from tests.support import serving as shared
from tests.support.certificates import make_certificate
from tests.support.serving import TEXT, Gate

gate, predictor = shared.gate, shared.predictor  # fixtures


def question(*texts: str) -> Any:
    tensor = messages.ModelInferRequest.InferInputTensor(name="text", datatype="BYTES", shape=[len(texts)])
    tensor.contents.bytes_contents.extend(text.encode() for text in texts)
    return messages.ModelInferRequest(model_name="tiny", inputs=[tensor])


@asynccontextmanager
async def asking(service: ModelService) -> AsyncIterator[Any]:
    """A client of the service, both in this loop."""
    async with (
        serve_grpc(service, service.settings, 0, middleware.make_authenticator(service.settings)) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield interface.GRPCInferenceServiceStub(channel)
    service.close()


async def refused(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value


async def counted(service: ModelService, status: int) -> None:
    """Wait until a request has ended so: the server may learn of it later than its client."""
    while (
        f'rtrain_requests_total{{model="tiny",route="{INFER_ROUTE}",status="{status}"}} 1.0'
        not in service.render_metrics()
    ):
        await asyncio.sleep(0.001)


def test_texts_in_messages_are_answered_like_raw_ones(predictor: Predictor) -> None:
    async def main() -> None:
        async with asking(ModelService(predictor, ServeConfig())) as stub:
            reply = await stub.ModelInfer(question(TEXT, "long " * 200))
            assert reply.parameters["truncated_inputs"].int64_param == 1
            raw = question(TEXT, "long " * 200)
            raw.inputs[0].ClearField("contents")
            raw.raw_input_contents.append(
                b"".join(len(t).to_bytes(4, "little") + t for t in (TEXT.encode(), b"long " * 200))
            )
            assert (await stub.ModelInfer(raw)).raw_output_contents == reply.raw_output_contents
            raw.raw_input_contents.append(b"")
            for wrong, field in (
                (raw, "raw_input_contents"),
                (messages.ModelInferRequest(model_name="tiny"), "inputs"),
            ):
                error = await refused(stub.ModelInfer(wrong))
                assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
                assert str(error.details()).startswith(f"{field}: ")

    asyncio.run(main())


def test_a_parameter_without_a_value_is_one_that_was_not_given_and_a_wrong_one_is_the_client_s_fault(
    predictor: Predictor,
) -> None:
    async def main() -> None:
        async with asking(ModelService(predictor, ServeConfig())) as stub:
            plain = await stub.ModelInfer(question(TEXT))
            for name in ("a", "top_k"):
                request = question(TEXT)
                request.parameters[name].SetInParent()
                assert await stub.ModelInfer(request) == plain
            for wrong in ({}, {"int64_param": 3}, {"double_param": float("nan")}, {"string_param": "true"}):
                request = question(TEXT)
                request.parameters["abstain"].CopyFrom(messages.InferParameter(**wrong))
                assert (await refused(stub.ModelInfer(request))).code() == grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(main())


def test_a_full_queue_is_unavailable_and_says_when_to_come_back(predictor: Predictor, gate: Gate) -> None:
    service = ModelService(predictor, ServeConfig(max_queued_inputs=1))

    async def main() -> None:
        async with asking(service) as stub:
            accepted = [asyncio.ensure_future(stub.ModelInfer(question(TEXT)))]
            await gate.entered()
            accepted.append(asyncio.ensure_future(stub.ModelInfer(question(TEXT))))
            while service.batcher.queued_rows < 1:
                await asyncio.sleep(0.001)
            error = await refused(stub.ModelInfer(question(TEXT)))
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            assert dict(error.trailing_metadata())["retry-after"] == "1"
            gate.open()
            assert [reply.outputs[0].name for reply in await asyncio.gather(*accepted)] == ["label", "label"]

    asyncio.run(main())


@pytest.mark.parametrize(("deadline_s", "timeout_s"), [(0.1, 20), (20, 0.1)])
def test_the_deadline_of_the_endpoint_or_of_the_client_ends_the_wait(
    predictor: Predictor, gate: Gate, deadline_s: float, timeout_s: float
) -> None:
    service = ModelService(predictor, ServeConfig(request_timeout_s=deadline_s))

    async def main() -> None:
        async with asking(service) as stub:
            while not gate.rows:  # on a busy machine one may expire before the engine has it
                error = await refused(stub.ModelInfer(question(TEXT), timeout=timeout_s))
                assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            error = await refused(stub.ModelInfer(question(TEXT), timeout=timeout_s))
            assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            while service.batcher.queued_rows:
                await asyncio.sleep(0.001)
            gate.open()

    asyncio.run(main())
    assert gate.rows == 1, "a text was computed that nobody awaited"


def test_the_texts_of_a_client_that_left_never_reach_the_engine(predictor: Predictor, gate: Gate) -> None:
    service = ModelService(predictor, ServeConfig())

    async def main() -> None:
        async with asking(service) as stub:
            first = asyncio.ensure_future(stub.ModelInfer(question(TEXT)))
            await gate.entered()
            gone = stub.ModelInfer(question(TEXT, TEXT))
            waits = asyncio.ensure_future(gone)
            while service.batcher.queued_rows < 2:
                await asyncio.sleep(0.001)
            gone.cancel()
            await asyncio.wait([waits])
            while service.batcher.queued_rows:
                await asyncio.sleep(0.001)
            gate.open()
            await first
            await counted(service, 499)

    asyncio.run(main())
    assert gate.rows == 1


def test_what_was_accepted_is_answered_before_the_end(predictor: Predictor, gate: Gate) -> None:
    service = ModelService(predictor, ServeConfig())

    async def main() -> None:
        async with serve_grpc(service, service.settings, 0, middleware.make_authenticator(service.settings)) as port:
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
            accepted = asyncio.ensure_future(interface.GRPCInferenceServiceStub(channel).ModelInfer(question(TEXT)))
            await gate.entered()
            asyncio.get_running_loop().call_later(0.1, gate.open)
        assert (await accepted).model_name == "tiny"
        await channel.close()

    asyncio.run(main())
    service.close()


def test_grpc_asks_for_the_keys_that_http_asks_for(predictor: Predictor, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    plain = api_keys.add_key(path, "shop", rate="3/hour")
    metrics = api_keys.add_key(path, "watch", ("metrics",))

    async def main() -> None:
        async with asking(ModelService(predictor, ServeConfig(keys=str(path)))) as stub:
            assert (await stub.ServerLive(messages.ServerLiveRequest())).live
            assert (await stub.ServerReady(messages.ServerReadyRequest())).ready
            wrong = (None, "Bearer rtrain_00000000_" + "x" * 43, f"Bearer {metrics}")
            codes = (*(grpc.StatusCode.UNAUTHENTICATED,) * 2, grpc.StatusCode.PERMISSION_DENIED)
            for value, code in zip(wrong, codes, strict=True):
                metadata = () if value is None else (("authorization", value),)
                for call, message in (
                    (stub.ModelInfer, question(TEXT)),
                    (stub.RepositoryIndex, messages.RepositoryIndexRequest()),
                    (stub.ModelMetadata, messages.ModelMetadataRequest(name="tiny")),
                ):
                    assert (await refused(call(message, metadata=metadata))).code() == code
            right = (("authorization", f"Bearer {plain}"),)
            for _ in range(3):
                assert len((await stub.ModelInfer(question(TEXT), metadata=right)).outputs) == 2
            error = await refused(stub.ModelInfer(question(TEXT), metadata=right))
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert int(dict(error.trailing_metadata() or ())["retry-after"]) > 0

    asyncio.run(main())


async def never() -> AsyncIterator[bytes]:
    """A call whose message does not come."""
    await asyncio.Event().wait()
    yield b""


def silent(channel: Any, route: str, *metadata: tuple[str, str]) -> Any:
    call = channel.stream_unary(route, request_serializer=bytes, response_deserializer=bytes)
    return call(never(), metadata=metadata, timeout=30)


def test_calls_without_a_key_end_before_their_message_and_leave_room_for_others(
    predictor: Predictor, tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    right = ("authorization", f"Bearer {api_keys.add_key(path, 'shop')}")
    settings = ServeConfig(keys=str(path), max_queued_inputs=1, max_batch_size=1)  # three calls at a time

    service = ModelService(predictor, settings)

    async def main() -> None:
        async with (
            serve_grpc(service, settings, 0, middleware.make_authenticator(settings)) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            for route in (INFER_ROUTE, INFER_ROUTE.replace("ModelInfer", "ModelStreamInfer"), "/no/Such"):
                for _ in range(5):
                    assert (await refused(silent(channel, route))).code() == grpc.StatusCode.UNAUTHENTICATED
            for _ in range(5):
                assert await silent(channel, INFER_ROUTE.replace("ModelInfer", "ServerLive"))
            stub = interface.GRPCInferenceServiceStub(channel)
            assert (await stub.ModelInfer(question(TEXT), metadata=(right,))).model_name == "tiny"

    asyncio.run(main())
    assert f'{{model="tiny",route="{INFER_ROUTE}",status="401"}} 5.0' in service.render_metrics()
    assert '{model="tiny",route="other",status="401"} 5.0' in service.render_metrics(), "a name of the client's is kept"


def test_a_message_has_to_arrive_within_the_deadline(predictor: Predictor) -> None:
    service = ModelService(predictor, ServeConfig(request_timeout_s=0.2))

    async def main() -> None:
        async with (
            serve_grpc(service, service.settings, 0) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            assert (await refused(silent(channel, INFER_ROUTE))).code() == grpc.StatusCode.DEADLINE_EXCEEDED

    asyncio.run(main())
    assert f'rtrain_requests_total{{model="tiny",route="{INFER_ROUTE}",status="408"}} 1.0' in service.render_metrics()
    assert service.errors == 0, "a canary is not judged by a client's silence"


def test_one_connection_does_not_take_all_calls(predictor: Predictor) -> None:
    settings = ServeConfig(max_queued_inputs=198, max_batch_size=1)  # 200 calls at a time

    async def main() -> None:
        async with (
            serve_grpc(ModelService(predictor, settings), settings, 0) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}", (("grpc.use_local_subchannel_pool", 1),)) as other,
        ):
            calls = [silent(channel, INFER_ROUTE) for _ in range(300)]
            live = interface.GRPCInferenceServiceStub(other).ServerLive
            for _ in range(20):
                assert (await live(messages.ServerLiveRequest())).live
                await asyncio.sleep(0.01)
            for call in calls:
                call.cancel()

    asyncio.run(main())


def test_a_connection_without_calls_ends_after_a_while(predictor: Predictor) -> None:
    service = ModelService(predictor, ServeConfig(keep_alive_s=1))

    async def main() -> None:
        async with (
            serve_grpc(service, service.settings, 0) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            await interface.GRPCInferenceServiceStub(channel).ServerLive(messages.ServerLiveRequest())
            while channel.get_state() != grpc.ChannelConnectivity.IDLE:
                await asyncio.sleep(0.01)
            assert (await interface.GRPCInferenceServiceStub(channel).ServerLive(messages.ServerLiveRequest())).live

    asyncio.run(asyncio.wait_for(main(), 60))


def test_questions_and_whoever_is_refused_are_counted_and_logged_as_over_http(
    predictor: Predictor, tmp_path: Path
) -> None:
    path, log = tmp_path / "keys.json", tmp_path / "asked.log"
    key = (("authorization", f"Bearer {api_keys.add_key(path, 'shop')}"),)
    service = ModelService(predictor, ServeConfig(keys=str(path), access_log=str(log)))

    async def main() -> None:
        async with asking(service) as stub:
            await refused(stub.ModelInfer(question(TEXT)))
            await refused(stub.RepositoryIndex(messages.RepositoryIndexRequest()))
            for name in ("mine", "a word of the client's"):
                request = question(TEXT)
                request.id = name
                assert (await stub.ModelInfer(request, metadata=key)).id == name
            await refused(stub.ModelInfer(messages.ModelInferRequest(model_name="tiny"), metadata=key))

    asyncio.run(main())
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    index = INFER_ROUTE.replace("ModelInfer", "RepositoryIndex")
    summaries = [(line["client"], line["method"], line["route"], line["status"], line["inputs"]) for line in lines]
    assert summaries == [
        ("", "POST", INFER_ROUTE, 401, 0),
        ("", "POST", index, 401, 0),
        ("shop", "POST", INFER_ROUTE, 200, 1),
        ("shop", "POST", INFER_ROUTE, 200, 1),
        ("shop", "POST", INFER_ROUTE, 422, 0),
    ]
    assert {(line["model"], line["version"]) for line in lines} == {("tiny", predictor.artifact.version)}
    assert [line["id"] == "mine" for line in lines] == [False, False, True, False, False]
    assert len({line["id"] for line in lines}) == 5
    assert "word" not in log.read_text()
    for route, status, count in ((INFER_ROUTE, 401, 1), (index, 401, 1), (INFER_ROUTE, 200, 2), (INFER_ROUTE, 422, 1)):
        line = f'rtrain_requests_total{{model="tiny",route="{route}",status="{status}"}} {count}.0'
        assert line in service.render_metrics().splitlines()


def test_a_renewed_certificate_is_that_of_new_connections(predictor: Predictor, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    old = Path(certificate).read_bytes()
    service = ModelService(predictor, ServeConfig())

    async def main() -> None:
        async with serve_grpc(service, ServeConfig(tls_cert=certificate, tls_key=key), 0) as port:

            def channel(root: bytes) -> grpc.aio.Channel:
                return grpc.aio.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(root))

            async with channel(old) as standing:
                before = interface.GRPCInferenceServiceStub(standing)
                await before.ModelInfer(question(TEXT))
                make_certificate(tmp_path)
                async with channel(Path(certificate).read_bytes()) as other:
                    await interface.GRPCInferenceServiceStub(other).ModelInfer(question(TEXT), timeout=10)
                await before.ModelInfer(question(TEXT))  # its connection stays open

    asyncio.run(main())
    service.close()


def test_with_a_certificate_it_encrypts_and_answers_nobody_who_does_not(predictor: Predictor, tmp_path: Path) -> None:
    """Third-party clients: gRPC's own, and Triton's."""
    certificate, key = make_certificate(tmp_path)
    path = tmp_path / "keys.json"
    plain = api_keys.add_key(path, "shop")
    settings = ServeConfig(keys=str(path), tls_cert=certificate, tls_key=key)
    metadata = (("authorization", f"Bearer {plain}"),)
    trusted = grpc.ssl_channel_credentials(Path(certificate).read_bytes())
    stranger, _ = make_certificate(tmp_path / "stranger")
    service = ModelService(predictor, settings)

    def asked_by_triton(port: int) -> str:
        tensor = tritonclient.grpc.InferInput("text", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([TEXT.encode()], dtype=np.object_))
        client = tritonclient.grpc.InferenceServerClient(
            f"127.0.0.1:{port}", ssl=True, root_certificates=certificate, verbose=False
        )
        with client:
            result = client.infer("tiny", [tensor], headers={"authorization": f"Bearer {plain}"})
            return str(result.as_numpy("label")[0], "utf-8")

    async def main() -> None:
        async with serve_grpc(service, settings, 0, middleware.make_authenticator(settings)) as port:
            address = f"127.0.0.1:{port}"
            async with grpc.aio.secure_channel(address, trusted) as channel:
                stub = interface.GRPCInferenceServiceStub(channel)
                reply = await stub.ModelInfer(question(TEXT), metadata=metadata)
                assert reply.raw_output_contents[0][4:].decode() == predictor([TEXT])[0][0]["label"]
                # A call without the key is refused by the endpoint: the connection itself has been made.
                assert (await refused(stub.ModelInfer(question(TEXT)))).code() == grpc.StatusCode.UNAUTHENTICATED
            assert await asyncio.to_thread(asked_by_triton, port) == predictor([TEXT])[0][0]["label"]
            wrong = grpc.ssl_channel_credentials(Path(stranger).read_bytes())
            for other in (grpc.aio.insecure_channel(address), grpc.aio.secure_channel(address, wrong)):
                async with other as channel:
                    stub = interface.GRPCInferenceServiceStub(channel)
                    call = stub.ModelInfer(question(TEXT), metadata=metadata, timeout=10)
                    assert (await refused(call)).code() == grpc.StatusCode.UNAVAILABLE

    asyncio.run(main())
    service.close()
