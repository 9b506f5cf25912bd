"""A script: one run whose every work without passes takes longer than `cluster.hang_timeout_s`, then a real hang.
Prints JSON.

    python -m tests.support.slow_phases FOLDER

A process of its own: its workers are slowed, and hang, by way of tests/failpoints.
"""

import importlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from rtrain import config
from rtrain.core import env
from tests.conftest import labelled_rows, write_rows
from tests.support.soak import FAILPOINTS, armed
from tests.support.tiny import make_encoder

STALL_S, SLOW_S = 5.0, 7.0
UNTIL = 12


def settings(folder: Path, **overrides: Any) -> config.Config:
    base = {
        "data.path": str(write_rows(folder / "rows.csv", labelled_rows(403))),
        "model.name": str(make_encoder(folder / "encoder")),
        "train.precision": "fp32",
        "train.epochs": 2,
        "train.global_batch_size": 24,
        "train.evaluate_every": UNTIL,
        "cluster.hang_timeout_s": STALL_S,
    }
    return config.load_config("intent", {**base, **overrides})


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["FAILPOINT"] = str(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FAILPOINTS), os.environ.get("PYTHONPATH", "")])
    importlib.import_module("tests.failpoints.sitecustomize")  # in this process too: it opens the storage
    env.set_env_defaults()
    from rtrain.cluster.connection import session

    with session(settings(folder), folder):
        sys.stdout.write(json.dumps({"slow": _slow(folder), "hung": _hung(folder)}))


def _slow(folder: Path) -> dict[str, Any]:
    """A run that pauses, loses its checkpoints and resumes from its storage, with two workers."""
    from rtrain.runs import controller, prepare

    selection = settings(folder, **{"cluster.storage": f"slow://{folder}/storage"})
    slow = folder / "slow"
    slow.write_text(str(SLOW_S))
    controller.fit(prepare.prepare_run(selection, folder / "run"), end_step=UNTIL)
    shutil.rmtree(folder / "run" / "checkpoints")
    controller.fit(prepare.prepare_run(selection, folder / "run", "resume"))
    slow.unlink()
    return _event_counts(folder / "run") | {"phases": sorted(set((folder / "slowed").read_text().splitlines()))}


def _hung(folder: Path) -> dict[str, Any]:
    """A run whose first worker hangs for ever when it makes the artefact."""
    from rtrain.runs import controller, prepare

    prepared = prepare.prepare_run(settings(folder), folder / "hung")
    armed("artefact", rank=0)(prepared.run)
    controller.fit(prepared)
    return _event_counts(prepared.run.folder) | {"taken": (folder / "taken.json").is_file()}


def _event_counts(run: Path) -> dict[str, Any]:
    from rtrain.core import events

    log = events.read_events(run)
    crashed = [event for event in log if event["kind"] == "crashed"]
    return {
        "crashed": [[event["cause"], event["error"], len(event["hang_tracebacks"])] for event in crashed],
        "started": [event["step"] for event in log if event["kind"] == "started"],
        "last": log[-1]["kind"],
        "artefact": (run / "artifact" / "artifact.json").is_file(),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
