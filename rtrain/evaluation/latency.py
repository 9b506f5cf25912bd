"""Latency and memory of models on this machine.

Latency of two models is interleaved, so that noise of the machine affects both.

In each round both models predict the same texts, one model after the other, and the first one alternates. A round gives
one ratio of medians; the result is an interval over rounds. The models do not alternate text by text: each would evict
the other's weights from the caches, which does not happen in an endpoint.
"""

import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rtrain.core.errors import UserError

MIN_ROUNDS, MAX_ROUNDS = 9, 51
"""Nine rounds are enough for an interval without the fastest and the slowest round, i.e. without one outlier."""
MIN_TEXTS, MAX_TEXTS = 3, 12
"""Texts per bucket and round."""
BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Upper bounds of the buckets in tokens; longer texts share one more bucket."""

BATCH_ROWS = 32
"""Rows of the batch whose memory is measured."""

RowAnswerer = Callable[[int], object]
"""Predicts the row at a position."""


@dataclass(frozen=True)
class LatencyComparison:
    """Latency of texts of similar length, one per call, in milliseconds."""

    bucket: str
    baseline_p50: float
    baseline_p99: float
    p50: float
    p99: float
    calls: int
    """Calls of each model."""
    ratio: float
    """Baseline median / candidate median; the median over rounds."""
    low: float
    high: float
    """Interval of the ratio over rounds."""


def bucket_name(tokens: int) -> str:
    upper = next((bound for bound in BUCKETS if tokens <= bound), None)
    return f"more than {BUCKETS[-1]} tokens" if upper is None else f"up to {upper} tokens"


def choose_rows(lengths: Sequence[int]) -> dict[str, list[int]]:
    """Choose at most `MAX_TEXTS` positions per bucket, evenly spread by length, short buckets first."""
    buckets: dict[str, list[int]] = {}
    for position in sorted(range(len(lengths)), key=lambda row: lengths[row]):
        buckets.setdefault(bucket_name(lengths[position]), []).append(position)
    return {name: _spread_evenly(rows, MAX_TEXTS) for name, rows in buckets.items()}


def _spread_evenly(rows: Sequence[int], max_rows: int) -> list[int]:
    return [rows[place] for place in np.unique(np.linspace(0, len(rows) - 1, min(max_rows, len(rows))).astype(int))]


def measure_latency(
    baseline: RowAnswerer,
    candidate: RowAnswerer,
    rows: Mapping[str, Sequence[int]],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[LatencyComparison]:
    """Compare the speed of both models in each bucket.

    It takes about `seconds`, or the time of `MIN_ROUNDS` rounds of `MIN_TEXTS` texts.
    """
    comparisons = []
    for name, positions in rows.items():
        # The first texts warm up both models and estimate the cost of a call.
        cost = [
            _time_call(baseline, row, clock) + _time_call(candidate, row, clock) for row in [*positions[:MIN_TEXTS]] * 2
        ]
        calls = int(seconds / len(rows) / max(statistics.median(cost), 1e-9))
        timed_rows = _spread_evenly(positions, max(MIN_TEXTS, min(calls // MIN_ROUNDS - 1, MAX_TEXTS)))
        rounds = max(MIN_ROUNDS, min(calls // (len(timed_rows) + 1), MAX_ROUNDS))
        comparisons.append(_measure_bucket(name, (baseline, candidate), timed_rows, rounds, clock))
    return comparisons


def _measure_bucket(
    name: str, models: Sequence[RowAnswerer], positions: Sequence[int], rounds: int, clock: Callable[[], float]
) -> LatencyComparison:
    """`models`: the baseline and the candidate."""
    times: tuple[list[float], list[float]] = ([], [])
    ratios = []
    for number in range(rounds):
        round_times: list[list[float]] = [[], []]
        for place in (0, 1) if number % 2 else (1, 0):
            answer = models[place]
            answer(positions[0])  # loads the weights into the caches again
            round_times[place] = [_time_call(answer, row, clock) for row in positions]
            times[place].extend(round_times[place])
        ratios.append(statistics.median(round_times[0]) / max(statistics.median(round_times[1]), 1e-9))
    low, high = median_interval(ratios)
    (baseline_p50, baseline_p99), (p50, p99) = (
        np.percentile(np.array(model_times) * 1000, (50, 99)).tolist() for model_times in times
    )
    return LatencyComparison(
        bucket=name,
        baseline_p50=baseline_p50,
        baseline_p99=baseline_p99,
        p50=p50,
        p99=p99,
        calls=len(times[0]),
        ratio=statistics.median(ratios),
        low=low,
        high=high,
    )


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Distribution-free 95 % interval of the median by order statistics, from the sign test (Conover, Practical
    Nonparametric Statistics). Five values or fewer give their range, with less confidence.
    """
    ordered, count = sorted(values), len(values)
    excluded, tail = 0, 0.0
    while excluded < (count - 1) // 2:
        tail += math.comb(count, excluded) / 2**count
        if 2 * tail > 0.05:
            break
        excluded += 1
    place = max(0, excluded - 1)
    return ordered[place], ordered[count - 1 - place]


def _time_call(answer: RowAnswerer, row: int, clock: Callable[[], float]) -> float:
    started_at = clock()
    answer(row)
    return clock() - started_at


def measure_memory_mb(folder: Path, threads: int) -> float:
    """Megabytes of an artifact in a process: library of the engine, weights, one batch."""
    command = [sys.executable, "-m", "rtrain.evaluation.latency", str(folder.absolute()), str(threads)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    if process.returncode:
        last_line = process.stderr.strip().splitlines()[-1:] or ["no error message"]
        raise UserError(f"{folder} could not be loaded in a separate process: {last_line[0]}", code="not_loaded")
    return float(process.stdout)


def measure_files_mb(folder: Path) -> float:
    """Megabytes of all files of an artifact."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def _measure_added_mb(folder: Path, threads: int) -> float:
    import psutil

    from rtrain.inference import artifact, predictor as inference_predictor

    metadata, process = artifact.read_artifact(folder, verify=False), psutil.Process()
    rss_before = process.memory_info().rss
    predictor = inference_predictor.Predictor(folder, metadata, threads)
    inputs = inference_predictor.make_golden_inputs(predictor.task, predictor.head)
    predictor.logits((inputs * BATCH_ROWS)[:BATCH_ROWS])
    return float(process.memory_info().rss - rss_before) / 1e6


if __name__ == "__main__":
    sys.stdout.write(f"{_measure_added_mb(Path(sys.argv[1]), int(sys.argv[2])):.1f}\n")
