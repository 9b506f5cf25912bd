"""One model takes another's place while requests come in, and goes back.

Every replica loads the candidate beside what it answers with, and proves its golden answers. Only when all of them have
done so is Ray told, by a change of the deployment's `user_config`, which Ray hands to the replicas there are, and to
each that it starts later: a replica that dies in mid-change comes back with what was decided. One refusal, and all of
them drop the candidate and go on.

With a trial the candidate proves itself on live requests first (`judge`). The plan is repeated with every look at the
replicas, so that one that was started meanwhile follows it too; nothing of it is decided before the end.
"""

import contextlib
import logging
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.serve.exceptions import RayServeException

import rtrain.inference.artifact
from rtrain.config import Serve
from rtrain.core.errors import UserError
from rtrain.core.run_folder import shown
from rtrain.inference.artifact import Artifact
from serve.auth import preflight
from serve.rollout import canary
from serve.rollout.model_slot import Plan
from serve.rollout.ray_app import ASK_S, Application, Served

logger = logging.getLogger(__name__)

LOAD_S = 120.0
"""Seconds in which every replica has loaded a candidate, or said why it cannot."""
SWITCH_S = 30.0
"""Seconds in which every replica answers with what was decided, once it is loaded."""
END_S = 2 * LOAD_S + SWITCH_S
"""Seconds in which a trial ends that is told to: it may be at its last look, and then at the switch."""
POLL_S = 0.02
WATCH_S = 1.0
"""Seconds between two looks at a trial."""
SILENCE = (ray.exceptions.RayError, RayServeException, TimeoutError)
"""What is raised where replicas do not answer."""
UNKNOWN: Mapping[str, Any] = {"version": None}
"""What is known of a model in a replica that has not loaded it, or has ended."""


@dataclass
class Standing:
    """How a trial stands, over all replicas."""

    version: str
    aim: canary.Aim
    state: canary.State
    seen: canary.Tally = field(default_factory=canary.Tally)
    ratio: float | None = None
    """The candidate's seconds to the other version's, the median of the replicas' medians."""

    def look(self, reports: Sequence[Mapping[str, Any]], now: float) -> None:
        """What the replicas have reported, and what follows from it."""
        refusals = [report["refusal"] for report in reports if report["refusal"]]
        if refusals:
            self.state = canary.dropped(self.state, refusals[0])
            return
        self.seen = canary.total(canary.Tally(*report["seen"]) for report in reports)
        ratios = [report["ratio"] for report in reports if report["ratio"] is not None]
        self.ratio = statistics.median(ratios) if ratios else None
        self.state = canary.follow(self.state, self.seen, self.aim, now)

    def document(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "stage": self.state.stage,
            "weight": self.state.weight,
            "reason": self.state.reason,
            "seen": self.seen._asdict(),
            "ratio": self.ratio,
            "aim": self.aim._asdict(),
        }


class Rollout:
    """What an application answers with for one model, and what it answered with before."""

    def __init__(self, application: Application, model: str, settings: Serve):
        self._application, self.model, self._settings = application, model, settings
        self._served = [application.decided[model]]
        self._one_at_a_time = threading.Lock()
        self._trial: Standing | None = None
        """The one in progress, or the last one."""
        self._thread: threading.Thread | None = None
        self._end_trial = threading.Event()

    @property
    def artifact(self) -> Path:
        """What answers."""
        return self._served[-1].folder

    def update(self, artifact: Path, aim: canary.Aim | None = None) -> str:
        """Answer with the artefact from now on, or, with an aim, as soon as it has proven itself; says so. Raises
        `UserError`, and nothing changes, where it may not be served, is another model, or is refused by a replica."""
        with self._alone():
            self._refuse_during_trial()
            said = list[str]()
            new, old = self._admitted(artifact, said.append), self._served[-1].made
            made = new.made
            if (artifact, made.version) == (self.artifact, old.version):
                raise UserError(
                    f"{shown(artifact)} is what answers already; an update is another version", code="already_serving"
                )
            if aim is None:
                self._load(new, old)
                return "\n".join([*said, self._switch([*self._served, new], old)])
            self._trial = Standing(made.version, aim, canary.State(time.monotonic()))
            self._end_trial.clear()
            self._thread = threading.Thread(target=self._watch, args=(new, old, self._trial), name="trial", daemon=True)
            self._thread.start()
        said.append(
            f"{made.version} is on trial: it answers {100 * aim.share:g} % of the texts beside {old.version}, then "
            "takes its place or is dropped; `rtrain serve status` tells how it stands"
        )
        return "\n".join(said)

    def back(self) -> str:
        """End the trial, if there is one that has not just been promoted. Else answer with what was served before; it
        is loaded and proven again. Raises `UserError` as `update` does."""
        with self._alone():
            if self.on_trial and (ended := self._ended_by_hand()):
                return ended
            if len(self._served) < 2:
                raise UserError("nothing was served before: there is nothing to go back to", code="nothing_before")
            before, old = self._served[-2], self._served[-1].made
            found = self._admitted(before.folder)
            if found.made.version != before.made.version:
                raise UserError(
                    f"{shown(before.folder)} holds {found.made.version} now, and not {before.made.version}, which was "
                    "served before; serve it by --update, if it is meant",
                    code="other_version",
                )
            self._load(before, old)
            return self._switch(self._served[:-1], old)

    def document(self, told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What is served and tried, from what the replicas have told of themselves; of one that has ended nothing is
        known."""
        return {
            "name": self.model,
            "artifact": str(self.artifact),
            "trial": self._trial.document() if self._trial else None,
            "replicas": [
                {"process": one.get("process"), **one.get("models", {}).get(self.model, UNKNOWN)} for one in told
            ],
        }

    def close(self, wait_s: float = SWITCH_S) -> None:
        """End the trial, if there is one; what answers goes on. It is over at the latest when its replicas answer."""
        self._end_trial.set()
        if self._thread is not None:
            self._thread.join(wait_s)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One that waited would change something else than was meant when it was asked for: what is served before it
        is known when the other has ended."""
        if not self._one_at_a_time.acquire(blocking=False):
            raise UserError(
                f"{self.model} is being changed just now; look at `rtrain serve status`, and ask again", code="busy"
            )
        try:
            yield
        finally:
            self._one_at_a_time.release()

    def _ended_by_hand(self) -> str:
        """How the trial has ended that was to be ended; nothing where it was promoted before that."""
        self.close(END_S)
        assert self._trial is not None
        if self.on_trial:
            late = f"the replicas have not answered for {END_S:.0f} s"
            raise UserError(
                f"{self._trial.version} is dropped as soon as its replicas answer: {late}; see Ray's logs",
                code="no_answer",
            )
        state = self._trial.state
        return "" if state.stage == "promoted" else f"{self._trial.version}: {state.reason}"

    @property
    def on_trial(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _refuse_during_trial(self) -> None:
        if self.on_trial and self._trial is not None:
            raise UserError(
                f"{self._trial.version} is on trial; wait for its end, or end it by --rollback", code="busy"
            )

    def _admitted(self, artifact: Path, say: Callable[[str], None] = lambda line: None) -> Served:
        """The artefact as it is now; `say` is told what speaks against it. Raises `UserError` where it may not take the
        place of what answers."""
        made, old = rtrain.inference.artifact.read(artifact), self._served[-1].made
        preflight.admit(made, artifact, self._settings, say)
        if made.name != old.name:
            raise UserError(
                f"{shown(artifact)} is called {made.name}, and what answers as {self.model} is called {old.name}; "
                "serve it under another name, or at another port",
                code="other_model",
            )
        if made.task != old.task:
            raise UserError(
                f"{shown(artifact)} answers {made.task}, and what answers as {self.model} answers {old.task}; serve it "
                "under another name, or at another port",
                code="other_task",
            )
        return Served(artifact, made)

    def _load(self, new: Served, old: Artifact) -> None:
        if refusals := self._refusals(new):
            self._drop()
            raise UserError(f"{shown(new.folder)} is not served, {old.version} goes on: {refusals[0]}", code="refused")

    def _drop(self) -> None:
        """The candidate. Where a replica does not answer, the next one takes its place."""
        with contextlib.suppress(*SILENCE):
            self._application.told("drop", self.model)

    def _switch(self, served: list[Served], old: Artifact) -> str:
        """To the last of `served`. Raises `UserError` where replicas are late; it is decided all the same."""
        self._served = served  # first: whatever becomes of it, Ray may have been told, and one has to get back
        made = served[-1].made
        self._application.decide(self.model, served[-1])
        give_up = time.monotonic() + SWITCH_S
        while not self._all_serve(served[-1]):
            if time.monotonic() > give_up:
                late = f"not every replica answers with {made.version} after {SWITCH_S:.0f} s"
                raise UserError(
                    f"{late}, which they are to do; see Ray's logs, or go back by --rollback", code="no_answer"
                )
            time.sleep(POLL_S)
        return f"{made.version} answers in place of {old.version}"

    def _all_serve(self, new: Served) -> bool:
        try:
            told = self._application.told("serves")
        except SILENCE:
            return False
        # One that has ended tells nothing; what comes in its place serves what is decided.
        versions = {one if isinstance(one, BaseException) else one.get(self.model) for one in told}
        return versions == {(str(new.folder), new.made.version)}

    def _watch(self, new: Served, old: Artifact, trial: Standing) -> None:
        """Carry the trial out, to its end."""
        began = False
        while not trial.state.over:
            plan = Plan(str(new.folder), trial.aim.share, trial.aim.slower, trial.state.weight, new.made.version)
            try:
                told = self._application.told("follow", self.model, plan._asdict(), timeout_s=LOAD_S)
                now = time.monotonic()
                if not began:  # it counts from when all have loaded it
                    began, trial.state = True, canary.State(now)
                # What one that has ended saw is lost.
                trial.look([report for report in told if not isinstance(report, BaseException)], now)
            except Exception as error:  # whatever Ray raises: the candidate has to be dropped
                trial.state = canary.dropped(trial.state, f"its replicas did not answer ({type(error).__name__})")
                break
            if self._end_trial.wait(0 if trial.state.over else WATCH_S):
                reason = f"dropped by hand; {old.version} goes on"
                trial.state = replace(trial.state, stage="dropped", reason=reason)
        try:
            self._settle(new, old, trial)
        except Exception as error:  # whatever Ray raises: the trial's end says so
            logger.exception("the end of the trial of %s", new.made.version)
            trial.state = replace(trial.state, reason=f"{type(error).__name__}: {error}")

    def _settle(self, new: Served, old: Artifact, trial: Standing) -> None:
        """What follows from a trial's end. Replicas that have come since the last look have not loaded the candidate,
        and may refuse it: all are asked before one switches."""
        if trial.state.stage == "promoted" and (refusals := self._refusals(new)):
            trial.state = replace(trial.state, stage="dropped", reason=refusals[0])
        if trial.state.stage == "promoted":
            self._switch([*self._served, new], old)
        else:
            self._drop()

    def _refusals(self, new: Served) -> list[str]:
        """Why replicas refuse the artefact; empty where all have loaded and proven it. Where one ends meanwhile, all
        are asked once more: what comes in its place may be there by then."""
        give_up = time.monotonic() + LOAD_S
        while True:
            try:
                found = self._application.told("load", self.model, str(new.folder), new.made.version, timeout_s=LOAD_S)
            except SILENCE as error:
                return [f"a replica did not answer ({type(error).__name__})"]
            ended = [one for one in found if isinstance(one, BaseException)]
            refusals = [one for one in found if one and isinstance(one, str)]
            if refusals or not ended:
                return refusals
            if time.monotonic() > give_up:
                return [f"a replica did not answer ({type(ended[0]).__name__})"]
            time.sleep(WATCH_S)


def status(application: Application, rollouts: Iterable[Rollout]) -> list[dict[str, Any]]:
    """What is served and tried of each model, and what each replica tells of it."""
    give_up = time.monotonic() + ASK_S
    while True:
        try:
            answers = application.told("status")
            break
        except RayServeException:  # Ray knows of no replica while the only one is told of a change
            if time.monotonic() > give_up:
                raise
            time.sleep(POLL_S)
    told = [{} if isinstance(one, BaseException) else one for one in answers]
    return [rollout.document(told) for rollout in rollouts]
