"""A profile's spans as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

The JSON object form of the Trace Event Format: complete events (`X`) on a worker's main thread, which nest; and pairs
of asynchronous events (`b`, `e`) for parts of an exchange that are under way beside it, since several are at a time.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from rtrain.doctor.profile.worker_file import Worker
from rtrain.exchange.timeline import SENDS

MAIN = 1
"""Thread of what the worker does itself."""
ROWS_APART = 1000
"""Process ids from one row of the profile to the next."""


def events(name: str, number: int, workers: Sequence[Worker]) -> list[dict[str, Any]]:
    """The events of row `number`, from 0, of a profile. Times are microseconds since its first update."""
    begin = min(one.updates[0].window.start + one.epoch for one in workers)
    return [event for worker in workers for event in _of_worker(name, number * ROWS_APART, worker, begin)]


def _of_worker(name: str, first: int, worker: Worker, begin: int) -> Iterator[dict[str, Any]]:
    process = first + worker.rank
    label = f"{name}, worker {worker.rank} on {worker.host}"
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": label}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    yield {"ph": "M", "name": "thread_name", "pid": process, "tid": MAIN, "args": {"name": "training"}}

    def at(moment: int) -> float:
        return (moment + worker.epoch - begin) / 1e3

    for update in worker.updates:
        window, counts = update.window, {"rows": update.rows, "passes": update.passes, "tokens": update.real_tokens}
        span = {"ts": at(window.start), "dur": window.wall / 1e3, "pid": process, "tid": MAIN}
        yield {"ph": "X", "name": f"update {window.number}", "cat": "update", **span, "args": counts}
        for place, one in enumerate(window.spans):
            known = {"name": one.kind, "cat": one.kind, "pid": process, "tid": MAIN}
            if one.kind == SENDS:
                identity = f"{process}-{window.number}-{place}"
                yield {"ph": "b", "id": identity, "ts": at(one.start), **known}
                yield {"ph": "e", "id": identity, "ts": at(one.stop), **known}
            else:
                yield {"ph": "X", "ts": at(one.start), "dur": (one.stop - one.start) / 1e3, **known}


def document(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"displayTimeUnit": "ms", "traceEvents": list(found)}
