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
from rtrain.core.ragged import Encoded, Floats
from rtrain.inference.explain.explainer import Explainer
from rtrain.inference.explain.gradients import Stopped
from rtrain.inference.explain.targets import LabelError
from rtrain.inference.predictor import Predictor
from rtrain.tasks.base import Input
from serve.schemas.predict import RequestError

MOST_WAITING = 16
"""Texts that may wait for an explanation or be in one, over all requests."""
NICENESS = 10


class Row(NamedTuple):
    """An answered text."""

    asked: Input
    encoded: Encoded
    output: Floats


class Explanations:
    """Belongs to one event loop. Its errors are those to answer, `RequestError`."""

    def __init__(self, predictor: Predictor, on_done: Callable[[float], None] = lambda seconds: None):
        """`on_done` is told the seconds of each explanation, on the thread that made it."""
        self._predictor, self._on_done = predictor, on_done
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="explain", initializer=_yield_processor)
        self._row_seconds = 0.0
        self.waiting = 0
        """Texts that have no explanation yet."""

    @functools.cached_property
    def _explainer(self) -> Explainer:
        """Made when first asked for: an int8 artefact answers, and has none."""
        return Explainer(self._predictor)

    def check(self, texts: int, label: str | None) -> None:
        """Refuse what cannot be explained before it is answered."""
        if texts > MOST_WAITING:
            raise RequestError(413, f"{texts} texts to explain; send at most {MOST_WAITING}", "inputs")
        try:
            self._explainer.check(label)
        except UserError as error:
            raise _refusal(error) from None

    async def submit(self, rows: Sequence[Row], label: str | None, deadline: float) -> list[dict[str, Any]]:
        """The explanation of each row's answer, or of `label`; `deadline` is on the loop's clock. Where it passes, or
        the caller is cancelled, the work ends."""
        if self.waiting + len(rows) > MOST_WAITING:
            retry_after = max(1, math.ceil(self.waiting * self._row_seconds))
            raise RequestError(503, "too many texts are waiting to be explained", retry_after=retry_after)
        loop, over = asyncio.get_running_loop(), threading.Event()
        self.waiting += len(rows)
        try:
            async with asyncio.timeout_at(deadline):
                return await loop.run_in_executor(self._thread, self._explain, rows, label, over)
        except TimeoutError:
            raise RequestError(504, "the deadline passed before the explanation was ready") from None
        except UserError as error:
            raise _refusal(error) from None
        finally:
            self.waiting -= len(rows)
            over.set()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _explain(self, rows: Sequence[Row], label: str | None, over: threading.Event) -> list[dict[str, Any]]:
        found = []
        for row in rows:
            began = time.monotonic()
            try:
                found.append(self._explainer.explain(*row, label, stop=over.is_set).to_document())
            except Stopped:
                break  # nobody reads the rest
            self._row_seconds = time.monotonic() - began
            self._on_done(self._row_seconds)
        return found


def _refusal(error: UserError) -> RequestError:
    field = "parameters.label" if isinstance(error, LabelError) else "parameters.explain"
    return RequestError(422, str(error), field)


def _yield_processor() -> None:
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
