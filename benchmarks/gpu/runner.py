"""Run one section after another, each in its own process with its share of the minutes; write the file after each line.

The processes are forked from one that has imported torch and transformers and computed nothing. So a section starts at
once, may run out of the GPU's memory without harm to others, and can be killed if it hangs.
"""

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu import report
from benchmarks.gpu.bench import Bench

SHARES: Mapping[str, float] = {
    "needs": 0.5,
    "right": 4,
    "resume": 4,
    "speed": 10.5,
    "profile": 2,
    "pays": 4,
    "score": 4.5,
    "memory": 3,
    "serving": 2,
    "serving_peers": 3,
    "flattened": 2,
    "start": 0.5,
}
"""The sections, most important first, with their parts of the time. Each is a module here with a function `run`."""
LOOK_S = 0.2
PLANTED = "an error that was asked for (--plant)"


@dataclass
class Plan:
    names: list[str]
    seconds: float
    out: Path
    scratch: Path
    bench: Bench
    planted: str | None = None
    """Name of a section that must fail when it begins, which shows how the report tells of a failure."""


def share(left: float, names: list[str]) -> float:
    """Seconds for the first of `names`; the rest of the time is for the other names, by their parts. Pure."""
    return left * SHARES[names[0]] / sum(SHARES[name] for name in names)


def run(plan: Plan, about: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Run the sections; returns the document. It is also in the file `plan.out`, which is complete at any moment."""
    document: dict[str, Any] = {"about": dict(about), "sections": {}}
    ends = time.monotonic() + plan.seconds
    for place, name in enumerate(plan.names):
        seconds = max(1.0, share(ends - time.monotonic(), plan.names[place:]))
        section: dict[str, Any] = {"status": "running", "share_s": round(seconds, 1), "seconds": 0.0, "lines": []}
        document["sections"][name] = section
        write(plan.out, document)
        _run_section(plan, name, seconds, section, lambda: write(plan.out, document), say)
        say(f"{name}: {section['status']}, {section['seconds']:.0f} of {seconds:.0f} s, {len(section['lines'])} lines")
    return document


def _run_section(
    plan: Plan, name: str, seconds: float, section: dict[str, Any], keep: Callable[[], None], say: Callable[[str], None]
) -> None:
    path = plan.scratch / f"{name}.jsonl"
    path.unlink(missing_ok=True)
    begun = time.monotonic()
    bench = replace(plan.bench, ends=begun + seconds, report=report.Report(path, name))
    context: Any = multiprocessing.get_context(plan.bench.start)
    process = context.Process(target=_child, args=(name, bench, plan.planted == name))
    process.start()

    def read() -> None:
        found = report.lines(path)
        section["seconds"] = round(time.monotonic() - begun, 1)
        if len(found) > len(section["lines"]) + ("error" in section):
            ended = [one for one in found if "failed" in one]
            known, section["lines"] = len(section["lines"]), [one for one in found if "failed" not in one]
            for one in ended:
                section.update(error=one["failed"], traceback=one["traceback"])
            for one in section["lines"][known:]:
                say(f"  {one['key']}: {one.get('error') or one['value']}")
            keep()

    try:
        while process.is_alive() and time.monotonic() - begun < seconds:
            process.join(LOOK_S)
            read()
        cut = process.is_alive()
    except BaseException:
        section["status"] = "stopped"
        _end(process)
        read()
        keep()
        raise
    _end(process)
    read()
    if cut:
        section["status"], section["error"] = "cut off", f"after its share of {seconds:.0f} s"
    elif process.exitcode:
        section["status"] = "failed"
        section.setdefault("error", f"the process ended with {process.exitcode}")
    else:
        section["status"] = "done"
    keep()


def _child(name: str, bench: Bench, planted: bool) -> None:
    os.setpgid(0, 0)  # so that processes that the section starts end with it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()
    try:
        if planted:
            raise RuntimeError(PLANTED)
        importlib.import_module(f"benchmarks.gpu.{name}").run(bench)
    except Exception as error:
        bench.report.failed(error)
        sys.stderr.flush()
        os._exit(1)


def _watch(parent: int) -> None:
    """End a section's processes, so that none outlives the command."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os.killpg(0, signal.SIGKILL)


def _end(process: Any) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():  # it had no process group yet
        process.kill()
    process.join()


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write a file so that it is never seen incomplete."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    draft.rename(path)


def in_child(work: Callable[[], Any], start: str) -> Any:
    """The result of `work`, done in another process. This process must not start CUDA, or it could not fork any
    more."""
    context: Any = multiprocessing.get_context(start)
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(work, theirs))
    process.start()
    theirs.close()
    try:
        return mine.recv()
    except EOFError:
        return None
    finally:
        process.join()


def _tell(work: Callable[[], Any], pipe: Any) -> None:
    pipe.send(work())
