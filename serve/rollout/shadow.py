"""A candidate beside the version that answers, in one replica: both answer a share of the live texts, one engine call
after the other, whenever the engine has nothing else to do. No client waits for it, and no text is kept or told."""

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
from serve.rollout.canary import Tally

if TYPE_CHECKING:
    from serve.model import Service

logger = logging.getLogger(__name__)

MOST_WAITING = 64
"""Texts that wait for an idle engine; beyond them the oldest goes."""
IDLE_S = 0.005
"""Seconds between two looks at a busy engine."""
KEPT = 500
"""Ratios of seconds, of which the median is told."""
NEAR = 0.1
"""Two numbers are the same within this share of the training scores' standard deviation."""


class Trial:
    """Belongs to one event loop."""

    def __init__(
        self,
        current: "Service",
        candidate: "Service",
        share: float,
        slower: float,
        draw: Callable[[], float] = random.random,
    ):
        self._current, self._candidate = current, candidate
        self._share, self._slower, self._draw = share, slower, draw
        self._texts: deque[Input] = deque(maxlen=MOST_WAITING)
        self._offered = asyncio.Event()
        self._seen = Tally()
        self._before = (current.requests, current.errors)
        self._ratios: deque[float] = deque(maxlen=KEPT)
        current.mirror = self.offer
        self._task = asyncio.get_running_loop().create_task(self._run())

    def offer(self, texts: Sequence[Input]) -> None:
        """Texts that the other version has answered."""
        taken = [text for text in texts if self._draw() < self._share]
        if taken:
            self._texts.extend(taken)
            self._offered.set()

    def tally(self) -> Tally:
        requests, errors = self._before
        return self._seen._replace(
            requests=self._candidate.requests,
            errors=self._candidate.errors,
            old_requests=self._current.requests - requests,
            old_errors=self._current.errors - errors,
        )

    @property
    def ratio(self) -> float | None:
        """Median of the candidate's seconds over the other version's, text by text."""
        return statistics.median(self._ratios) if self._ratios else None

    def close(self) -> None:
        self._current.mirror = None
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            await self._offered.wait()
            while self._texts:
                await self._try(self._texts.popleft())
            self._offered.clear()

    async def _try(self, text: Input) -> None:
        # Each goes first in turn: what the first one of two leaves in the caches helps the second.
        sides = [self._current, self._candidate]
        found: dict[Service, tuple[float, Any]] = {}
        try:
            for side in sides if (self._seen.rows % 2) else reversed(sides):
                found[side] = await self._asked(side, text)
            side = self._candidate  # it fails, too, where its answer cannot be compared
            self._count(found[self._current], found[self._candidate])
        except Exception:
            if side is self._candidate:
                logger.exception("the candidate failed on a text")
                self._seen = self._seen._replace(failed=self._seen.failed + 1)
                self._current.telemetry.shadow.labels("failed").inc()

    async def _asked(self, side: "Service", text: Input) -> tuple[float, Any]:
        """On the side's own thread, which answers its requests too: an engine is not for two threads at a time. While
        neither works, since they share the processors."""
        while self._current.batcher.busy or self._candidate.batcher.busy:
            await asyncio.sleep(IDLE_S)
        return await side.batcher.aside(functools.partial(_answer, side, text))

    def _count(self, old: tuple[float, Any], new: tuple[float, Any]) -> None:
        """Seconds and answer of both versions."""
        (old_s, old_answer), (new_s, new_answer) = old, new
        predictor, candidate = self._current.predictor, self._candidate.predictor
        agreed = same(predictor.task, predictor.head, old_answer, candidate.head, new_answer)
        self._current.telemetry.shadow.labels("same" if agreed else "other").inc()
        self._ratios.append(new_s / old_s)
        self._seen = self._seen._replace(
            rows=self._seen.rows + 1,
            agreed=self._seen.agreed + agreed,
            slower=self._seen.slower + (new_s > self._slower * old_s),
        )


def _answer(service: "Service", text: Input) -> tuple[float, Any]:
    """Seconds of the tokens and the engine, and the answer; on the engine's thread."""
    predictor, began = service.predictor, time.perf_counter()
    encoded = predictor.encode([text])
    outputs = service.run(encoded)
    seconds = time.perf_counter() - began
    return seconds, predictor.decode(outputs, [text], encoded, {})[0]


def same(task: Task, head: Head, first: Any, other: Head, second: Any) -> bool:
    """Whether two versions of a model give a text the same answer: what a client would act on, not how sure it is.
    `first`, `second`: answers to one text, by `Predictor.decode`; `head`, `other`: those of the versions that gave
    them. Of several labels each version has given those from its own thresholds on."""
    if task.output == "number":
        return bool(abs(first - second) <= NEAR * head.facts.get("std", 1.0))
    return bool(_essence(task, head, first) == _essence(task, other, second))


def _essence(task: Task, head: Head, answer: Any) -> Any:
    output = task.output
    if output == "classes":
        return answer[0]["label"]
    if output == "labels":
        thresholds = task.thresholds(head) or {}
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
