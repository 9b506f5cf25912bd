"""Ray Serve: the private names of its controller, proxies and replicas still exist and mean the same."""

import asyncio
import inspect
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rtrain import ray_internals
from rtrain.ray_internals import serving


def test_a_deployment_keeps_the_version_that_it_was_given() -> None:
    from ray import serve

    deployment: Any = serve.deployment(name="a")(type("Anything", (), {}))
    given = ray_internals.with_version(deployment, "7")
    assert (deployment.version, given.version) == (None, "7")
    assert given.options(user_config={"artifact": "there"}).version == "7"


def test_a_proxy_that_is_to_end_answers_what_it_has_and_says_that_it_was_the_last() -> None:
    """One client waits for its answer, one has had one and asks again, one comes too late."""
    import ray.serve._private.proxy
    from ray.serve._private.http_util import start_asgi_http_server
    from ray.serve.config import HTTPOptions

    assert "self._start_http_server_task = " in inspect.getsource(ray.serve._private.proxy)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            asked.set()
            await may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def ask(path: str, streams: Any) -> bytes:
        reader, writer = streams
        writer.write(f"GET {path} HTTP/1.1\r\nhost: here\r\n\r\n".encode())
        head: bytes = await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(2) == b"ok"
        return head.lower()

    async def check() -> None:
        loop = asyncio.get_running_loop()
        starting = loop.create_task(
            start_asgi_http_server(application, HTTPOptions(host="127.0.0.1", port=port), event_loop=loop)
        )
        server = (await starting)[1]
        while not server.started:
            await asyncio.sleep(0.01)
        proxy = SimpleNamespace(_start_http_server_task=starting)
        waiting, idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        slow = loop.create_task(ask("/slow", waiting))
        await asked.wait()
        assert b"connection: close" not in await ask("/", idle)
        serving._stop_server(proxy)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        assert b"connection: close" in await ask("/", idle)
        await asyncio.sleep(serving.DRAIN_GRACE_S + 0.2)
        assert not serving._is_server_stopped(proxy)
        may_answer.set()
        assert b"connection: close" in await slow
        await asyncio.wait_for(starting.result()[0], 5)
        assert serving._is_server_stopped(proxy)
        for _, writer in (waiting, idle):
            writer.close()

    asyncio.run(check())


def test_serve_is_imported_without_pandas_which_can_be_imported_then() -> None:
    program = (
        "import sys; from rtrain import ray_internals; ray_internals.import_serve()\n"
        "assert 'ray.serve._private.replica' in sys.modules\n"
        "assert 'pandas' not in sys.modules\n"
        "import pandas; pandas.DataFrame"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
