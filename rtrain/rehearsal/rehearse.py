"""`rtrain cluster rehearse`: a cluster's file tried on this machine before anything is paid for.

The cluster of the file is brought up as real Ray nodes, which Ray's own autoscaler starts and ends. The command runs as
a job there, twice: undisturbed, and with a spot notice and the loss of a node in its middle. Both must come to the same
weights, by the same rows, and nothing may be left when the cluster is taken down.
"""

import math
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from rtrain import config as configuration, ray_internals
from rtrain.cluster import capacity
from rtrain.cluster.jobs import upload
from rtrain.core.errors import ConfigError, Problem
from rtrain.core.run_folder import Run
from rtrain.rehearsal import command_line as commands, measurements, plan as plans, ports, resize
from rtrain.rehearsal.certificate import Certificate
from rtrain.rehearsal.faults import Kind, Saboteur, after_join
from rtrain.rehearsal.job_follower import LOOK_EVERY_S, Broken, Follower, Say
from rtrain.rehearsal.machines.local_cluster import Up, up
from rtrain.rehearsal.measurements import Resized
from rtrain.rehearsal.plan import Plan

ENDED_WITHIN_S = 120.0
"""Seconds beyond the idle time in which nodes without work must have ended."""
UNDISTURBED, DISTURBED = "undisturbed", "rehearsed"
RESIZE = "resize"
ALSO = (RESIZE,)
"""What may be rehearsed beside: a run that goes on with fewer workers and grows again."""


def check(words: Sequence[str], text: str, also: Collection[str] = ()) -> tuple[Plan, list[str]]:
    """The plan of a cluster's file, and the words with the whole paths of what they name on this machine. `also`: what
    of `ALSO` is wanted. Raises `ConfigError` with everything that can be refused before anything is started."""
    problems = []
    if not words or words[0] != "train":
        reason = "is not rehearsed: a training is, whose rows and weights can be compared"
        problems.append(
            Problem(
                "verb", words[0] if words else None, reason, "write -- train RECIPE --data FILE", code="not_a_training"
            )
        )
    whole, missing = commands.of_this_machine(words)
    problems += missing
    try:
        plan = plans.of(text)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    problems += [
        Problem("--also", one, "is unknown", f"write {ALSO[0]}", code="unknown_name") for one in also if one not in ALSO
    ]
    if not problems and RESIZE in also:
        problems += resize.problems(plan, commands.workers(whole))
    if problems:
        raise ConfigError(problems)
    return plan, whole


class Rehearsal:
    """One rehearsal: what is asked of the cluster, and what is seen of it meanwhile."""

    def __init__(self, plan: Plan, words: Sequence[str], out: Path, say: Say, also: Collection[str] = ()):
        """`words` with whole paths, as `check` returns them."""
        self.plan, self.out, self._also = plan, out, also
        self._words, self._say = words, say
        self._begin = time.time()
        self._listeners: set[ports.Listener] = set()
        self._first_job = 0.0
        self._resized: Resized | None = None
        self._scale_down: float | None = None
        self._joined: dict[str, float] = {}
        self._saboteur: Saboteur | None = None

    @property
    def wanted(self) -> tuple[Kind, ...]:
        """A notice is given where the file listens for it."""
        return ("notice", "kill") if self.plan.watcher else ("kill",)

    def run(self, files: upload.Upload) -> Certificate:
        """Raises `UserError` where the undisturbed run fails by itself: then there is nothing to rehearse."""
        errors = list[str]()
        with up(self.plan, self.out / "machines", self._say) as made:
            follower = Follower(made, self.out / "machines", self._say)
            self._first_job = time.time()
            self._train(made, follower, UNDISTURBED, files)
            updates = Run(self.out / UNDISTURBED).events("trained")[-1]["updates"]
            self._saboteur = Saboteur(made, self.wanted, updates)
            try:
                self._train(made, follower, DISTURBED, files)
                self._await_idle(made)
            except Broken as error:
                errors.append(str(error))
            self._listeners = follower.listeners
            self._joined = ray_internals.joined(made.address, seconds=10.0)
            self._say("taking the cluster down")
        if RESIZE in self._also and not errors:
            try:
                like = Run(self.out / UNDISTURBED)
                self._resized = resize.rehearsed(self.plan, self._words, like, self.out, files, self._say)
            except Broken as error:
                errors.append(str(error))
        return self._judge(made, self._saboteur, errors)

    # ------------------------------------------------------------------------------------------------------ the jobs

    def _train(self, made: Up, follower: Follower, name: str, files: upload.Upload) -> None:
        run = Run(self.out / name)
        words = commands.of(self._words, str(run.folder), f"file://{self.out}/storage")
        job = made.jobs.submit(words, files, lambda text: self._say(f"{name} run: {text}"))
        follower.training(job, run, name, self._saboteur)

    def _await_idle(self, made: Up) -> None:
        """Wait until the nodes that have no work are ended."""
        begin = time.monotonic()
        give_up = begin + self.plan.rehearsed_idle_s + ENDED_WITHIN_S
        self._say(f"waiting for idle nodes to end, after {self.plan.rehearsed_idle_s:.0f} s")
        while len(made.book.up()) - 1 > self.plan.least:
            if time.monotonic() > give_up:
                return
            time.sleep(LOOK_EVERY_S)
        self._scale_down = round(time.monotonic() - begin, 1)

    # --------------------------------------------------------------------------------------------------- the judgement

    def _judge(self, made: Up, saboteur: Saboteur, errors: Sequence[str]) -> Certificate:
        control, run = Run(self.out / UNDISTURBED), Run(self.out / DISTURBED)
        nodes = measurements.nodes_of(made.machines, self._joined, self.plan, saboteur.met, self._begin)
        workers_nodes = [node for node in nodes if node.type != self.plan.head.name]
        came = [node.joined for node in workers_nodes if node.joined is not None]
        first = min(came) - (self._first_job - self._begin) if came and not self.plan.least else None
        starts = run.events("started") if run.log.is_file() else []
        sizes = {event["workers"] for event in [*starts, *control.events("started")]}
        for fault in saboteur.met:
            fault.seconds_after_join = after_join(fault, self._joined.values())
        began = starts[0]["time"] - self._begin if starts else math.inf
        settings = configuration.load(str(control.config))
        train = settings.recipe.train
        device = "gpu" if self.plan.counts_gpus and train.device != "cpu" else "cpu"
        return Certificate(
            plan=self.plan,
            nodes=nodes,
            most_at_a_time=measurements.most_at_a_time(workers_nodes),
            needed=self.plan.needed(train.workers, capacity.needs(settings, device)),
            scale_up_s=None if first is None else round(first, 1),
            scale_down_s=self._scale_down,
            ports=sorted(self._listeners),
            faults=saboteur.met,
            wanted_faults=len(self.wanted),
            restarts=max(0, len(starts) - 1),
            rows=measurements.compare_rows(control, run) if run.finished else None,
            weights=measurements.compare_weights(control, run, len(sizes) == 1) if run.finished else None,
            updates=max((event["update"] for event in run.events("progress")), default=0) if starts else 0,
            workers=[event["workers"] for event in starts],
            device=device,
            resized=self._resized,
            left_behind=made.left,
            seconds=round(time.time() - self._begin, 1),
            idled=sum(node.end == measurements.ENDS["terminated"] and node.ended < began for node in workers_nodes),
            errors=errors,
        )
