"""Private names of torch: each still exists and means the same."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rtrain import torch_internals


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_softmax_s_gradient_is_autograd_s(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    scores = torch.randn(2, 3, 5).to(dtype).requires_grad_()
    answer, gradient = torch.softmax(scores, -1), torch.randn(2, 3, 5).to(dtype)
    (expected,) = torch.autograd.grad(answer, scores, gradient)
    found = torch_internals.softmax_backward(gradient, answer.detach())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_shares_of_several_have_a_part_of_each(tmp_path: Path) -> None:
    """Two workers have of each of three parts a half; no other placement is one of these."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/alone", rank=0, world_size=1)
    try:
        how, whole = torch_internals.make_strided_shard(0, 3), torch.arange(24.0).view(12, 2)
        shares, _ = how._split_tensor(whole, 2, with_padding=False, contiguous=True)
        assert [share[:, 0].div(2).int().tolist() for share in shares] == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
        alone = distribute_tensor(whole, init_device_mesh("cpu", (1,)), [how], src_data_rank=None)
        assert torch.equal(alone.full_tensor(), whole)
        assert [torch_internals.is_strided_shard(one) for one in (*alone.placements, Shard(0))] == [True, False]
    finally:
        dist.destroy_process_group()


def test_fake_tensors_have_shapes_and_their_memory_is_counted_by_what_it_is_for() -> None:
    """A product of [64, 100] with the weights [50, 100]: forward it keeps its input and makes the answer."""
    with torch_internals.fake_tensor_mode():
        layer = torch.nn.Linear(100, 50, bias=False)
        given = torch.ones(64, 100)

        def run() -> None:
            (layer(given) ** 2).sum().backward()

        peak = torch_internals.measure_peak_bytes(layer, run)
        with pytest.raises(torch_internals.fake_tensor_errors()):
            given.sum().item()
        with pytest.raises(torch_internals.fake_tensor_errors()):
            given.nonzero()
        assert layer.weight.shape == (50, 100)
        assert layer.weight.grad is not None
    assert peak["Parameter"] == 4 * 50 * 100
    assert {"Buffer", "Gradient", "Activation", "Temp", "Total"} <= peak.keys()
    assert 4 * 64 * 50 <= peak["Activation"] + peak["Temp"] <= 4 * (4 * 64 * 50 + 50 * 100) + 1024
    assert peak["Total"] == sum(size for kind, size in peak.items() if kind != "Total")


@contextlib.contextmanager
def group() -> Iterator[None]:
    """Inside, this process is a group of its own."""
    import torch.distributed as dist

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_the_share_of_a_cut_tensor_can_be_put_elsewhere() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    with group():
        before = torch.arange(3.0)
        cut = DTensor.from_local(before, init_device_mesh("cpu", (1,)), [Replicate()], run_check=False)
        weight: Any = torch.nn.Parameter(cut)
        share = torch_internals.raw_local_tensor(weight)
        assert share.data_ptr() == before.data_ptr()
        share.data = share.data.clone()
        assert weight.to_local().data_ptr() == share.data_ptr() != before.data_ptr()
        with torch.no_grad():
            weight.add_(1.0)
        assert weight.full_tensor().tolist() == [1.0, 2.0, 3.0]
    assert torch_internals.raw_local_tensor(before) is before


def test_a_wait_for_a_collective_of_cut_tensors_has_a_context_around_it_until_the_end() -> None:
    from torch.distributed import _functional_collectives as collectives
    from torch.distributed.device_mesh import init_device_mesh

    waits, before = list[int](), collectives.wait_tensor

    @contextlib.contextmanager
    def seen() -> Iterator[None]:
        waits.append(1)
        yield

    def summed() -> list[float]:
        found: Any = collectives.all_reduce(torch.ones(2), "sum", init_device_mesh("cpu", (1,)))
        return (found + 1).tolist()  # type: ignore[no-any-return]

    with group():
        with torch_internals.wrap_collective_waits(seen):
            assert summed() == [2.0, 2.0]
        assert (len(waits), collectives.wait_tensor) == (1, before)
        assert summed() == [2.0, 2.0]
    assert len(waits) == 1


def test_what_is_left_out_is_not_in_the_buckets() -> None:
    from torch.nn.parallel import DistributedDataParallel

    with group():
        module, sizes = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)), list[int]()
        torch_internals.ignore_ddp_parameters(module, ["0.weight"])
        model = DistributedDataParallel(module)
        torch_internals.set_ddp_timing_sample_rate(model)
        assert torch_internals.exposed_comm_seconds(model) == 0.0

        def sent(bucket: Any) -> Any:
            sizes.append(bucket.buffer().numel())
            future: Any = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        model.register_comm_hook(None, lambda state, bucket: sent(bucket))
        model(torch.ones(1, 3)).sum().backward()
        assert sum(sizes) == sum(one.numel() for one in module.parameters()) - 15
        for _ in range(3):  # the times of an exchange are taken from the next one's forward pass on
            model(torch.ones(1, 3)).sum().backward()
        assert {
            "avg_backward_comm_time",
            "avg_backward_compute_comm_overlap_time",
        } <= model._get_ddp_logging_data().keys()
        assert 0 < torch_internals.exposed_comm_seconds(model) < 1
