"""The word embedding's gradient as the rows that a step touched, exactly.

A step touches some hundred of thirty thousand words. As a dense tensor that gradient is half of all bytes that workers
synchronize for a small encoder, and every micro-batch would fill and add it. The optimizer gets the same gradient as
before, so the moments and the decay of untouched rows continue.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from rtrain.parallel.ddp import DDPStrategy


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
    """Gathers the gradients of an embedding's rows over the micro-batches of a step."""

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
