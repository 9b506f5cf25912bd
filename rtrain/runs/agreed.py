"""What the workers of a start agree on, once for a run: rank 0 decides, and all follow."""

from typing import TYPE_CHECKING

from rtrain.errors import ConfigError
from rtrain.exchange import ranks
from rtrain.exchange.alive import Watch
from rtrain.network import precision as formats
from rtrain.run import Run

if TYPE_CHECKING:
    import torch

PASS = "tokens_per_pass"
"""The name under which a run keeps the decision."""


def precision(watch: Watch, device: "torch.device", run: Run, wanted: str) -> str:
    """Rank 0's device decides, once; a format that some other device lacks is refused there by name.

    Rank 0 alone reads what was decided before, and tells the others: on a mounted folder they may not see a file that
    was just written, and would decide apart.
    """
    native = formats.of(device)
    place = ranks.decided(watch, lambda: formats.FORMATS.index(formats.decide(run, wanted, native)))
    chosen = formats.FORMATS[place]
    if problems := formats.problems(chosen, native):
        raise ConfigError(problems)
    return chosen


def measures(watch: Watch, run: Run) -> bool:
    """Whether the noise of gradients is measured: always, but in a run that an earlier version began, whose rows were
    dealt otherwise. It goes on with the same sums, bit for bit."""
    return bool(ranks.decided(watch, lambda: int(run.decide("noise", int(run.first("started") is None)))))


def known_pass(watch: Watch, run: Run) -> int | None:
    """Tokens of a pass as an earlier start has decided: rank 0 reads it and tells the others."""
    return ranks.decided(watch, lambda: int(run.decisions.get(PASS, 0))) or None


def smallest_pass(watch: Watch, run: Run, fits: int | None) -> int | None:
    """Tokens of a pass that fits on every worker's GPU. Rank 0 decides, once."""
    if fits is None:
        return None
    smallest = -ranks.most(-fits)

    def keep() -> int:
        if PASS not in run.decisions:
            run.append("pass_size", tokens=smallest)
        return int(run.decide(PASS, smallest))

    return ranks.decided(watch, keep)
