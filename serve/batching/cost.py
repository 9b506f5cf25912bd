"""What an engine call costs: seconds = a + b x padded tokens, learned from the calls as they end."""

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
    """Least squares with exponential forgetting (Ljung 1999, System Identification, 11.2), kept as moments: they do
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
