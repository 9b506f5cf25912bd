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

from benchmarks import ours
from benchmarks.peers import common
from benchmarks.rows import Files
from rtrain.core import env, events

ROOT = Path(__file__).resolve().parents[1]
NOT_INHERITED = ("OMP_", "MKL_", "MALLOC_", "LD_PRELOAD", "TORCH_", "RAY_", "RANK", "WORLD_SIZE", "ACCELERATE_")
"""Prefixes of environment variables that a side must not inherit from the caller's shell."""


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
    "hf_grouped_k4": Peer("benchmarks.peers.hf_trainer", (*GROUPED, "--passes", "4")),
    "hf_equal": Peer("benchmarks.peers.hf_trainer", equal=True),
    "ray_documented": Peer("benchmarks.peers.ray_documented", torchrun=False),
    "ddp": Peer("benchmarks.peers.ddp_loop"),
}


@dataclass(frozen=True)
class OwnSide:
    """A run of rtrain; `is_isolated`: as many independent runs at once as the peers have processes."""

    passes: int = 1
    is_isolated: bool = False
    equal: bool = False


OWN_SIDES = {
    "ours": OwnSide(),
    "ours_k4": OwnSide(passes=4),
    "ours_equal": OwnSide(equal=True),
    "apart": OwnSide(is_isolated=True),
    "apart_k4": OwnSide(passes=4, is_isolated=True),
}


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

    def files_for(self, equal: bool) -> Files:
        return self.equal if equal else self.files


def peer_command(name: str, work: Work, seed: int, out: Path) -> list[str]:
    peer = PEERS[name]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(common.PROCESSES)]
    command = [sys.executable, *(launcher if peer.torchrun else []), "-m", peer.module]
    files = ["--model", str(work.model), "--rows", str(work.files_for(peer.equal).train), "--out", str(out)]
    store = ["--store", str(work.store)] if name == "ddp" else []
    return [*command, *files, *store, *peer.arguments, "--seed", str(seed)]


def own_commands(name: str, work: Work, seed: int) -> dict[Path, list[str]]:
    """The command of each run, by run folder. Runs apart have different seeds, and so different orders of rows."""
    side = OWN_SIDES[name]
    files, workers = work.files_for(side.equal), 1 if side.is_isolated else common.PROCESSES
    commands_by_run = {}
    for place in range(common.PROCESSES if side.is_isolated else 1):
        run = work.folder / "runs" / f"{name}-{place}"
        commands_by_run[run] = ours.command(
            files.train, files.test, run, ours.settings(workers, side.passes, seed + place)
        )
    return commands_by_run


def commands(name: str, work: Work, seed: int) -> list[list[str]]:
    """The programs that a side runs at the same time."""
    if name in OWN_SIDES:
        return list(own_commands(name, work, seed).values())
    return [peer_command(name, work, seed, work.folder / f"{name}.json")]


def run(name: str, work: Work, seed: int) -> dict[str, float]:
    """Run a side to its end; returns its measurements."""
    if name in OWN_SIDES:
        return _run_own(name, work, seed)
    out = work.folder / f"{name}.json"
    out.unlink(missing_ok=True)
    run_all({name: peer_command(name, work, seed, out)}, environment(os.environ), work)
    figures: dict[str, float] = json.loads(out.read_text(encoding="utf-8"))
    return figures


def _run_own(name: str, work: Work, seed: int) -> dict[str, float]:
    started, is_isolated = own_commands(name, work, seed), OWN_SIDES[name].is_isolated
    for folder in started:
        shutil.rmtree(folder, ignore_errors=True)
    # Each independent run gets one core, so that it has one thread, as a worker has.
    run_all({folder.name: command for folder, command in started.items()}, own_environment(), work, is_isolated)
    logs = [events.read_events(folder) for folder in started]
    for folder in started:
        shutil.rmtree(folder)
    return ours.together(logs) if is_isolated else ours.measured(logs[0])


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of a side's processes: one thread, rtrain's settings of the allocator, nothing is downloaded,
    and no setting of the caller's shell counts."""
    return {
        **{name: value for name, value in inherited.items() if not name.startswith(NOT_INHERITED)},
        **{name: value for name, value in env.ENV_DEFAULTS.items() if name.startswith("MALLOC_")},
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_V2_ENABLED": "1",
    }


def own_environment() -> dict[str, str]:
    """The environment of rtrain's runs: rtrain itself sets what its processes need."""
    variables = environment(os.environ)
    return {name: value for name, value in variables.items() if not name.startswith(("OMP_", "MALLOC_"))}


def run_all(
    programs: Mapping[str, Sequence[str]], environment: Mapping[str, str], work: Work, is_isolated: bool = False
) -> None:
    """Run programs at the same time, each with its output in a file of its name. If one fails, or at Ctrl-C, all
    end."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for place, (name, command) in enumerate(programs.items()):
            pin = partial(os.sched_setaffinity, 0, {work.cores[place]}) if is_isolated else None
            with (work.folder / f"{name}.log").open("wb") as output:
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
                raise SystemExit(f"{name} ended with {code}; its output is in {work.folder / f'{name}.log'}")
    finally:
        for process in started.values():
            if process.poll() is None:
                process.terminate()
                process.wait()


def make_store(work: Work) -> Work:
    """Make a run that is not counted. It warms the machine up, and leaves the token store that other sides read."""
    ((folder, command),) = own_commands("ours", work, seed=0).items()
    shutil.rmtree(folder, ignore_errors=True)
    run_all({"warm-up": command}, own_environment(), work)
    created = next(event for event in events.read_events(folder) if event["kind"] == "created")
    shutil.rmtree(folder)
    return dataclasses.replace(work, store=Path(created["store"]))
