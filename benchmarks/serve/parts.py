"""The parts of the benchmark: each returns its figures and what they were made from."""

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
from benchmarks.serve.load import Open, Void
from benchmarks.serve.sides import Running, cores, memory_mb, raw, running, sides_of
from rtrain.inference import artifact as artifacts, predictor

MANY = 16
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


def beside(work: Work) -> dict[str, Any]:
    """All sides, one at a time in interleaved rounds: one connection, then many."""
    server, client = cores()
    sides = sides_of(work.student, work.parent, work.settings)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ("raw", *sides)}
    names = list(found)
    for turn in range(work.rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if name == "raw":
                found[name].append(raw(work.student, work.texts, max(200, int(200 * work.seconds)), server))
                continue
            with running(sides[name], server, work.log(name)) as one:
                load.closed(one.url, work.texts, 1, 1, client)  # warm
                lone = load.closed(one.url, work.texts, 1, work.seconds, client)
                many = load.closed(one.url, work.texts, MANY, work.seconds, client)
                loops = {"rps": many}
                if name == "rtrain":  # beside the best label, which all sides answer with
                    loops["rps_all_labels"] = load.closed(
                        one.url, work.texts, MANY, work.seconds, client, parameters={}
                    )
            errors = lone["errors"] + sum(loop["errors"] for loop in loops.values())
            rps = {figure: loop["rps"] for figure, loop in loops.items()}
            found[name].append({"p50_ms": lone["p50_ms"], **rps, "errors": errors})
    return {**ratios(found), "sides": found}


def ratios(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians of the rounds' own differences and ratios: both sides of each are of one round."""

    def middle(of: Callable[[dict[str, dict[str, float]]], float]) -> float:
        rounds = [{name: rows[turn] for name, rows in found.items()} for turn in range(len(found["raw"]))]
        return statistics.median(map(of, rounds))

    over = {
        "rps_vs_raw": "raw",
        "vs_hf_pipeline": "pipeline",
        "vs_stock_serve": "stock",
        "vs_uvicorn": "uvicorn",
    }
    return {
        "overhead_ms_p50": middle(lambda one: one["rtrain"]["p50_ms"] - one["raw"]["p50_ms"]),
        "alone_overhead_ms_p50": middle(lambda one: one["alone"]["p50_ms"] - one["raw"]["p50_ms"]),
        **{name: middle(lambda one, of=of: one["rtrain"]["rps"] / one[of]["rps"]) for name, of in over.items()},  # type: ignore[misc]
        "rps_vs_raw_all_labels": middle(lambda one: one["rtrain"]["rps_all_labels"] / one["raw"]["rps"]),
        "errors": sum(row.get("errors", 0) for row in found["rtrain"]),
    }


def capacity(one: Running, work: Work, client: int | None) -> float:
    """Requests a second that the endpoint answers at most, by a closed loop."""
    load.closed(one.url, work.texts, 1, 1, client)
    return float(load.closed(one.url, work.texts, MANY, work.seconds, client)["rps"])


def open_loop(one: Running, work: Work, rate: float, seed: int, client: int | None) -> Open:
    for turn in range(TRIES):
        try:
            return load.opened_on(
                client, url=one.url, texts=list(work.texts), rate=rate, seconds=work.seconds, seed=seed + 1000 * turn
            )
        except Void:
            continue
    raise SystemExit(f"the client began late {TRIES} times: the machine is too busy to measure on")


def tail(work: Work) -> dict[str, Any]:
    """p99 over p50 at 70 % of what the endpoint can do, in an open loop."""
    server, client = cores()
    with running(sides_of(work.student, work.parent, work.settings)["rtrain"], server, work.log("tail")) as one:
        most = capacity(one, work, client)
        loops = [open_loop(one, work, 0.7 * most, turn, client) for turn in range(work.rounds)]
    rounds = [{"p50_ms": loop.percentile(0.5), "p99_ms": loop.percentile(0.99)} for loop in loops]
    return {
        "tail": statistics.median(row["p99_ms"] / row["p50_ms"] for row in rounds),
        "rate": 0.7 * most,
        "errors": sum(loop.requests - len(loop.ms.get(200, [])) for loop in loops),
        "rounds": rounds,
    }


def shadow(work: Work, share: float = 0.2) -> dict[str, Any]:
    """p99 at 70 % of the load, with a candidate that answers a share of the texts too over p99 without, in rounds of
    both."""
    server, client = cores()
    candidate = twin(work.student, work.folder / "candidate")
    rounds = []
    with running(sides_of(work.student, work.parent, work.settings)["rtrain"], server, work.log("shadow")) as one:
        most = capacity(one, work, client)
        for turn in range(work.rounds):
            alone = open_loop(one, work, 0.7 * most, turn, client)
            endless = ("--set", "serve.shadow_rows=1000000", "--set", "serve.shadow_s=100000")
            one.command("--update", str(candidate), "--shadow", str(share), *endless)
            both = open_loop(one, work, 0.7 * most, turn, client)
            seen = json.loads(one.command("status", "--json"))["models"][0]["trial"]["seen"]
            one.command("--rollback")
            rounds.append(
                {
                    "p99_ms": alone.percentile(0.99),
                    "p99_ms_shadowed": both.percentile(0.99),
                    "asked": both.requests,
                    "shadowed": seen["rows"],
                }
            )
    return {
        "shadow_p99": statistics.median(row["p99_ms_shadowed"] / row["p99_ms"] for row in rounds),
        "rate": 0.7 * most,
        "rounds": rounds,
    }


def twin(student: Path, folder: Path) -> Path:
    """The same model under another version's name."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(student, folder)
    made = artifacts.read(folder)
    artifacts.write(folder, replace(made, facts={**made.facts, "note": "a twin"}), predictor.golden_logits)
    return folder


def overload(work: Work, times: Sequence[int] = (4, 20)) -> dict[str, Any]:
    """More requests than can be answered: what is accepted is answered, the rest is told so at once."""
    server, client = cores()
    found: dict[str, Any] = {}
    with running(sides_of(work.student, work.parent, work.settings)["rtrain"], server, work.log("overload")) as one:
        most = capacity(one, work, client)
        for factor in times:
            before = one.memory_mb()
            loop = load.flooded(one.url, work.texts[0], factor * most, work.seconds, client)
            found[f"{factor}x"] = {
                "by_status": {str(status): len(ms) for status, ms in sorted(loop.ms.items())},
                "answers_of_capacity": len(loop.ms.get(200, [])) / (most * work.seconds),
                "accepted_p99_ms": loop.percentile(0.99),
                "rejected_p99_ms": loop.percentile(0.99, 503),
                "memory_grown_mb": one.memory_mb() - before,
            }
    return {"capacity": most, **found}


def replicas(one: Running) -> list[psutil.Process]:
    """Newest last."""
    found = []
    for each in one.tree():
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if REPLICA in " ".join(each.cmdline()):
                found.append((each.create_time(), each))
    return [each for _, each in sorted(found, key=lambda pair: pair[0])]


def kills(work: Work, number: int = 10, copies: int = 2) -> dict[str, Any]:
    """Replicas killed under 70 % of the load, one after another."""
    settings = (*work.settings, f"serve.replicas={copies}")
    with running(sides_of(work.student, work.parent, settings)["rtrain"], None, work.log("kills")) as one:
        most = capacity(one, work, None)
        gap = max(8.0, work.seconds)
        with ThreadPoolExecutor(1) as pool:
            given = {"url": one.url, "texts": list(work.texts), "rate": 0.7 * most, "seconds": gap * (number + 1)}
            asked = pool.submit(load.opened_on, None, **given, void=False)
            killed = 0
            for _ in range(number):
                time.sleep(gap)
                if found := replicas(one):
                    os.kill(found[0].pid, signal.SIGKILL)
                    killed += 1
            loop = asked.result()
    raw_errors = loop.requests - len(loop.ms.get(200, []))
    return {
        "killed": killed,
        "requests": loop.requests,
        "raw_errors": raw_errors,
        "by_status": {str(status): len(ms) for status, ms in sorted(loop.ms.items())},
        "errors_after_one_retry": sum(n for status, n in loop.again.items() if status != 200),
        "p99_ms": loop.percentile(0.99),
        "longest_ms": max((max(ms) for ms in loop.ms.values()), default=math.nan),
    }


def soak(work: Work) -> dict[str, Any]:
    """70 % of the load for a long time: the slope of the memory, and errors."""
    server, client = cores()
    memory: list[tuple[float, float, float]] = []
    with running(sides_of(work.student, work.parent, work.settings)["rtrain"], server, work.log("soak")) as one:
        most, began = capacity(one, work, client), time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            given = {"url": one.url, "texts": list(work.texts), "rate": 0.7 * most, "seconds": 60 * work.minutes}
            asked = pool.submit(load.opened_on, client, **given, void=False)
            while not asked.done():
                memory.append(((time.monotonic() - began) / 60, one.memory_mb(), memory_mb(replicas(one))))
                time.sleep(min(10.0, 6 * work.minutes))
            loop = asked.result()
    return {
        "minutes": work.minutes,
        "rate": 0.7 * most,
        "requests": loop.requests,
        "by_status": {str(status): len(ms) for status, ms in sorted(loop.ms.items())},
        "errors": loop.requests - len(loop.ms.get(200, [])),
        "errors_after_one_retry": sum(n for status, n in loop.again.items() if status != 200),
        "late": loop.share_late(),
        "p50_ms": loop.percentile(0.5),
        "p99_ms": loop.percentile(0.99),
        "memory_mb_a_minute": slope([(minute, mb) for minute, mb, _ in memory]),
        "replicas_mb_a_minute": slope([(minute, mb) for minute, _, mb in memory]),
        "memory": memory,
    }


def slope(memory: Sequence[tuple[float, float]]) -> float:
    """MB a minute, of minutes and MB; NaN of fewer than two. The first fifth fills what is filled once."""
    steady = memory[len(memory) // 5 :]
    return statistics.linear_regression(*zip(*steady, strict=True)).slope if len(steady) > 1 else math.nan
