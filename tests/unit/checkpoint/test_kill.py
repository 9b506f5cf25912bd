"""A process that is killed at any write of a save: what loads is the newest checkpoint that was whole, and no rest.

A child process loads torch once and forks: each fork saves three checkpoints and dies at its own point of them.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rtrain.checkpoint.format import (
    CHECKPOINT_FILES,
    CheckpointState,
    checkpoint_path,
    find_latest,
    load_checkpoint,
    remove_drafts,
)
from tests.support.root import ROOT

SAVES = 3
KEEP = 1
POINTS = "points.json"


@dataclass
class Points:
    """Every point of the saves so far, by name; the process dies at point number `target`."""

    target: int | None
    names: list[str] = field(default_factory=list)

    def hit(self, name: str) -> None:
        self.names.append(re.sub(r"\.[0-9a-f]{8}\b", "", name))
        if self.is_last():
            os.kill(os.getpid(), signal.SIGKILL)

    def is_last(self, ahead: int = 0) -> bool:
        return len(self.names) - 1 + ahead == self.target

    def install(self) -> None:
        import safetensors.torch

        for name in ("mkdir", "rename", "unlink", "rmdir"):
            setattr(os, name, self._around(name, getattr(os, name)))
        os.fsync = self._around("fsync", lambda _: None)  # what a killed process wrote, the kernel keeps
        save_file, write_text = safetensors.torch.save_file, Path.write_text

        def save(tensors: Any, path: Path, notes: Any) -> None:
            save_file(tensors, path, notes)
            if self.is_last(ahead=1):
                os.truncate(path, path.stat().st_size // 2)
            self.hit(f"half of {path.name}")
            self.hit(f"all of {path.name}")

        def write(path: Path, text: str) -> int:
            write_text(path, text[: len(text) // 2])
            self.hit(f"half of {path.name}")
            written = write_text(path, text)
            self.hit(f"all of {path.name}")
            return written

        safetensors.torch.save_file = save  # type: ignore[assignment]
        Path.write_text = write  # type: ignore[method-assign, assignment]

    def _around(self, what: str, whole: Callable[..., Any]) -> Callable[..., Any]:
        def call(subject: Any, *rest: Any, **named: Any) -> Any:
            place = os.readlink(f"/proc/self/fd/{subject}") if what == "fsync" else subject
            paths = [Path(path).name for path in (place, *rest) if isinstance(path, str | Path)]
            told = f"{what} {' to '.join(paths)}"
            self.hit(f"before {told}")
            found = whole(subject, *rest, **named)
            self.hit(f"after {told}")
            return found

        return call


def saves(folder: Path, target: int | None) -> None:
    """In a fork: three checkpoints, one after another; the process does not return from point `target`."""
    from rtrain.checkpoint.saver import CheckpointSaver
    from rtrain.config import OptimConfig
    from rtrain.trainer import optimizers
    from tests.unit.checkpoint.test_format import RUN, make_network, train

    points = Points(target)
    points.install()
    network = make_network()
    optimizer = optimizers.build_optimizer(network, OptimConfig(lr=0.01))
    with CheckpointSaver(folder / "checkpoints", KEEP) as saver:
        for update in range(1, SAVES + 1):
            points.names.append(f"update {update}")
            train(network, optimizer, 1)
            saver.save(network, optimizer, CheckpointState(update, f"{update:02d}", None, None, RUN))
            saver.flush()
    (folder / POINTS).write_bytes(json.dumps(points.names).encode())


def forks(root: Path) -> None:
    """In the child: a fork that lives and writes down its points, then one that dies at each of them."""
    import torch

    from rtrain.config import OptimConfig
    from rtrain.trainer import optimizers
    from tests.unit.checkpoint.test_format import make_network, train

    torch.set_num_threads(1)  # no thread may be lost by a fork
    network = make_network()
    train(
        network, optimizers.build_optimizer(network, OptimConfig()), 1
    )  # torch loads much of itself now: once, not in every fork
    assert forked(root / "whole", None) == 0
    for target in targets(json.loads((root / "whole" / POINTS).read_text())):
        assert forked(root / str(target), target) == -signal.SIGKILL, target


def targets(points: list[str]) -> list[int]:
    """Points of the first save, which no checkpoint precedes, and of the last, which deletes one."""
    starts = [points.index(f"update {update}") for update in range(1, SAVES + 1)]
    return [*range(starts[0] + 1, starts[1]), *range(starts[-1] + 1, len(points))]


def forked(folder: Path, target: int | None) -> int:
    """Exit code of a fork; of a killed one, the signal below zero."""
    folder.mkdir(parents=True)
    if (process := os.fork()) == 0:
        try:
            saves(folder, target)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@dataclass(frozen=True)
class Killed:
    points: list[str]
    folders: dict[int, Path]
    """The checkpoints that a kill at a point left."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    root = tmp_path_factory.mktemp("killed")
    script = (
        "from pathlib import Path; from tests.unit.checkpoint import test_kill as kill; "
        f"kill.forks(Path({str(root)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    points = json.loads((root / "whole" / POINTS).read_text())
    return Killed(points, {target: root / str(target) / "checkpoints" for target in targets(points)})


def test_the_points_are_every_boundary_of_a_save(killed: Killed) -> None:
    last = killed.points[killed.points.index(f"update {SAVES}") + 1 :]
    files = [*CHECKPOINT_FILES, "MANIFEST.json"]
    draft, final = f".step-{SAVES:08d}", f"step-{SAVES:08d}"
    synced = [f"after fsync {name}" for name in files]
    order = [
        f"after mkdir {draft}",
        *(f"{part} of {name}" for name in CHECKPOINT_FILES for part in ("half", "all")),
        *synced[:-1],
        "half of MANIFEST.json",  # nothing that it records may be lost when it is there
        synced[-1],
        f"after fsync {draft}",
        f"before rename {draft} to {final}",
        f"after rename {draft} to {final}",
        "after fsync checkpoints",
        f"before rename step-{SAVES - 1:08d} to .step-{SAVES - 1:08d}",  # only now the older one may go
        *(f"after {what}" for what in ("unlink MANIFEST.json", f"rmdir .step-{SAVES - 1:08d}")),
    ]
    assert [last.index(point) for point in order] == sorted(last.index(point) for point in order)
    assert len(last) >= 30
    assert len(killed.folders) >= 55


def test_after_a_kill_at_any_point_the_newest_whole_checkpoint_loads(killed: Killed, tmp_path: Path) -> None:
    from rtrain.checkpoint.saver import CheckpointSaver
    from rtrain.config import OptimConfig
    from rtrain.trainer import optimizers
    from tests.unit.checkpoint.test_format import RUN, equal, make_network, names, train

    weights = {}
    network = make_network()
    optimizer = optimizers.build_optimizer(network, OptimConfig(lr=0.01))
    for update in range(1, SAVES + 1):
        train(network, optimizer, 1)
        weights[update] = {name: value.clone() for name, value in network.state_dict().items()}
    left_over = 0
    for target, folder in killed.folders.items():
        at = killed.points[: target + 1]
        committed = [update for update in range(1, SAVES + 1) if f"after rename {renamed(update)}" in at]
        newest = max(committed, default=None)
        left_over += any(name.startswith(".") for name in (names(folder) if folder.is_dir() else []))
        remove_drafts(folder)
        assert find_latest(folder, RUN) == newest, killed.points[target]
        found = make_network(seed=9)
        restored = optimizers.build_optimizer(found, OptimConfig(lr=0.01))
        if newest is not None:
            load_checkpoint(checkpoint_path(folder, newest), found, restored)
            assert equal(found.state_dict(), weights[newest]), killed.points[target]
            train(found, restored, 1)
        with CheckpointSaver(folder, KEEP) as saver:
            saver.save(found, restored, CheckpointState(9, "09", None, None, RUN))
        assert find_latest(folder, RUN) == 9
        assert names(folder) == ["step-00000009"]  # no draft, and nothing was damaged
        shutil.rmtree(folder.parent)
    assert left_over >= 30


def renamed(update: int) -> str:
    return f".step-{update:08d} to step-{update:08d}"
