"""Parts of the benchmark: each returns its figures and the data behind them."""

import json
import math
import os
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.serve import load
from benchmarks.serve.load import ClientTooLate, OpenLoop
from benchmarks.serve.sides import Running, cores, make_sides, memory_mb, raw, running
from rtrain.inference import artifact as artifacts, predictor

MANY_CONNECTIONS = 16
"""Connections of the closed loop that looks for the most requests a second."""
TRIES = 3
"""How often an open loop is begun whose client was late."""
REPLICA = "ServeReplica"


@dataclass(frozen=True)
class Work:
    student: Path
    parent: Path
    texts: Sequence[str]
    rounds: int
    seconds: float
    folder: Path
    settings: Sequence[str] = ()
    minutes: float = 15.0
    """How long the soak lasts."""

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def compare_sides(work: Work) -> dict[str, Any]:
    """All sides, one at a time in interleaved rounds: one connection, then many."""
    server, client = cores()
    sides = make_sides(work.student, work.parent, work.settings)
    side_rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ("raw", *sides)}
    names = list(side_rounds)
    for turn in range(work.rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if name == "raw":
                side_rounds[name].append(raw(work.student, work.texts, max(200, int(200 * work.seconds)), server))
                continue
            with running(sides[name], server, work.log(name)) as endpoint:
                load.run_closed_loop(endpoint.url, work.texts, 1, 1, client)  # warm
                lone = load.run_closed_loop(endpoint.url, work.texts, 1, work.seconds, client)
                many = load.run_closed_loop(endpoint.url, work.texts, MANY_CONNECTIONS, work.seconds, client)
                loops = {"rps": many}
                if name == "rtrain":  # beside the best label, which all sides answer with
                    loops["rps_all_labels"] = load.run_closed_loop(
                        endpoint.url, work.texts, MANY_CONNECTIONS, work.seconds, client, parameters={}
                    )
            errors = lone["errors"] + sum(loop["errors"] for loop in loops.values())
            rps = {figure: loop["rps"] for figure, loop in loops.items()}
            side_rounds[name].append({"p50_ms": lone["p50_ms"], **rps, "errors": errors})
    return {**ratios(side_rounds), "sides": side_rounds}


def ratios(side_rounds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians of the rounds' own differences and ratios: both sides of each are of one round."""

    def median(figure: Callable[[dict[str, dict[str, float]]], float]) -> float:
        rounds = [{name: rows[turn] for name, rows in side_rounds.items()} for turn in range(len(side_rounds["raw"]))]
        return statistics.median(map(figure, rounds))

    over = {"rps_vs_raw": "raw", "vs_hf_pipeline": "pipeline", "vs_stock_serve": "stock", "vs_uvicorn": "uvicorn"}
    return {
        "overhead_ms_p50": median(lambda row: row["rtrain"]["p50_ms"] - row["raw"]["p50_ms"]),
        "standalone_overhead_ms_p50": median(lambda row: row["standalone"]["p50_ms"] - row["raw"]["p50_ms"]),
        **{name: median(lambda row, side=side: row["rtrain"]["rps"] / row[side]["rps"]) for name, side in over.items()},  # type: ignore[misc]
        "rps_vs_raw_all_labels": median(lambda row: row["rtrain"]["rps_all_labels"] / row["raw"]["rps"]),
        "errors": sum(row.get("errors", 0) for row in side_rounds["rtrain"]),
    }


def capacity(endpoint: Running, work: Work, client: int | None) -> float:
    """Requests a second that the endpoint answers at most, by a closed loop."""
    load.run_closed_loop(endpoint.url, work.texts, 1, 1, client)
    return float(load.run_closed_loop(endpoint.url, work.texts, MANY_CONNECTIONS, work.seconds, client)["rps"])


def open_loop(endpoint: Running, work: Work, rate: float, seed: int, client: int | None) -> OpenLoop:
    for turn in range(TRIES):
        try:
            return load.run_open_loop_on_core(
                client,
                url=endpoint.url,
                texts=list(work.texts),
                rate=rate,
                seconds=work.seconds,
                seed=seed + 1000 * turn,
            )
        except ClientTooLate:
            continue
    raise SystemExit(f"the client began late {TRIES} times: the machine is too busy to measure on")


def tail(work: Work) -> dict[str, Any]:
    """p99 over p50 at 70 % of the endpoint's capacity, in an open loop."""
    server, client = cores()
    with running(make_sides(work.student, work.parent, work.settings)["rtrain"], server, work.log("tail")) as endpoint:
        max_rps = capacity(endpoint, work, client)
        loops = [open_loop(endpoint, work, 0.7 * max_rps, turn, client) for turn in range(work.rounds)]
    rounds = [{"p50_ms": loop.percentile(0.5), "p99_ms": loop.percentile(0.99)} for loop in loops]
    return {
        "tail": statistics.median(row["p99_ms"] / row["p50_ms"] for row in rounds),
        "rate": 0.7 * max_rps,
        "errors": sum(loop.requests - len(loop.ms.get(200, [])) for loop in loops),
        "rounds": rounds,
    }


def shadow(work: Work, share: float = 0.2) -> dict[str, Any]:
    """p99 at 70 % of the load, with a candidate that answers a share of the texts too over p99 without, in rounds of
    both."""
    server, client = cores()
    candidate = twin(work.student, work.folder / "candidate")
    rounds = []
    with running(
        make_sides(work.student, work.parent, work.settings)["rtrain"], server, work.log("shadow")
    ) as endpoint:
        max_rps = capacity(endpoint, work, client)
        for turn in range(work.rounds):
            without_shadow = open_loop(endpoint, work, 0.7 * max_rps, turn, client)
            endless = ("--set", "serve.shadow_min_rows=1000000", "--set", "serve.shadow_timeout_s=100000")
            endpoint.command("--update", str(candidate), "--shadow", str(share), *endless)
            with_shadow = open_loop(endpoint, work, 0.7 * max_rps, turn, client)
            stats = json.loads(endpoint.command("status", "--json"))["models"][0]["canary"]["stats"]
            endpoint.command("--rollback")
            rounds.append(
                {
                    "p99_ms": without_shadow.percentile(0.99),
                    "p99_ms_shadowed": with_shadow.percentile(0.99),
                    "asked": with_shadow.requests,
                    "shadowed": stats["rows"],
                }
            )
    return {
        "shadow_p99": statistics.median(row["p99_ms_shadowed"] / row["p99_ms"] for row in rounds),
        "rate": 0.7 * max_rps,
        "rounds": rounds,
    }


def twin(student: Path, folder: Path) -> Path:
    """The same model under another version's name."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(student, folder)
    twin_artifact = artifacts.read_artifact(folder)
    artifacts.write_artifact(
        folder, replace(twin_artifact, facts={**twin_artifact.facts, "note": "a twin"}), predictor.compute_golden_logits
    )
    return folder


def overload(work: Work, times: Sequence[int] = (4, 20)) -> dict[str, Any]:
    """More requests than the capacity: accepted requests are answered, the others are rejected at once."""
    server, client = cores()
    by_factor: dict[str, Any] = {}
    with running(
        make_sides(work.student, work.parent, work.settings)["rtrain"], server, work.log("overload")
    ) as endpoint:
        max_rps = capacity(endpoint, work, client)
        for factor in times:
            before = endpoint.memory_mb()
            loop = load.run_flood(endpoint.url, work.texts[0], factor * max_rps, work.seconds, client)
            by_factor[f"{factor}x"] = {
                "by_status": {str(status): len(ms) for status, ms in sorted(loop.ms.items())},
                "answers_of_capacity": len(loop.ms.get(200, [])) / (max_rps * work.seconds),
                "accepted_p99_ms": loop.percentile(0.99),
                "rejected_p99_ms": loop.percentile(0.99, 503),
                "memory_grown_mb": endpoint.memory_mb() - before,
            }
    return {"capacity": max_rps, **by_factor}


def replicas(endpoint: Running) -> list[psutil.Process]:
    """Newest last."""
    processes = []
    for process in endpoint.tree():
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if REPLICA in " ".join(process.cmdline()):
                processes.append((process.create_time(), process))
    return [process for _, process in sorted(processes, key=lambda pair: pair[0])]


def kills(work: Work, number: int = 10, copies: int = 2) -> dict[str, Any]:
    """Replicas killed under 70 % of the load, one after another."""
    settings = (*work.settings, f"serve.replicas={copies}")
    with running(make_sides(work.student, work.parent, settings)["rtrain"], None, work.log("kills")) as endpoint:
        max_rps = capacity(endpoint, work, None)
        gap = max(8.0, work.seconds)
        with ThreadPoolExecutor(1) as pool:
            arguments = {
                "url": endpoint.url,
                "texts": list(work.texts),
                "rate": 0.7 * max_rps,
                "seconds": gap * (number + 1),
            }
            future = pool.submit(load.run_open_loop_on_core, None, **arguments, void=False)
            killed = 0
            for _ in range(number):
                time.sleep(gap)
                if processes := replicas(endpoint):
                    os.kill(processes[0].pid, signal.SIGKILL)
                    killed += 1
            loop = future.result()
    raw_errors = loop.requests - len(loop.ms.get(200, []))
    return {
        "killed": killed,
        "requests": loop.requests,
        "raw_errors": raw_errors,
        "by_status": {str(status): len(ms) for status, ms in sorted(loop.ms.items())},
        "errors_after_one_retry": sum(n for status, n in loop.retry_statuses.items() if status != 200),
        "p99_ms": loop.percentile(0.99),
        "longest_ms": max((max(ms) for ms in loop.ms.values()), default=math.nan),
    }


def soak(work: Work) -> dict[str, Any]:
    """70 % of the load for a long time: the slope of the memory, and errors."""
    server, client = cores()
    memory: list[tuple[float, float, float]] = []
    with running(make_sides(work.student, work.parent, work.settings)["rtrain"], server, work.log("soak")) as endpoint:
        max_rps, began = capacity(endpoint, work, client), time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            arguments = {
                "url": endpoint.url,
                "texts": list(work.texts),
                "rate": 0.7 * max_rps,
                "seconds": 60 * work.minutes,
            }
            future = pool.submit(load.run_open_loop_on_core, client, **arguments, void=False)
            while not future.done():
                memory.append(((time.monotonic() - began) / 60, endpoint.memory_mb(), memory_mb(replicas(endpoint))))
                time.sleep(min(10.0, 6 * work.minutes))
            loop = future.result()
    return {
        "minutes": work.minutes,
        "rate": 0.7 * max_rps,
        "requests": loop.requests,
        "by_status": {str(status): len(ms) for status, ms in sorted(loop.ms.items())},
        "errors": loop.requests - len(loop.ms.get(200, [])),
        "errors_after_one_retry": sum(n for status, n in loop.retry_statuses.items() if status != 200),
        "late": loop.share_late(),
        "p50_ms": loop.percentile(0.5),
        "p99_ms": loop.percentile(0.99),
        "memory_mb_a_minute": slope([(minute, mb) for minute, mb, _ in memory]),
        "replicas_mb_a_minute": slope([(minute, mb) for minute, _, mb in memory]),
        "memory": memory,
    }


def slope(memory: Sequence[tuple[float, float]]) -> float:
    """Slope in MB per minute; NaN for fewer than two points. The first fifth is skipped: caches fill up there."""
    steady = memory[len(memory) // 5 :]
    return statistics.linear_regression(*zip(*steady, strict=True)).slope if len(steady) > 1 else math.nan
