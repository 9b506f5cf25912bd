"""A profile's workers and its document, made of figures that can be added up by hand."""

from collections.abc import Mapping
from typing import Any

from rtrain.parallel import profiler
from rtrain.parallel.profiler import COMM_ASYNC, COMM_WAIT, StepWindow, TimeSpan
from rtrain.profiling import profile
from rtrain.profiling.profile import DOCUMENT_KIND, DOCUMENT_VERSION, ProfiledStep, ProfiledWorker, ProfileLength

LENGTH = ProfileLength(steps=4, warm_up_steps=2)
MS = 1_000_000
"""Nanoseconds."""


def worker(rank: int = 0, *, slower: int = 1, cores: int = 2, host: str = "here") -> ProfiledWorker:
    """Seven steps of 100 ms times `slower`, including 10 ms idle; the last one ends with a checkpoint of 50 ms. The
    clock's zero is an hour after 1970, plus a second per rank."""
    updates, at = [], 5 * MS
    for number in range(LENGTH.total_steps):
        last = number == LENGTH.total_steps - 1
        wall = 100 * slower * MS + last * 50 * MS
        ends = [at + part * slower * MS for part in (5, 35, 80, 90)]
        spans = [
            TimeSpan(profiler.GET_BATCH, at, ends[0]),
            TimeSpan(profiler.FORWARD, ends[0], ends[1]),
            TimeSpan(COMM_ASYNC, ends[1] + 10 * slower * MS, ends[1] + 30 * slower * MS),
            TimeSpan(COMM_WAIT, ends[2] - 5 * slower * MS, ends[2]),
            TimeSpan(COMM_ASYNC, ends[2] - 5 * slower * MS, ends[2]),
            TimeSpan(profiler.BACKWARD, ends[1], ends[2]),
            TimeSpan(profiler.OPTIMIZER, ends[2], ends[3]),
        ]
        if last:
            spans.append(TimeSpan(profiler.CHECKPOINT, at + wall - 50 * MS, at + wall))
        updates.append(
            ProfiledStep(StepWindow(number, at, at + wall, tuple(spans)), rows=8, micro_batches=2, real_tokens=200)
        )
        at += wall
    seconds = sum(update.window.wall for update in updates) / 1e9
    return ProfiledWorker(rank, host, cores, seconds / 2, seconds, (3600 + rank) * 1_000_000_000, tuple(updates))


def row(workers: int = 1, *, slower: int = 1, cores: int = 2, **facts: Any) -> dict[str, Any]:
    """A row of a profile's document."""
    known_values: dict[str, Any] = {
        **{"name": f"workers={workers}", "settings": {"train.workers": workers}, "precision": "fp32"},
        **{"device": "cpu", "global_batch_size": 8 * workers, "order_digest": "ab" * 32},
        **{"save_every": 25, "run_steps": 1000},
    }
    result = [worker(rank, slower=slower, cores=cores) for rank in range(workers)]
    return profile.summarize_row(profile.ProfiledRunInfo(**{**known_values, **facts}), result, LENGTH)


def document(*rows: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    return {
        **{
            "kind": DOCUMENT_KIND,
            "version": DOCUMENT_VERSION,
            "name": "intent-profile",
            "recipe": "intent",
            "task": "classification",
        },
        **{"model": "minilm", "time": 0.0, "length": {"steps": LENGTH.steps, "warm_up": LENGTH.warm_up_steps}},
        "machine": {"host": "here", "cores": 2, "processor": "a processor", "load": [0.5, 2.5]},
        "rows": list(rows) or [row()],
        **changed,
    }
