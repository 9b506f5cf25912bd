"""What the workers of a run decide once, and keep: rank 0 reads it or decides, and tells the others.

On a mounted folder the others may not see a file that was just written, and would decide apart.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rtrain.errors import ConfigError
from rtrain.exchange import noise, ranks
from rtrain.exchange.alive import Watch
from rtrain.network import precision as formats
from rtrain.run import Run
from rtrain.training import balance

if TYPE_CHECKING:
    import torch

PASS = "tokens_per_pass"
"""The name under which a run keeps the decision."""


def precision(watch: Watch, device: "torch.device", run: Run, wanted: str) -> str:
    """Rank 0's device decides, once; a format that some other device lacks is refused there by name."""
    native = formats.of(device)
    place = ranks.decided(watch, lambda: formats.FORMATS.index(formats.decide(run, wanted, native)))
    chosen = formats.FORMATS[place]
    if problems := formats.problems(chosen, native):
        raise ConfigError(problems)
    return chosen


def measures(watch: Watch, run: Run, told: bool) -> int:
    """By which rule the noise of gradients is measured (`exchange.noise`), where the layout has it `told`; 0: by none.
    The rows of those updates are dealt otherwise. A run goes on with the same sums, bit for bit, as the version that
    began it: the first measured nothing, the second dealt by rule 1, in every layout."""
    rule = ranks.decided(watch, lambda: int(run.decide("noise", noise.RULE * int(run.first("started") is None))))
    return rule if told or rule == 1 else 0


def threads(watch: Watch, run: Run, available: int) -> int:
    """Threads of each rank's sums: as many as it had in the first start with as many workers, since the last bits of
    LayerNorm's gradients depend on their number. Fewer where this rank has fewer cores, and the log says so.

    Args:
        available: threads that this rank's share of its machine's cores allows.
    """
    by_rank = ranks.every(available)
    name = f"threads of {len(by_rank)}"
    ranks.decided(watch, lambda: len(run.decide(name, by_rank)))
    kept: list[int] = ranks.every(run.decisions[name] if ranks.first() else [])[0]
    if ranks.first() and (short := [rank for rank, number in enumerate(kept) if by_rank[rank] < number]):
        run.append("threads", kept=kept, available=by_rank, short=short)
    return min(kept[ranks.own()], available)


def speeds(watch: Watch, run: Run, timed: Callable[[], float]) -> tuple[float, ...]:
    """How fast each worker is, by rank, beside the fastest. `timed`: seconds of a pass of this one; it is called where
    no start with as many workers has told."""
    name = f"speeds of {len(ranks.every(None))}"
    if not ranks.decided(watch, lambda: int(name in run.decisions)):
        found = balance.relative(ranks.every(ranks.together(watch, watch.busy()(timed))))
        ranks.decided(watch, lambda: len(run.decide(name, found)))
        if ranks.first():
            run.append("speeds", speeds=found)
    kept: list[float] = ranks.every(run.decisions[name] if ranks.first() else [])[0]
    return tuple(kept)


def size(watch: Watch, run: Run) -> int | None:
    """Tokens of a pass as an earlier start has decided: rank 0 reads it and tells the others."""
    return ranks.decided(watch, lambda: int(run.decisions.get(PASS, 0))) or None


def smallest(watch: Watch, run: Run, fits: int | None) -> int | None:
    """Tokens of a pass that fits on every worker's GPU. Rank 0 decides, once."""
    if fits is None:
        return None
    smallest = -ranks.most(-fits)

    def keep() -> int:
        if PASS not in run.decisions:
            run.append("pass_size", tokens=smallest)
        return int(run.decide(PASS, smallest))

    return ranks.decided(watch, keep)
