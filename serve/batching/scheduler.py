"""Selection of rows for the next engine call: pure, given the time. `batcher` waits, calls the engine and answers.

Scheduling is fair by tokens served. The client with the fewest served tokens leads, and its most urgent row sets the
length of the call. The call is filled with rows of that length, again from the clients with the fewest tokens, and with
rows of other lengths where padding costs less than a separate call. A returning client starts level with waiting
clients, so idle time earns no credit (start-time fair queueing, Goyal et al. 1996; with tokens as the service, Sheng et
al. 2024, arXiv:2401.00588). Deficit round robin does not fit calls that take rows of several clients at a time.
"""

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rtrain.core.ragged import EncodedRow

MIN_BUCKET_TOKENS = 16
"""In tokens. Shorter rows share a bucket: below this length a call costs about the same whatever the length."""
AGING_LIMIT_S = 1.0
"""An urgent row overtakes an earlier one only if its deadline is within this time after the other's arrival."""

FORGETTING_FACTOR = 0.97
"""Weight of a call relative to the next one: about the last 30 calls count, since the load of the machine changes."""
ORIGIN_WEIGHT = 0.01
"""Weight, per call, of the point (0 tokens, 0 seconds). Where all calls were of one size, it decides the slope."""
MIN_CALLS = 10
"""Calls before which nothing is expected: the first ones load what later ones find in the caches."""
OUTLIER_FACTOR = 5.0
"""A call that takes more than this many times its estimate was delayed by something else, and counts as this long. The
estimate still follows a lasting slowdown, by about a seventh per call."""
DECAY_FACTOR = 0.8
"""Factor on the estimate each time that only the estimate kept the engine idle."""


class CostModel:
    """Cost model of an engine call: seconds = a + b x padded tokens, fitted online.

    Least squares with exponential forgetting (Ljung 1999, System Identification, 11.2), kept as moments: they do not
    wind up during calls of one size, as a covariance matrix does.
    """

    def __init__(self) -> None:
        self._num_calls = 0
        self._total_weight = self._mean_tokens = self._mean_seconds = self._token_variance = self._covariance = 0.0
        self._seconds_per_call = self._seconds_per_token = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """A call of so many tokens, padding included, has taken so long."""
        self._num_calls += 1
        if expected := self.estimate_seconds(tokens):
            seconds = min(seconds, OUTLIER_FACTOR * expected)
        self._total_weight = FORGETTING_FACTOR * self._total_weight + 1
        from_tokens, from_seconds = tokens - self._mean_tokens, seconds - self._mean_seconds
        self._mean_tokens += from_tokens / self._total_weight
        self._mean_seconds += from_seconds / self._total_weight
        self._token_variance = FORGETTING_FACTOR * self._token_variance + from_tokens * (tokens - self._mean_tokens)
        self._covariance = FORGETTING_FACTOR * self._covariance + from_tokens * (seconds - self._mean_seconds)
        if self._num_calls >= MIN_CALLS:
            self._fit()

    def estimate_seconds(self, tokens: int, calls: int = 1) -> float:
        """What so many tokens in so many calls should take; 0 before `MIN_CALLS` have ended."""
        return calls * self._seconds_per_call + self._seconds_per_token * tokens

    def is_cheaper_than_call(self, tokens: int) -> bool:
        """Whether so many tokens more cost less than another call does."""
        return self.estimate_seconds(tokens, 0) < self.estimate_seconds(0, 1)

    def decay(self) -> None:
        """A wrong estimate that keeps every row from the engine would never meet the call that corrects it."""
        self._mean_seconds *= DECAY_FACTOR
        self._covariance *= DECAY_FACTOR
        self._fit()

    def _fit(self) -> None:
        origin_pull = ORIGIN_WEIGHT * self._total_weight * self._mean_tokens
        slope = (self._covariance + origin_pull * self._mean_seconds) / (
            self._token_variance + origin_pull * self._mean_tokens
        )
        self._seconds_per_token = min(max(0.0, slope), self._mean_seconds / self._mean_tokens)
        self._seconds_per_call = max(0.0, self._mean_seconds - self._seconds_per_token * self._mean_tokens)


@dataclass(frozen=True)
class BatchLimits:
    max_batch_size: int = 32
    max_batch_tokens: int | None = None
    """Most tokens of a call, padding included; a row of more goes alone."""
    max_batch_latency_s: float = math.inf
    """Maximum seconds for the tokens of a call; a larger row runs alone. The fixed cost of a call is excluded: smaller
    calls would not reduce it."""
    max_queued_inputs: int = 1024
    max_queued_tokens: int | None = None
    """Most tokens that may wait, each row padded to its own longest window."""


class QueuedRow:
    """A queued text. `owner`: its request; all rows of an owner leave together. `is_unpadded`: the engine does not pad,
    so a row counts as windows of one token, and rows of all lengths share a bucket."""

    __slots__ = ("client", "deadline", "encoded", "num_windows", "owner", "position", "tokens", "window_length")

    def __init__(
        self, owner: Any, position: int, encoded: EncodedRow, client: str, deadline: float, is_unpadded: bool = False
    ):
        self.owner, self.position, self.encoded = owner, position, encoded
        self.client, self.deadline = client, deadline
        lengths = [window.num_tokens for window in encoded.windows]
        self.num_windows, self.window_length = (sum(lengths), 1) if is_unpadded else (len(lengths), max(lengths))
        self.tokens = self.num_windows * self.window_length


class NextBatch(NamedTuple):
    batch: list[QueuedRow]
    """Rows of one length bucket, with those of others that cost less so; none where nothing waits."""
    expired: list[QueuedRow]
    """Rows that are not begun: their answers would not be ready by their deadlines."""


class _QueueEntry(NamedTuple):
    """An entry of a heap, the most urgent first; no two have the same number, so rows are never compared."""

    due_at: float
    sequence: int
    row: QueuedRow


class Overloaded(Exception):
    """The queue is full; `retry_after` is the time, in whole seconds, in which the engine should have emptied it."""

    def __init__(self, retry_after: int):
        super().__init__(f"too many texts are waiting; try again in {retry_after} s")
        self.retry_after = retry_after


def bucket_length(tokens: int) -> int:
    """The length to which a window may be padded: the next power of two."""
    return max(MIN_BUCKET_TOKENS, 1 << (tokens - 1).bit_length())


class Scheduler:
    """The rows that wait, by client and length bucket."""

    def __init__(self, limits: BatchLimits, cost_model: CostModel):
        self._limits, self._cost_model = limits, cost_model
        # Heaps by client and bucket; none is empty, and no client is without one.
        self._queues: dict[str, dict[int, list[_QueueEntry]]] = {}
        # Tokens that each client has had, from a level on that rises with those who wait.
        self._served_tokens: dict[str, float] = {}
        self._virtual_time = 0.0
        self._sequence = itertools.count()
        self.queued_rows = 0
        """Rows that wait."""
        self.queued_tokens = 0
        """Their tokens, each row padded to its own longest window."""

    @property
    def estimated_seconds(self) -> float:
        """Estimated engine seconds for all queued rows."""
        limits = self._limits
        calls = max(
            self.queued_rows / limits.max_batch_size, self.queued_tokens / (limits.max_batch_tokens or math.inf)
        )
        return self._cost_model.estimate_seconds(self.queued_tokens, math.ceil(calls))

    def enqueue(self, rows: Sequence[QueuedRow], now: float) -> None:
        """Queue the rows of one owner, and therefore of one client. Raises `Overloaded`, with nothing queued.

        In a full queue a client may still use its share: the limits divided by the number of clients. A client without
        queued rows is always accepted, otherwise its retries might never succeed. So n clients fill at most 1 + 1/2 +
        ... + 1/n times the limits, plus one request each: the share of the first client was the whole queue when it
        arrived, that of the second a half, that of the last the nth part.
        """
        client = rows[0].client
        queues = self._queues.get(client)
        if queues and not self._fits_queue(queues, len(rows), sum(row.tokens for row in rows)):
            raise Overloaded(max(1, math.ceil(self.estimated_seconds)))
        if not self._queues:
            self._served_tokens, self._virtual_time = {}, 0.0
        if queues is None:
            queues = self._queues[client] = {}
            self._served_tokens[client] = max(self._virtual_time, self._served_tokens.get(client, 0.0))
        for row in rows:
            entry = _QueueEntry(min(row.deadline, now + AGING_LIMIT_S), next(self._sequence), row)
            heapq.heappush(queues.setdefault(bucket_length(row.window_length), []), entry)
            self.queued_rows += 1
            self.queued_tokens += row.tokens

    def next_batch(self, now: float) -> NextBatch:
        """Remove and return the rows of the next engine call.

        A row expires if even a separate call would end after its deadline, by the cost model. If the whole call would
        end after the deadline of its most urgent row, that row expires and the next one takes its place: in overload,
        where every row is near its deadline, smaller calls would answer fewer rows in total.
        """
        batch: list[QueuedRow] = []
        expired: list[QueuedRow] = []
        while batch or self._queues:
            if not batch:
                length = self._pick_bucket()
            self._fill_batch(batch, expired, length, now)
            if not batch:
                continue
            self._merge_buckets(batch, expired, length, now)
            earliest = min(batch, key=lambda row: row.deadline)
            if earliest.deadline > now + self._cost_model.estimate_seconds(count_padded_tokens(batch)):
                break
            batch.remove(earliest)
            expired.append(earliest)
            self._served_tokens[earliest.client] -= earliest.tokens
        if not batch and any(row.deadline > now for row in expired):
            self._cost_model.decay()
        return NextBatch(batch, expired)

    def remove(self, owner: Any, client: str) -> int:
        """Take an owner's rows off the queue; returns how many were there."""
        removed = [
            (length, entry)
            for length, lane in self._queues.get(client, {}).items()
            for entry in lane
            if entry.row.owner is owner
        ]
        for length in {length for length, _ in removed}:
            queue = self._queues[client][length]
            queue[:] = [entry for entry in queue if entry.row.owner is not owner]
            heapq.heapify(queue)
            self._drop_empty(client, length)
        self.queued_rows -= len(removed)
        self.queued_tokens -= sum(entry.row.tokens for _, entry in removed)
        return len(removed)

    def _fits_queue(self, queues: dict[int, list[_QueueEntry]], rows: int, tokens: int) -> bool:
        """Whether that many more rows and tokens of a client fit, into the queue or into the client's share of it."""
        max_queued_tokens = self._limits.max_queued_tokens or math.inf
        if (
            self.queued_rows + rows <= self._limits.max_queued_inputs
            and self.queued_tokens + tokens <= max_queued_tokens
        ):
            return True
        clients = len(self._queues)
        client_tokens = [entry.row.tokens for lane in queues.values() for entry in lane]
        return (
            clients > 1
            and len(client_tokens) + rows <= self._limits.max_queued_inputs / clients
            and sum(client_tokens) + tokens <= max_queued_tokens / clients
        )

    def _pick_bucket(self) -> int:
        """The length of the next call: that of the most urgent row of the client that has had least."""
        most_urgent = {
            client: min((lane[0], length) for length, lane in lanes.items()) for client, lanes in self._queues.items()
        }
        next_client = min(most_urgent, key=lambda client: (self._served_tokens[client], most_urgent[client]))
        self._virtual_time = self._served_tokens[next_client]
        return most_urgent[next_client][1]

    def _fill_batch(self, batch: list[QueuedRow], expired: list[QueuedRow], length: int, now: float) -> None:
        """Add waiting rows of the length until the call is full."""
        num_windows = sum(row.num_windows for row in batch)
        window_length = max((row.window_length for row in batch), default=0)
        queues = {client: lanes[length] for client, lanes in self._queues.items() if length in lanes}
        while queues:
            client = next(iter(queues))
            if len(queues) > 1:
                client = min(queues, key=lambda client: (self._served_tokens[client], queues[client][0]))
            queue = queues[client]
            row = queue[0].row
            if row.deadline > now + self._cost_model.estimate_seconds(row.tokens):
                num_windows, window_length = num_windows + row.num_windows, max(window_length, row.window_length)
                if batch and (
                    len(batch) == self._limits.max_batch_size or not self._fits_engine_call(num_windows * window_length)
                ):
                    break  # the first of its length: none that came later goes before it
                batch.append(row)
                self._served_tokens[client] += row.tokens
            else:
                expired.append(row)
            heapq.heappop(queue)
            self.queued_rows -= 1
            self.queued_tokens -= row.tokens
            if not queue:
                del queues[client]
                self._drop_empty(client, length)

    def _merge_buckets(self, batch: list[QueuedRow], expired: list[QueuedRow], length: int, now: float) -> None:
        """Add the rows of other lengths, the nearest first, where a call of their own would cost more than the padding
        that they bring: on a GPU a call of 8 short texts costs about what one of 32 does. No row of the call may be
        late by it."""
        lengths = {other for lanes in self._queues.values() for other in lanes} - {length}
        for other_length in sorted(lengths, key=lambda other: max(other, length) / min(other, length)):
            if len(batch) == self._limits.max_batch_size:
                break
            waiting_rows = [entry.row for lanes in self._queues.values() for entry in lanes.get(other_length, ())]
            merged_tokens = count_padded_tokens([*batch, *waiting_rows])
            earliest_deadline = min(row.deadline for row in batch)
            padding = merged_tokens - count_padded_tokens(batch) - count_padded_tokens(waiting_rows)
            if self._cost_model.is_cheaper_than_call(
                padding
            ) and earliest_deadline > now + self._cost_model.estimate_seconds(merged_tokens):
                self._fill_batch(batch, expired, other_length, now)

    def _fits_engine_call(self, tokens: int) -> bool:
        """Whether a call may have that many tokens."""
        max_tokens = self._limits.max_batch_tokens
        return (max_tokens is None or tokens <= max_tokens) and self._cost_model.estimate_seconds(
            tokens, 0
        ) <= self._limits.max_batch_latency_s

    def _drop_empty(self, client: str, length: int) -> None:
        """Drop a lane that was emptied, and its client with its last one."""
        if not self._queues[client][length]:
            del self._queues[client][length]
            if not self._queues[client]:
                del self._queues[client]


def count_padded_tokens(batch: Sequence[QueuedRow]) -> int:
    """Tokens of a call, padding included."""
    return sum(row.num_windows for row in batch) * max((row.window_length for row in batch), default=0)
