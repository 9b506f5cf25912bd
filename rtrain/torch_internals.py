"""All uses of private names of torch, one function each.

A new version may take any of them away: `tests/unit/project/test_torch_internals.py` asks that each still exists and
means the same. Torch is not imported before a function is called.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


def ignore_ddp_parameters(module: "torch.nn.Module", names: Sequence[str]) -> None:
    """Make DistributedDataParallel ignore the parameters of these names in `module`."""
    from torch.nn.parallel import DistributedDataParallel

    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(names))


DDP_TIMING_SAMPLE_RATE = 10
"""Steps between two whose all-reduce is timed."""


def set_ddp_timing_sample_rate(model: "torch.nn.parallel.DistributedDataParallel") -> None:
    """Time every tenth all-reduce, and the first ten; torch by default times every hundredth."""
    model._set_ddp_runtime_logging_sample_rate(DDP_TIMING_SAMPLE_RATE)


def exposed_comm_seconds(model: "torch.nn.parallel.DistributedDataParallel") -> float:
    """Return the mean seconds of communication after the backward pass, over the timed all-reduces; 0 without any."""
    logging_data = model._get_ddp_logging_data()
    comm_ns, overlap_ns = (
        float(logging_data.get(f"avg_backward_{name}", 0)) for name in ("comm_time", "compute_comm_overlap_time")
    )
    return max(0.0, comm_ns - overlap_ns) / 1e9


def multiply(tensors: "Sequence[torch.Tensor]", factor: "float | torch.Tensor") -> None:
    """Multiply each tensor by `factor`, in place, in one call for all of them."""
    import torch

    torch._foreach_mul_(list(tensors), factor)


def raw_local_tensor(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return the tensor of a DTensor's local shard (`to_local` returns a view of it); any other tensor unchanged."""
    local_tensor: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local_tensor


@contextlib.contextmanager
def wrap_collective_waits(make_context: "Callable[[], contextlib.AbstractContextManager[Any]]") -> Iterator[None]:
    """Within the block, enter the context of `make_context` around each wait for a collective of sharded tensors. This
    is process-wide: no other thread may use sharded tensors meanwhile."""
    from torch.distributed import _functional_collectives as collectives

    original_wait: Callable[[torch.Tensor], torch.Tensor] = collectives.wait_tensor

    def wait_in_context(tensor: "torch.Tensor") -> Any:
        with make_context():
            return original_wait(tensor)

    collectives.wait_tensor = wait_in_context
    try:
        yield
    finally:
        collectives.wait_tensor = original_wait


def silence_redistribution_warnings() -> None:
    """Suppress torch's warning, on every rank, about gathering a tensor that is sharded in two dimensions one dimension
    after the other: it is rare, and for a checkpoint."""
    import logging

    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def make_strided_shard(dim: int, split_factor: int) -> Any:
    """Make the placement of a tensor whose axis `dim` consists of several parts, each sharded over the workers; torch's
    `Shard` gives a worker one contiguous shard of the axis."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def is_strided_shard(placement: Any) -> bool:
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, _StridedShard)


def softmax_backward(gradient: "torch.Tensor", output: "torch.Tensor") -> "torch.Tensor":
    """Return the gradient of a softmax's input over the last axis, from that of its `output`, in one pass over both."""
    import torch

    input_gradient: torch.Tensor = torch._softmax_backward_data(gradient, output, -1, output.dtype)
    return input_gradient


Qkv = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]
"""Queries, keys and values [tokens, heads, dim] of concatenated windows; or their gradients."""
SequenceBounds = tuple["torch.Tensor", "torch.Tensor", int, int]
"""Windows of a flash-attention call: cumulative lengths of queries and of keys, both int32 [windows + 1] from 0; then
the largest numbers of queries and of keys of a window."""


class FlashOptions(NamedTuple):
    scale: float
    dropout: float = 0.0
    """The rate at which attention weights are dropped, by the GPU's own generator."""
    window: int | None = None
    """Tokens that a token attends to on either side; None for all."""


def flash_forward(qkv: Qkv, bounds: SequenceBounds, options: FlashOptions) -> "tuple[torch.Tensor, ...]":
    """GPU flash attention over concatenated windows (Dao 2023, arXiv:2307.08691).
    `torch.nn.attention.varlen.varlen_attn` calls the same kernel, without dropout.

    Returns:
        The outputs [queries, heads, dim], the log-sum-exp values [heads, queries] in fp32, and two tensors from which
        `flash_backward` reproduces the dropout mask.
    """
    import torch

    window = options.window
    outputs: tuple[torch.Tensor, ...] = torch.ops.aten._flash_attention_forward(
        *(*qkv, *bounds, options.dropout, False, False),
        scale=options.scale,
        window_size_left=window,
        window_size_right=window,
    )
    return outputs[:4]


def flash_backward(
    gradient: "torch.Tensor", qkv: Qkv, outputs: "Sequence[torch.Tensor]", bounds: SequenceBounds, options: FlashOptions
) -> Qkv:
    """Compute the gradients of queries, keys and values, from the `outputs` of `flash_forward`.

    The weight of a key is exp(score - log_sum). So a query may also have read keys of another call, if outputs and
    log-sum-exp values include all of its keys. A log-sum-exp of infinity leaves a query out, as the kernel itself does
    for a query without keys.
    """
    import torch

    window = options.window
    output, log_sums, *state = outputs
    gradients: Qkv = torch.ops.aten._flash_attention_backward(
        *(gradient, *qkv, output, log_sums, *bounds, options.dropout, False, *state),
        scale=options.scale,
        window_size_left=window,
        window_size_right=window,
    )
    return gradients


def fake_tensor_mode() -> "contextlib.AbstractContextManager[Any]":
    """A context for fake tensors, with shape, type and device but no data: they take no memory, and computations with
    them no time."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_tensor_errors() -> tuple[type[Exception], ...]:
    """Errors of computations that depend on the data of fake tensors, or that these do not support."""
    from torch._subclasses import fake_tensor

    return (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException,
        fake_tensor.UnsupportedOperatorException,
    )


def measure_peak_bytes(network: "torch.nn.Module", run: Callable[[], None]) -> dict[str, int]:
    """Return the peak bytes of all tensors of `network` and of `run`: `Parameter`, `Buffer`, `Gradient`, `Activation`,
    `Temp` (temporary tensors of the backward pass) and `Total`. Tensors on the meta device count 0.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    class PeakTracker(MemTracker):
        """It keeps no peak of each module, which takes most of the time, and bears weights that are not trained."""

        def _track_module_params_and_buffers(
            self, module: "torch.nn.Module", install_grad_hooks: bool = True
        ) -> tuple[int, int]:
            is_trainable = all(parameter.requires_grad for parameter in module.parameters())
            return super()._track_module_params_and_buffers(module, install_grad_hooks and is_trainable)

        def _update_peak_stats(self, peak_state: Any) -> None:
            for device, snapshot in self._curr_mem_snap.items():
                if self._peak_mem.get(device, 0) < snapshot["Total"]:
                    self._peak_mem[device], self._peak_mem_snap[device] = snapshot["Total"], dict(snapshot)

    tracker = PeakTracker()
    tracker.track_external(network)
    with warnings.catch_warnings(), tracker:
        # DistilBERT's head makes a module in its forward pass, which is gone in the backward one. Its bytes count.
        warnings.filterwarnings("ignore", "Module is None", UserWarning)
        run()
    bytes_by_kind: dict[str, int] = {}
    for device, sizes in tracker.get_tracker_snapshot("peak").items():
        for kind, size in sizes.items() if device.type != "meta" else ():
            name = str(getattr(kind, "value", kind))
            bytes_by_kind[name] = bytes_by_kind.get(name, 0) + size
    return bytes_by_kind
