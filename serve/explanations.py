"""Explanations beside the answers: a thread of their own, so that they never hold up the batcher, and few at a time.

An explanation costs some dozens of engine calls. Its thread yields the processor to the engine's (Linux gives threads a
niceness each), it works off one request after another, and stops between two passes as soon as nobody awaits it.
"""

import asyncio
import functools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from rtrain.core.errors import UserError
from rtrain.core.ragged import EncodedRow, Floats
from rtrain.inference.explain.explainer import Explainer
from rtrain.inference.explain.gradients import ExplanationCancelled
from rtrain.inference.explain.targets import LabelError
from rtrain.inference.predictor import Predictor
from rtrain.tasks.base import Input
from serve.schemas.predict import RequestError

MAX_QUEUED_TEXTS = 16
"""Texts that may wait for an explanation or be in one, over all requests."""
NICENESS = 10


class AnsweredRow(NamedTuple):
    """An answered text."""

    text: Input
    encoded: EncodedRow
    output: Floats


class ExplanationQueue:
    """Belongs to one event loop. Its errors are those to answer, `RequestError`."""

    def __init__(self, predictor: Predictor, on_done: Callable[[float], None] = lambda seconds: None):
        """`on_done` receives the seconds of each explanation, on the explaining thread."""
        self._predictor, self._on_done = predictor, on_done
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="explain", initializer=_yield_processor)
        self._row_seconds = 0.0
        self.queued_texts = 0
        """Texts that have no explanation yet."""

    @functools.cached_property
    def _explainer(self) -> Explainer:
        """Made when first asked for: an int8 artifact answers, and has none."""
        return Explainer(self._predictor)

    def check_request(self, num_texts: int, label: str | None) -> None:
        """Refuse what cannot be explained before it is answered."""
        if num_texts > MAX_QUEUED_TEXTS:
            raise RequestError(413, f"{num_texts} texts to explain; send at most {MAX_QUEUED_TEXTS}", "inputs")
        try:
            self._explainer.check(label)
        except UserError as error:
            raise _to_request_error(error) from None

    async def submit(self, rows: Sequence[AnsweredRow], label: str | None, deadline: float) -> list[dict[str, Any]]:
        """The explanation of each row's answer, or of `label`; `deadline` is on the loop's clock. Where it passes, or
        the caller is cancelled, the work ends."""
        if self.queued_texts + len(rows) > MAX_QUEUED_TEXTS:
            retry_after = max(1, math.ceil(self.queued_texts * self._row_seconds))
            raise RequestError(503, "too many texts are waiting to be explained", retry_after=retry_after)
        loop, stop_event = asyncio.get_running_loop(), threading.Event()
        self.queued_texts += len(rows)
        try:
            async with asyncio.timeout_at(deadline):
                return await loop.run_in_executor(self._thread, self._explain, rows, label, stop_event)
        except TimeoutError:
            raise RequestError(504, "the deadline passed before the explanation was ready") from None
        except UserError as error:
            raise _to_request_error(error) from None
        finally:
            self.queued_texts -= len(rows)
            stop_event.set()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _explain(
        self, rows: Sequence[AnsweredRow], label: str | None, stop_event: threading.Event
    ) -> list[dict[str, Any]]:
        documents = []
        for row in rows:
            started_at = time.monotonic()
            try:
                documents.append(self._explainer.explain(*row, label, should_stop=stop_event.is_set).to_document())
            except ExplanationCancelled:
                break  # nobody reads the rest
            self._row_seconds = time.monotonic() - started_at
            self._on_done(self._row_seconds)
        return documents


def _to_request_error(error: UserError) -> RequestError:
    field = "parameters.label" if isinstance(error, LabelError) else "parameters.explain"
    return RequestError(422, str(error), field)


def _yield_processor() -> None:
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
