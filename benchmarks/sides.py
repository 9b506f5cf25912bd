"""The sides of `benchmarks.train`: the programs that each runs, and how. Every side runs in its own processes."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import budgets, ours
from benchmarks.budgets import Budget
from benchmarks.peers import common
from benchmarks.rows import Files
from rtrain import events

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Peer:
    module: str
    arguments: tuple[str, ...] = ()
    torchrun: bool = True
    """Whether torchrun starts its processes. If not, it is one program that starts processes itself."""
    equal: bool = False
    """Whether it trains on rows of equal length."""


GROUPED = ("--sampling", "group_by_length")
PEERS = {
    "hf_default": Peer("benchmarks.peers.hf_trainer"),
    "hf_grouped": Peer("benchmarks.peers.hf_trainer", GROUPED),
    "hf_grouped_mean": Peer("benchmarks.peers.hf_trainer", (*GROUPED, "--pooling", "mean")),
    "hf_grouped_k4": Peer("benchmarks.peers.hf_trainer", (*GROUPED, "--passes", "4")),
    "hf_equal": Peer("benchmarks.peers.hf_trainer", equal=True),
    "ray_documented": Peer("benchmarks.peers.ray_documented", torchrun=False),
    "accelerate": Peer("benchmarks.peers.accelerate_loop"),
    "ddp": Peer("benchmarks.peers.ddp_loop"),
}
SAME_BUDGET = {"hf_equal": "hf_default", "hf_grouped_mean": "hf_grouped"}
"""Sides that are not swept themselves: each runs with the budget of the peer named here."""


@dataclass(frozen=True)
class Own:
    """A run of rtrain; with `apart`, as many independent runs at once as the peers have processes."""

    passes: int = 1
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    apart: bool = False
    equal: bool = False


OWN = {
    "ours": Own(),
    "ours_k4": Own(passes=4),
    "ours_equal": Own(equal=True),
    "harness": Own(settings=ours.PLAIN),
    "apart": Own(apart=True),
    "apart_k4": Own(passes=4, apart=True),
    **{f"with_{name}": Own(settings=settings) for name, settings in ours.OPTIONS.items()},
    **{f"without_{name}": Own(settings=settings) for name, settings in ours.TECHNIQUES.items()},
}
PROBE = "probe"


@dataclass(frozen=True)
class Work:
    """The rows, the model and the cores that all sides share."""

    folder: Path
    model: Path
    files: Files
    equal: Files
    cores: tuple[int, ...]
    store: Path | None = None
    """Token store of `files`; None until a run has made it."""

    def of(self, equal: bool) -> Files:
        return self.equal if equal else self.files


def torchrun(module: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return [*launcher, str(common.PROCESSES), "-m", module]


def peer_command(name: str, work: Work, seed: int, budget: Budget, out: Path) -> list[str]:
    peer = PEERS[name]
    command = torchrun(peer.module) if peer.torchrun else [sys.executable, "-m", peer.module]
    files = ["--model", str(work.model), "--rows", str(work.of(peer.equal).train), "--out", str(out)]
    store = ["--store", str(work.store)] if name == "ddp" else []
    loading = ["--loader-workers", str(budget.loader_workers), "--attention", budget.attention]
    return [*command, *files, *store, *peer.arguments, *loading, "--seed", str(seed)]


def probe_command(work: Work, out: Path) -> list[str]:
    return [*torchrun("benchmarks.probe"), "--model", str(work.model), "--store", str(work.store), "--out", str(out)]


def own_commands(name: str, work: Work, seed: int) -> dict[Path, list[str]]:
    """The command of each run, by run folder. Runs apart have different seeds, and so different orders of rows."""
    side = OWN[name]
    files = work.of(side.equal)
    seeds = [seed + number for number in range(common.PROCESSES if side.apart else 1)]
    found = {}
    for place, own_seed in enumerate(seeds):
        chosen = ours.settings(1 if side.apart else common.PROCESSES, side.passes, own_seed) | dict(side.settings)
        run = work.folder / "runs" / f"{name}-{place}"
        found[run] = ours.command(sys.executable, files.train, files.test, run, chosen)
    return found


def commands(name: str, work: Work, seed: int, budget: Budget) -> list[list[str]]:
    """The programs that a side runs at the same time."""
    if name in OWN:
        return list(own_commands(name, work, seed).values())
    out = result_of(name, work)
    return [probe_command(work, out) if name == PROBE else peer_command(name, work, seed, budget, out)]


def result_of(name: str, work: Work) -> Path:
    return work.folder / f"{name}.json"


def run(name: str, work: Work, seed: int, budget: Budget) -> dict[str, float]:
    """Run a side to its end and return what it measured."""
    if name in OWN:
        return _run_own(name, work, seed)
    out = result_of(name, work)
    out.unlink(missing_ok=True)
    (command,) = commands(name, work, seed, budget)
    run_all({name: command}, budgets.environment(budget, os.environ, ROOT), work)
    found: dict[str, float] = json.loads(out.read_text(encoding="utf-8"))
    return {key: value for key, value in found.items() if isinstance(value, int | float)}


def _run_own(name: str, work: Work, seed: int) -> dict[str, float]:
    started, apart = own_commands(name, work, seed), OWN[name].apart
    for folder in started:
        shutil.rmtree(folder, ignore_errors=True)
    # Each independent run gets one core, so that it has one thread, as a worker has.
    run_all({folder.name: command for folder, command in started.items()}, own_environment(), work, apart)
    logs = [events.read(folder) for folder in started]
    for folder in started:
        shutil.rmtree(folder)
    return ours.together(logs) if apart else ours.measured(logs[0])


def own_environment() -> dict[str, str]:
    """The environment of rtrain's runs: rtrain itself sets what its processes need."""
    found = budgets.environment(Budget(), os.environ, ROOT)
    del found["OMP_NUM_THREADS"]
    return found


def run_all(
    programs: Mapping[str, Sequence[str]], environment: Mapping[str, str], work: Work, apart: bool = False
) -> None:
    """Run programs at the same time, each with its output in a file of its name. If one fails, or at Ctrl-C, all
    end."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for place, (name, command) in enumerate(programs.items()):
            pin = partial(os.sched_setaffinity, 0, {work.cores[place]}) if apart else None
            with log(name, work).open("wb") as output:
                started[name] = subprocess.Popen(
                    command,
                    env=dict(environment),
                    cwd=work.folder,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    preexec_fn=pin,
                )
        for name, process in started.items():
            if code := process.wait():
                raise SystemExit(f"{name} ended with {code}; its output is in {log(name, work)}")
    finally:
        for process in started.values():
            if process.poll() is None:
                process.terminate()
                process.wait()


def log(name: str, work: Work) -> Path:
    return work.folder / f"{name}.log"


def make_store(work: Work) -> Work:
    """Make a run that is not counted. It warms the machine up, and leaves the token store that other sides read."""
    ((folder, command),) = own_commands("ours", work, seed=0).items()
    shutil.rmtree(folder, ignore_errors=True)
    run_all({"warm-up": command}, own_environment(), work)
    created = next(event for event in events.read(folder) if event["kind"] == "created")
    shutil.rmtree(folder)
    return dataclasses.replace(work, store=Path(created["store"]))
