"""Rollout of a model version under load, and rollback.

Every replica loads the candidate beside the current version, and verifies its golden answers. Only when all have
succeeded does the deployment's `user_config` change. Ray passes it to all replicas, including later ones, so a replica
that dies during the change restarts with the decided version. If one replica refuses the candidate, all replicas drop
it.

With a canary, the candidate first proves itself on live requests (`canary`). Each poll of the replicas repeats the
plan, so a replica that started meanwhile follows it too; the deployment changes only at the end.
"""

import contextlib
import logging
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import ray
import ray.serve
from ray.serve.exceptions import RayServeException
from ray.serve.schema import LoggingConfig

import rtrain.inference.artifact
from rtrain import ray_internals
from rtrain.config import ServeConfig
from rtrain.core.errors import UserError
from rtrain.core.run_folder import quote_path
from rtrain.inference.artifact import Artifact
from serve.auth import preflight
from serve.registry import CanaryPlan
from serve.rollout import canary

BROADCAST_TIMEOUT_S = 30.0
"""Seconds in which every replica answers a question that it answers at once."""
VERSIONS_KEY = "versions"
"""Key of `user_config` with the version of each model: the content of a folder may have been replaced since."""
logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 120.0
"""Seconds in which every replica has loaded a candidate, or said why it cannot."""
SWITCH_TIMEOUT_S = 30.0
"""Timeout for all replicas to serve the decided version, once it is loaded."""
END_TIMEOUT_S = 2 * LOAD_TIMEOUT_S + SWITCH_TIMEOUT_S
"""Timeout for a canary to stop: it may be at its last poll, and then at the switch."""
POLL_INTERVAL_S = 0.02
CANARY_POLL_S = 1.0
"""Seconds between two looks at a trial."""
NO_REPLY_ERRORS = (ray.exceptions.RayError, RayServeException, TimeoutError)
"""Exceptions of replicas that do not answer."""
UNKNOWN_STATUS: Mapping[str, Any] = {"version": None}
"""Status of a model in a replica that has not loaded it, or has ended."""


class ArtifactRef(NamedTuple):
    """An artifact at the time of the decision."""

    folder: Path
    artifact: Artifact


class RayApp:
    """Asked by several threads: each model changes by itself."""

    def __init__(
        self,
        deployment: ray.serve.Deployment,
        name: str,
        settings: ServeConfig,
        artifacts: Mapping[str, Path],
        logging_config: LoggingConfig,
    ):
        """`targets`: the first ones, by the models' names."""
        # Ray draws a new code version at each `run`, and starts all replicas anew for it.
        self._deployment = ray_internals.with_version(deployment, "1")
        self.name, self._settings, self._logging_config = name, settings, logging_config
        self.targets = {
            model: ArtifactRef(folder, rtrain.inference.artifact.read_artifact(folder, verify=False))
            for model, folder in artifacts.items()
        }
        """The artifact of each model."""
        self._lock = threading.Lock()

    def start(self) -> None:
        """Returns when the replicas are up. Raises what Ray raises where one fails."""
        self._deploy(self.targets)

    def set_target(self, model: str, target: ArtifactRef) -> None:
        """The replicas that there are, and each that is started later, are to answer with that artifact."""
        with self._lock:
            # First: Ray may already know it even if this fails, and the next decision is about another model.
            self.targets = {**self.targets, model: target}
            self._deploy(self.targets)

    def broadcast(self, method: str, *args: Any, timeout_s: float = BROADCAST_TIMEOUT_S) -> list[Any]:
        """Replies of all replicas; exceptions are returned, a `ray.exceptions.RayError` for an ended replica."""
        handle: Any = ray.serve.get_app_handle(self.name)
        replies: list[Any] = handle.broadcast(method, *args).results(timeout_s=timeout_s, return_exceptions=True)
        return replies

    def _deploy(self, targets: Mapping[str, ArtifactRef]) -> None:
        user_config = {
            "models": {name: str(target.folder) for name, target in targets.items()},
            VERSIONS_KEY: {name: target.artifact.version for name, target in targets.items()},
        }
        app = self._deployment.options(user_config=user_config).bind(self._settings, list(targets))
        ray.serve.run(app, name=self.name, route_prefix="/", logging_config=self._logging_config)


@dataclass
class CanaryRun:
    """How a trial stands, over all replicas."""

    version: str
    policy: canary.CanaryPolicy
    state: canary.CanaryState
    stats: canary.CanaryStats = field(default_factory=canary.CanaryStats)
    ratio: float | None = None
    """The candidate's seconds to the other version's, the median of the replicas' medians."""

    def update(self, reports: Sequence[Mapping[str, Any]], now: float) -> None:
        """Apply the reports of the replicas."""
        refusals = [report["refusal"] for report in reports if report["refusal"]]
        if refusals:
            self.state = canary.drop(self.state, refusals[0])
            return
        self.stats = canary.sum_stats(canary.CanaryStats(*report["stats"]) for report in reports)
        ratios = [report["ratio"] for report in reports if report["ratio"] is not None]
        self.ratio = statistics.median(ratios) if ratios else None
        self.state = canary.advance(self.state, self.stats, self.policy, now)

    def to_document(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "stage": self.state.stage,
            "weight": self.state.weight,
            "reason": self.state.reason,
            "stats": self.stats._asdict(),
            "ratio": self.ratio,
            "policy": self.policy._asdict(),
        }


class Rollout:
    """Served version of one model, and its history."""

    def __init__(self, ray_app: RayApp, model: str, settings: ServeConfig):
        self._ray_app, self.model, self._settings = ray_app, model, settings
        self._history = [ray_app.targets[model]]
        self._lock = threading.Lock()
        self._canary: CanaryRun | None = None
        """The one in progress, or the last one."""
        self._thread: threading.Thread | None = None
        self._stop_event = threading.Event()

    @property
    def folder(self) -> Path:
        """What answers."""
        return self._history[-1].folder

    def update(self, folder: Path, policy: canary.CanaryPolicy | None = None) -> str:
        """Answer with the artifact from now on, or, with an aim, as soon as it has proven itself; says so. Raises
        `UserError`, and nothing changes, where it may not be served, is another model, or is refused by a replica."""
        with self._hold_lock():
            self._check_no_canary()
            lines = list[str]()
            candidate, baseline = self._check_artifact(folder, lines.append), self._history[-1].artifact
            artifact = candidate.artifact
            if (folder, artifact.version) == (self.folder, baseline.version):
                raise UserError(
                    f"{quote_path(folder)} is already served; an update needs another version", code="already_serving"
                )
            if policy is None:
                self._load_candidate(candidate, baseline)
                return "\n".join([*lines, self._switch_to([*self._history, candidate], baseline)])
            self._canary = CanaryRun(artifact.version, policy, canary.CanaryState(time.monotonic()))
            self._stop_event.clear()
            self._thread = threading.Thread(
                target=self._run_canary, args=(candidate, baseline, self._canary), name="canary", daemon=True
            )
            self._thread.start()
        lines.append(
            f"canary of {artifact.version}: it answers {100 * policy.traffic_share:g} % of the texts beside "
            f"{baseline.version}, then it is promoted or dropped; see `rtrain serve status`"
        )
        return "\n".join(lines)

    def rollback(self) -> str:
        """Stop a running canary. Without one, or if it was just promoted, serve the previous version, which is loaded
        and verified again. Raises `UserError` like `update`."""
        with self._hold_lock():
            if self.has_running_canary and (outcome := self._stop_canary()):
                return outcome
            if len(self._history) < 2:
                raise UserError("no previous version to roll back to", code="no_previous_version")
            previous, baseline = self._history[-2], self._history[-1].artifact
            candidate = self._check_artifact(previous.folder)
            if candidate.artifact.version != previous.artifact.version:
                raise UserError(
                    f"{quote_path(previous.folder)} now holds {candidate.artifact.version} instead of "
                    f"{previous.artifact.version}; "
                    "use --update to serve it",
                    code="version_mismatch",
                )
            self._load_candidate(previous, baseline)
            return self._switch_to(self._history[:-1], baseline)

    def to_document(self, replica_statuses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Served version and canary, from the statuses of the replicas; a replica that has ended has an unknown
        status."""
        return {
            "name": self.model,
            "artifact": str(self.folder),
            "canary": self._canary.to_document() if self._canary else None,
            "replicas": [
                {"process": status.get("process"), **status.get("models", {}).get(self.model, UNKNOWN_STATUS)}
                for status in replica_statuses
            ],
        }

    def close(self, timeout_s: float = SWITCH_TIMEOUT_S) -> None:
        """Stop a running canary; the current version keeps serving. Ends at the latest when its replicas answer."""
        self._stop_event.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    @contextlib.contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Reject concurrent changes: a queued change would act on another baseline than intended."""
        if not self._lock.acquire(blocking=False):
            raise UserError(f"{self.model} is being changed; see `rtrain serve status`, and try again", code="busy")
        try:
            yield
        finally:
            self._lock.release()

    def _stop_canary(self) -> str:
        """How the trial has ended that was to be ended; nothing where it was promoted before that."""
        self.close(END_TIMEOUT_S)
        assert self._canary is not None
        if self.has_running_canary:
            reason = f"the replicas have not answered for {END_TIMEOUT_S:.0f} s"
            raise UserError(
                f"{self._canary.version} is dropped as soon as its replicas answer: {reason}; see Ray's logs",
                code="no_answer",
            )
        state = self._canary.state
        return "" if state.stage == "promoted" else f"{self._canary.version}: {state.reason}"

    @property
    def has_running_canary(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _check_no_canary(self) -> None:
        if self.has_running_canary and self._canary is not None:
            raise UserError(
                f"{self._canary.version} runs as a canary; wait for its end, or stop it with --rollback", code="busy"
            )

    def _check_artifact(self, folder: Path, notify: Callable[[str], None] = lambda line: None) -> ArtifactRef:
        """The artifact now; `notify` receives warnings. Raises `UserError` if it may not replace the current
        version."""
        artifact, baseline = rtrain.inference.artifact.read_artifact(folder), self._history[-1].artifact
        preflight.require_servable(artifact, folder, self._settings, notify)
        if artifact.name != baseline.name:
            raise UserError(
                f"{quote_path(folder)} is called {artifact.name}, and what answers as {self.model} is called "
                f"{baseline.name}; "
                "serve it under another name, or at another port",
                code="model_mismatch",
            )
        if artifact.task != baseline.task:
            raise UserError(
                f"{quote_path(folder)} answers {artifact.task}, and what answers as {self.model} answers "
                f"{baseline.task}; serve it "
                "under another name, or at another port",
                code="task_mismatch",
            )
        return ArtifactRef(folder, artifact)

    def _load_candidate(self, candidate: ArtifactRef, baseline: Artifact) -> None:
        if refusals := self._collect_refusals(candidate):
            self._drop_candidate()
            raise UserError(
                f"{quote_path(candidate.folder)} was refused, {baseline.version} keeps serving: {refusals[0]}",
                code="refused",
            )

    def _drop_candidate(self) -> None:
        """The candidate. Where a replica does not answer, the next one takes its place."""
        with contextlib.suppress(*NO_REPLY_ERRORS):
            self._ray_app.broadcast("drop_candidate", self.model)

    def _switch_to(self, history: list[ArtifactRef], baseline: Artifact) -> str:
        """To the last of `history`. Raises `UserError` where replicas are late; it is decided all the same."""
        self._history = history  # first: Ray may already know it even if this fails, and a rollback must be possible
        artifact = history[-1].artifact
        self._ray_app.set_target(self.model, history[-1])
        give_up_at = time.monotonic() + SWITCH_TIMEOUT_S
        while not self._all_replicas_serve(history[-1]):
            if time.monotonic() > give_up_at:
                reason = f"not every replica answers with {artifact.version} after {SWITCH_TIMEOUT_S:.0f} s"
                raise UserError(f"{reason}; see Ray's logs, or use --rollback", code="no_answer")
            time.sleep(POLL_INTERVAL_S)
        return f"{artifact.version} answers in place of {baseline.version}"

    def _all_replicas_serve(self, candidate: ArtifactRef) -> bool:
        try:
            replies = self._ray_app.broadcast("serving_versions")
        except NO_REPLY_ERRORS:
            return False
        # An ended replica gives no version; its successor serves the decided one.
        versions = {reply if isinstance(reply, BaseException) else reply.get(self.model) for reply in replies}
        return versions == {(str(candidate.folder), candidate.artifact.version)}

    def _run_canary(self, candidate: ArtifactRef, baseline: Artifact, canary_run: CanaryRun) -> None:
        """Carry the trial out, to its end."""
        has_started = False
        while not canary_run.state.is_over:
            plan = CanaryPlan(
                str(candidate.folder),
                canary_run.policy.traffic_share,
                canary_run.policy.max_latency_ratio,
                canary_run.state.weight,
                candidate.artifact.version,
            )
            try:
                reports = self._ray_app.broadcast("start_canary", self.model, plan._asdict(), timeout_s=LOAD_TIMEOUT_S)
                now = time.monotonic()
                if not has_started:  # it counts from when all have loaded it
                    has_started, canary_run.state = True, canary.CanaryState(now)
                # Counts of an ended replica are lost.
                canary_run.update([report for report in reports if not isinstance(report, BaseException)], now)
            except Exception as error:  # whatever Ray raises: the candidate has to be dropped
                canary_run.state = canary.drop(
                    canary_run.state, f"its replicas did not answer ({type(error).__name__})"
                )
                break
            if self._stop_event.wait(0 if canary_run.state.is_over else CANARY_POLL_S):
                reason = f"dropped by rollback; {baseline.version} keeps serving"
                canary_run.state = replace(canary_run.state, stage="dropped", reason=reason)
        try:
            self._finish_canary(candidate, baseline, canary_run)
        except Exception as error:  # whatever Ray raises: the trial's end says so
            logger.exception("the end of the trial of %s", candidate.artifact.version)
            canary_run.state = replace(canary_run.state, reason=f"{type(error).__name__}: {error}")

    def _finish_canary(self, candidate: ArtifactRef, baseline: Artifact, canary_run: CanaryRun) -> None:
        """What follows from a trial's end. Replicas that have come since the last look have not loaded the candidate,
        and may refuse it: all are asked before one switches."""
        if canary_run.state.stage == "promoted" and (refusals := self._collect_refusals(candidate)):
            canary_run.state = replace(canary_run.state, stage="dropped", reason=refusals[0])
        if canary_run.state.stage == "promoted":
            self._switch_to([*self._history, candidate], baseline)
        else:
            self._drop_candidate()

    def _collect_refusals(self, candidate: ArtifactRef) -> list[str]:
        """Reasons of replicas that refuse the artifact; empty if all have loaded and verified it. If a replica ends
        meanwhile, all are asked again: its successor may be up by then."""
        give_up_at = time.monotonic() + LOAD_TIMEOUT_S
        while True:
            try:
                replies = self._ray_app.broadcast(
                    "load_candidate",
                    self.model,
                    str(candidate.folder),
                    candidate.artifact.version,
                    timeout_s=LOAD_TIMEOUT_S,
                )
            except NO_REPLY_ERRORS as error:
                return [f"a replica did not answer ({type(error).__name__})"]
            failed_replies = [reply for reply in replies if isinstance(reply, BaseException)]
            refusals = [reply for reply in replies if reply and isinstance(reply, str)]
            if refusals or not failed_replies:
                return refusals
            if time.monotonic() > give_up_at:
                return [f"a replica did not answer ({type(failed_replies[0]).__name__})"]
            time.sleep(CANARY_POLL_S)


def collect_status(ray_app: RayApp, rollouts: Iterable[Rollout]) -> list[dict[str, Any]]:
    """Served version and canary of each model, and the status of each replica."""
    give_up_at = time.monotonic() + BROADCAST_TIMEOUT_S
    while True:
        try:
            answers = ray_app.broadcast("status")
            break
        except RayServeException:  # Ray lists no replica while the only one is being reconfigured
            if time.monotonic() > give_up_at:
                raise
            time.sleep(POLL_INTERVAL_S)
    replica_statuses = [{} if isinstance(answer, BaseException) else answer for answer in answers]
    return [rollout.to_document(replica_statuses) for rollout in rollouts]
