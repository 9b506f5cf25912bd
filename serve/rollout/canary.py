"""Canary analysis: whether a candidate replaces the baseline. `ShadowTest` collects the
numbers in each replica, `advance` decides, and `controller` acts.

Errors of candidate and baseline are compared over the same time. Each step counts from zero, since a past incident
would hide new failures. The comparison is repeated, and the chance of a false alarm is divided over all repeats
(Bonferroni; Lan & DeMets 1983 on spending it).

A candidate first answers live texts that the baseline has answered, unseen by clients (`shadow_fraction`). Then it
serves requests itself, a few at first (`weighted`). It is dropped at the first failed check, and promoted after the
last passed one.
"""

import asyncio
import functools
import logging
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rtrain.config import ServeConfig
from rtrain.core.ragged import Head
from rtrain.tasks.base import Input, Task

if TYPE_CHECKING:
    from serve.model import ModelService


logger = logging.getLogger(__name__)
WEIGHTS = (0.05, 0.25)
"""Shares of the requests that a candidate answers before it answers all of them."""
WEIGHTED_REQUESTS = 50
"""Requests that a candidate answers in each step."""
INTERIM_REQUESTS = (3, 4, 5, 6, 8, 10, 13, 16, 20, 25, 32, 40, WEIGHTED_REQUESTS)
"""Requests of a step after which the errors of both versions are compared (the R10 series of ISO 3)."""
WEIGHTED_TIMEOUT_S = 60.0
"""Seconds after which a step ends all the same: where few requests come, few can be lost."""
ALPHA = 0.01
"""Chance of a wrong word where a candidate is just as good as it has to be. For errors it is that of the whole trial:
an equal share of it for each of `INTERIM_REQUESTS` of each step."""
NUM_INTERIM_TESTS = len(WEIGHTS) * len(INTERIM_REQUESTS)
CanaryStage = Literal["shadow", "weighted", "promoted", "dropped"]
MAX_QUEUED_TEXTS = 64
"""Texts that wait for an idle engine; beyond them the oldest goes."""
IDLE_POLL_S = 0.005
"""Seconds between two looks at a busy engine."""
MAX_RATIOS = 500
"""Maximum number of latency ratios; their median is reported."""
NUMBER_TOLERANCE = 0.1
"""Two numbers are the same within this share of the training scores' standard deviation."""


class CanaryPolicy(NamedTuple):
    """Acceptance criteria of a candidate."""

    traffic_share: float
    """The part of the live texts that both versions are to answer."""
    min_rows: int
    """Minimum number of compared texts, over all replicas."""
    min_agreement: float
    """Least share of the same answers."""
    max_latency_ratio: float
    """Times as long as the other version that it may take for a text."""
    timeout_s: float
    """In which the texts have to come."""

    @classmethod
    def from_settings(cls, settings: ServeConfig) -> "CanaryPolicy":
        return cls(
            settings.shadow_fraction,
            settings.shadow_min_rows,
            settings.shadow_min_agreement,
            settings.shadow_max_latency_ratio,
            settings.shadow_timeout_s,
        )


class CanaryStats(NamedTuple):
    """What one replica, or all of them, have seen since the candidate was loaded."""

    rows: int = 0
    """Texts answered by both."""
    same_answers: int = 0
    """Those of these with the same answer."""
    slower_rows: int = 0
    """Those of these for which the candidate took more than `CanaryPolicy.max_latency_ratio` times as long, call after
    call."""
    failed_rows: int = 0
    """Texts that the candidate failed to answer, unseen by clients."""
    requests: int = 0
    """Requests that the candidate has served; requests with client errors are excluded."""
    errors: int = 0
    """Those of these with the status 500 or above: it failed, was full or too slow."""
    baseline_requests: int = 0
    baseline_errors: int = 0
    """The same of the other version, meanwhile."""

    def add(self, other: "CanaryStats") -> "CanaryStats":
        return CanaryStats(*(count + other_count for count, other_count in zip(self, other, strict=True)))

    def subtract(self, other: "CanaryStats") -> "CanaryStats":
        """Difference to earlier statistics."""
        return CanaryStats(*(count - other_count for count, other_count in zip(self, other, strict=True)))


NO_STATS = CanaryStats()


def sum_stats(replica_stats: Iterable[CanaryStats]) -> CanaryStats:
    summed = NO_STATS
    for stats in replica_stats:
        summed = summed.add(stats)
    return summed


@dataclass(frozen=True)
class CanaryState:
    """Where a candidate stands."""

    started_at: float
    stage: CanaryStage = "shadow"
    step: int = 0
    """A place in `WEIGHTS`."""
    step_started_at: float = 0.0
    step_start_stats: CanaryStats = NO_STATS
    """What had been seen when the step began, or began to count anew."""
    last_stats: CanaryStats = NO_STATS
    """Statistics of the last update."""
    interim_tests: int = 0
    """Number of `INTERIM_REQUESTS` thresholds that the step has passed."""
    reason: str = ""
    """Why it was dropped or promoted."""

    @property
    def weight(self) -> float:
        """Share of the requests that the candidate answers."""
        return WEIGHTS[self.step] if self.stage == "weighted" else 0.0

    @property
    def is_over(self) -> bool:
        return self.stage in ("promoted", "dropped")


def advance(state: CanaryState, stats: CanaryStats, policy: CanaryPolicy, now: float) -> CanaryState:
    """Next state of the candidate, from the statistics so far."""
    if state.is_over:
        return state
    if stats.failed_rows:
        return replace(
            state, stage="dropped", reason=f"it failed on {stats.failed_rows} of {stats.rows + stats.failed_rows} texts"
        )
    if state.stage == "shadow":
        return _advance_shadow(state, stats, policy, now)
    if stats.requests < state.last_stats.requests or stats.baseline_requests < state.last_stats.baseline_requests:
        # A replica has ended, and its counts are lost: the remaining counts cover no common period.
        state = replace(state, step_start_stats=stats, interim_tests=0)
    total_stats, stats = stats, stats.subtract(state.step_start_stats)
    due_tests = sum(requests <= stats.requests for requests in INTERIM_REQUESTS)
    if (
        due_tests > state.interim_tests
        and stats.errors
        and _error_p_value(stats) < ALPHA * (due_tests - state.interim_tests) / NUM_INTERIM_TESTS
    ):
        return replace(state, stage="dropped", reason=_describe_errors(stats))
    state = replace(state, last_stats=total_stats, interim_tests=due_tests)
    has_enough_requests, step_seconds = stats.requests >= WEIGHTED_REQUESTS, now - state.step_started_at
    if not has_enough_requests and stats.errors * stats.baseline_requests > stats.baseline_errors * stats.requests:
        # Neither chance nor fault by so few: the clock promotes nothing that fails more often.
        if step_seconds < policy.timeout_s:
            return state
        return replace(
            state, stage="dropped", reason=f"{_describe_errors(stats)}, and no more came in {policy.timeout_s:g} s"
        )
    if not has_enough_requests and step_seconds < WEIGHTED_TIMEOUT_S:
        return state
    if state.step + 1 < len(WEIGHTS):
        return replace(state, step=state.step + 1, step_started_at=now, step_start_stats=total_stats, interim_tests=0)
    return replace(state, stage="promoted", reason=f"{state.reason}; {total_stats.requests} requests answered")


def drop(state: CanaryState, reason: str) -> CanaryState:
    return state if state.is_over else replace(state, stage="dropped", reason=reason)


def _describe_errors(stats: CanaryStats) -> str:
    baseline_text = f"the other version on {stats.baseline_errors} of {stats.baseline_requests}"
    return f"it failed on {stats.errors} of {stats.requests} requests, {baseline_text}"


def _advance_shadow(state: CanaryState, stats: CanaryStats, policy: CanaryPolicy, now: float) -> CanaryState:
    if stats.rows < policy.min_rows:
        if now - state.started_at < policy.timeout_s:
            return state
        missing_rows = (
            f"{stats.rows} of {policy.min_rows} texts came while the engines had nothing else to do, in "
            f"{policy.timeout_s:g} s"
        )
        return replace(state, stage="dropped", reason=missing_rows)
    agreement = f"the same answer to {stats.same_answers} of {stats.rows} texts"
    if binomial_upper_bound(stats.rows - stats.same_answers, stats.rows) > 1 - policy.min_agreement:
        reason = f"{agreement}: too few to be sure of {100 * policy.min_agreement:g} %"
        return replace(state, stage="dropped", reason=reason)
    if sign_test_p_value(stats.slower_rows, stats.rows) < ALPHA:
        reason = (
            f"more than {policy.max_latency_ratio:g} times as long as the other version for {stats.slower_rows} "
            f"of {stats.rows} texts"
        )
        return replace(state, stage="dropped", reason=reason)
    return replace(
        state, stage="weighted", step=0, step_started_at=now, step_start_stats=stats, last_stats=stats, reason=agreement
    )


@functools.lru_cache(1 << 14)
def _error_p_value(stats: CanaryStats) -> float:
    """The chance of so many of all errors among the candidate's requests where both versions fail equally often
    (Fisher's exact test, one-sided)."""
    from scipy.stats import hypergeom

    errors, requests = stats.errors + stats.baseline_errors, stats.requests + stats.baseline_requests
    return float(hypergeom.sf(stats.errors - 1, requests, errors, stats.requests))


def binomial_upper_bound(count: int, rows: int) -> float:
    """Upper confidence bound of a proportion: `count` of `rows`, at level 1 - `ALPHA` (Clopper and Pearson 1934)."""
    from scipy.stats import beta

    return 1.0 if count == rows else float(beta.ppf(1 - ALPHA, count + 1, rows - count))


def sign_test_p_value(count: int, rows: int) -> float:
    """Probability of `count` or more heads in `rows` fair coin flips: the paired sign test (Arbuthnot 1710; Conover
    1999) of whether the candidate is too slow for most texts."""
    from scipy.stats import binom

    return float(binom.sf(count - 1, rows, 0.5))


class ShadowTest:
    """Has candidate and baseline answer a sample of the live texts, one call after the other, while the engine is idle.
    No client waits for it, and no text is kept. Belongs to one event loop."""

    def __init__(
        self,
        baseline: "ModelService",
        candidate: "ModelService",
        traffic_share: float,
        max_latency_ratio: float,
        draw: Callable[[], float] = random.random,
    ):
        self._baseline, self._candidate = baseline, candidate
        self._traffic_share, self._max_latency_ratio, self._draw = traffic_share, max_latency_ratio, draw
        self._queue: deque[Input] = deque(maxlen=MAX_QUEUED_TEXTS)
        self._texts_available = asyncio.Event()
        self._stats = CanaryStats()
        self._baseline_start = (baseline.requests, baseline.errors)
        self._ratios: deque[float] = deque(maxlen=MAX_RATIOS)
        baseline.mirror_texts = self.submit
        self._task = asyncio.get_running_loop().create_task(self._run())

    def submit(self, texts: Sequence[Input]) -> None:
        """Texts that the other version has answered."""
        sampled_texts = [text for text in texts if self._draw() < self._traffic_share]
        if sampled_texts:
            self._queue.extend(sampled_texts)
            self._texts_available.set()

    def collect_stats(self) -> CanaryStats:
        requests, errors = self._baseline_start
        return self._stats._replace(
            requests=self._candidate.requests,
            errors=self._candidate.errors,
            baseline_requests=self._baseline.requests - requests,
            baseline_errors=self._baseline.errors - errors,
        )

    @property
    def ratio(self) -> float | None:
        """Median of the candidate's seconds over the other version's, text by text."""
        return statistics.median(self._ratios) if self._ratios else None

    def close(self) -> None:
        self._baseline.mirror_texts = None
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            await self._texts_available.wait()
            while self._queue:
                await self._compare(self._queue.popleft())
            self._texts_available.clear()

    async def _compare(self, text: Input) -> None:
        # They take turns to go first: the first one warms the caches for the second.
        services = [self._baseline, self._candidate]
        timed_answers: dict[ModelService, tuple[float, Any]] = {}
        try:
            for service in services if (self._stats.rows % 2) else reversed(services):
                timed_answers[service] = await self._answer_when_idle(service, text)
            service = self._candidate  # it fails, too, where its answer cannot be compared
            self._record_comparison(timed_answers[self._baseline], timed_answers[self._candidate])
        except Exception:
            if service is self._candidate:
                logger.exception("the candidate failed on a text")
                self._stats = self._stats._replace(failed_rows=self._stats.failed_rows + 1)
                self._baseline.telemetry.shadow_texts.labels("failed").inc()

    async def _answer_when_idle(self, service: "ModelService", text: Input) -> tuple[float, Any]:
        """On the side's own thread, which answers its requests too: an engine is not for two threads at a time. While
        neither works, since they share the processors."""
        while self._baseline.batcher.is_busy or self._candidate.batcher.is_busy:
            await asyncio.sleep(IDLE_POLL_S)
        return await service.batcher.run_when_idle(functools.partial(_time_answer, service, text))

    def _record_comparison(self, baseline: tuple[float, Any], candidate: tuple[float, Any]) -> None:
        """Seconds and answer of both versions."""
        (baseline_s, baseline_answer), (candidate_s, candidate_answer) = baseline, candidate
        predictor, candidate_predictor = self._baseline.predictor, self._candidate.predictor
        is_same = same_prediction(
            predictor.task, predictor.head, baseline_answer, candidate_predictor.head, candidate_answer
        )
        self._baseline.telemetry.shadow_texts.labels("same" if is_same else "different").inc()
        self._ratios.append(candidate_s / baseline_s)
        self._stats = self._stats._replace(
            rows=self._stats.rows + 1,
            same_answers=self._stats.same_answers + is_same,
            slower_rows=self._stats.slower_rows + (candidate_s > self._max_latency_ratio * baseline_s),
        )


def _time_answer(service: "ModelService", text: Input) -> tuple[float, Any]:
    """Seconds of the tokens and the engine, and the answer; on the engine's thread."""
    predictor, started_at = service.predictor, time.perf_counter()
    text = predictor.clean_input(text)
    encoded = predictor.encode([text])
    outputs = service.run_engine(encoded)
    seconds = time.perf_counter() - started_at
    return seconds, predictor.decode(outputs, [text], encoded, {})[0]


def same_prediction(task: Task, head: Head, first: Any, other_head: Head, second: Any) -> bool:
    """Whether two versions give a text the same prediction, scores aside. `first`, `second`: answers of
    `Predictor.decode`; `head`, `other_head`: heads of their versions. In multi-label answers each version applies its
    own thresholds."""
    if task.output == "number":
        return bool(abs(first - second) <= NUMBER_TOLERANCE * head.facts.get("std", 1.0))
    return bool(_decision(task, head, first) == _decision(task, other_head, second))


def _decision(task: Task, head: Head, answer: Any) -> Any:
    output = task.output
    if output == "classes":
        return answer[0]["label"]
    if output == "labels":
        thresholds = task.label_thresholds(head) or {}
        return {entry["label"] for entry in answer if entry["score"] >= thresholds.get(entry["label"], 0.0)}
    if output == "heads":
        return {head: entries[0]["label"] for head, entries in answer.items()}
    if output == "tags":
        return {(entity["entity_group"], entity["start"], entity["end"]) for entity in answer}
    if output == "spans":
        return (answer["start"], answer["end"])
    if output == "summary":
        return [(sentence["start"], sentence["end"]) for sentence in answer["sentences"]]
    # Not its number: in a trimmed vocabulary the same word has another.
    return [mask[0]["token_str"] for mask in answer]
