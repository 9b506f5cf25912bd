"""Every private name of torch that rtrain uses, each by a function that says what it means.

A new version may take any of them away: `tests/test_torch_internals.py` asks that each still exists and means the same.
Torch is not imported before a function is called.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def leave_out(module: "torch.nn.Module", names: Sequence[str]) -> None:
    """Let DistributedDataParallel, when it is made of `module`, not exchange the parameters of these names."""
    from torch.nn.parallel import DistributedDataParallel

    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(names))


EXCHANGES_APART = 10
"""Passes with an exchange from one whose time is taken to the next."""


def take_times(model: "torch.nn.parallel.DistributedDataParallel") -> None:
    """Take the times of every tenth exchange, and of the first ten; otherwise torch takes those of every hundredth."""
    model._set_ddp_runtime_logging_sample_rate(EXCHANGES_APART)


def unhidden_seconds(model: "torch.nn.parallel.DistributedDataParallel") -> float:
    """Mean seconds for which sending gradients went on after the backward pass, by the exchanges whose times were
    taken; 0 where none was."""
    found = model._get_ddp_logging_data()
    whole, hidden = (float(found.get(f"avg_backward_{name}", 0)) for name in ("comm_time", "compute_comm_overlap_time"))
    return max(0.0, whole - hidden) / 1e9


def multiply(tensors: "Sequence[torch.Tensor]", factor: "float | torch.Tensor") -> None:
    """Multiply each tensor by `factor`, in place, in one call for all of them."""
    import torch

    torch._foreach_mul_(list(tensors), factor)


def share_of(tensor: "torch.Tensor") -> "torch.Tensor":
    """The tensor itself in which a DTensor has this worker's share, of which `to_local` gives a view; of another tensor
    that one."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


@contextlib.contextmanager
def around_waits(made: "Callable[[], contextlib.AbstractContextManager[Any]]") -> Iterator[None]:
    """Inside, a context that `made` gives stands around each wait for a collective of cut tensors. In the whole
    process: no other thread may use such tensors meanwhile."""
    from torch.distributed import _functional_collectives as collectives

    wait: Callable[[torch.Tensor], torch.Tensor] = collectives.wait_tensor

    def waited(tensor: "torch.Tensor") -> Any:
        with made():
            return wait(tensor)

    collectives.wait_tensor = waited
    try:
        yield
    finally:
        collectives.wait_tensor = wait


def hush_redistribution() -> None:
    """Leave out what torch says, on every rank, where a tensor that is cut two ways is gathered one way after the
    other: it is rare, and for a checkpoint."""
    import logging

    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def shares_of_several(dim: int, several: int) -> Any:
    """The placement of a tensor whose axis `dim` is so many parts after each other, of each of which a worker has a
    share; torch's `Shard` gives a worker one stretch of the whole axis."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=several)


def is_of_several(placement: Any) -> bool:
    """Whether a placement is one of `shares_of_several`."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, _StridedShard)


def softmax_backward(gradient: "torch.Tensor", answer: "torch.Tensor") -> "torch.Tensor":
    """Gradient of a softmax's input over the last axis, from that of its `answer`, in one pass over both."""
    import torch

    found: torch.Tensor = torch._softmax_backward_data(gradient, answer, -1, answer.dtype)
    return found


def flash_attention(
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    ends: "torch.Tensor",
    longest: int,
    *,
    scale: float,
    dropout: float = 0.0,
    reach: int | None = None,
) -> "torch.Tensor":
    """A GPU's flash attention over windows one after another (Dao 2023, arXiv:2307.08691): [tokens, heads, dim] of each
    gives the same of the answers. It is what `torch.nn.attention.varlen.varlen_attn` calls, which has no dropout.

    `ends`, int32 [windows + 1]: 0, and where each window ends; `longest`: tokens of the longest; `dropout`: the rate at
    which attention weights are dropped, by the GPU's own generator; `reach`: tokens that a token reads on either side,
    None for all.
    """
    import torch

    sides = (ends, ends, longest, longest)
    found: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, *sides, dropout, False, False, scale=scale, window_size_left=reach, window_size_right=reach
    )[0]
    return found


def fake_tensors() -> "contextlib.AbstractContextManager[Any]":
    """A context in which a tensor that is made has a shape, a type and a device, and no numbers: it takes no memory,
    and what is computed of it takes no time."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def asks_for_numbers() -> tuple[type[Exception], ...]:
    """What computations raise that depend on the numbers of fake tensors, or that these do not know."""
    from torch._subclasses import fake_tensor

    return (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException,
        fake_tensor.UnsupportedOperatorException,
    )


def peak_bytes(network: "torch.nn.Module", run: Callable[[], None]) -> dict[str, int]:
    """Bytes of all tensors of `network`, and of those that `run` makes, at the moment when they were most: of the
    `Parameter`s, `Buffer`s, `Gradient`s, `Activation`s, of what is `Temp`orary in the backward pass, and the `Total`.
    What is on the meta device takes none.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    class Tracker(MemTracker):
        """It keeps no peak of each module, which takes most of the time, and bears weights that are not trained."""

        def _track_module_params_and_buffers(
            self, module: "torch.nn.Module", install_grad_hooks: bool = True
        ) -> tuple[int, int]:
            trained = all(one.requires_grad for one in module.parameters())
            return super()._track_module_params_and_buffers(module, install_grad_hooks and trained)

        def _update_peak_stats(self, peak_state: Any) -> None:
            for device, now in self._curr_mem_snap.items():
                if self._peak_mem.get(device, 0) < now["Total"]:
                    self._peak_mem[device], self._peak_mem_snap[device] = now["Total"], dict(now)

    tracker = Tracker()
    tracker.track_external(network)
    with warnings.catch_warnings(), tracker:
        # DistilBERT's head makes a module in its forward pass, which is gone in the backward one. Its bytes count.
        warnings.filterwarnings("ignore", "Module is None", UserWarning)
        run()
    found: dict[str, int] = {}
    for device, of_device in tracker.get_tracker_snapshot("peak").items():
        for kind, size in of_device.items() if device.type != "meta" else ():
            name = str(getattr(kind, "value", kind))
            found[name] = found.get(name, 0) + size
    return found
