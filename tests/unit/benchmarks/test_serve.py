"""The endpoint's benchmark: its open loop against a real server, and its figures."""

import asyncio
import itertools
import json
import math
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serve import load, parts
from benchmarks.serve.__main__ import TEXTS, read_texts, table
from tests.support.root import ROOT
from tests.support.tiny import make_artifact

REPLY = b"HTTP/1.1 %d OK\r\ncontent-length: 2\r\n\r\n{}"


@contextmanager
def answering(statuses: list[int], keeps: bool = True) -> Iterator[str]:
    """Address of a server that answers with these statuses in turn, and cuts the connection at 0. One that keeps no
    connection closes it after an answer without having said so."""
    ready, stopped, ports = threading.Event(), threading.Event(), []

    async def serve() -> None:
        remaining_statuses = iter(statuses * 1000)

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while head := await reader.readline():
                length = 0
                while head.strip():
                    name, _, value = head.partition(b":")
                    length = int(value) if name == b"content-length" else length
                    head = await reader.readline()
                await reader.readexactly(length)
                if not (status := next(remaining_statuses)):
                    break
                writer.write(REPLY % status)
                if not keeps:
                    break
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            ports.append(server.sockets[0].getsockname()[1])
            ready.set()
            await asyncio.to_thread(stopped.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    ready.wait()
    try:
        yield f"http://127.0.0.1:{ports[0]}/predict"
    finally:
        stopped.set()
        thread.join()


def test_every_request_that_is_due_is_sent_and_each_answer_counts_by_its_status() -> None:
    with answering([200, 200, 503]) as url:
        result = load.run_open_loop(url, ["a text"], rate=200, seconds=0.5, seed=3, void=False)
    assert result.requests == len(load.arrival_times(200, 0.5, 3))
    assert set(result.ms) == {200, 503}
    assert result.retried == len(result.ms[503]) == sum(result.retry_statuses.values())


def test_a_cut_connection_is_an_answer_of_0_and_is_tried_once_more() -> None:
    with answering([200, 0]) as url:
        result = load.run_open_loop(url, ["a text"], rate=100, seconds=0.3, void=False)
    assert result.ms[0]
    assert result.retried == len(result.ms[0])


def test_a_connection_that_the_server_has_closed_meanwhile_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "arrival_times", lambda *_: [0.2 * number for number in range(4)])
    with answering([200], keeps=False) as url:
        result = load.run_open_loop(url, ["a text"], rate=5, seconds=1, void=False)
    assert {status: len(ms) for status, ms in result.ms.items()} == {200: 4}


def test_arrivals_are_those_of_the_rate_and_the_seed() -> None:
    moments = load.arrival_times(100, 100, 1)
    assert moments == load.arrival_times(100, 100, 1) != load.arrival_times(100, 100, 2)
    assert moments == sorted(moments)
    assert len(moments) == pytest.approx(10_000, rel=0.05)
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    assert sum(gap**2 for gap in gaps) / len(gaps) == pytest.approx(2 / 100**2, rel=0.1)  # exponential


def test_a_client_that_comes_late_has_measured_nothing() -> None:
    """Nobody sends 20,000 requests a second from Python."""
    with answering([200]) as url, pytest.raises(load.ClientTooLate):
        load.run_open_loop_on_core(None, url=url, texts=["a text"], rate=20_000, seconds=0.1)


def test_a_percentile_is_of_one_status_by_rank() -> None:
    result = load.OpenLoop({200: [float(n) for n in range(100, 0, -1)], 503: [1.0]})
    assert [result.percentile(share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert result.percentile(0.5, 503) == 1.0
    assert math.isnan(result.percentile(0.5, 500))


def test_ratios_are_made_within_a_round() -> None:
    def rounds(*values: float) -> list[dict[str, float]]:
        return [{"p50_ms": 1 / value, "rps": value, "rps_all_labels": value / 2, "errors": 0} for value in values]

    side_rounds: dict[str, Any] = {
        "raw": rounds(10, 100, 10),
        "rtrain": rounds(20, 100, 10),
        "standalone": rounds(5, 50, 5),
        "stock": rounds(5, 25, 5),
        "uvicorn": rounds(10, 100, 10),
        "pipeline": rounds(2, 10, 2),
    }
    ratios = parts.ratios(side_rounds)
    assert [ratios[name] for name in ("rps_vs_raw", "vs_stock_serve", "vs_uvicorn", "vs_hf_pipeline")] == [1, 4, 1, 10]
    assert ratios["rps_vs_raw_all_labels"] == 0.5
    assert ratios["overhead_ms_p50"] == 0
    assert ratios["standalone_overhead_ms_p50"] == 1 / 5 - 1 / 10
    assert "vs_stock_serve         2.50     4.00      4.000" in table({"beside": ratios})


def test_texts_are_our_own_or_a_column_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text\n" + "\n".join(map(str, range(10))))
    assert read_texts(tmp_path / "rows.csv", max_texts=4) == ["0", "3", "6", "9"]
    assert read_texts(None) == list(TEXTS)


@pytest.mark.ray
@pytest.mark.serve
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")
def test_all_sides_are_measured_beside_each_other(tmp_path: Path) -> None:
    make_models, out = str(make_artifact(tmp_path / "model")), tmp_path / "serve.json"
    arguments = [
        make_models,
        make_models,
        *["--json", "--only", "beside", "--rounds", "1", "--seconds", "1", "--out"],
        str(out),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.serve", *arguments], cwd=ROOT, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    measured = json.loads(done.stdout.splitlines()[-1])["beside"]
    assert measured["errors"] == 0
    assert min(measured[name] for name in ("rps_vs_raw", "vs_hf_pipeline", "vs_stock_serve", "vs_uvicorn")) > 0


def test_a_flood_s_log_is_read_to_its_last_whole_line() -> None:
    result = load.parse_h2load_log(
        "1795472932000000\t200\t1500\n1795472932000100\t503\t250\n1795472932000200\t-1\t90\n17954729"
    )
    assert result.ms == {200: [1.5], 503: [0.25], 0: [0.09]}
    assert result.requests == 3


def test_the_memory_s_slope_is_that_of_the_minutes_after_the_first_fifth() -> None:
    filled = [(0.0, 0.0), (1.0, 500.0)]
    assert parts.slope([*filled, *((minute, 400 + 2 * minute) for minute in range(2, 10))]) == pytest.approx(2)
    assert math.isnan(parts.slope([(0.0, 1.0)]))
