"""Data parallelism: the full model on every worker, gradients averaged by DistributedDataParallel."""

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from rtrain import torch_internals
from rtrain.parallel import collectives, dtensor_utils
from rtrain.parallel.base import EventLogger, MicroBatchRunnerProtocol, Strategy, ignore_event
from rtrain.parallel.profiler import BACKWARD, COMM_ASYNC, COMM_WAIT, Timeline
from rtrain.parallel.watchdog import Watchdog

if TYPE_CHECKING:
    import torch


class DDPStrategy(Strategy):
    """Micro-batches call `model`, which averages gradients over the workers once per step."""

    def __init__(
        self,
        module: "torch.nn.Module",
        watchdog: Watchdog | None = None,
        log_event: EventLogger = ignore_event,
        *,
        touched_rows: bool = True,
        compression: str = "none",
    ):
        """Initialize the strategy.

        Args:
            log_event: Logs the error of gradient compression.
            touched_rows: Synchronize only the touched rows of the word embedding's gradient.
            compression: As `train.gradient_compression`.
        """
        super().__init__(module, watchdog, log_event)
        self._comm_timer, self.local_grad_norm = CommTimer(self.timeline), LocalGradNorm()
        # A single GPU adds a dense gradient faster than it waits for the touched rows.
        is_dense = not self.is_distributed and dtensor_utils.module_device(module).type == "cuda"
        embedding = find_embedding(module) if touched_rows and not is_dense else None
        self.touched_rows = TouchedRows(embedding[1]) if embedding else None
        # Cached, since walking through the module takes milliseconds several times a step.
        sparse_weight = None if self.touched_rows is None else self.touched_rows.weight
        self._dense_parameters = [parameter for parameter in module.parameters() if parameter is not sparse_weight]
        if self.is_distributed:
            import torch
            from torch.nn.parallel import DistributedDataParallel

            if embedding:
                torch_internals.ignore_ddp_parameters(module, [embedding[0]])
            # gradient_as_bucket_view: gradients live in the buckets, which saves a copy of all of them per step.
            # forward_sync_buffers: an encoder's buffers are constants, so rank 0 need not broadcast them before each
            # step.
            self.model = DistributedDataParallel(module, gradient_as_bucket_view=True, forward_sync_buffers=False)
            torch_internals.set_ddp_timing_sample_rate(self.model)
            self._comm_dtype = torch.bfloat16 if compression == "bf16" else None
            self._transport = collectives.ProcessGroupTransport(self.num_replicas)
            if self._comm_dtype is not None:
                self._transport = collectives.CompressionErrorProbe(self.num_replicas, self._comm_dtype)
            state = (self._transport, self._comm_timer, self.local_grad_norm)
            self.model.register_comm_hook(state, lambda state, bucket: _start_all_reduce(state, bucket))

    def warm_up(self, runner: MicroBatchRunnerProtocol) -> None:
        """Run one gradient synchronization and discard it, with three workers or more.

        DistributedDataParallel rebuilds its buckets after the first synchronization, which changes the order of
        summation: a restart would differ from the run that it continues. A sum of two terms has only one order.
        """
        if self.num_replicas > 2:
            runner.compute_loss(runner.compute_logits(self.model, runner.idle_tokens), runner.idle_tokens).backward()

    def begin_step(self, measure_noise: bool = False) -> None:
        self.local_grad_norm.begin_step(measure_noise)
        if self.touched_rows is not None:
            self.touched_rows.begin_step()
        if self.is_distributed:  # gradients live in the buckets
            self.module.zero_grad(set_to_none=False)
        else:
            for parameter in self._dense_parameters:
                parameter.grad = None

    @contextlib.contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """Wrap a micro-batch. Only the last micro-batch of a step synchronizes gradients."""
        from torch.nn.parallel import DistributedDataParallel

        no_sync = self.model.no_sync if not is_last and isinstance(self.model, DistributedDataParallel) else None
        if self.touched_rows is not None:
            self.touched_rows.is_recording = True
        try:
            with no_sync() if no_sync else contextlib.nullcontext():
                yield
        finally:
            if self.touched_rows is not None:
                self.touched_rows.is_recording = False
        if self.touched_rows is not None and is_last:
            with self._comm_timer.count_wait() if self.is_distributed else self.timeline.span(BACKWARD):
                self.touched_rows.set_mean_gradient(self)
        self._comm_timer.num_reductions += is_last
        probe = self._transport if is_last and self.is_distributed else None
        if isinstance(probe, collectives.CompressionErrorProbe) and (error := probe.pop_error()) is not None:
            self._log_event("gradient_compression", error=error)

    def comm_cost(self) -> dict[str, Any] | None:
        if not self.is_distributed or not self._comm_timer.num_reductions:
            return None
        return self._comm_timer.comm_cost(self.model, self.gradients(), self._comm_dtype)

    def gradients(self) -> "list[torch.Tensor]":
        """The complete gradient: one tensor for each parameter with a gradient; of the word embedding only the touched
        rows."""
        row_gradients = [] if self.touched_rows is None else [self.touched_rows.gradient]
        return row_gradients + self._dense_gradients()

    def local_gradients(self) -> "list[torch.Tensor]":
        row_gradients = [] if self.touched_rows is None else [self.touched_rows.local_gradient()[1]]
        return self._dense_gradients() + row_gradients

    def _dense_gradients(self) -> "list[torch.Tensor]":
        return [parameter.grad for parameter in self._dense_parameters if parameter.grad is not None]

    @property
    def supports_noise_scale(self) -> bool:
        return True

    def local_sq_norm(self) -> float | None:
        return self.local_grad_norm.sq_norm if self.is_distributed else self._first_sq_norm

    def scale_gradients(self, factor: "float | torch.Tensor") -> None:
        if gradients := self._dense_gradients():
            torch_internals.multiply(gradients, factor)
        if self.touched_rows is not None:
            self.touched_rows.gradient = self.touched_rows.gradient * factor

    def average_rows(self, row_ids: "torch.Tensor", rows: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        """Average a matrix that is 0 except for some rows. Returns the rows that any worker has, ascending, and their
        means [rows, dim]. `row_ids` are this worker's rows, ascending, with the values `touched_rows`."""
        import torch

        ids_by_rank = self.gather_over_replicas(row_ids.cpu().numpy())
        all_ids = torch.unique(torch.cat([torch.from_numpy(ids) for ids in ids_by_rank])).to(row_ids.device)
        summands = rows.new_zeros(len(all_ids), rows.shape[1])
        summands[torch.searchsorted(all_ids, row_ids)] = rows
        with self.timeline.span(COMM_WAIT):
            self._transport.mean(summands.view(-1))
        return all_ids, summands


class LocalGradNorm:
    """Squared norm of this worker's gradient before the all-reduce, in measuring steps."""

    def __init__(self) -> None:
        self._is_measuring = False
        self._sq_norms: list[torch.Tensor] = []

    def begin_step(self, measure_noise: bool) -> None:
        self._is_measuring, self._sq_norms = measure_noise, []

    def add(self, part: "torch.Tensor") -> None:
        """Record a part of the gradient before its all-reduce."""
        if self._is_measuring:
            self._sq_norms.append(dtensor_utils.squared_norm(part))

    @property
    def sq_norm(self) -> float:
        return float(sum(self._sq_norms))


class CommTimer:
    """Cost of the gradient synchronization on this worker: seconds that lengthen a micro-batch, and bytes sent. Waiting
    for slower workers counts, since the worker cannot compute meanwhile."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.num_reductions = 0
        self._wait_s = 0.0

    @contextlib.contextmanager
    def count_wait(self) -> Iterator[None]:
        """Wrap a blocking part of the synchronization."""
        start = time.perf_counter()
        try:
            with self._timeline.span(COMM_WAIT):
                yield
        finally:
            self._wait_s += time.perf_counter() - start

    def start(self, process_group_transport: collectives.ProcessGroupTransport, part: "torch.Tensor") -> Any:
        """Start the synchronization of a part of the gradient, which overlaps with computation."""
        timeline = self._timeline
        begin = timeline.now()
        with self.count_wait():
            future = process_group_transport.start_mean(part)

        def finish(future: Any) -> Any:
            timeline.add_span(COMM_ASYNC, begin, timeline.now())
            return future.value()

        return future.then(finish)

    def comm_cost(
        self, model: Any, gradients: "list[torch.Tensor]", comm_dtype: "torch.dtype | None"
    ) -> dict[str, Any]:
        """See `Strategy.comm_cost`: the cost of synchronizing `gradients` of `model`, without the time hidden behind
        the backward pass. `comm_dtype`: the dtype on the wire; None for the gradient's own."""
        seconds = self._wait_s / self.num_reductions + torch_internals.exposed_comm_seconds(model)
        size = sum(gradient.numel() * (comm_dtype or gradient.dtype).itemsize for gradient in gradients)
        return {"seconds": round(seconds, 6), "bytes": size}


def _start_all_reduce(state: "tuple[collectives.ProcessGroupTransport, CommTimer, LocalGradNorm]", bucket: Any) -> Any:
    """DistributedDataParallel's hook. A function, not a method of a strategy: it is stored below Python, where the
    garbage collector finds no cycles."""
    process_group_transport, comm_timer, local_grad_norm = state
    local_grad_norm.add(bucket.buffer())
    return comm_timer.start(process_group_transport, bucket.buffer())


def find_embedding(module: Any) -> "tuple[str, torch.nn.Embedding] | None":
    """The module's input embedding and the name of its weight, if its gradient comes from look-ups alone. A
    language-model head with a tied output embedding makes it dense."""
    import torch

    embedding = module.get_input_embeddings() if hasattr(module, "get_input_embeddings") else None
    if type(embedding) is not torch.nn.Embedding or not embedding.weight.requires_grad:
        return None
    if embedding.sparse or embedding.max_norm is not None or embedding.scale_grad_by_freq:
        return None
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    if head is not None and head.weight is embedding.weight:
        return None
    [name] = [name for name, parameter in module.named_parameters() if parameter is embedding.weight]
    return name, embedding


class TouchedRows:
    """The word embedding's gradient as the rows that a step touched, exactly.

    A step touches some hundred of thirty thousand words. As a dense tensor that gradient is half of all bytes that
    workers synchronize for a small encoder, and every micro-batch would fill and add it. The optimizer gets the same
    gradient as before, so the moments and the decay of untouched rows continue.
    """

    def __init__(self, embedding: "torch.nn.Embedding"):
        import torch

        self.weight = embedding.weight
        self.is_recording = False
        """Whether look-ups belong to a step's micro-batch; otherwise the embedding behaves as usual."""
        self._padding_id = embedding.padding_idx
        self._ids: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []
        self._dense = torch.zeros_like(self.weight)
        self._row_ids = torch.empty(0, dtype=torch.int64, device=self.weight.device)
        embedding.forward = partial(self._look_up, embedding)  # type: ignore[method-assign]

    def _look_up(self, embedding: "torch.nn.Embedding", ids: "torch.Tensor") -> "torch.Tensor":
        import torch

        if not self.is_recording or not torch.is_grad_enabled():
            return torch.nn.Embedding.forward(embedding, ids)
        vectors = torch.nn.functional.embedding(ids, self.weight.detach()).requires_grad_()
        vectors.register_hook(partial(self._store_gradient, ids))
        return vectors

    def _store_gradient(self, ids: "torch.Tensor", gradient: "torch.Tensor") -> None:
        self._ids.append(ids.reshape(-1))
        self._gradients.append(gradient.reshape(-1, gradient.shape[-1]))

    def begin_step(self) -> None:
        """Discard the previous step's rows. Called before a step's first micro-batch."""
        self._ids, self._gradients = [], []
        self.weight.grad = None

    def local_gradient(self) -> "tuple[torch.Tensor, torch.Tensor]":
        """(rows, their gradients [rows, dim]) of the micro-batches so far, on this worker."""
        import torch

        weight = self.weight
        ids = torch.cat(self._ids) if self._ids else torch.empty(0, dtype=torch.int64, device=weight.device)
        gradients = torch.cat(self._gradients) if self._gradients else weight.new_empty(0, weight.shape[1])
        if self._padding_id is not None:
            is_token = ids != self._padding_id
            ids, gradients = ids[is_token], gradients[is_token]
        rows, indices = torch.unique(ids, return_inverse=True)
        # The kernel of dense embedding gradients, for the same order of additions.
        return rows, torch.ops.aten.embedding_dense_backward(gradients, indices, len(rows), -1, False)

    def set_mean_gradient(self, strategy: "DDPStrategy") -> None:
        """Call after the last micro-batch. `weight.grad` becomes the mean over the workers, like
        DistributedDataParallel's."""

        rows, sums = self.local_gradient()
        strategy.local_grad_norm.add(sums)
        if strategy.is_distributed:
            rows, sums = strategy.average_rows(rows, sums)
        self._dense.index_fill_(0, self._row_ids, 0.0)
        self._dense.index_copy_(0, rows, sums)
        self._row_ids, self.weight.grad = rows, self._dense
        self._ids, self._gradients = [], []

    @property
    def gradient(self) -> "torch.Tensor":
        """The touched rows of the complete gradient, a copy [rows, dim]; the others are zero."""
        return self._dense.index_select(0, self._row_ids)

    @gradient.setter
    def gradient(self, values: "torch.Tensor") -> None:
        self._dense.index_copy_(0, self._row_ids, values)
