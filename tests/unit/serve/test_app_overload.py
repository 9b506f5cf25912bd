"""The application under load: a full queue, a deadline that passed, a client that left, an engine that stalls."""

import asyncio

from rtrain.config import ServeConfig
from rtrain.inference.predictor import Predictor
from serve.app import build_app
from tests.support import serving
from tests.support.serving import INFER, TEXT, Gate, client, refusal, tensor
from tests.support.tiny import CORPUS

gate, predictor = serving.gate, serving.predictor  # fixtures


def test_a_full_queue_is_answered_503_with_retry_after_and_those_in_it_are_served(
    predictor: Predictor, gate: Gate
) -> None:
    app = build_app(predictor, ServeConfig(max_queued_inputs=2))
    queue = app.state.service.batcher

    async def main() -> None:
        async with client(app) as session:
            accepted = [asyncio.create_task(session.post("/predict", json={"inputs": TEXT}))]
            await gate.entered()
            accepted.append(asyncio.create_task(session.post("/predict", json={"inputs": [TEXT, TEXT]})))
            while queue.queued_rows < 2:
                await asyncio.sleep(0.001)
            for path, document in (("/predict", {"inputs": TEXT}), (INFER, {"inputs": [tensor([TEXT], [1])]})):
                refused = await session.post(path, json=document)
                assert refused.status_code == 503
                assert refused.headers["retry-after"] == "1"
            gate.open()
            answers = await asyncio.gather(*accepted)
            assert [(answer.status_code, len(answer.json())) for answer in answers] == [(200, 1), (200, 2)]

    asyncio.run(main())
    assert gate.rows == 3


def test_a_request_past_its_deadline_is_answered_504_whatever_the_client_asks_for(
    predictor: Predictor, gate: Gate
) -> None:
    app = build_app(predictor, ServeConfig(request_timeout_s=0.05))
    headers = {"x-request-timeout-seconds": "0", "x-request-disconnect-disabled": "?1", "timeout": "60"}

    async def main() -> None:
        async with client(app) as session:
            engine_has_it = asyncio.create_task(session.post("/predict", json={"inputs": TEXT}, headers=headers))
            await gate.entered()
            waits = await session.post("/predict", json={"inputs": [TEXT, TEXT]}, headers=headers)
            for late in (await engine_has_it, waits):
                assert refusal(late) == (504, "deadline_exceeded", None)
            gate.open()
            assert (await session.get("/v2/health/live")).json() == {"live": True}

    asyncio.run(main())
    assert gate.rows == 1


def test_the_texts_of_a_client_that_left_never_reach_the_engine(predictor: Predictor, gate: Gate) -> None:
    app = build_app(predictor, ServeConfig())
    queue = app.state.service.batcher

    async def main() -> None:
        async with client(app) as session:
            first = asyncio.create_task(session.post("/predict", json={"inputs": TEXT}))
            await gate.entered()
            gone = asyncio.create_task(session.post("/predict", json={"inputs": [TEXT, CORPUS[0]]}))
            while queue.queued_rows < 2:
                await asyncio.sleep(0.001)
            gone.cancel()
            await asyncio.wait([gone])
            assert queue.queued_rows == 0
            gate.open()
            assert (await first).status_code == 200

    asyncio.run(main())
    assert (gate.rows, queue.stats.dropped_rows) == (1, 2)
    assert 'rtrain_requests_total{model="tiny",route="/predict",status="499"} 1.0' in app.state.service.render_metrics()


def test_readiness_ends_where_an_engine_call_outlasts_the_deadline(predictor: Predictor, gate: Gate) -> None:
    app = build_app(predictor, ServeConfig(request_timeout_s=0.05))

    async def main() -> None:
        async with client(app) as session:
            assert (await session.post("/predict", json={"inputs": TEXT})).status_code == 504
            while (stalled := await session.get("/v2/health/ready")).status_code == 200:
                await asyncio.sleep(0.001)
            assert (stalled.status_code, stalled.json()) == (503, {"ready": False})
            stalled = await session.get("/v2/models/tiny/ready")
            assert (stalled.status_code, stalled.json()) == (503, {"name": "tiny", "ready": False})
            assert (await session.get("/v2/health/live")).status_code == 200
            gate.open()
            while (await session.get("/v2/health/ready")).status_code != 200:
                await asyncio.sleep(0.001)

    asyncio.run(main())
