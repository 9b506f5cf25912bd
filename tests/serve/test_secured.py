"""The endpoint on Ray Serve with keys and TLS: who is answered, and keys that change while it answers."""

import contextlib
import ssl
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from rtrain.config import ServeConfig
from serve.auth import api_keys
from serve.deployment import start_endpoint
from serve.ingress.address import find_free_address
from tests.support.certificates import make_certificate
from tests.support.serving import TEXT
from tests.support.tiny import make_artifact

WAIT_S = 30.0
"""Most seconds until a change of the file must show; that it takes about one is not asserted."""


@pytest.mark.serve
@pytest.mark.usefixtures("ray_session")
def test_a_rate_is_one_over_all_replicas_over_http_and_over_grpc(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    web, line = (api_keys.add_key(path, name, rate="30/hour") for name in ("web", "line"))
    free = api_keys.add_key(path, "free")
    settings = ServeConfig(port=0, replicas=2, grpc_port=find_free_address("127.0.0.1", 0).port, keys=str(path))
    tensor = tritonclient.grpc.InferInput("text", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([TEXT.encode()], dtype=np.object_))
    answered = Counter[str]()
    with start_endpoint(make_artifact(tmp_path / "artifact"), settings) as endpoint:
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{settings.grpc_port}") as client:
            for _ in range(45):  # a connection stays with one replica
                with contextlib.suppress(InferenceServerException):
                    client.infer("tiny", [tensor], headers={"authorization": f"Bearer {line}"})
                    answered["grpc"] += 1
        for _ in range(45):  # each on a connection of its own, so that both replicas get some
            headers = {"authorization": f"Bearer {web}"}
            reply = httpx.post(f"{endpoint.url}/predict", json={"inputs": TEXT}, headers=headers, trust_env=False)
            answered["http"] += reply.status_code == 200
        headers = {"authorization": f"Bearer {free}"}
        index = httpx.post(f"{endpoint.url}/v2/repository/index", headers=headers, trust_env=False)
        assert index.status_code == 200
        assert httpx.get(f"{endpoint.url}/-/routes", trust_env=False).status_code == 401
    assert answered["grpc"] == 30
    assert 30 <= answered["http"] <= 31  # both may have taken the last one


@pytest.mark.slow
@pytest.mark.serve
@pytest.mark.usefixtures("ray_session")
def test_keys_are_rotated_under_load_and_encrypted(tmp_path: Path) -> None:
    path, (certificate, key) = tmp_path / "keys.json", make_certificate(tmp_path)
    standing, old = api_keys.add_key(path, "standing"), api_keys.add_key(path, "old")
    settings = ServeConfig(port=0, replicas=2, keys=str(path), tls_cert=certificate, tls_key=key)
    context = ssl.create_default_context(cafile=certificate)
    with start_endpoint(make_artifact(tmp_path / "artifact"), settings) as endpoint:
        assert endpoint.url.startswith("https://127.0.0.1:")
        with (
            httpx.Client(base_url=endpoint.url, verify=context, trust_env=False) as client,
            pytest.raises(httpx.TransportError),
        ):
            client.get(endpoint.url.replace("https", "http"))

        def status(client: httpx.Client, plain: str | None) -> int:
            headers = {"authorization": f"Bearer {plain}"} if plain else {}
            return client.post("/predict", json={"inputs": TEXT}, headers=headers).status_code

        done, statuses = threading.Event(), Counter[int]()

        def load() -> None:
            with httpx.Client(base_url=endpoint.url, verify=context, trust_env=False) as client:
                while not done.is_set():
                    statuses[status(client, standing)] += 1

        def until(client: httpx.Client, plain: str, expected_status: int) -> None:
            """Wait for so many equal answers in a row that both replicas have given some."""
            give_up, right = time.monotonic() + WAIT_S, 0
            while right < 20:
                assert time.monotonic() < give_up
                right = right + 1 if status(client, plain) == expected_status else 0

        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            with httpx.Client(base_url=endpoint.url, verify=context, trust_env=False) as client:
                assert [status(client, plain) for plain in (None, old[:-1], old)] == [401, 401, 200]
                assert client.get("/v2/health/ready").json() == {"ready": True}
                new = api_keys.add_key(path, "new")
                until(client, new, 200)
                api_keys.revoke_key(path, "old")
                until(client, old, 401)
        finally:
            done.set()
            for thread in threads:
                thread.join()
        assert set(statuses) == {200}, "the standing key was refused while others changed"
        assert statuses[200] > 100
