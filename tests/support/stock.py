"""Run folders as trainings, searches and kills leave them, made in milliseconds: settings, log, stand-in weights."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rtrain import config
from rtrain.core import events, manifest
from rtrain.core.run_folder import Run
from rtrain.runs import run_folders

WEIGHTS = 10_000
"""Bytes of a checkpoint's stand-in weights."""


def make(
    folder: Path,
    *,
    ended: str | None = "finished",
    version: str | None = None,
    updates: Sequence[int] = (5, 10, 20),
    store: str = "aaaa",
    valid: float = 0.5,
    test: float | None = 0.6,
    begun: float = 1_700_000_000.0,
    best: int = 10,
    **overrides: Any,
) -> Run:
    """A run beside `.tokens/<store>`; `ended` is the kind of its last event, or None for one that was killed. A
    finished one has an artefact of `version`, which answers nothing."""
    run = Run(folder)
    settings = {"data.path": "/data/rows.csv", **{name.replace("__", "."): value for name, value in overrides.items()}}
    run_folders.write_frozen_config(run, config.load_config("intent", settings))
    tokens = folder.parent / ".tokens" / store
    log(run, "created", begun, store=str(tokens), data_digest=store, task="classification")
    log(run, "started", begun + 1, workers=2, step=0, total_steps=20, precision="fp32")
    for update in range(1, 21):
        log(run, "progress", begun + 1 + update, step=update, total_steps=20, loss=1.0)
    log(run, "evaluated", begun + 30, split="valid", step=best, scores={"accuracy": valid, "rows": 10})
    if test is not None:
        log(run, "evaluated", begun + 31, split="test", step=20, scores={"accuracy": test, "rows": 10})
    if ended == "finished":
        log(run, "trained", begun + 40, steps=20, best_step=best, finished=True, seconds={})
        artifact(run.artifact, version or f"version-{run.name}")
    if ended is not None:
        log(run, ended, begun + 60)
    for update in updates:
        checkpoint(run, update, best if best <= update else None)
    return run


def search(folder: Path, *, trials: int = 3, best: int | None = 1, **overrides: Any) -> Run:
    """A search whose trials were paused at their budget; the chosen one is finished."""
    run = Run(folder)
    run_folders.write_frozen_config(run, config.load_config("intent", {"data.path": "/data/rows.csv"}))
    for number in range(trials):
        ended = "finished" if number == best else "paused"
        trial = make(run.trial(number).folder, ended=ended, updates=(5, 20), valid=number / 10, **overrides)
        place = str(folder.parent / ".tokens" / "aaaa")
        trial.log.write_text(trial.log.read_text().replace(str(folder / ".tokens" / "aaaa"), place))
    (run.ray_storage / "tune-000").mkdir(parents=True)
    (run.ray_storage / "tune-000" / "state.json").write_bytes(b"r" * 1000)
    if best is not None:
        events.append_event(folder, "searched", winner=best, trials=trials)
        run.trials.write_text("{}\n" * trials)
    return run


def log(run: Run, kind: str, at: float, **fields: Any) -> None:
    """An event of another time."""
    with run.log.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": at, "kind": kind, **fields}) + "\n")


def artifact(folder: Path, version: str, **fields: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "artifact.json").write_text(json.dumps({"version": version, **fields}))
    (folder / "model.safetensors").write_bytes(b"a" * WEIGHTS)
    manifest.write_manifest(folder)
    return folder


def checkpoint(run: Run, update: int, best: int | None = None) -> Path:
    """`best`: the update that was best by then."""
    folder = run.checkpoints / f"step-{update:08d}"
    folder.mkdir(parents=True)
    state = {"schema_version": 4, "step": update, "ledger": "", "scale": None, "best_step": best, "best_score": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "model.safetensors").write_bytes(b"c" * WEIGHTS)
    manifest.write_manifest(folder)
    return folder


def store(root: Path, digest: str = "aaaa", size: int = 500) -> Path:
    folder = root / ".tokens" / digest
    (folder / "shards").mkdir(parents=True)
    (folder / "shards" / "0-0.arrow").write_bytes(b"t" * size)
    (folder / "manifest.json").write_text("{}")
    return folder


def age(path: Path, seconds: float = 90_000.0) -> Path:
    """As if nothing had been written there for so long."""
    then = time.time() - seconds
    for one in [*path.rglob("*"), path] if path.is_dir() else [path]:
        os.utime(one, (then, then))
    return path


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
