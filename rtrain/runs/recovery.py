"""What becomes of a run whose workers failed. Pure: from what happened to what is to be done."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["crash", "memory", "lost", "preemption", "refused"]
"""`memory` is a crash for want of memory; passes are half as large afterwards. `lost` is a node that is gone without
notice, with workers on it. `refused` is an error that the user can mend and that would only come again."""

OUT_OF_MEMORY = (
    "MemoryError",
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "low on memory",
    "ALLOC_FAILED",
)
"""Words by which Python, CUDA, torch's CPU allocator, Ray's memory monitor, cuBLAS and cuDNN say that memory is
short."""
FEWEST_TOKENS = 64
"""Fewest tokens of a pass. Smaller ones would save no memory: weights and optimizer take theirs all the same."""


def out_of_memory(errors: Iterable[str]) -> bool:
    return any(phrase in error for error in errors for phrase in OUT_OF_MEMORY)


_NODE = re.compile(
    r"Memory on the node \(IP: (?P<node>[^,]+), .*?was (?P<used>[\d.]+)GB used / (?P<limit>[\d.]+)GB limit"
)
_SHARE = re.compile(r"exceeded threshold of .*?\((?P<share>[\d.]+)% of")
_ENDED = re.compile(r"Selected to kill: .*?pid=(?P<pid>\d+), actual memory used=(?P<used>[\d.]+)GB")
_USER = re.compile(r"^(?P<pid>\d+)\t(?P<used>[\d.]+)\t(?P<command>.+)$", re.MULTILINE)
LARGEST = 3
"""How many processes an error names."""
COMMAND_CHARACTERS = 60


def memory_told(errors: Iterable[str]) -> str | None:
    """Who used how much memory and what to set, where Ray's memory monitor ended a worker; None where it did not.

    Its own message has all of it but the settings, in forty lines of which the last are about Ray's.
    """
    text = next((error for error in errors if _NODE.search(error)), None)
    if text is None or not (node := _NODE.search(text)):
        return None
    share = f", above {float(found['share']):.3g} %" if (found := _SHARE.search(text)) else ""
    # By process: a worker group's error has the message once and again, and idle processes are ended with a worker.
    ended = {found["pid"]: float(found["used"]) for found in _ENDED.finditer(text)}
    largest = {
        found["pid"]: f"{found['used']} GB {found['command'].strip()[:COMMAND_CHARACTERS]} ({found['pid']})"
        for found in _USER.finditer(text)
    }
    worst = max(ended, key=lambda pid: ended[pid], default=None)
    others = f" and {len(ended) - 1} more" if len(ended) > 1 else ""
    who = f"; Ray ended process {worst} with {ended[worst]:.2f} GB{others}" if worst else ""
    most = f". The largest processes there: {'; '.join(list(largest.values())[:LARGEST])}" if largest else ""
    return (
        f"node {node['node']} ran out of memory: {node['used']} of {node['limit']} GB were used{share}{who}{most}. "
        "Lower train.tokens_per_pass or data.max_tokens, take fewer train.workers on a node, or nodes with more memory"
    )


def halvings(events: Iterable[Mapping[str, Any]]) -> int:
    """How many starts of a run ran out of memory. Each halves the size of a pass, for resumes too."""
    return sum(event["kind"] == "crashed" and event["cause"] == "memory" for event in events)


def tokens_per_pass(asked: int, halvings: int) -> int:
    """Tokens of a pass after so many halvings. An update keeps its rows in more passes, and so its sum."""
    return max(min(asked, FEWEST_TOKENS), asked >> halvings)


@dataclass
class Recovery:
    """The budget of one run. Preemptions are not the run's fault and cost nothing; nor do spot nodes that are lost.

    Crashes are counted since the run last got on: a run of weeks may meet many, but a fault that comes again at the
    same update comes from the run itself.
    """

    max_crashes: int
    crashes: int = 0
    reached: int = -1
    """Update of the newest checkpoint at the last crash."""
    error: str | None = None
    """Error of the last crash, where it was of the program itself."""

    def retry(self, kind: Kind, update: int, spot: bool = False, error: str | None = None) -> bool:
        """Whether to start again from the newest checkpoint, which is of `update`. `spot`: a node that was lost was a
        spot node. `error`: what the program itself raised, as opposed to a process that died or a disk that failed; the
        same one at the same update would come each time."""
        if kind == "refused":
            return False
        if kind == "preemption" or (kind == "lost" and spot):
            return True
        if error is not None and error == self.error and update <= self.reached:
            return False
        self.error = error
        self.crashes = 1 if update > self.reached else self.crashes + 1
        self.reached = max(self.reached, update)
        return self.crashes <= self.max_crashes


def workers_for(most: int, least: int | None, room: int) -> int:
    """Workers of the next start where there is room for `room`; 0: wait for more.

    Without `least` the number is fixed, and Ray waits for the room by itself.
    """
    if least is None:
        return most
    fitting = min(most, room)
    return fitting if fitting >= least else 0


def most_after(placed: bool, workers: int, least: int | None, most: int) -> int:
    """The most workers of the next start: `most`, but one fewer than the last start had if that could not be placed:
    what seemed free is in pieces or was taken meanwhile, and the same number would only time out again."""
    return most if placed or least is None else max(least, workers - 1)


@dataclass
class Growth:
    """When a run may be started again with more workers: when there has been room for more for `after_s` seconds.

    Nodes that come and go would only cost restarts, so the cluster must have had that much in every look; and at some
    look that much must have been free, or the run would be restarted into CPUs that others hold. Not at every look: its
    own data tasks take CPUs for moments.
    """

    after_s: float
    since: float | None = None
    free: int = 0

    def look(self, now: float, workers: int, had: int, free: int) -> bool:
        """`had`, `free`: workers that the cluster would allow if all of it were free, and as it is."""
        if had <= workers:
            self.since, self.free = None, 0
            return False
        self.since = now if self.since is None else self.since
        self.free = max(self.free, free)
        if now - self.since < self.after_s:
            return False
        grown, self.since, self.free = self.free > workers, None, 0
        return grown
