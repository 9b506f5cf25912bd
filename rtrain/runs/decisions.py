"""Decisions that are made once for a run: rank 0 reads or makes them and broadcasts them.

Other ranks may not see a file that was just written to a mounted folder, so they do not read it.

"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rtrain.core.errors import ConfigError
from rtrain.core.run_folder import Run
from rtrain.models import precision as formats
from rtrain.parallel import collectives, gradient_noise
from rtrain.parallel.watchdog import Watchdog
from rtrain.trainer import load_balancing

if TYPE_CHECKING:
    import torch

MICRO_BATCH_TOKENS_KEY = "max_tokens_per_micro_batch"
"""Key of the decision in decisions.json."""


def decide_precision(watchdog: Watchdog, device: "torch.device", run: Run, requested: str) -> str:
    """Decide the precision by rank 0's device, once. Raises `ConfigError` on a rank whose device lacks the format."""
    native_formats = formats.device_formats(device)
    index = collectives.decide_on_rank_zero(
        watchdog, lambda: formats.FORMATS.index(formats.decide_precision(run, requested, native_formats))
    )
    selected = formats.FORMATS[index]
    if problems := formats.check_precision(selected, native_formats):
        raise ConfigError(problems)
    return selected


def decide_noise_measurement(watchdog: Watchdog, run: Run, supports_noise_scale: bool) -> tuple[int, bool]:
    """Return (every how many steps the rows are assigned at random, whether these steps measure the gradient noise).

    Noise is measured if the strategy supports it (`supports_noise_scale`) and the run was created for it
    (`rtrain.parallel.gradient_noise`).
    """
    interval = collectives.decide_on_rank_zero(watchdog, lambda: int(run.decide_once("noise", 0)))
    return (interval or gradient_noise.DEFAULT_INTERVAL, interval > 0) if supports_noise_scale else (0, False)


def decide_threads(watchdog: Watchdog, run: Run, available: int) -> int:
    """Return this rank's number of threads: the same as in the first attempt with as many workers.

    The last bits of LayerNorm's gradients depend on it. A rank with fewer cores gets fewer threads; a `threads` event
    reports that.

    Args:
        available: threads that this rank's share of its node's cores allows.

    """
    available_by_rank = collectives.all_gather_object(available)
    key = f"threads_by_rank_{len(available_by_rank)}"
    collectives.decide_on_rank_zero(watchdog, lambda: len(run.decide_once(key, available_by_rank)))
    threads_by_rank: list[int] = collectives.all_gather_object(
        run.decisions[key] if collectives.is_rank_zero() else []
    )[0]
    if collectives.is_rank_zero() and (
        short_ranks := [rank for rank, number in enumerate(threads_by_rank) if available_by_rank[rank] < number]
    ):
        run.append_event(
            "threads", threads_by_rank=threads_by_rank, available=available_by_rank, short_ranks=short_ranks
        )
    return min(threads_by_rank[collectives.rank()], available)


def decide_speeds(watchdog: Watchdog, run: Run, measure_seconds: Callable[[], float]) -> tuple[float, ...]:
    """Return the speed of each rank relative to the fastest.

    Args:
        measure_seconds: measures seconds of a micro-batch on this rank; called only if no attempt with as many workers
            has measured it.
    """
    key = f"speeds_{len(collectives.all_gather_object(None))}"
    if not collectives.decide_on_rank_zero(watchdog, lambda: int(key in run.decisions)):
        relative_speeds = load_balancing.relative_speeds(
            collectives.all_gather_object(
                collectives.run_on_all_ranks(watchdog, watchdog.extended_timeout()(measure_seconds))
            )
        )
        collectives.decide_on_rank_zero(watchdog, lambda: len(run.decide_once(key, relative_speeds)))
        if collectives.is_rank_zero():
            run.append_event("speeds", speeds=relative_speeds)
    speeds: list[float] = collectives.all_gather_object(run.decisions[key] if collectives.is_rank_zero() else [])[0]
    return tuple(speeds)


def load_micro_batch_tokens(watchdog: Watchdog, run: Run) -> int | None:
    """Return the tokens of a micro-batch that an earlier attempt has decided. Collective."""
    return collectives.decide_on_rank_zero(watchdog, lambda: int(run.decisions.get(MICRO_BATCH_TOKENS_KEY, 0))) or None


def decide_micro_batch_tokens(watchdog: Watchdog, run: Run, fitting_tokens: int | None) -> int | None:
    """Decide the tokens of a micro-batch that fits on every worker's GPU, once. Collective."""
    if fitting_tokens is None:
        return None
    min_tokens = -collectives.all_reduce_max(-fitting_tokens)

    def record_decision() -> int:
        if MICRO_BATCH_TOKENS_KEY not in run.decisions:
            run.append_event("micro_batch_size_decided", tokens=min_tokens)
        return int(run.decide_once(MICRO_BATCH_TOKENS_KEY, min_tokens))

    return collectives.decide_on_rank_zero(watchdog, record_decision)
