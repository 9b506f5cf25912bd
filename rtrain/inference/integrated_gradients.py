"""Integrated gradients (Sundararajan et al. 2017, arXiv:1703.01365) of a function that returns values and slopes.

attribution = (x - baseline) * integral over a from 0 to 1 of the gradient at baseline + a (x - baseline)

The attributions sum to f(x) - f(baseline); the difference, the completeness error, measures the quadrature. The rule is
Clenshaw-Curtis: nearly as accurate as Gauss-Legendre (Trefethen 2008, "Is Gauss quadrature better than
Clenshaw-Curtis?"), and it reuses every point when the steps are doubled. Its points include both ends, so f(x) and
f(baseline) need no further evaluation. Captum's `IntegratedGradients` explains one output per call, so each target
costs the forward passes again, and its rules share no points when the steps double.

The line of `IntegrationPath` runs in embedding space, from padding (special tokens are kept) to the row's tokens. All
windows of a row are interpolated together, and the caller's score function pools them, so the attributions of a long
text sum to the change of its value.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rtrain.core.errors import UserError
from rtrain.core.ragged import TokenBatch

if TYPE_CHECKING:
    import torch
    import transformers


Doubles = npt.NDArray[np.float64]
INITIAL_STEPS, MAX_STEPS = 16, 256
ERROR_TOLERANCE = 0.01
"""Steps are doubled until the completeness error is at most this."""
ROUNDING_TOLERANCE = 1e-4
"""Rounding error of fp32 logits, relative to the largest value; smaller differences count as zero."""


@dataclass(frozen=True, eq=False)
class Integral:
    attributions: Doubles
    """[targets, tokens]."""
    values: Doubles
    """f(x) of each target."""
    baselines: Doubles
    """f(baseline) of each target."""
    steps: int
    """Intervals; gradients were computed at `steps` + 1 points."""

    @property
    def errors(self) -> list[float | None]:
        """|sum of attributions - (f(x) - f(baseline))| / |f(x) - f(baseline)|; None if f is equal at both."""
        changes = self.values - self.baselines
        return [
            float(gap / abs(change)) if change else None
            for gap, change in zip(_completeness_gaps(self), changes.tolist(), strict=True)
        ]


def integrate(evaluate: Callable[[Doubles], tuple[Doubles, Doubles]], steps: int | None = None) -> Integral:
    """Integrate a function along the line from the baseline to x.

    Args:
        evaluate: points [n] -> values [n, targets] and slopes [n, targets, tokens]; a token's slope is the dot product
            of its gradient and its difference from the baseline.
        steps: even number. Default: start at `INITIAL_STEPS` and double until the error of each target is at most
            `ERROR_TOLERANCE`, or `MAX_STEPS` are reached (see `errors`).

    """
    num_steps = steps or INITIAL_STEPS
    values, slopes = evaluate(quadrature_nodes(num_steps))
    while True:
        attributions = np.tensordot(quadrature_weights(num_steps), slopes, axes=1)
        integral = Integral(attributions, values[-1], values[0], num_steps)
        if steps or 2 * num_steps > MAX_STEPS or _has_converged(integral):
            return integral
        num_steps *= 2
        between_values, between_slopes = evaluate(quadrature_nodes(num_steps)[1::2])
        values, slopes = _interleave(values, between_values), _interleave(slopes, between_slopes)


def _has_converged(integral: Integral) -> bool:
    changes = np.abs(integral.values - integral.baselines)
    rounding = ROUNDING_TOLERANCE * np.maximum(np.abs(integral.values), np.abs(integral.baselines))
    return bool((_completeness_gaps(integral) <= ERROR_TOLERANCE * changes + rounding).all())


def _completeness_gaps(integral: Integral) -> Doubles:
    gaps: Doubles = np.abs(integral.attributions.sum(axis=1) - (integral.values - integral.baselines))
    return gaps


def _interleave(even: Doubles, odd: Doubles) -> Doubles:
    combined = np.empty((len(even) + len(odd), *even.shape[1:]))
    combined[::2], combined[1::2] = even, odd
    return combined


def quadrature_nodes(steps: int) -> Doubles:
    """Return the `steps` + 1 points in [0, 1], with both ends. Every second one is a point of half as many steps."""
    points: Doubles = (1 - np.cos(np.arange(steps + 1) * np.pi / steps)) / 2
    return points


def quadrature_weights(steps: int) -> Doubles:
    """Return the weights [steps + 1]. They sum to 1 and are exact for polynomials of degree `steps` (even)."""
    half = np.arange(1, steps // 2 + 1)
    factors = np.where(half == steps // 2, 1.0, 2.0) / (4.0 * half**2 - 1)
    angles: Any = 2 * np.pi * np.outer(np.arange(steps + 1), half) / steps
    node_weights: Doubles = (1 - np.cos(angles) @ factors) / steps
    node_weights[[0, -1]] /= 2
    return node_weights


MAX_BATCH_TOKENS = 1024
"""Tokens of one forward and backward pass, about 150 MB with MiniLM; a longer row is computed one point at a time."""
ScoreFunction = Callable[["torch.Tensor", TokenBatch], "torch.Tensor"]
"""Logits [windows or tokens, outputs] of rows -> [rows, targets]."""


class ExplanationCancelled(Exception):
    """The caller no longer needs the explanation."""


class IntegrationPath:
    """The line to one row. The network is not changed, so other threads may use it."""

    def __init__(
        self,
        model: tuple["transformers.PreTrainedModel", frozenset[str]],
        row: TokenBatch,
        is_special: npt.NDArray[np.bool_],
        pad_id: int,
        score: ScoreFunction,
        should_stop: Callable[[], bool] = lambda: False,
    ):
        """Args:
        model: the network, and the arguments of its forward (`Predictor.network`).
        row: one row.
        is_special: [tokens] bool; these tokens are in the baseline too.
        should_stop: called before each forward pass.
        """
        import torch

        network, accepted_arguments = model
        if "inputs_embeds" not in accepted_arguments:
            kind = type(network).__name__
            raise UserError(
                f"{kind} does not accept embeddings as input, so its predictions cannot be explained",
                code="not_explainable",
            )
        self._network, self._row, self._score, self._should_stop = network, row, score, should_stop
        embed: Any = network.get_input_embeddings()
        device = embed.weight.device
        ids = torch.from_numpy(row.ids.astype(np.int64)).to(device)
        baseline = torch.where(torch.from_numpy(is_special).to(device), ids, pad_id)
        with torch.no_grad():
            self._baseline_embeddings = embed(baseline)
            self._delta = embed(ids) - self._baseline_embeddings
        ends = np.cumsum(row.window_lengths, dtype=np.int64)
        self._windows = [
            (slice(int(end - length), int(end)), _window_inputs(int(length), int(second), accepted_arguments, device))
            for end, length, second in zip(ends, row.window_lengths, row.pair_start, strict=True)
        ]

    def __call__(self, points: Doubles) -> tuple[Doubles, Doubles]:
        """Return values [points, targets] and slopes [points, targets, tokens] (see
        `integrated_gradients.integrate`)."""
        batch_points = max(1, MAX_BATCH_TOKENS // len(self._row.ids))
        batches = [
            self._forward_backward(points[start : start + batch_points])
            for start in range(0, len(points), batch_points)
        ]
        return np.concatenate([values for values, _ in batches]), np.concatenate([slopes for _, slopes in batches])

    def _forward_backward(self, points: Doubles) -> tuple[Doubles, Doubles]:
        import torch

        if self._should_stop():
            raise ExplanationCancelled
        fractions = torch.from_numpy(points).to(self._delta)[:, None, None]
        embeddings = (self._baseline_embeddings + fractions * self._delta).requires_grad_()  # [points, tokens, hidden]
        window_logits = [self._window_logits(embeddings[:, place], inputs) for place, inputs in self._windows]
        rows = self._row.take([0] * len(points))
        # [points, tokens, outputs] or [points, windows, outputs], flattened as the score function expects.
        by_token = window_logits[0].ndim == 3
        logits = (torch.cat(window_logits, dim=1) if by_token else torch.stack(window_logits, dim=1)).flatten(0, 1)
        values = self._score(logits.cpu(), rows)
        slopes = np.empty((len(points), values.shape[1], len(self._row.ids)))
        for target in range(values.shape[1]):
            # `grad` does not accumulate into the parameters, which are shared between threads.
            (gradient,) = torch.autograd.grad(values[:, target].sum(), embeddings, retain_graph=True)
            slopes[:, target] = (gradient * self._delta).double().sum(dim=-1).cpu().numpy()
        return values.detach().double().numpy(), slopes

    def _window_logits(self, embeddings: "torch.Tensor", inputs: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        """Return the logits of one window at each point: [points, outputs] or [points, tokens, outputs]."""
        from torch.utils import checkpoint

        def forward(embeddings: "torch.Tensor") -> "torch.Tensor":
            expanded_inputs = {name: value.expand(len(embeddings), -1) for name, value in inputs.items()}
            logits: torch.Tensor = self._network(inputs_embeds=embeddings, **expanded_inputs).logits
            return logits

        if len(self._windows) == 1:
            return forward(embeddings)
        # Activation checkpointing: memory for one window's activations.
        checkpointed: torch.Tensor = checkpoint.checkpoint(
            forward, embeddings, use_reentrant=False, preserve_rng_state=False
        )
        return checkpointed


def _window_inputs(
    length: int, pair_start: int, accepted_arguments: frozenset[str], device: "torch.device"
) -> dict[str, "torch.Tensor"]:
    """Return attention mask and token types [1, length], if the network accepts them. No padding."""
    import torch

    types = (torch.arange(length) >= pair_start).long()
    candidates = {"attention_mask": torch.ones(1, length, dtype=torch.long), "token_type_ids": types[None]}
    return {name: value.to(device) for name, value in candidates.items() if name in accepted_arguments}


def find_special_tokens(
    ids: Sequence[int], spans: Sequence[tuple[int, int]], special_ids: frozenset[int]
) -> npt.NDArray[np.bool_]:
    """Return which tokens the tokenizer added [tokens]. A special token in the user's text counts as text."""
    return np.array(
        [number in special_ids and start == end for number, (start, end) in zip(ids, spans, strict=True)],
        dtype=np.bool_,
    )
