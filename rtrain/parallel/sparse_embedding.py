"""The word embedding's gradient as the rows that an update touched, exactly.

Of a vocabulary of thirty thousand words an update sees some hundred. As a dense tensor that gradient is half of all
bytes that workers exchange for a small encoder, and every pass fills and adds it anew. The optimizer gets the same
gradient as ever: moments and decay of untouched rows go on.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from rtrain.parallel.ddp import Replicated


def table_of(module: Any) -> "tuple[str, torch.nn.Embedding] | None":
    """The embedding of the module's input words and its weight's name, where its gradient comes from look-ups alone: a
    language-model head whose output embedding is the same makes it dense."""
    import torch

    found = module.get_input_embeddings() if hasattr(module, "get_input_embeddings") else None
    if type(found) is not torch.nn.Embedding or not found.weight.requires_grad:
        return None
    if found.sparse or found.max_norm is not None or found.scale_grad_by_freq:
        return None
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    if head is not None and head.weight is found.weight:
        return None
    [name] = [name for name, parameter in module.named_parameters() if parameter is found.weight]
    return name, found


class TouchedRows:
    """Gathers what the passes of an update give an embedding's rows, and makes the gradient of it."""

    def __init__(self, embedding: "torch.nn.Embedding"):
        import torch

        self.weight = embedding.weight
        self.gathers = False
        """Whether look-ups are part of an update's pass; else they are like any embedding's."""
        self._padding = embedding.padding_idx
        self._ids: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []
        self._dense = torch.zeros_like(self.weight)
        self._filled = torch.empty(0, dtype=torch.int64, device=self.weight.device)
        embedding.forward = partial(self._look_up, embedding)  # type: ignore[method-assign]

    def _look_up(self, embedding: "torch.nn.Embedding", ids: "torch.Tensor") -> "torch.Tensor":
        import torch

        if not self.gathers or not torch.is_grad_enabled():
            return torch.nn.Embedding.forward(embedding, ids)
        vectors = torch.nn.functional.embedding(ids, self.weight.detach()).requires_grad_()
        vectors.register_hook(partial(self._keep, ids))
        return vectors

    def _keep(self, ids: "torch.Tensor", gradient: "torch.Tensor") -> None:
        self._ids.append(ids.reshape(-1))
        self._gradients.append(gradient.reshape(-1, gradient.shape[-1]))

    def begin(self) -> None:
        """Forget the last update's rows. Called before an update's first pass."""
        self._ids, self._gradients = [], []
        self.weight.grad = None

    def collected(self) -> "tuple[torch.Tensor, torch.Tensor]":
        """(rows, their gradients [rows, dim]) by the passes until now, on this worker."""
        import torch

        weight = self.weight
        ids = torch.cat(self._ids) if self._ids else torch.empty(0, dtype=torch.int64, device=weight.device)
        gradients = torch.cat(self._gradients) if self._gradients else weight.new_empty(0, weight.shape[1])
        if self._padding is not None:
            counted = ids != self._padding
            ids, gradients = ids[counted], gradients[counted]
        rows, places = torch.unique(ids, return_inverse=True)
        # The kernel by which a dense gradient is made: it adds in the same order.
        return rows, torch.ops.aten.embedding_dense_backward(gradients, places, len(rows), -1, False)

    def complete(self, exchange: "Replicated") -> None:
        """After its last pass: `weight.grad` is the mean over the workers, as DistributedDataParallel's."""

        rows, sums = self.collected()
        exchange.own.add(sums)
        if exchange.distributed:
            rows, sums = exchange.union(rows, sums)
        self._dense.index_fill_(0, self._filled, 0.0)
        self._dense.index_copy_(0, rows, sums)
        self._filled, self.weight.grad = rows, self._dense
        self._ids, self._gradients = [], []

    @property
    def gradient(self) -> "torch.Tensor":
        """The touched rows of the complete gradient, a copy [rows, dim]: the others are zero."""
        return self._dense.index_select(0, self._filled)

    @gradient.setter
    def gradient(self, values: "torch.Tensor") -> None:
        self._dense.index_copy_(0, self._filled, values)
