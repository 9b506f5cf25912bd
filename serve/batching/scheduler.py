"""Which rows the next engine call takes: pure, given the time. `batcher` waits, calls and answers.

Clients are served by what they have had: the one that had the fewest tokens leads, and its most urgent row decides the
length of the call, which is filled with rows of that length, again from who had the fewest, and with rows of other
lengths where that costs less than a call of their own. A client that comes back starts level with those that wait, so
that nobody saves up a claim (start-time fair queueing, Goyal et al. 1996; with tokens as the service, Sheng et al.
2024, arXiv:2401.00588). The rounds of deficit round robin would not fit calls that take rows of several clients at a
time.
"""

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rtrain.core.ragged import Encoded

SHORTEST_BUCKET = 16
"""In tokens. Shorter rows share a bucket: below this length a call costs about the same whatever the length."""
PATIENCE_S = 1.0
"""A row goes before one that came earlier only if its deadline is within this time of the other's arrival."""

FORGETTING = 0.97
"""What an earlier call weighs beside the next one: about the last 30 calls count, as the machine's load changes."""
ORIGIN_WEIGHT = 0.01
"""Weight, per call, of the point (0 tokens, 0 seconds). Where all calls were of one size, it decides the slope."""
LEAST_CALLS = 10
"""Calls before which nothing is expected: the first ones load what later ones find in the caches."""
HELD_UP = 5.0
"""A call that takes more than this many times as long as expected was held up by something else, and counts as this
long. One that becomes slower for good is still followed: by about a seventh with every call."""
DOUBT = 0.8
"""What is left of the estimate each time that it alone kept the engine idle."""


class Cost:
    """What an engine call costs: seconds = a + b x padded tokens, learned from the calls as they end.

    Least squares with exponential forgetting (Ljung 1999, System Identification, 11.2), kept as moments: they do
    not wind up where calls of one size follow each other, as a covariance matrix does."""

    def __init__(self) -> None:
        self._calls = 0
        self._weight = self._tokens = self._seconds = self._spread = self._joint = 0.0
        self._base = self._per_token = 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        """A call of so many tokens, padding included, has taken so long."""
        self._calls += 1
        if expected := self.seconds(tokens):
            seconds = min(seconds, HELD_UP * expected)
        self._weight = FORGETTING * self._weight + 1
        from_tokens, from_seconds = tokens - self._tokens, seconds - self._seconds
        self._tokens += from_tokens / self._weight
        self._seconds += from_seconds / self._weight
        self._spread = FORGETTING * self._spread + from_tokens * (tokens - self._tokens)
        self._joint = FORGETTING * self._joint + from_tokens * (seconds - self._seconds)
        if self._calls >= LEAST_CALLS:
            self._solve()

    def seconds(self, tokens: int, calls: int = 1) -> float:
        """What so many tokens in so many calls should take; 0 before `LEAST_CALLS` have ended."""
        return calls * self._base + self._per_token * tokens

    def saves_a_call(self, tokens: int) -> bool:
        """Whether so many tokens more cost less than another call does."""
        return self.seconds(tokens, 0) < self.seconds(0, 1)

    def doubt(self) -> None:
        """A wrong estimate that keeps every row from the engine would never meet the call that corrects it."""
        self._seconds *= DOUBT
        self._joint *= DOUBT
        self._solve()

    def _solve(self) -> None:
        pull = ORIGIN_WEIGHT * self._weight * self._tokens
        slope = (self._joint + pull * self._seconds) / (self._spread + pull * self._tokens)
        self._per_token = min(max(0.0, slope), self._seconds / self._tokens)
        self._base = max(0.0, self._seconds - self._per_token * self._tokens)


@dataclass(frozen=True)
class Limits:
    batch_rows: int = 32
    batch_tokens: int | None = None
    """Most tokens of a call, padding included; a row of more goes alone."""
    batch_s: float = math.inf
    """Most seconds that the tokens of a call should cost; a row of more goes alone. What a call costs whatever its size
    is left out: smaller calls would not save it."""
    queue_rows: int = 1024
    queue_tokens: int | None = None
    """Most tokens that may wait, each row padded to its own longest window."""


class Row:
    """A text that waits. `owner`: what it is part of; all rows of an owner leave together. `is_unpadded`: the engine
    pads nothing, so a row counts as so many windows of one token, and rows of all lengths share a bucket."""

    __slots__ = ("client", "deadline", "encoded", "longest", "owner", "position", "tokens", "windows")

    def __init__(
        self, owner: Any, position: int, encoded: Encoded, client: str, deadline: float, is_unpadded: bool = False
    ):
        self.owner, self.position, self.encoded = owner, position, encoded
        self.client, self.deadline = client, deadline
        lengths = [window.tokens for window in encoded.windows]
        self.windows, self.longest = (sum(lengths), 1) if is_unpadded else (len(lengths), max(lengths))
        self.tokens = self.windows * self.longest


class Taken(NamedTuple):
    batch: list[Row]
    """Rows of one length bucket, with those of others that cost less so; none where nothing waits."""
    late: list[Row]
    """Rows that are not begun: their answers would not be ready by their deadlines."""


class _Entry(NamedTuple):
    """An entry of a heap, the most urgent first; no two have the same number, so rows are never compared."""

    due: float
    number: int
    row: Row


class Overloaded(Exception):
    """The queue is full; `retry_after` is the time, in whole seconds, in which the engine should have emptied it."""

    def __init__(self, retry_after: int):
        super().__init__(f"too many texts are waiting; try again in {retry_after} s")
        self.retry_after = retry_after


def bucket(tokens: int) -> int:
    """The length to which a window may be padded: the next power of two."""
    return max(SHORTEST_BUCKET, 1 << (tokens - 1).bit_length())


class Scheduler:
    """The rows that wait, by client and length bucket."""

    def __init__(self, limits: Limits, cost: Cost):
        self._limits, self._cost = limits, cost
        # Heaps by client and bucket; none is empty, and no client is without one.
        self._waiting: dict[str, dict[int, list[_Entry]]] = {}
        # Tokens that each client has had, from a level on that rises with those who wait.
        self._served: dict[str, float] = {}
        self._level = 0.0
        self._numbers = itertools.count()
        self.rows = 0
        """Rows that wait."""
        self.tokens = 0
        """Their tokens, each row padded to its own longest window."""

    @property
    def seconds(self) -> float:
        """What the engine should need for all that waits."""
        limits = self._limits
        calls = max(self.rows / limits.batch_rows, self.tokens / (limits.batch_tokens or math.inf))
        return self._cost.seconds(self.tokens, math.ceil(calls))

    def put(self, rows: Sequence[Row], now: float) -> None:
        """Queue the rows of one owner, and so of one client. Raises `Overloaded`, with nothing queued.

        Where the queue is full, a client may still wait with its share: the limits over the number of clients there.
        One that has nothing there is always let in: its request could come back for ever and find no room. So n clients
        fill 1 + 1/2 + ... + 1/n times the limits at most, beside a request of each: the first one had all of them for
        its share when it came, the second a half, the last the nth part.
        """
        client = rows[0].client
        lanes = self._waiting.get(client)
        if lanes and not self._has_room(lanes, len(rows), sum(row.tokens for row in rows)):
            raise Overloaded(max(1, math.ceil(self.seconds)))
        if not self._waiting:
            self._served, self._level = {}, 0.0
        if lanes is None:
            lanes = self._waiting[client] = {}
            self._served[client] = max(self._level, self._served.get(client, 0.0))
        for row in rows:
            entry = _Entry(min(row.deadline, now + PATIENCE_S), next(self._numbers), row)
            heapq.heappush(lanes.setdefault(bucket(row.longest), []), entry)
            self.rows += 1
            self.tokens += row.tokens

    def take(self, now: float) -> Taken:
        """The next engine call, whose rows have left the queue.

        A row is late that even a call of its own would answer too late, by what calls have cost; and the most urgent
        row of a call that ends after its deadline, whose place is taken by the next: in overload, where every row is
        near its deadline, smaller calls for the first of them would answer fewer in all.
        """
        batch: list[Row] = []
        late: list[Row] = []
        while batch or self._waiting:
            if not batch:
                length = self._lead()
            self._fill(batch, late, length, now)
            if not batch:
                continue
            self._join(batch, late, length, now)
            first = min(batch, key=lambda row: row.deadline)
            if first.deadline > now + self._cost.seconds(padded(batch)):
                break
            batch.remove(first)
            late.append(first)
            self._served[first.client] -= first.tokens
        if not batch and any(row.deadline > now for row in late):
            self._cost.doubt()
        return Taken(batch, late)

    def remove(self, owner: Any, client: str) -> int:
        """Take an owner's rows off the queue; returns how many were there."""
        found = [
            (length, entry)
            for length, lane in self._waiting.get(client, {}).items()
            for entry in lane
            if entry.row.owner is owner
        ]
        for length in {length for length, _ in found}:
            lane = self._waiting[client][length]
            lane[:] = [entry for entry in lane if entry.row.owner is not owner]
            heapq.heapify(lane)
            self._tidy(client, length)
        self.rows -= len(found)
        self.tokens -= sum(entry.row.tokens for _, entry in found)
        return len(found)

    def _has_room(self, lanes: dict[int, list[_Entry]], rows: int, tokens: int) -> bool:
        """Whether that many more rows and tokens of a client fit, into the queue or into the client's share of it."""
        most_tokens = self._limits.queue_tokens or math.inf
        if self.rows + rows <= self._limits.queue_rows and self.tokens + tokens <= most_tokens:
            return True
        clients = len(self._waiting)
        own = [entry.row.tokens for lane in lanes.values() for entry in lane]
        return (
            clients > 1
            and len(own) + rows <= self._limits.queue_rows / clients
            and sum(own) + tokens <= most_tokens / clients
        )

    def _lead(self) -> int:
        """The length of the next call: that of the most urgent row of the client that has had least."""
        firsts = {
            client: min((lane[0], length) for length, lane in lanes.items()) for client, lanes in self._waiting.items()
        }
        leader = min(firsts, key=lambda client: (self._served[client], firsts[client]))
        self._level = self._served[leader]
        return firsts[leader][1]

    def _fill(self, batch: list[Row], late: list[Row], length: int, now: float) -> None:
        """Add waiting rows of the length until the call is full."""
        windows, longest = sum(row.windows for row in batch), max((row.longest for row in batch), default=0)
        lanes = {client: lanes[length] for client, lanes in self._waiting.items() if length in lanes}
        while lanes:
            client = next(iter(lanes))
            if len(lanes) > 1:
                client = min(lanes, key=lambda client: (self._served[client], lanes[client][0]))
            lane = lanes[client]
            row = lane[0].row
            if row.deadline > now + self._cost.seconds(row.tokens):
                windows, longest = windows + row.windows, max(longest, row.longest)
                if batch and (len(batch) == self._limits.batch_rows or not self._is_call(windows * longest)):
                    break  # the first of its length: none that came later goes before it
                batch.append(row)
                self._served[client] += row.tokens
            else:
                late.append(row)
            heapq.heappop(lane)
            self.rows -= 1
            self.tokens -= row.tokens
            if not lane:
                del lanes[client]
                self._tidy(client, length)

    def _join(self, batch: list[Row], late: list[Row], length: int, now: float) -> None:
        """Add the rows of other lengths, the nearest first, where a call of their own would cost more than the padding
        that they bring: on a GPU a call of 8 short texts costs about what one of 32 does. No row of the call may be
        late by it."""
        lengths = {other for lanes in self._waiting.values() for other in lanes} - {length}
        for other in sorted(lengths, key=lambda other: max(other, length) / min(other, length)):
            if len(batch) == self._limits.batch_rows:
                break
            waiting = [entry.row for lanes in self._waiting.values() for entry in lanes.get(other, ())]
            joined = padded([*batch, *waiting])
            soonest = min(row.deadline for row in batch)
            padding = joined - padded(batch) - padded(waiting)
            if self._cost.saves_a_call(padding) and soonest > now + self._cost.seconds(joined):
                self._fill(batch, late, other, now)

    def _is_call(self, tokens: int) -> bool:
        """Whether a call may have that many tokens."""
        most = self._limits.batch_tokens
        return (most is None or tokens <= most) and self._cost.seconds(tokens, 0) <= self._limits.batch_s

    def _tidy(self, client: str, length: int) -> None:
        """Drop a lane that was emptied, and its client with its last one."""
        if not self._waiting[client][length]:
            del self._waiting[client][length]
            if not self._waiting[client]:
                del self._waiting[client]


def padded(batch: Sequence[Row]) -> int:
    """Tokens of a call, padding included."""
    return sum(row.windows for row in batch) * max((row.longest for row in batch), default=0)
