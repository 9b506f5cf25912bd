"""Shrink and grow: a run that loses a node at the cluster's cap, goes on with fewer workers, and takes more again.

It is trained on a cluster of the same file whose nodes are so few that the run needs all of them, in float64 and
without dropout: then other workers differ by rounding alone, and its weights must be those of a run that was left in
peace.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rtrain import config as configuration, ray_internals
from rtrain.checkpoint import format as checkpoint_format
from rtrain.cluster.jobs import upload
from rtrain.core.errors import Problem
from rtrain.core.run_folder import Run
from rtrain.models import builder
from rtrain.rehearsal import command_line as commands, measurements
from rtrain.rehearsal.faults import PLACES, Events, Fault, Saboteur, after_join
from rtrain.rehearsal.job_follower import Follower, Say
from rtrain.rehearsal.machines.local_cluster import up
from rtrain.rehearsal.measurements import Resized
from rtrain.rehearsal.plan import Plan
from rtrain.verification import ledger

STEADY, RESIZED = "steady", "resized"
SAVE_EVERY = 20
"""An even number: the steady run saves at its half as well."""
ENDLESS = 1_000_000
DATA_CPUS = 1
SETTINGS = (
    *("train.precision=fp64", "train.device=cpu", f"cluster.data_cpus={DATA_CPUS}"),
    # The run is ended once it has grown: its rate must not depend on how long it might have been.
    *(f"train.epochs={ENDLESS}", f"train.evaluate_every={ENDLESS}", "optim.schedule=constant", "optim.warmup=0"),
)


def problems(plan: Plan, workers: int) -> list[Problem]:
    """Why the run cannot go on smaller."""
    if workers < 2:
        return [
            Problem(
                "--workers",
                workers,
                "a run of one worker cannot go on with fewer (--also resize)",
                "write 2",
                code="too_few_workers",
            )
        ]
    if (tight := plan.tight(workers, DATA_CPUS)) is None or tight.watcher is None:
        reason = "the file has no nodes of CPUs, or starts no watcher for spot notices"
        return [Problem("--also", "resize", reason, "leave it out", code="cannot_resize")]
    return []


def rehearsed(plan: Plan, words: Sequence[str], like: Run, out: Path, files: upload.Upload, say: Say) -> Resized:
    """`like`: a run of these words, whose model and workers are taken. Raises `Broken` where one of the two runs does
    not come so far."""
    recipe = configuration.load(str(like.config)).recipe
    workers = recipe.train.workers
    tight = plan.tight(workers, DATA_CPUS)
    assert tight is not None  # else `problems` has said so
    source = without_dropout(builder.resolve(recipe.model.name, like.folder.parent), out / "model")
    begin = time.time()
    steady, resized = Run(out / STEADY), Run(out / RESIZED)

    def command(run: Run, *settings: str) -> list[str]:
        made = commands.of(words, str(run.folder), f"file://{out}/storage")
        return commands.changed(made, str(source), *SETTINGS, *settings)

    with up(tight, out / "machines-resized", say) as made:
        follower = Follower(made, out / "machines-resized", say)
        saboteur = Saboteur(made, ("notice",), PLACES["notice"] * SAVE_EVERY, workers)

        def has_grown(log: Events) -> bool:
            return bool(saboteur.met) and has_trained_on(saboteur.met[0], log, 2 * SAVE_EVERY)

        job = made.jobs.submit(command(resized, "train.min_workers=1", f"train.save_every={SAVE_EVERY}"), files, say)
        follower.training(job, resized, RESIZED, saboteur, until=has_grown)
        last = max(checkpoint_format.updates(resized.checkpoints))
        job = made.jobs.submit(command(steady, f"train.save_every={last // 2}"), files, say)
        follower.training(job, steady, STEADY, until=lambda log: last in checkpoint_format.updates(steady.checkpoints))
        joined = ray_internals.joined(made.address, seconds=10.0)
    [notice] = saboteur.met
    notice.seconds_after_join = after_join(notice, joined.values())
    nodes = measurements.nodes_of(made.machines, joined, tight, [notice], begin)
    (same, off), found = measurements.compare_at(resized, steady, last), ledger.check(resized)
    return Resized(
        notice=notice,
        workers=[event["workers"] for event in resized.events("started")],
        update=last,
        rows=measurements.Rows(found.passed, found.missing, found.repeated, same),
        difference=off,
        started=len(nodes) - 1,
        needed=tight.most + 1,
        seconds=round(time.time() - begin, 1),
        left_behind=made.left,
    )


def has_trained_on(notice: Fault, log: Events, updates: int) -> bool:
    """Whether a run has made so many updates since it had all its workers again."""
    if notice.whole is None:
        return False
    since = next(event["update"] for event in log if event["kind"] == "progress" and event["time"] >= notice.whole)
    return bool(log[-1]["kind"] == "progress" and log[-1]["update"] >= since + updates)


def without_dropout(source: Path, folder: Path) -> Path:
    """The same model with every dropout of its configuration at 0; its other files are linked."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path.resolve())
    known: Mapping[str, Any] = json.loads((source / "config.json").read_text())
    changed = {
        name: 0.0 if "drop" in name and isinstance(value, int | float) and not isinstance(value, bool) else value
        for name, value in known.items()
    }
    (folder / "config.json").write_text(json.dumps(changed, indent=2))
    return folder
