"""Faults from inside a training worker. With this folder on PYTHONPATH every Python process reads it when it starts.

A test arms one fault by writing `FAILPOINT/armed.json` = {"rank": 1, "action": "segfault"}; the worker of that rank
finds it before its next update, or evaluation, or save, or its artefact, takes it away, and does it. While
`FAILPOINT/slow` is there, with seconds in it, every kind of work without passes takes so much longer, once in each
process. Nothing of rtrain knows of this.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FAILPOINT = "FAILPOINT"
HOOKED = "rtrain.runs.worker"


def take(*actions: str, rank: int | None = None) -> str | None:
    """The armed action, where it is one of these and this rank's; it is taken once."""
    path = Path(os.environ[FAILPOINT]) / "armed.json"
    try:
        armed = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if armed["action"] not in actions or rank not in (None, armed["rank"]):
        return None
    try:
        path.rename(path.with_name("taken.json"))
    except OSError:  # another process was quicker
        return None
    return str(armed["action"])


SLOWED: set[str] = set()


def delay(phase: str, share: float = 1.0) -> None:
    """The phase takes so much longer in this process, the first time; it says so in `FAILPOINT/slowed`."""
    path = Path(os.environ[FAILPOINT]) / "slow"
    if phase in SLOWED or not path.is_file():
        return
    import time

    SLOWED.add(phase)
    time.sleep(share * float(path.read_text()))
    with path.with_name("slowed").open("a") as file:
        file.write(f"{phase}\n")


def slowed(phase: str, whole: Callable[..., Any]) -> Callable[..., Any]:
    def call(*rest: Any, **options: Any) -> Any:
        delay(phase)
        return whole(*rest, **options)

    return call


def hang_with_the_lock() -> None:
    import ctypes

    ctypes.PyDLL(None).sleep(10**6)  # PyDLL, unlike CDLL, keeps the interpreter's lock


def hang() -> None:
    import time

    time.sleep(10**6)


def segfault() -> None:
    import ctypes

    ctypes.string_at(0)


def raise_error() -> None:
    raise RuntimeError("armed by a test")


def run_out_of_memory() -> None:
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    bytearray(1 << 30)


NOW: dict[str, Callable[[], None]] = {
    "lock": hang_with_the_lock,
    "hang": hang,
    "segfault": segfault,
    "error": raise_error,
    "memory": run_out_of_memory,
}


def hook(worker: Any) -> None:
    """Wrap what a worker calls."""
    import safetensors.torch

    from rtrain.trainer import step

    loop: Any = worker.trainer
    update, score_rows, save = step.StepRunner.run_step, loop.evaluate.score_rows, safetensors.torch.save_file
    score = worker._TrainReporter.score

    def run_update(runner: Any, *rest: Any, **options: Any) -> Any:
        exchange = runner.strategy
        action = take(*NOW, "exchange", "nan", rank=exchange.replica_rank)
        if action in NOW:
            NOW[action]()
        elif action:
            first = next(exchange.module.parameters())
            if action == "nan":
                first.data.fill_(float("nan"))
            else:  # the first parameter's gradient is the last to come: other buckets are under way by then
                first.register_hook(lambda gradient: os._exit(1))
        return update(runner, *rest, **options)

    def hanging_evaluate(exchange: Any, *rest: Any, **options: Any) -> Any:
        if take("evaluation", rank=exchange.replica_rank):
            hang()
        return score_rows(exchange, *rest, **options)

    def failing_save(*rest: Any, **options: Any) -> Any:
        if take("disk"):
            raise OSError(5, "Input/output error")
        return save(*rest, **options)

    def skipping_score(reporter: Any, metrics: Any) -> None:
        if not take("report", rank=reporter._rank):
            score(reporter, metrics)

    def hanging_write(*rest: Any, **options: Any) -> Any:
        if take("artefact"):
            hang()
        return write(*rest, **options)

    runner_class: Any = step.StepRunner
    runner_class.run_step, loop.evaluate.score_rows = run_update, hanging_evaluate
    write = worker.artifact.write_artifact
    worker.artifact.write_artifact = slowed("artefact", hanging_write)
    worker.predictions.write_predictions = slowed("predictions", worker.predictions.write_predictions)
    worker.predictions.measure_scores = slowed("scores", worker.predictions.measure_scores)
    worker.builder.build_network = slowed("model", worker.builder.build_network)
    loop.checkpoint_format.load_checkpoint = slowed("checkpoint", loop.checkpoint_format.load_checkpoint)
    hook_evaluate(worker.evaluate)
    safetensors.torch.save_file = failing_save
    worker._TrainReporter.score = skipping_score


def hook_evaluate(evaluate: Any) -> None:
    """The scores of a split, on every worker; and the passes of all workers but the first."""
    import torch.distributed as dist

    metric_for, forward = evaluate.get_metric, evaluate.forward

    def slow_metric(output: Any) -> Any:
        delay("metric")
        return metric_for(output)

    def slow_forward(*rest: Any, **options: Any) -> Any:
        if dist.get_rank():  # no pass is a stall by itself; the first worker has long done its own
            delay(f"pass {sum(phase.startswith('pass') for phase in SLOWED) % 3}", share=0.5)
        return forward(*rest, **options)

    evaluate.get_metric, evaluate.forward = slow_metric, slow_forward
    evaluate.MAX_ROWS_PER_MICRO_BATCH = 8


def hook_replica(replica: Any) -> None:
    """`slow:///folder` is a storage where weights take their time, in both directions."""
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    class Slow(LocalFileSystem):  # type: ignore[misc]  # it has no types
        protocol = "slow"

        def put_file(self, path: str, *rest: Any, **options: Any) -> None:
            if path.endswith("model.safetensors"):
                delay("upload")
            super().put_file(path, *rest, **options)

        def get_file(self, path: str, *rest: Any, **options: Any) -> None:
            if path.endswith("model.safetensors"):
                delay("download")
            super().get_file(path, *rest, **options)

    fsspec.register_implementation("slow", Slow, clobber=True)


def hook_ingest(ingest: Any) -> None:
    plan = ingest.plan_worker_batch

    def dying_plan(*rest: Any, **options: Any) -> Any:
        if take("data task"):
            os._exit(1)
        return plan(*rest, **options)

    ingest.plan_worker_batch = dying_plan


HOOKS = {HOOKED: hook, "rtrain.data.stream": hook_ingest, "rtrain.checkpoint.remote_copy": hook_replica}


class Finder(importlib.abc.MetaPathFinder):
    """Hooks a module when it has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in HOOKS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        whole = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            whole(module)
            HOOKS[name](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if FAILPOINT in os.environ:
    sys.meta_path.insert(0, Finder())
