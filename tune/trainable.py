"""A trial of a search: an ordinary run in the search's folder, trained to a rung or to its end when it is told to."""

import errno
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.checkpoint.remote_copy import Replica, Unreachable
from rtrain.cluster import preflight
from rtrain.compress import distill
from rtrain.config import Config, Train
from rtrain.core.errors import ConfigError, Problem, TryAgain, UserError
from rtrain.core.ragged import Ragged
from rtrain.core.run_folder import Run
from rtrain.data.store.store import open_store
from rtrain.evaluation.training_curves import trained
from rtrain.metrics.registry import metric_for
from rtrain.parallel import gradient_noise
from rtrain.runs import controller, failures, prepare, run_folders, stop_request, worker_group
from rtrain.tasks import base
from rtrain.trainer import best_checkpoint, rung_predictions
from rtrain.trainer.step import NonFinite
from tune import difference_ci, holdout_scores, space
from tune.history import Journal

LOG_EVERY = "train.log_every"
LOGGED = Train.model_fields["log_every"].default
"""What a search has that was given no other; whether it was given this very one, a resume is not told."""
FIXED = ("train.workers", "train.micro_batch")
"""Settings beside those of `tune` with which a search, or a study, goes on as it began: of them are a trial's rows per
update."""
MAY_CHANGE = ("concurrent", "minutes", "money", "price")
"""Settings of `tune` that may be others on a resume."""
FIRST, LAST = 3, 5
"""Losses at the begin, and newest ones, by which a trial is seen to diverge."""
RISE, LEAST_RISE = 1.5, 0.5
"""Each of the newest is so many times the least of the first, and so much above it. Losses are nats, or squared
deviations: those of a model that has learnt its task already are so small that a wrong label makes them many times
larger, and a model that has forgotten it is as far off as one that guesses, 0.69 for two labels alike."""


@dataclass(frozen=True)
class Task:
    """What all trials of a search have in common. Plain values: it goes to other processes."""

    document: Mapping[str, Any]
    """The search's configuration."""
    named: frozenset[str]
    """Settings that the user gave."""
    search: Path
    tokens_root: Path
    teacher: Path | None = None
    """The artefact of which all trials are students; None where they are no students."""
    measures: bool = False
    """Whether all trials measure the gradient's noise, and not trial 0 alone."""

    @property
    def config(self) -> Config:
        return replace(configuration.parse(self.document, {}), named=self.named)

    def of(self, settings: Mapping[str, Any]) -> Config:
        """The configuration of a trial with such settings."""
        config = configuration.parse(self.document, settings)
        if every := space.evaluated_every(self.config):
            updates = max(1, round(every / config.recipe.rows_per_update))
            config = configuration.with_overrides(config, {"train.evaluate_every": updates})
        if config.recipe.train.log_every == LOGGED:  # a trial that diverges is frozen by what its log says
            config = configuration.with_overrides(config, {LOG_EVERY: 1})
        config = replace(config, named=config.named | self.named)
        if storage := _storage(config, self.search):
            config = configuration.with_overrides(config, {"cluster.storage": storage})
        if self.teacher is not None:
            config = distill.started(config, distill.Teacher.read(self.teacher), self.tokens_root)
        return config

    def prepared(self, number: int, settings: Mapping[str, Any]) -> prepare.Prepared:
        """The run of a trial, begun or taken up. Its rows are those of trial 0, which was checked as the search
        began: what was allowed then is not refused to the others."""
        run = Run(self.search).trial(number)
        reuse: run_folders.Reuse = "resume" if run.exists else "refuse"
        config, begun = self.of(settings), number > 0
        if self.teacher is None:
            prepared = prepare.prepare(config, run.folder, reuse, self.tokens_root, begun=begun)
        else:
            teacher = distill.Teacher.read(self.teacher)
            prepared = distill.prepare(config, teacher, run.folder, reuse, tokens_root=self.tokens_root, begun=begun)
        if number == 0 or self.measures:
            run.decide("noise", gradient_noise.EVERY)
        return prepared


def refused(config: Config) -> list[Problem]:
    """What is decided by the memory of a node cannot be where trials share it, some beginning when others end."""
    if config.recipe.train.strategy == "manual":
        return []
    reason, fix = "trials share the memory of nodes", "write manual, with what rtrain plan --search names"
    return [Problem("train.strategy", "auto", reason, fix, code="unsupported")]


@contextmanager
def held(
    config: Config,
    folder: Path,
    reuse: run_folders.Reuse,
    tokens_root: Path | None,
    teacher: Path | None = None,
) -> Iterator[tuple[Config, Task]]:
    """Open the folder of a search or a study, for this process alone: what it is to do, and what its trials share.

    The trials share the token store under `tokens_root`, by default the folder that holds the search. Raises
    `ConfigError` if a resumed one would be another, before anything is written, and `TryAgain` where the disk became
    full within the block.
    """
    words = ("train", config.recipe.name) if teacher is None else ("distill", teacher.parent)
    prepare.refuse_lost(config, folder, reuse, *words)
    folder, config = prepare.chosen(config, folder, reuse)
    # All trials use the same commits of hub names.
    config = run_folders.absolute(config, folder if reuse == "resume" else None)
    if reuse == "resume":
        _refuse_another(run_folders.stored(folder), config)
    with run_folders.claimed(Run(folder), reuse) as search:
        run_folders.freeze(search, config)
        document = configuration.to_document(config)
        _bring_back(config, search)
        try:
            yield config, Task(document, config.named, search.folder, tokens_root or folder.parent, teacher)
        except OSError as error:
            if error.strerror not in FULL:
                raise
            text = f"{error.strerror}; make room, and the same command with --resume goes on"
            raise TryAgain(text, code="disk_full") from error


def _bring_back(config: Config, search: Run) -> None:
    """Bring the trials back of which the storage has copies and the search's folder nothing: it was lost."""
    if storage := _storage(config, search.folder):
        for run in (search.trial(trial.number) for trial in Journal(search.trials).history.trials):
            copy = Replica(storage, run.name)
            if not run.exists and copy.exists():
                copy.restore(run.folder)


def _storage(config: Config, search: Path) -> str | None:
    """Where the copies of a search's trials lie: trials of several searches have the same names."""
    storage = config.deploy.cluster.storage
    return f"{storage}/{search.name}" if storage else None


def _refuse_another(old: Config, new: Config) -> None:
    """Raise `ConfigError` if a resumed search or study would be another one."""
    before, after = configuration.flat(old), configuration.flat(new)
    fixed = [*FIXED, *(n for n in before if n.startswith("tune.") and n.removeprefix("tune.") not in MAY_CHANGE)]
    what = "study" if old.deploy.tune.study else "search"
    fix = f"leave it out, or start another {what} with --new"
    if changed := [name for name in fixed if before[name] != after[name]]:
        started = f"the {what} was started with "
        raise ConfigError(
            [Problem(name, after[name], f"{started}{before[name]!r}", fix, code="changed_setting") for name in changed]
        )


@dataclass(frozen=True)
class Order:
    """What a slot is told to do."""

    trial: int
    settings: Mapping[str, Any]
    rung: int | None
    """The rung to which the trial is trained; None for its end."""
    rows: int
    """Rows of that rung, or of the whole run."""
    of: int | None = None
    """The trial that this one repeats with another seed, if any."""


Outcome = dict[str, Any]
"""An event of the journal: what an order has come to. `kind` is reached, finished, diverged or failed; or `AGAIN`,
which is none."""
AGAIN = "again"
"""The order is for another start of the search: something is wrong with the machine, and not with the trial."""
FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
"""What an error of a full disk says; that of a worker comes as text."""


def run(order: Order, task: Task, workers: worker_group.Workers) -> list[Outcome]:
    """Do an order. A run that was begun goes on from its newest checkpoint; one that is there already is read."""
    run = Run(task.search).trial(order.trial)
    watch, prepared, until = DivergenceWatch(run), None, None
    try:
        prepared = task.prepared(order.trial, order.settings)
        until = None if order.rung is None else prepared.order.update_at(order.rows)
        if not (run.finished or watch.why or _is_at(run, until)):
            controller.fit(
                prepared, until=until, rung=order.rung is not None, workers=workers, reports=False, on_event=watch
            )
    except NonFinite as error:
        return [{"kind": "diverged", "why": str(error).splitlines()[0], "seconds": seconds_of(run)}]
    except stop_request.AskedToEnd:
        return []
    except Exception as error:
        # One that is finished though the storage does not answer counts: its copy alone is not whole, and the winner's
        # is made at the search's end.
        if prepared is None or not (run.finished and isinstance(error, TryAgain)):
            return [_broken(run, error)]
    if watch.why and not run.finished:
        return [{"kind": "diverged", "why": watch.why, "seconds": seconds_of(run)}]
    try:
        found = [] if order.rung is None or until is None else [_reached(order, task, prepared, until)]
        found += [_finished(run, prepared)] if run.finished else []
    except Exception as error:  # it is the trial's alone: raised here, it would end the slot again and again
        return [_broken(run, error)]
    if broken := [one for one in found if not math.isfinite(one["score"] + one.get("held", 0.0))]:
        why = f"its score at update {broken[0]['update']} is no number"
        return [{"kind": "diverged", "why": why, "seconds": seconds_of(run)}]
    return found


def _broken(run: Run, error: Exception) -> Outcome:
    """The outcome of an order that an error has ended."""
    told = str(error).splitlines()[0] if isinstance(error, UserError) else first_line(error)
    if _is_of_the_machine(error):
        return {"kind": AGAIN, "error": told}
    if not isinstance(error, UserError):
        run.folder.mkdir(parents=True, exist_ok=True)
        told += f" (traceback in {failures.keep_traceback(run, 'error', error)})"
    return {"kind": "failed", "error": told, "seconds": seconds_of(run)}


def _is_of_the_machine(error: Exception) -> bool:
    """Whether it tells of a disk that is full or a storage that is away, which may soon be mended, and nothing of the
    trial."""
    return isinstance(error, TryAgain | preflight.Short | Unreachable) or any(text in str(error) for text in FULL)


def _is_at(run: Run, until: int | None) -> bool:
    """Whether the trial is frozen at that update already: the search was killed before it could write that down."""
    last = run.last("started", "paused")
    return last is not None and last["kind"] == "paused" and last["update"] == until


def _reached(order: Order, task: Task, prepared: prepare.Prepared, update: int) -> Outcome:
    """What the answers at a rung come to on the rows that steer the search."""
    run, config, store = prepared.run, prepared.config, open_store(prepared.store.folder)
    output = base.get(config.recipe.task).output
    positions = holdout_scores.steering(store, config.deploy.tune.held_back)
    targets, headline = store.targets("valid", positions), headline_of(config)

    def answers(of: Run) -> Ragged | None:
        known = rung_predictions.read(of, update)
        return None if known is None else known.take(positions)

    steering, additive = answers(run), metric_for(output).additive
    assert steering is not None  # they are written before the rung's checkpoint
    luck = None
    if order.of is not None and (other := answers(Run(task.search).trial(order.of))) is not None:
        both = (additive(one, targets, store.manifest.head) for one in (other, steering))
        luck = difference_ci.luck(
            *(difference_ci.Held(headline, store.column("valid", "row_id")[positions], one) for one in both)
        )
    return {
        "kind": "reached",
        "rung": order.rung,
        "update": update,
        "rows": prepared.order.rows_until(update),
        "score": metric_for(output).scores(steering, targets, store.manifest.head)[headline],
        "loss": best_checkpoint.mean_loss(base.get(config.recipe.task), steering, store, positions),
        "seconds": seconds_of(run),
        "luck": luck,
    }


def _finished(run: Run, prepared: prepare.Prepared) -> Outcome:
    config, headline = prepared.config, headline_of(prepared.config)
    chosen, held = run.last("best") or {}, holdout_scores.of(run, config.deploy.tune.held_back)
    return {
        "kind": "finished",
        "update": chosen.get("update", prepared.updates),
        "rows": prepared.order.rows_until(prepared.updates),
        "score": max(float(event["scores"][headline]) for event in _evaluations(run)),
        "held": held.score,
        "held_rows": len(held.ids),
        "seconds": seconds_of(run),
        "to_target": to_target(run, headline, config.deploy.tune.target),
    }


def headline_of(config: Config) -> str:
    return metric_for(base.get(config.recipe.task).output).headline


def seconds_of(run: Run) -> float:
    """Seconds of training, over all starts."""
    return round(max((seconds for _, seconds in trained(run.events())), default=0.0), 3)


def to_target(run: Run, headline: str, target: float | None) -> float | None:
    """Seconds of training until the first evaluation that reached the target on all validation rows; None without a
    target, or where none did."""
    if target is None:
        return None
    log = trained(run.events())
    there = [seconds for one, seconds in log if one["kind"] == "evaluated" and one["scores"][headline] >= target]
    return round(min(there), 3) if there else None


def _evaluations(run: Run) -> list[dict[str, Any]]:
    """On all validation rows, as training goes on."""
    log = run.events("evaluated")
    return [event for event in log if event["split"] == "valid" and "chosen" not in event]


def first_line(error: BaseException) -> str:
    """The first line of the error that ended a trial. For an error from a Ray process, it is that of the error raised
    there."""
    cause = getattr(error, "cause", None)
    lines = [line for line in str(cause or error).splitlines() if line.strip()]
    return lines[0 if cause else -1].strip() if lines else type(cause or error).__name__


# --------------------------------------------------------------------------------------------------------- divergence


def diverges(losses: Sequence[float]) -> bool:
    """Whether training losses say that a trial learns nothing any more: the newest are all far above the first.

    A run that goes well falls; one whose learning rate is a little too high wavers about where it began. A loss is that
    of one update, of few rows maybe, and of these one may be a hard one or wrongly labelled: so no newest one may be
    low. The least of the first ones counts, as the first step may have thrown the others up already.
    """
    if len(losses) < FIRST + LAST:
        return False
    began = min(losses[:FIRST])
    return min(losses[-LAST:]) > max(RISE * began, began + LEAST_RISE)


class DivergenceWatch:
    """Follows a trial's log, and freezes the trial as soon as it diverges."""

    def __init__(self, run: Run):
        self._run, self.why = run, ""
        self._losses: list[float] = []
        for event in run.events("progress"):  # a search that was killed may have seen it, and not written it down
            self._is_told_by(event)

    def __call__(self, event: dict[str, Any]) -> None:
        if event["kind"] == "progress" and self._is_told_by(event):
            stop_request.give(self._run, stop_request.DIVERGED)

    def _is_told_by(self, event: dict[str, Any]) -> bool:
        """Whether it is the first event by which the trial is seen to diverge."""
        self._losses.append(event["loss"])
        if self.why or not diverges(self._losses):
            return False
        began, now = min(self._losses[:FIRST]), min(self._losses[-LAST:])
        self.why = f"the training loss rose from {began:.3g} to {now:.3g} and more by update {event['update']}"
        return True
