"""What the workers of a run decide once, and keep: rank 0 reads it or decides, and tells the others.

On a mounted folder the others may not see a file that was just written, and would decide apart.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rtrain.core.errors import ConfigError
from rtrain.core.run_folder import Run
from rtrain.models import precision as formats
from rtrain.parallel import collectives, gradient_noise
from rtrain.parallel.watchdog import Watch
from rtrain.trainer import load_balancing

if TYPE_CHECKING:
    import torch

PASS = "tokens_per_pass"
"""The name under which a run keeps the decision."""


def precision(watch: Watch, device: "torch.device", run: Run, wanted: str) -> str:
    """Rank 0's device decides, once; a format that some other device lacks is refused there by name."""
    native = formats.of(device)
    place = collectives.decided(watch, lambda: formats.FORMATS.index(formats.decide(run, wanted, native)))
    chosen = formats.FORMATS[place]
    if problems := formats.problems(chosen, native):
        raise ConfigError(problems)
    return chosen


def measures(watch: Watch, run: Run, tells: bool) -> tuple[int, bool]:
    """Of how many updates one has its rows dealt at random, and whether these measure the gradient's noise: where the
    layout `tells` it, and whoever made the run has decided so (`exchange.noise`)."""
    decided = collectives.decided(watch, lambda: int(run.decide("noise", 0)))
    return (decided or gradient_noise.EVERY, decided > 0) if tells else (0, False)


def threads(watch: Watch, run: Run, available: int) -> int:
    """Threads of each rank's sums: as many as it had in the first start with as many workers, since the last bits of
    LayerNorm's gradients depend on their number. Fewer where this rank has fewer cores, and the log says so.

    Args:
        available: threads that this rank's share of its machine's cores allows.
    """
    by_rank = collectives.every(available)
    name = f"threads of {len(by_rank)}"
    collectives.decided(watch, lambda: len(run.decide(name, by_rank)))
    kept: list[int] = collectives.every(run.decisions[name] if collectives.first() else [])[0]
    if collectives.first() and (short := [rank for rank, number in enumerate(kept) if by_rank[rank] < number]):
        run.append("threads", kept=kept, available=by_rank, short=short)
    return min(kept[collectives.own()], available)


def speeds(watch: Watch, run: Run, timed: Callable[[], float]) -> tuple[float, ...]:
    """How fast each worker is, by rank, beside the fastest. `timed`: seconds of a pass of this one; it is called where
    no start with as many workers has told."""
    name = f"speeds of {len(collectives.every(None))}"
    if not collectives.decided(watch, lambda: int(name in run.decisions)):
        found = load_balancing.relative(collectives.every(collectives.together(watch, watch.busy()(timed))))
        collectives.decided(watch, lambda: len(run.decide(name, found)))
        if collectives.first():
            run.append("speeds", speeds=found)
    kept: list[float] = collectives.every(run.decisions[name] if collectives.first() else [])[0]
    return tuple(kept)


def size(watch: Watch, run: Run) -> int | None:
    """Tokens of a pass as an earlier start has decided: rank 0 reads it and tells the others."""
    return collectives.decided(watch, lambda: int(run.decisions.get(PASS, 0))) or None


def smallest(watch: Watch, run: Run, fits: int | None) -> int | None:
    """Tokens of a pass that fits on every worker's GPU. Rank 0 decides, once."""
    if fits is None:
        return None
    smallest = -collectives.most(-fits)

    def keep() -> int:
        if PASS not in run.decisions:
            run.append("pass_size", tokens=smallest)
        return int(run.decide(PASS, smallest))

    return collectives.decided(watch, keep)
