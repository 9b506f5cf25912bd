"""One step: micro-batches, globally normalized loss, all-reduce, clipping, finite check, optimizer. It needs torch and
a `Strategy`; it knows no run, store or Ray."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rtrain.core.errors import UserError
from rtrain.core.ragged import Ints, TokenBatch, pad_batch, single_window_batch
from rtrain.models import network_parts, unpadded
from rtrain.models.device import to_device
from rtrain.models.network_parts import LAYOUT, accepted_inputs, logits_of
from rtrain.parallel import dtensor_utils, gradient_noise, profiler
from rtrain.parallel.gradient_noise import NoiseMeasurement

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from rtrain.parallel.base import Strategy


AUTOCAST_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
"""Precisions with autocast; weights, gradients and moments are fp32."""
NUM_STEP_COUNTERS = 4
"""Counters of a step before those of the targets."""
MAX_TOTAL_ERROR = 1e-9
"""Largest relative difference between the planned and the summed weight of a step's targets. Counts are below its
inverse, so that they must be equal."""
NON_FINITE_FIX = "lower optim.lr, set train.precision=fp32, or set optim.max_grad_norm"


class Loss(Protocol):
    """Loss with one or more parts (one per head of the model), each a sum over its own targets."""

    num_parts: int

    def count_targets(self, tokens: TokenBatch) -> Sequence[float]:
        """Number of targets of each part, or their total weight."""
        ...

    def logit_positions(self, tokens: TokenBatch) -> Ints | None:
        """Positions of the tokens whose logits it needs; None for all, or if windows are classified."""
        ...

    def __call__(self, logits: "torch.Tensor", tokens: TokenBatch) -> "torch.Tensor":
        """Sum over the targets of each part, [parts]."""
        ...


class Observer:
    """Hooks of a step. This base class does nothing."""

    def stop_requested(self) -> bool:
        """Whether to stop after this step. All workers learn of it by `StepResult.stop_requested`."""
        return False

    def on_gradient(self, strategy: "Strategy") -> None:
        """Called on every worker with the complete gradient, before clipping."""


class NonFinite(UserError):
    """The gradient is NaN or infinite: training cannot continue."""

    code = "not_finite"


class WrongRows(RuntimeError):
    """The workers together hold other rows than the step's: a bug, or a wrong store. Such rows are never trained on."""


@dataclass(frozen=True)
class StepResult:
    """Result of a step on this worker; `loss` is the step's mean over all workers."""

    loss: float
    gradient_norm: float
    rows: int
    micro_batches: int
    real_tokens: int
    padded_tokens: int
    stop_requested: bool = False
    """Some worker has seen a stop request; all workers know it after the same step."""
    is_skipped: bool = False
    """The gradient was infinite with this loss scale, on every worker; the weights are unchanged."""
    noise_measurement: NoiseMeasurement | None = None
    """Measurement of the gradient noise, in a measuring step."""


def sum_row_ids(row_ids: "npt.NDArray[np.uint64]") -> int:
    """Sum of row ids modulo 2^64, as a signed number. Ids are uniform hashes, so other rows have another sum."""
    return int(row_ids.sum(dtype="uint64").astype("int64"))


def forward(
    model: "torch.nn.Module", tokens: TokenBatch, pad_id: int, precision: str, logit_positions: Ints | None = None
) -> "torch.Tensor":
    """Compute logits: [windows, outputs] of rows without padding, or [tokens, outputs] for token-level models; all of
    them, or those at the indices `logit_positions` into `tokens.ids`. Packed models compute no padding."""
    import torch

    device = dtensor_utils.module_device(model)
    network: Any = getattr(model, "module", model)
    inputs: dict[str, Any]
    if unpadded.is_packed(network):
        inputs, token_indices = unpadded.make_inputs(network, tokens, device)
    else:
        arrays = pad_batch(tokens, pad_id)
        inputs = {name: to_device(value, device) for name, value in arrays.items()}
        token_indices = np.flatnonzero(arrays["attention_mask"])
    accepted_names = accepted_inputs(network) | {LAYOUT}
    inputs = {name: value for name, value in inputs.items() if name in accepted_names}
    positions = to_device(token_indices if logit_positions is None else token_indices[logit_positions], device)
    autocast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if precision in AUTOCAST_DTYPES:
        autocast = torch.autocast(device.type, dtype=getattr(torch, AUTOCAST_DTYPES[precision]))
    with (
        autocast,
        contextlib.nullcontext() if logit_positions is None else _select_positions(network.base_model, positions),
    ):
        logits = logits_of(model(**inputs))
    if logits.dim() == 2:
        return logits
    if logit_positions is None:
        return logits.flatten(0, 1)[positions]
    if logits.shape[:2] != (1, len(positions)):
        class_name = type(network).__name__
        message = f"model.name: {class_name} has a language-model head that reads more than its encoder's last answers"
        raise UserError(message, code="unsupported")
    return logits.squeeze(0)  # a view: the gradient of an index would copy a full vocabulary for each token


@contextlib.contextmanager
def _select_positions(encoder: "torch.nn.Module", positions: "torch.Tensor") -> Iterator[None]:
    """Select the tokens at `positions` from the encoder's last hidden states [windows, longest window, hidden] inside
    the block, as [1, positions, hidden]: the head treats them as the tokens of one window."""

    def select(module: "torch.nn.Module", inputs: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[positions][None]
        return output

    hook = encoder.register_forward_hook(select)
    try:
        yield
    finally:
        hook.remove()


@dataclass(eq=False)
class StepRunner:
    """Trains a step from its micro-batches. The strategy decides when each is computed, and calls this object's
    methods for it (`base.MicroBatchRunnerProtocol`)."""

    strategy: "Strategy"
    optimizer: "torch.optim.Optimizer"
    loss: Loss
    _: KW_ONLY
    pad_id: int
    precision: str = "fp32"
    max_grad_norm: float | None = None
    observer: Observer = field(default_factory=Observer)

    def __post_init__(self) -> None:
        self.idle_tokens = idle_micro_batch(self.pad_id)

    def run_step(
        self,
        micro_batches: Sequence[TokenBatch],
        *,
        scale: float | None = None,
        expected_row_sum: int | None = None,
        expected_targets: Sequence[float] | None = None,
        measure_noise: bool = False,
    ) -> StepResult:
        """Train one step. Every worker takes part in the same collectives, even without rows: the others would wait
        forever.

        loss = sum over the step's targets / their count, over all micro-batches and workers; the sum over several
        parts. Weighted targets have a weighted sum, divided by their total weight. DistributedDataParallel averages
        over workers, so each worker's sum is multiplied by their number: mean_w(world * sum_w / count) = sum / count. A
        part without a target in the step adds nothing.

        Args:
            scale: A power of two. It multiplies the loss and divides the gradient. If the gradient is infinite the
                step is skipped (`StepResult.is_skipped`), on all workers alike.
            expected_row_sum: The `sum_row_ids` of all workers' rows. It is checked before the optimizer's step, so
                other rows are never trained on.
            expected_targets: Target counts of the parts over all rows of the step, if planned. Otherwise the workers
                sum them before the first micro-batch, by one more all-reduce.
            measure_noise: Measure the gradient noise (`StepResult.noise_measurement`); the step's rows must be in
                random order.

        Raises:
            WrongRows: The workers hold other rows.
            NonFinite: The gradient is not finite, without a scale.
        """
        import torch

        strategy, num_parts = self.strategy, self.loss.num_parts
        counts = self._count_targets(micro_batches)
        counters, totals = self._make_counters(micro_batches, counts), expected_targets
        if totals is None:
            counters = strategy.sum_over_replicas(counters)
            _check_rows(counters, expected_row_sum)
            totals = counters[NUM_STEP_COUNTERS:].tolist()
        target_weights = counters.new_tensor([1.0 / total if total else 0.0 for total in totals])
        gradient_factor = strategy.num_replicas * (scale or 1.0)

        self._start_sums(gradient_factor * target_weights)
        strategy.run_micro_batches(micro_batches, self, measure_noise)

        noise_terms = [0.0, 0.0]
        if measure_noise and (sq_norm := strategy.local_sq_norm()) is not None and micro_batches:
            # A single replica uses the square of its first micro-batch.
            counts = counts if strategy.num_replicas > 1 else self.loss.count_targets(micro_batches[0])
            noise_terms = _noise_terms(sq_norm / gradient_factor**2, counts, totals, strategy.num_replicas)
        parts = [
            self.loss_sums,
            counters.new_tensor(noise_terms),
            *([counters] if expected_targets is not None else []),
        ]
        sums = strategy.sum_over_replicas(torch.cat(parts))
        if expected_targets is not None:
            counters = sums[num_parts + len(noise_terms) :]
            _check_rows(counters, expected_row_sum, expected_targets)

        with strategy.timeline.span(profiler.OPTIMIZER):
            if scale is not None:
                strategy.scale_gradients(1.0 / scale)
            self.observer.on_gradient(strategy)
            norm = strategy.gradient_norm()
            is_finite = bool(torch.isfinite(norm))
            if not is_finite and scale is None:
                raise NonFinite(f"the gradient is not finite: {NON_FINITE_FIX}")
            if is_finite:
                if self.max_grad_norm is not None:  # as torch.nn.utils.clip_grads_with_norm_
                    strategy.scale_gradients(torch.clamp(self.max_grad_norm / (norm + 1e-6), max=1.0))
                self.optimizer.step()

        noise_measurement = None
        if measure_noise and is_finite:
            sq_norm_sum, number = sums[num_parts:][: len(noise_terms)].tolist()
            total_sq_norm, num_rows = float(norm) ** 2, int(counters[0])
            noise_measurement = (
                gradient_noise.measure_between_replicas(sq_norm_sum, int(number), total_sq_norm, num_rows)
                if strategy.num_replicas > 1
                else gradient_noise.measure_within_replica(sq_norm_sum, number, total_sq_norm, num_rows)
            )
        return StepResult(
            loss=float((sums[:num_parts] * target_weights).sum()),
            gradient_norm=float(norm),
            rows=sum(len(tokens) for tokens in micro_batches),
            micro_batches=len(micro_batches),
            real_tokens=sum(int(tokens.window_lengths.sum()) for tokens in micro_batches),
            padded_tokens=sum(
                unpadded.count_computed_tokens(strategy.module, tokens.window_lengths) for tokens in micro_batches
            ),
            stop_requested=float(counters[3]) > 0,
            is_skipped=not is_finite,
            noise_measurement=noise_measurement,
        )

    def warm_up(self) -> None:
        """Warm up before the first step of every attempt; see `Strategy.warm_up`."""
        import torch

        device = dtensor_utils.module_device(self.strategy.module)
        self._start_sums(torch.zeros(self.loss.num_parts, dtype=torch.float64, device=device))
        self.strategy.warm_up(self)

    def _count_targets(self, micro_batches: Sequence[TokenBatch]) -> Sequence[float]:
        """Number of targets, or their total weight, of each part on this worker."""
        counts = [self.loss.count_targets(tokens) for tokens in micro_batches]
        return [sum(part) for part in zip([0] * self.loss.num_parts, *counts, strict=True)]

    def _make_counters(self, micro_batches: Sequence[TokenBatch], counts: Sequence[float]) -> "torch.Tensor":
        """This worker's addends to the counters of a step: rows, the two halves of the sum of their ids, stop requests,
        and targets of each part; see `_check_rows`."""
        import torch

        row_sum = sum(sum_row_ids(tokens.row_ids) for tokens in micro_batches) % (1 << 64)
        num_rows = sum(len(tokens) for tokens in micro_batches)
        stop_requests = self.strategy.replica_max(int(self.observer.stop_requested()))
        counters = [num_rows, row_sum >> 32, row_sum % (1 << 32), stop_requests, *counts]
        # Exact, but for weights: each is less than 2^53.
        return torch.tensor(counters, dtype=torch.float64, device=dtensor_utils.module_device(self.strategy.module))

    # ------------------------------------------------------------------------------------------- micro-batches

    def _start_sums(self, factors: "torch.Tensor") -> None:
        """Start a step. `factors` [parts]: the factor of each part of the loss in the gradient."""
        import torch

        self._factors, self.loss_sums = factors, torch.zeros_like(factors)
        """`loss_sums` [parts]: the sums of the losses so far."""

    def compute_logits(self, model: "torch.nn.Module", tokens: TokenBatch) -> "torch.Tensor":
        positions = None if tokens is self.idle_tokens else self.loss.logit_positions(tokens)
        return forward(model, tokens, self.pad_id, self.precision, positions)

    def compute_loss(self, logits: "torch.Tensor", tokens: TokenBatch) -> "torch.Tensor":
        if tokens is self.idle_tokens:
            auxiliary = network_parts.auxiliary_parameters(self.strategy.module)
            return sum((part.float().sum() for part in auxiliary), logits.float().sum()) * 0.0
        value = self.loss(logits, tokens)
        self.loss_sums += value.detach().double()
        return (value * self._factors.to(value.dtype)).sum()


def _noise_terms(sq_norm: float, counts: Sequence[float], totals: Sequence[float], num_replicas: int) -> list[float]:
    """A replica's addends to the two sums of the noise measurement, for `gradient_noise.measure_between_replicas`, or
    for `measure_within_replica` with a single replica. `counts` of the step's `totals` targets are its own, by part."""
    shares = [part / total for part, total in zip(counts, totals, strict=True) if total]
    target_share = sum(shares) / len(shares) if shares else 0.0
    if num_replicas == 1:
        return [sq_norm, target_share]
    return [sq_norm / target_share, 1.0] if target_share else [0.0, 0.0]


def _check_rows(
    counters: "torch.Tensor", expected_row_sum: int | None, expected_targets: Sequence[float] | None = None
) -> None:
    """Refuse rows other than the step's, or rows with other target counts than planned."""
    *step_counters, totals = *counters[:NUM_STEP_COUNTERS].tolist(), counters[NUM_STEP_COUNTERS:].tolist()
    count, high, low, _ = map(int, step_counters)
    row_sum = ((high << 32) + low + (1 << 63)) % (1 << 64) - (1 << 63)
    if expected_row_sum is None:
        return
    if row_sum != expected_row_sum:
        raise WrongRows(
            f"the workers' {count} rows are not the step's: their ids sum to {row_sum}, not to {expected_row_sum}"
        )
    # Sums of weights differ in their last digits with the order of the rows.
    if expected_targets is not None and not np.allclose(totals, list(expected_targets), rtol=MAX_TOTAL_ERROR, atol=0):
        raise WrongRows(
            f"the workers' {count} rows have {totals} targets, and the step's plan has {list(expected_targets)}"
        )


def idle_micro_batch(pad_id: int) -> TokenBatch:
    """One padding token without a row."""
    zeros = np.zeros(1, dtype=np.int32)
    return single_window_batch(zeros + pad_id, zeros + 1, zeros + 1, zeros, zeros.astype(np.uint64))
