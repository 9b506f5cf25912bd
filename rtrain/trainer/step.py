"""ONE update: passes, global-count loss, exchange, clip, finite check, optimizer. Needs torch alone."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rtrain.core.errors import UserError
from rtrain.core.ragged import Ints, Tokens, padded, single
from rtrain.models import auxiliary_params, unpadded
from rtrain.models.device import moved
from rtrain.models.forward import LAYOUT, accepted, logits_of
from rtrain.parallel import dtensor_utils, gradient_noise
from rtrain.parallel.gradient_noise import Measured
from rtrain.trainer import step_timing

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from rtrain.parallel.base import Exchange


HALF = {"bf16": "bfloat16", "fp16": "float16"}
"""Precisions in which passes compute by torch's autocast; weights, gradients and moments are fp32."""


class Loss(Protocol):
    """One or more parts (one per head of the model), each a sum over its own targets."""

    parts: int

    def counts(self, tokens: Tokens) -> Sequence[int]:
        """Number of targets of each part."""
        ...

    def wanted(self, tokens: Tokens) -> Ints | None:
        """Places of the tokens whose logits it is called with; None for all, or where windows are answered."""
        ...

    def __call__(self, logits: "torch.Tensor", tokens: Tokens) -> "torch.Tensor":
        """Sum over the targets of each part, [parts]."""
        ...


class Observer:
    """Looks on at an update. This one sees nothing and says nothing."""

    def notice(self) -> bool:
        """Whether something is to be done after this update. Every worker learns by `Done.notice` if any says so."""
        return False

    def gradient(self, exchange: "Exchange") -> None:
        """The gradient is complete, and not clipped yet. Called on every worker."""


class NonFinite(UserError):
    """The gradient is not a number: training cannot go on from here."""

    code = "not_finite"


class WrongRows(RuntimeError):
    """The workers together hold other rows than the update's: a bug, or a mixed-up store, never to be trained on."""


@dataclass(frozen=True)
class Done:
    """What an update did on this worker; `loss` is the update's mean over all workers."""

    loss: float
    gradient_norm: float
    rows: int
    passes: int
    real_tokens: int
    padded_tokens: int
    notice: bool = False
    """Some worker gave notice: every worker knows it after the same update."""
    skipped: bool = False
    """The gradient was infinite at this loss scale, on every worker: the weights are as they were."""
    noise: Measured | None = None
    """What a measuring update tells of the gradient's noise."""


class RunUpdate(Protocol):
    """What is called as `run_update` is: by itself, or with a mistake that was planted."""

    def __call__(
        self,
        exchange: Any,
        optimizer: "torch.optim.Optimizer",
        loss: Loss,
        passes: Sequence[Tokens],
        /,
        *,
        pad_id: int,
        precision: str = "fp32",
        scale: float | None = None,
        clip_norm: float | None = None,
        rows: int | None = None,
        observer: Observer | None = None,
        measures: bool = False,
        targets: Sequence[int] | None = None,
    ) -> Done:
        """`exchange`: an `Exchange`; mistakes are of some of its classes."""
        ...


def row_sum(row_ids: "npt.NDArray[np.uint64]") -> int:
    """Sum of row ids modulo 2^64, as a signed number. Ids are uniform hashes: other rows have another sum."""
    return int(row_ids.sum(dtype="uint64").astype("int64"))


def forward(
    model: "torch.nn.Module", tokens: Tokens, pad_id: int, precision: str, wanted: Ints | None = None
) -> "torch.Tensor":
    """Logits [windows, outputs] of rows without padding, or [tokens, outputs] where the model answers each token: all
    of them, or those at the places `wanted` in `tokens.ids`. A model for which `packed` is enabled computes no padding.
    """
    import torch

    device = dtensor_utils.device(model)
    network: Any = getattr(model, "module", model)
    inputs: dict[str, Any]
    if unpadded.enabled(network):
        inputs, chosen = unpadded.inputs_of(network, tokens, device)
    else:
        arrays = padded(tokens, pad_id)
        inputs = {name: moved(value, device) for name, value in arrays.items()}
        chosen = np.flatnonzero(arrays["attention_mask"])
    takes = accepted(network) | {LAYOUT}
    inputs = {name: value for name, value in inputs.items() if name in takes}
    places = moved(chosen if wanted is None else chosen[wanted], device)
    half: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if precision in HALF:
        half = torch.autocast(device.type, dtype=getattr(torch, HALF[precision]))
    with half, contextlib.nullcontext() if wanted is None else _only(network.base_model, places):
        logits = logits_of(model(**inputs))
    if logits.dim() == 2:
        return logits
    if wanted is None:
        return logits.flatten(0, 1)[places]
    if logits.shape[:2] != (1, len(places)):
        kind = type(network).__name__
        told = f"model.name: {kind} has a language-model head that reads more than its encoder's last answers"
        raise UserError(told, code="unsupported")
    return logits.squeeze(0)  # a view: the gradient of an index is a copy, here of a whole vocabulary for each token


@contextlib.contextmanager
def _only(encoder: "torch.nn.Module", places: "torch.Tensor") -> Iterator[None]:
    """Inside, the encoder's last answers [windows, longest window, hidden] are those at `places` of all of its tokens
    [1, places, hidden]: whatever head comes after it takes these for the tokens of one window."""

    def choose(module: "torch.nn.Module", inputs: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[places][None]
        return output

    hook = encoder.register_forward_hook(choose)
    try:
        yield
    finally:
        hook.remove()


def run_update(
    exchange: "Exchange",
    optimizer: "torch.optim.Optimizer",
    loss: Loss,
    passes: Sequence[Tokens],
    *,
    pad_id: int,
    precision: str = "fp32",
    scale: float | None = None,
    clip_norm: float | None = None,
    rows: int | None = None,
    observer: Observer | None = None,
    measures: bool = False,
    targets: Sequence[int] | None = None,
) -> Done:
    """Train on one update. Every worker exchanges exactly once, also one without rows: the others would wait for ever.

    loss = sum over the update's targets / their count, over all passes and workers; of several parts, the sum of those.
    DistributedDataParallel averages over workers, so each worker's sum is multiplied by their number:
    mean_w(world * sum_w / count) = sum / count. A part without a target in the update adds nothing.

    `rows` is the `row_sum` that the rows of all workers must come to. `targets` are the counts of the parts in all rows
    of the update, where its plan tells them; else the workers add up theirs before the first pass, which is one
    exchange more. Row sums, what the observers notice and the losses are added up before the optimizer's step: other
    rows are never trained on. With a `scale`, a power of two, the loss is multiplied by it and the gradient
    divided by it again; where the gradient is infinite, nothing is trained and `Done.skipped` says so. The workers have
    added their gradients before: what is infinite on one is so on all. With `measures`, `Done.noise` is what the update
    tells of the gradient's noise; its rows must have been dealt at random.
    Raises `WrongRows`, and `NonFinite` without a scale.
    """
    import torch

    observer = observer or Observer()
    device = dtensor_utils.device(exchange.module)
    counts = [sum(part) for part in zip([0] * loss.parts, *(loss.counts(tokens) for tokens in passes), strict=True)]
    ids = sum(row_sum(tokens.row_ids) for tokens in passes) % (1 << 64)
    own = [sum(len(tokens) for tokens in passes), ids >> 32, ids % (1 << 32), exchange.agreed(int(observer.notice()))]
    facts = torch.tensor([*own, *counts], dtype=torch.float64, device=device)  # exact: less than 2^53 each
    if targets is None:
        facts = exchange.sum(facts)
        _check(facts, rows)
    totals = [int(total) for total in facts[len(own) :].tolist()] if targets is None else list(targets)
    share = torch.tensor([1.0 / total if total else 0.0 for total in totals], dtype=torch.float64, device=device)
    factor = exchange.world * (scale or 1.0)
    work = Passes(exchange.module, pad_id, precision, loss, factor * share)
    exchange.run(passes, work, measures)
    terms = torch.zeros(2, dtype=torch.float64, device=device)
    square = exchange.own_square() if measures else None
    if square is not None and passes:
        # A single replica has that of its first pass.
        part = _part_of(counts if exchange.world > 1 else loss.counts(passes[0]), totals)
        terms += terms.new_tensor(_noise_terms(square / factor**2, part, exchange.world))
    sums = exchange.sum(torch.cat([work.sums, terms, *([] if targets is None else [facts])]))
    if targets is not None:
        facts = sums[loss.parts + len(terms) :]
        _check(facts, rows, targets)
    count, notices = int(facts[0]), float(facts[3])
    with exchange.timeline.during(step_timing.OPTIMIZER):
        if scale is not None:
            exchange.multiply(1.0 / scale)
        observer.gradient(exchange)
        norm = exchange.norm()
        finite = bool(torch.isfinite(norm))
        if not finite and scale is None:
            raise NonFinite(
                "the gradient is not finite: lower optim.lr, set train.precision=fp32, or set optim.clip_norm"
            )
        if finite:
            if clip_norm is not None:  # as torch.nn.utils.clip_grads_with_norm_
                exchange.multiply(torch.clamp(clip_norm / (norm + 1e-6), max=1.0))
            optimizer.step()
    measured = None
    if measures and finite:
        square_sum, number = sums[loss.parts :][: len(terms)].tolist()
        if exchange.world > 1:
            measured = gradient_noise.between(square_sum, int(number), float(norm) ** 2, count)
        else:
            measured = gradient_noise.within(square_sum, number, float(norm) ** 2, count)
    return Done(
        loss=float((sums[: loss.parts] * share).sum()),
        gradient_norm=float(norm),
        rows=sum(len(tokens) for tokens in passes),
        passes=len(passes),
        real_tokens=sum(int(tokens.lengths.sum()) for tokens in passes),
        padded_tokens=sum(unpadded.computed(exchange.module, tokens.lengths) for tokens in passes),
        notice=notices > 0,
        skipped=not finite,
        noise=measured,
    )


def _part_of(own: Sequence[int], totals: Sequence[int]) -> float:
    """The share of an update's targets: the mean over the loss's parts, each of which is a mean over its own."""
    shares = [part / total for part, total in zip(own, totals, strict=True) if total]
    return sum(shares) / len(shares) if shares else 0.0


def _noise_terms(square: float, part: float, world: int) -> list[float]:
    """What a replica adds to the two sums by which noise is measured: for `noise.between`, or of one for `within`."""
    if world == 1:
        return [square, part]
    return [square / part, 1.0] if part else [0.0, 0.0]


def _check(facts: "torch.Tensor", rows: int | None, targets: Sequence[int] | None = None) -> None:
    """Refuse other rows than the update's, or rows with other counts of targets than its plan has."""
    count, high, low, _, *totals = (int(value) for value in facts.tolist())
    found = ((high << 32) + low + (1 << 63)) % (1 << 64) - (1 << 63)
    if rows is None:
        return
    if found != rows:
        raise WrongRows(f"the workers' {count} rows are not the update's: their ids sum to {found}, not to {rows}")
    if targets is not None and totals != list(targets):
        raise WrongRows(f"the workers' {count} rows have {totals} targets, and the update's plan {list(targets)}")


class Passes:
    """What the passes of an update compute; see `exchange.Work`."""

    def __init__(self, network: "torch.nn.Module", pad_id: int, precision: str, loss: Loss, factors: "torch.Tensor"):
        """`factors` [parts]: what each part of the loss is multiplied by."""
        import torch

        self._network, self._pad_id, self._precision, self._loss = network, pad_id, precision, loss
        self._factors, self.sums = factors, torch.zeros_like(factors)
        """`sums` [parts]: of the losses until now."""
        self.idle = idle(pad_id)

    def answer(self, model: "torch.nn.Module", tokens: Tokens) -> "torch.Tensor":
        wanted = None if tokens is self.idle else self._loss.wanted(tokens)
        return forward(model, tokens, self._pad_id, self._precision, wanted)

    def loss(self, logits: "torch.Tensor", tokens: Tokens) -> "torch.Tensor":
        if tokens is self.idle:
            nothing = sum(
                (part.float().sum() for part in auxiliary_params.parameters(self._network)), logits.float().sum()
            )
            return nothing * 0.0
        value = self._loss(logits, tokens)
        self.sums += value.detach().double()
        return (value * self._factors.to(value.dtype)).sum()


def idle(pad_id: int) -> Tokens:
    """One padding token, of no row."""
    nothing = np.zeros(1, dtype=np.int32)
    return single(nothing + pad_id, nothing + 1, nothing + 1, nothing, nothing.astype(np.uint64))


def settle(exchange: "Exchange", loss: Loss, pad_id: int, precision: str) -> None:
    """Before the first update of every start; see `Exchange.settle`."""
    import torch

    device = dtensor_utils.device(exchange.module)
    nothing = torch.zeros(loss.parts, dtype=torch.float64, device=device)
    exchange.settle(Passes(exchange.module, pad_id, precision, loss, nothing))
