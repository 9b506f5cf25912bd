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

from rtrain.config import Serve
from rtrain.inference.predictor import Predictor
from serve.auth import api_keys, middleware
from serve.grpc import ROUTE, serving
from serve.model import Service
from tests import serving as shared
from tests.certificates import make_certificate
from tests.serving import TEXT, Gate

gate, predictor = shared.gate, shared.predictor  # fixtures


def question(*texts: str) -> Any:
    tensor = messages.ModelInferRequest.InferInputTensor(name="text", datatype="BYTES", shape=[len(texts)])
    tensor.contents.bytes_contents.extend(text.encode() for text in texts)
    return messages.ModelInferRequest(model_name="tiny", inputs=[tensor])


@asynccontextmanager
async def asking(service: Service) -> AsyncIterator[Any]:
    """A client of the service, both in this loop."""
    async with (
        serving(service, service.settings, 0, middleware.door(service.settings)) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield interface.GRPCInferenceServiceStub(channel)
    service.close()


async def refused(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as found:
        await call
    return found.value


async def counted(service: Service, status: int) -> None:
    """Wait until a request has ended so: the server may learn of it later than its client."""
    while f'rtrain_requests_total{{model="tiny",route="{ROUTE}",status="{status}"}} 1.0' not in service.exposition():
        await asyncio.sleep(0.001)


def test_texts_in_messages_are_answered_like_raw_ones(predictor: Predictor) -> None:
    async def main() -> None:
        async with asking(Service(predictor, Serve())) as stub:
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
        async with asking(Service(predictor, Serve())) as stub:
            plain = await stub.ModelInfer(question(TEXT))
            for name in ("a", "top_k"):
                asked = question(TEXT)
                asked.parameters[name].SetInParent()
                assert await stub.ModelInfer(asked) == plain
            for wrong in ({}, {"int64_param": 3}, {"double_param": float("nan")}, {"string_param": "true"}):
                asked = question(TEXT)
                asked.parameters["abstain"].CopyFrom(messages.InferParameter(**wrong))
                assert (await refused(stub.ModelInfer(asked))).code() == grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(main())


def test_a_full_queue_is_unavailable_and_says_when_to_come_back(predictor: Predictor, gate: Gate) -> None:
    service = Service(predictor, Serve(max_queue_rows=1))

    async def main() -> None:
        async with asking(service) as stub:
            accepted = [asyncio.ensure_future(stub.ModelInfer(question(TEXT)))]
            await gate.entered()
            accepted.append(asyncio.ensure_future(stub.ModelInfer(question(TEXT))))
            while service.batcher.waiting < 1:
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
    service = Service(predictor, Serve(deadline_s=deadline_s))

    async def main() -> None:
        async with asking(service) as stub:
            while not gate.rows:  # on a busy machine the time of one may pass before the engine has it
                error = await refused(stub.ModelInfer(question(TEXT), timeout=timeout_s))
                assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            error = await refused(stub.ModelInfer(question(TEXT), timeout=timeout_s))
            assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            while service.batcher.waiting:
                await asyncio.sleep(0.001)
            gate.open()

    asyncio.run(main())
    assert gate.rows == 1, "a text was computed that nobody awaited"


def test_the_texts_of_a_client_that_left_never_reach_the_engine(predictor: Predictor, gate: Gate) -> None:
    service = Service(predictor, Serve())

    async def main() -> None:
        async with asking(service) as stub:
            first = asyncio.ensure_future(stub.ModelInfer(question(TEXT)))
            await gate.entered()
            gone = stub.ModelInfer(question(TEXT, TEXT))
            waits = asyncio.ensure_future(gone)
            while service.batcher.waiting < 2:
                await asyncio.sleep(0.001)
            gone.cancel()
            await asyncio.wait([waits])
            while service.batcher.waiting:
                await asyncio.sleep(0.001)
            gate.open()
            await first
            await counted(service, 499)

    asyncio.run(main())
    assert gate.rows == 1


def test_what_was_accepted_is_answered_before_the_end(predictor: Predictor, gate: Gate) -> None:
    service = Service(predictor, Serve())

    async def main() -> None:
        async with serving(service, service.settings, 0, middleware.door(service.settings)) as port:
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
    plain = api_keys.add(path, "shop", rate="3/hour")
    metrics = api_keys.add(path, "watch", ("metrics",))

    async def main() -> None:
        async with asking(Service(predictor, Serve(keys=str(path)))) as stub:
            assert (await stub.ServerLive(messages.ServerLiveRequest())).live
            assert (await stub.ServerReady(messages.ServerReadyRequest())).ready
            wrong = (None, "Bearer rtrain_00000000_" + "x" * 43, f"Bearer {metrics}")
            codes = (*(grpc.StatusCode.UNAUTHENTICATED,) * 2, grpc.StatusCode.PERMISSION_DENIED)
            for value, code in zip(wrong, codes, strict=True):
                given = () if value is None else (("authorization", value),)
                for call, message in (
                    (stub.ModelInfer, question(TEXT)),
                    (stub.RepositoryIndex, messages.RepositoryIndexRequest()),
                    (stub.ModelMetadata, messages.ModelMetadataRequest(name="tiny")),
                ):
                    assert (await refused(call(message, metadata=given))).code() == code
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
    right = ("authorization", f"Bearer {api_keys.add(path, 'shop')}")
    settings = Serve(keys=str(path), max_queue_rows=1, max_batch_rows=1)  # three calls at a time

    service = Service(predictor, settings)

    async def main() -> None:
        async with (
            serving(service, settings, 0, middleware.door(settings)) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            for route in (ROUTE, ROUTE.replace("ModelInfer", "ModelStreamInfer"), "/no/Such"):
                for _ in range(5):
                    assert (await refused(silent(channel, route))).code() == grpc.StatusCode.UNAUTHENTICATED
            for _ in range(5):
                assert await silent(channel, ROUTE.replace("ModelInfer", "ServerLive"))
            stub = interface.GRPCInferenceServiceStub(channel)
            assert (await stub.ModelInfer(question(TEXT), metadata=(right,))).model_name == "tiny"

    asyncio.run(main())
    assert f'{{model="tiny",route="{ROUTE}",status="401"}} 5.0' in service.exposition()
    assert '{model="tiny",route="other",status="401"} 5.0' in service.exposition(), "a name of the client's is kept"


def test_a_message_has_to_arrive_within_the_deadline(predictor: Predictor) -> None:
    service = Service(predictor, Serve(deadline_s=0.2))

    async def main() -> None:
        async with (
            serving(service, service.settings, 0) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            assert (await refused(silent(channel, ROUTE))).code() == grpc.StatusCode.DEADLINE_EXCEEDED

    asyncio.run(main())
    assert f'rtrain_requests_total{{model="tiny",route="{ROUTE}",status="408"}} 1.0' in service.exposition()
    assert service.errors == 0, "a version on trial is not judged by a client's silence"


def test_one_connection_does_not_take_all_calls(predictor: Predictor) -> None:
    settings = Serve(max_queue_rows=198, max_batch_rows=1)  # 200 calls at a time

    async def main() -> None:
        async with (
            serving(Service(predictor, settings), settings, 0) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}", (("grpc.use_local_subchannel_pool", 1),)) as other,
        ):
            held = [silent(channel, ROUTE) for _ in range(300)]
            live = interface.GRPCInferenceServiceStub(other).ServerLive
            for _ in range(20):
                assert (await live(messages.ServerLiveRequest())).live
                await asyncio.sleep(0.01)
            for call in held:
                call.cancel()

    asyncio.run(main())


def test_a_connection_without_calls_ends_after_a_while(predictor: Predictor) -> None:
    service = Service(predictor, Serve(keep_alive_s=1))

    async def main() -> None:
        async with (
            serving(service, service.settings, 0) as port,
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
    key = (("authorization", f"Bearer {api_keys.add(path, 'shop')}"),)
    service = Service(predictor, Serve(keys=str(path), access_log=str(log)))

    async def main() -> None:
        async with asking(service) as stub:
            await refused(stub.ModelInfer(question(TEXT)))
            await refused(stub.RepositoryIndex(messages.RepositoryIndexRequest()))
            for name in ("mine", "a word of the client's"):
                asked = question(TEXT)
                asked.id = name
                assert (await stub.ModelInfer(asked, metadata=key)).id == name
            await refused(stub.ModelInfer(messages.ModelInferRequest(model_name="tiny"), metadata=key))

    asyncio.run(main())
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    index = ROUTE.replace("ModelInfer", "RepositoryIndex")
    told = [(one["client"], one["method"], one["route"], one["status"], one["texts"]) for one in lines]
    assert told == [
        ("", "POST", ROUTE, 401, 0),
        ("", "POST", index, 401, 0),
        ("shop", "POST", ROUTE, 200, 1),
        ("shop", "POST", ROUTE, 200, 1),
        ("shop", "POST", ROUTE, 422, 0),
    ]
    assert {(one["model"], one["version"]) for one in lines} == {("tiny", predictor.artifact.version)}
    assert [one["id"] == "mine" for one in lines] == [False, False, True, False, False]
    assert len({one["id"] for one in lines}) == 5
    assert "word" not in log.read_text()
    for route, status, count in ((ROUTE, 401, 1), (index, 401, 1), (ROUTE, 200, 2), (ROUTE, 422, 1)):
        line = f'rtrain_requests_total{{model="tiny",route="{route}",status="{status}"}} {count}.0'
        assert line in service.exposition().splitlines()


def test_a_renewed_certificate_is_that_of_new_connections(predictor: Predictor, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    old = Path(certificate).read_bytes()
    service = Service(predictor, Serve())

    async def main() -> None:
        async with serving(service, Serve(tls_cert=certificate, tls_key=key), 0) as port:

            def channel(root: bytes) -> grpc.aio.Channel:
                return grpc.aio.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(root))

            async with channel(old) as standing:
                before = interface.GRPCInferenceServiceStub(standing)
                await before.ModelInfer(question(TEXT))
                make_certificate(tmp_path)
                async with channel(Path(certificate).read_bytes()) as other:
                    await interface.GRPCInferenceServiceStub(other).ModelInfer(question(TEXT), timeout=10)
                await before.ModelInfer(question(TEXT))  # its connection goes on

    asyncio.run(main())
    service.close()


def test_with_a_certificate_it_encrypts_and_answers_nobody_who_does_not(predictor: Predictor, tmp_path: Path) -> None:
    """By clients that others wrote: gRPC's own, and Triton's."""
    certificate, key = make_certificate(tmp_path)
    path = tmp_path / "keys.json"
    plain = api_keys.add(path, "shop")
    settings = Serve(keys=str(path), tls_cert=certificate, tls_key=key)
    metadata = (("authorization", f"Bearer {plain}"),)
    trusted = grpc.ssl_channel_credentials(Path(certificate).read_bytes())
    stranger, _ = make_certificate(tmp_path / "stranger")
    service = Service(predictor, settings)

    def asked_by_triton(port: int) -> str:
        tensor = tritonclient.grpc.InferInput("text", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([TEXT.encode()], dtype=np.object_))
        client = tritonclient.grpc.InferenceServerClient(
            f"127.0.0.1:{port}", ssl=True, root_certificates=certificate, verbose=False
        )
        with client:
            found = client.infer("tiny", [tensor], headers={"authorization": f"Bearer {plain}"})
            return str(found.as_numpy("label")[0], "utf-8")

    async def main() -> None:
        async with serving(service, settings, 0, middleware.door(settings)) as port:
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
