"""Shadow test of a candidate in one replica: candidate and baseline both answer a sample of the live texts, one engine
call after the other, while the engine is idle. No client waits for it, and no text is kept."""

import asyncio
import functools
import logging
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rtrain.core.ragged import Head
from rtrain.tasks.base import Input, Task
from serve.rollout.canary import CanaryStats

if TYPE_CHECKING:
    from serve.model import ModelService

logger = logging.getLogger(__name__)

MAX_QUEUED_TEXTS = 64
"""Texts that wait for an idle engine; beyond them the oldest goes."""
IDLE_POLL_S = 0.005
"""Seconds between two looks at a busy engine."""
MAX_RATIOS = 500
"""Maximum number of latency ratios; their median is reported."""
NUMBER_TOLERANCE = 0.1
"""Two numbers are the same within this share of the training scores' standard deviation."""


class ShadowTest:
    """Belongs to one event loop."""

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
