"""A script: drills of a tiny encoder with more faults than `rtrain drill` knows, in a table or as a seeded soak.

    python -m tests.support.soak FOLDER                          every fault once
    python -m tests.support.soak FOLDER --seed 1 --minutes 10    faults drawn at random until the time is over
    python -m tests.support.soak FOLDER --rpc 10                 10 of 100 calls of Ray fail, no other fault

Prints certificates as JSON, one a line. Faults from inside a worker come by way of tests/failpoints.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rtrain import config
from rtrain.core import env
from rtrain.core.run_folder import Run
from rtrain.verification.drill import CONTROLLER_CLASS, FAULTS, WORKER_CLASS, DrillFault, find_processes
from tests.conftest import labelled_rows, write_rows
from tests.support.tiny import make_encoder

FAILPOINTS = Path(__file__).resolve().parents[1] / "failpoints"
SAVE_EVERY = 16
ROUND = 12
"""Faults of one drill of a soak."""
RPCS = ("CoreWorkerService.grpc_client.PushTask", "NodeManagerService.grpc_client.RequestWorkerLease")


def armed(action: str, rank: int = 1) -> Callable[[Run], None]:
    def inject(run: Run) -> None:
        path = Path(os.environ["FAILPOINT"]) / "armed.json"
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps({"rank": rank, "action": action}))
        draft.rename(path)

    return inject


def data_task(run: Run) -> None:
    """The first data task of the next start dies."""
    armed("data task")(run)
    os.kill(find_processes(WORKER_CLASS)[0], signal.SIGKILL)


def snapshots(run: Run) -> None:
    """What Ray itself wrote down of this run is cut off, and its controller dies."""
    for path in run.ray_storage.rglob("*.json"):
        os.truncate(path, path.stat().st_size // 2)
    os.kill(find_processes(CONTROLLER_CLASS)[-1], signal.SIGKILL)


MORE = (
    DrillFault("F2  death inside the exchange", armed("exchange")),
    DrillFault("F4  hang with Python's lock held", armed("lock")),
    DrillFault("F5  training thread hangs", armed("hang")),
    DrillFault("F6  a rank skips its report", armed("report"), recomputed_intervals=2),
    DrillFault("F7  exception", armed("error")),
    DrillFault("F8  segmentation fault", armed("segfault")),
    DrillFault("F8  out of memory", armed("memory")),
    DrillFault("F20 worker killed, then a data task", data_task),
    DrillFault("F25 Ray's own snapshot torn", snapshots),
    DrillFault("F27 input/output error in a save", armed("disk"), recomputed_intervals=2),
    DrillFault("F30 hang in an evaluation", armed("evaluation"), recomputed_intervals=2),
    DrillFault("NaN in the weights", armed("nan")),
)


def settings(folder: Path) -> config.Config:
    overrides = {
        "data.path": str(write_rows(folder / "rows.csv", labelled_rows(403))),
        "model.name": str(make_encoder(folder / "encoder")),
        "train.precision": "fp32",
        "train.global_batch_size": 24,
        "train.save_every": SAVE_EVERY,
        "train.evaluate_every": 2 * SAVE_EVERY,
    }
    return config.load_config("intent", overrides)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rpc", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[""], help="words of the faults' names")
    options = parser.parse_args(arguments)
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["FAILPOINT"] = str(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FAILPOINTS), os.environ.get("PYTHONPATH", "")])
    if options.rpc:
        share = {"num_failures": -1, "req_failure_prob": options.rpc, "resp_failure_prob": options.rpc}
        os.environ["RAY_testing_rpc_failure"] = json.dumps(dict.fromkeys(RPCS, share))  # noqa: SIM112 - Ray's own spelling
    env.set_env_defaults()
    from rtrain.cluster.connection import session

    chosen = settings(folder)
    with session(chosen, folder):
        passed = soak(chosen, folder, options) if options.seed is not None else table(chosen, folder, options)
    sys.exit(not passed)


def table(chosen: config.Config, folder: Path, options: Any) -> bool:
    faults = (
        [] if options.rpc else [fault for fault in (*FAULTS, *MORE) if any(word in fault.name for word in options.only)]
    )
    return drill(chosen, folder / "table", faults)


def soak(chosen: config.Config, folder: Path, options: Any) -> bool:
    draw, end, number, passed = random.Random(options.seed), time.monotonic() + 60 * options.minutes, 0, True
    while passed and time.monotonic() < end:
        faults = draw.choices((*FAULTS, *MORE), k=ROUND)
        passed = drill(chosen, folder / f"soak-{options.seed}-{number}", faults)
        number += 1
    return passed


def drill(chosen: config.Config, folder: Path, faults: Sequence[DrillFault]) -> bool:
    from rtrain.verification import drill as proof

    def say(event: dict[str, Any]) -> None:
        if event["kind"] in ("stage", "crashed", "failed", "quarantined", "started"):
            sys.stderr.write(f"{time.strftime('%X')} {json.dumps(event)[:400]}\n")

    certificate = proof.run(chosen, folder, faults, say)
    sys.stderr.write(certificate.format_text() + "\n")
    sys.stdout.write(json.dumps(certificate.to_document()) + "\n")
    sys.stdout.flush()
    return certificate.passed


if __name__ == "__main__":
    main()
