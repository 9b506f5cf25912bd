"""From a configuration to a finished run, on the Ray that the process is connected to."""

import hashlib
import math
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rtrain import ray_internals
from rtrain.checkpoint import format as checkpoint_format, remote_copy
from rtrain.cluster import capacity, pricing
from rtrain.cluster.autoscaler_requests import Demand, Place, of_worker, places
from rtrain.config import Cluster
from rtrain.core import events
from rtrain.core.errors import TryAgain, UserError
from rtrain.core.run_folder import Run
from rtrain.report import baselines, cost, html, summary
from rtrain.report.live import trackers
from rtrain.runs import failures, node_info, resource_leases, run_folders, stop_request, worker_group
from rtrain.runs.prepare import Prepared, said_of_rows
from rtrain.runs.recovery import Kind, Recovery, halvings, most_after, out_of_memory
from rtrain.runs.worker import Start

OnEvent = Callable[[dict[str, Any]], None]
LOST_S = 10.0
"""Seconds in which a node that is gone shows, where workers died and said nothing."""
COUNT_EVERY_S = 5.0
"""Seconds after which it is counted anew what the autoscaler may start."""
SETTLE_S = 5.0
"""Seconds after which CPUs that were given back are seen as free."""


@dataclass(frozen=True)
class _Plan:
    """What `fit` is asked for; see there."""

    until: int | None
    rung: bool
    profile: bool
    workers: worker_group.Workers


def fit(
    prepared: Prepared,
    *,
    until: int | None = None,
    rung: bool = False,
    profile: bool = False,
    workers: worker_group.Workers | None = None,
    reports: bool = True,
    on_event: OnEvent | None = None,
) -> dict[str, Any]:
    """Train from the newest checkpoint to update `until` (default: the last) and return the run's summary.

    With `rung`, the answers to the validation rows at `until` are kept (`training.rungs`); with `profile`, where the
    time of each update went (`training.watched`). `workers` are new processes for each start, unless others are given.
    A run that is finished already is left as it is; one that finishes gets its report, if `reports`. Raises `TryAgain`
    where the run was asked to end (`notice.Asked`) before that, and where it is finished and the storage of its copy
    does not answer.
    """
    plan = _Plan(until, rung, profile, workers or worker_group.Fresh())
    run = prepared.run
    if run.finished:
        trackers.fill(prepared.config, run, on_event or (lambda event: None))
        made = summary.write(run)
        copy_out(run, prepared.config.deploy.cluster)
        return made
    say = on_event or (lambda event: None)
    for event in said_of_rows(run):
        say(event)  # logged before the run was followed
    told = events.Follow([(run.folder, {})], on_event), trackers.following(prepared.config, run, say)
    file = prepared.config.deploy.cluster.prices
    known = pricing.user_prices(Path(file) if file else None, (capacity.autoscaler() or {}).get("metadata"))
    with (
        run_folders.hold(run),
        told[0],
        told[1],
        stop_request.Asked(run) as asked,
        _Asking(prepared) as asking,
    ):
        if known:
            run.append(cost.PRICES, prices={name: asdict(price) for name, price in known.items()})
        try:
            plan.workers.taken(run)
            _attempts(prepared, plan, say, asked, asking)
        except (KeyboardInterrupt, SystemExit, TryAgain):
            run.append("interrupted")
            summary.write(run)
            raise
        except Exception as error:  # of Ray, say, outside of a start: without an event the run would go on for ever
            if summary.status(run.events()) == "running":
                run.append("failed", error=str(error)[:2000])
                summary.write(run)
            if isinstance(error, UserError):
                raise
            raise failures.explain(run, error) from error
        finally:
            plan.workers.left(run)
            for path in set(run.folder.glob(run.stalled("*").name)) - set(run.tracebacks()):
                path.unlink()
    last = _last_trained(run)
    run.append("finished" if last["finished"] else "paused", update=last["updates"])
    if last["finished"] and reports:  # one that is paused or stopped goes on: `rtrain report` shows it meanwhile
        report(run, say)
    made = summary.write(run)
    if last["finished"]:
        copy_out(run, prepared.config.deploy.cluster)
    return made


def report(run: Run, say: OnEvent) -> None:
    """Measure baselines, and write the page about the run."""
    for name, make, text in (
        ("baselines", baselines.ensure, "measuring baselines for the report"),
        (run.report.name, html.write, "writing the report"),
    ):
        say(events.doing(text, "report"))
        add(run, name, make, say)


def add(run: Run, name: str, make: Callable[[Run], Any], say: OnEvent) -> None:
    """Make something about a run that has ended. What goes wrong in it is said and kept in a file, and costs no one the
    run."""
    try:
        make(run)
    except Exception as error:
        kept = failures.keep_traceback(run, Path(name).stem, error)
        say({"kind": "stage", "text": f"no {name}: {failures.first_line([error])} (traceback in {kept})"})


def copy_out(run: Run, cluster: Cluster) -> None:
    """Copy what the storage lacks of a finished run. Raises `TryAgain` where it does not answer."""
    owners = _tokens(run)
    copy = remote_copy.of(cluster, run.folder, owners)
    if copy is None:
        return
    here = [checkpoint_format.path_of(run.checkpoints, update) for update in checkpoint_format.updates(run.checkpoints)]
    try:
        copy.refuse_other(run.folder)
        # Where each that is here is there too, the others there may be all that is left: some here were cleaned away.
        if owners and {path.name for path in here} - {*copy.checkpoints()}:
            copy.push(run.folder, here)
        if run.artifact.is_dir():  # else what is there is all there is
            copy.push_artifact(run.folder)
    except remote_copy.Unreachable as error:
        run.append("uncopied", error=str(error))
        way_on = "the same command with --resume copies the rest"
        told = f"{run} is finished, and its copy is not whole ({error}); {way_on}"
        raise TryAgain(told, code="unreachable") from error


def _attempts(prepared: Prepared, plan: _Plan, say: OnEvent, asked: stop_request.Asked, asking: "_Asking") -> None:
    """Start the workers again and again until they have come to the end, or until that makes no sense.

    Each start is a worker group with a controller of its own, and resumes from the newest checkpoint, which the workers
    select. Ray's own retries end with the controller that makes them; here the death of a controller is a fault like
    every other.
    """
    run, train, cluster = prepared.run, prepared.config.recipe.train, prepared.config.deploy.cluster
    kind, least, most = prepared.device.device, train.min_workers, prepared.device.workers
    wanted, ceiling = stop_request.wanted(most, least, asking.needs), most
    waiting = stop_request.Waiting(run, asking.needs, asking.places)
    if prepared.device.why:
        run.append("device", device=kind, why=prepared.device.why)
    recovery, owners = Recovery(cluster.max_crashes), claim_storage(run, cluster)
    while True:
        stop_request.take(run)  # one that was left by a driver that died is of no concern to the workers of this one
        asking()
        workers = 0 if asked.given else min(ceiling, count_workers(run, wanted, waiting, asking, asked))
        if not workers:  # a search gives its trials notice
            raise _asked_to_end(prepared)
        start = Start(
            config=prepared.config,
            run=run.folder,
            store=prepared.store.folder,
            model=prepared.model,
            teacher=prepared.teacher,
            until=plan.until,
            rung=plan.rung,
            profile=plan.profile,
            head=node_info.head(),
            owners=owners,
            halvings=halvings(run.events()),
        )
        say(events.doing(f"starting {workers} worker{'' if workers == 1 else 's'}", "start of workers"))
        layout = worker_group.Layout(
            workers,
            kind,
            cluster.stall_s,
            elastic=least is not None,
            labels=cluster.labels,
            asked=asking.demand is not None,
            share=asking.needs.share,
        )
        watch = stop_request.Watch(run, workers, wanted, say, waiting, asking)
        try:
            with watch:
                plan.workers.train(start, layout)
        except Exception as error:
            held = watch.nodes | resource_leases.workers_by_node(run).keys()  # before their places are given back
            plan.workers.lost(run)
            placed = not failures.is_unplaced(error)
            if placed:
                recover(run, error, recovery, held)
            else:  # nothing was lost, and the cluster has had time to see which nodes are gone
                waiting.say(workers)
            ceiling = most_after(placed, workers, least, most)
            continue
        ceiling = most
        reason, last = stop_request.take(run), _last_trained(run)
        if reason == stop_request.DIVERGED or last["finished"] or last["updates"] == plan.until:
            return
        if reason == stop_request.ASKED and not asked.given:  # by the search that it is a trial of
            raise _asked_to_end(prepared)
        plan.workers.lost(run)
        if not asked.given:  # a worker may have read a notice that is taken already, from the cache of a shared folder
            run.append("yielded", reason=reason or "a notice of an earlier start", update=last["updates"])


def _asked_to_end(prepared: Prepared) -> stop_request.AskedToEnd:
    run = prepared.run
    saved = f"update {_newest(run)} of {prepared.updates} is saved"
    return stop_request.AskedToEnd(f"{run} was asked to end: {saved}. The same command with --resume goes on")


def claim_storage(run: Run, cluster: Cluster) -> tuple[str, ...]:
    """The tokens of all starts from this run folder. The last one is this start's: only it may write to the replica.

    Where the storage fails and there are checkpoints here, the run goes on; its next save claims the replica then.
    """
    if cluster.storage is None:
        return ()
    run.append("claimed", token=uuid.uuid4().hex)
    owners = _tokens(run)
    copy = remote_copy.Replica(cluster.storage, run.name, owners)
    try:
        copy.refuse_other(run.folder)
        copy.claim()
    except remote_copy.Unreachable as error:
        if not checkpoint_format.updates(run.checkpoints):
            raise
        run.append("unreachable", update=_newest(run), error=str(error))
    return owners


def _tokens(run: Run) -> tuple[str, ...]:
    return tuple(event["token"] for event in run.events("claimed"))


def _last_trained(run: Run) -> dict[str, Any]:
    return run.events("trained")[-1]


class _Asking:
    """Asks the autoscaler for all workers that an elastic run may have; called again and again, or the request ends.
    Leaving its `with` block takes it back. Where there is no autoscaler, nobody is asked."""

    def __init__(self, prepared: Prepared):
        self._most = prepared.device.workers
        self.needs = capacity.needs(prepared.config, prepared.device.device)
        asks = prepared.config.recipe.train.min_workers is not None and capacity.autoscaler() is not None
        # By the whole path: runs of one name would take each other's nodes away.
        whose = hashlib.sha256(str(prepared.run.folder).encode()).hexdigest()[:8]
        requests = ray_internals.Requests(f"rtrain-{prepared.run.name}-{whose}")
        self.demand = Demand(requests) if asks else None
        self._counted = -math.inf

    def __call__(self) -> None:
        now = time.monotonic()
        if self.demand is not None and now - self._counted >= COUNT_EVERY_S:
            self._counted = now
            self.demand.want(places(self._most, self.needs, capacity.up(), capacity.may_start()))

    def places(self) -> list[Place]:
        """What an autoscaler is asked for: by this, or by Ray Train, for the workers alone."""
        if self.demand is not None:
            return self.demand.places
        return [of_worker(self.needs)] * self._most

    def __enter__(self) -> "_Asking":
        return self

    def __exit__(self, *_: object) -> None:
        if self.demand is not None:
            self.demand.end()


def count_workers(
    run: Run, wanted: stop_request.Wanted, waiting: stop_request.Waiting, asking: _Asking, asked: stop_request.Asked
) -> int:
    """How many workers the next start has, by what is free. While that is too little for the least number, it waits and
    says so; where it is asked to end, it waits no more.

    What this process has just given back, the CPUs of the start before or of its data tasks, is seen as free some
    moments later: fewer workers than the nodes would allow are started only after those.
    """
    patient = time.monotonic() + SETTLE_S
    while not (asked.given or stop_request.given(run)):
        free = capacity.free(resource_leases.workers_by_node(run), waiting.needs)
        workers, is_settled = wanted(free), time.monotonic() > patient
        if workers and (is_settled or workers >= wanted(capacity.up())):
            return workers
        asking()
        if is_settled:
            waiting.look(None, SETTLE_S)
        time.sleep(stop_request.LOOK_EVERY_S)
    return 0


def recover(run: Run, error: Exception, recovery: Recovery, held: Collection[str] = ()) -> None:
    """Return if the run should start again; otherwise raise the error that the user should read. `held`: the nodes that
    had its workers."""
    if summary.status(run.events()) == "stopped":  # a search ends the workers of a trial that it stops
        summary.write(run)
        raise failures.explain(run, error) from error
    causes = failures.causes(error)
    user_error = failures.user_error(causes)
    preempted = stop_request.take(run) == "preemption" or any(getattr(cause, "preempted", False) for cause in causes)
    short = out_of_memory(map(str, causes))
    again = user_error if isinstance(user_error, TryAgain) else None  # a mount that is away for a moment, say
    refused = user_error is not None and again is None
    kind: Kind = "refused" if refused else "preemption" if preempted else "memory" if short else "crash"
    told, spot = failures.first_line(causes), False
    if kind == "crash" and held and (lost := capacity.lost(held, LOST_S if failures.maybe_of_a_node(causes) else 0)):
        kind, spot = "lost", all(capacity.has(host.labels, capacity.SPOT) for host in lost.values())
        nodes = ", ".join(sorted(name[:8] for name in lost))
        told = f"{'spot ' if spot else ''}node{'' if len(lost) == 1 else 's'} {nodes} gone without notice; {told}"
    update = _newest(run)
    certain = kind == "crash" and again is None and failures.is_of_the_program(causes)
    if recovery.retry(kind, update, spot, told if certain else None):
        stalled = [str(path) for path in run.tracebacks()]
        run.append("crashed", cause=kind, resumes_from=update, error=told, stalled=stalled)
        return
    if again is not None:
        raise again from error
    run.append("failed", error=str(error)[:2000])
    summary.write(run)
    report(run, lambda event: None)
    raise failures.explain(run, error) from error


def _newest(run: Run) -> int:
    """Update of the newest complete checkpoint; whether it verifies is for the workers to find out."""
    return max(checkpoint_format.updates(run.checkpoints), default=0)
