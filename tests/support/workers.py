"""Worker processes of a test: forked from one that has imported what they need, and joined into a group.

A process that starts from nothing imports torch and transformers for three seconds, and most of these train for one.
"""

import atexit
import contextlib
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, start_processes

from tests.support.root import ROOT

T = TypeVar("T")
PRELOADED = [
    "tests.unit.trainer.test_trainer",
    "torch.distributed.pipelining",
    "transformers.models.bert.modeling_bert",
]
"""What forked processes have from the start."""


def forking() -> Any:
    """The multiprocessing context of processes that are forked from one that has imported `PRELOADED`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with contextlib.chdir(ROOT):  # where it finds `tests`; its children have the folder of this process
        forkserver.ensure_running()
    return context


def begun(work: Callable[..., None], arguments: tuple[Any, ...], processes: int, anew: bool = False) -> ProcessContext:
    """Processes that do `work(rank, *arguments)`. `anew`: from nothing, with the environment that this one has now."""
    method = "spawn" if anew else forking().get_start_method()
    context: ProcessContext = start_processes(work, arguments, processes, join=False, start_method=method)
    return context


def run(
    work: Callable[..., None], arguments: tuple[Any, ...], processes: int, within: float = 240.0, anew: bool = False
) -> None:
    """Let processes do `work(rank, *arguments)`; raises where one failed, and where they do not end."""
    context = begun(work, arguments, processes, anew)
    end = time.monotonic() + within
    try:
        while not context.join(timeout=1):
            if time.monotonic() > end:
                raise TimeoutError("workers that should have ended have not")
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def once(prefix: str) -> Callable[[Callable[[Path], T]], Callable[[], T]]:
    """Decorate a set-up in a folder: the first call runs it, and every call returns its result or raises its error. The
    end of this process removes the folder, whose name begins with `prefix`."""

    def decorate(prepare: Callable[[Path], T]) -> Callable[[], T]:
        @cache
        def attempt() -> tuple[list[T], Exception | None]:
            folder = Path(mkdtemp(prefix=prefix))
            atexit.register(shutil.rmtree, folder)
            try:
                return [prepare(folder)], None
            except Exception as error:
                return [], error

        def result() -> T:
            values, error = attempt()
            if error is not None:
                raise error
            return values[0]

        return result

    return decorate


def load_results(folder: Path, worlds: Iterable[int]) -> dict[tuple[int, int], dict[str, Any]]:
    """The JSON file `world-rank.json` that each worker of each world wrote."""
    places = [(world, rank) for world in worlds for rank in range(world)]
    return {(world, rank): json.loads((folder / f"{world}-{rank}.json").read_text()) for world, rank in places}


def joined(rank: int, world: int, folder: Path, within: float = 60.0) -> None:
    """In such a process: make it a member of a group."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous-{world}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=within),
    )
