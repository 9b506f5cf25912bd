"""Tensor-parallel plans of encoder layers, by architecture (Shoeybi et al. 2019, arXiv:1909.08053).

Two consecutive linear layers need one all-reduce: the first is sharded by its outputs, the second by its inputs. The
values between them (attention heads, or the inner vector of the feed-forward layer) are local to a worker.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from rtrain.models import attention, dropout, unpadded

if TYPE_CHECKING:
    import torch
    import transformers

MASK_SAMPLERS: Mapping[str | None, Any] = {
    unpadded.ATTENTION_NAME: dropout.draw_mask,
    unpadded.TORCH_DROPOUT_NAME: dropout.draw_salted_torch_mask,
}
"""Samplers of local dropout masks, by the attention implementation of a network."""


@dataclass(frozen=True)
class TPPlan:
    """Names of modules within an encoder layer."""

    colwise: tuple[str, ...]
    """Linear layers that are sharded by outputs."""
    rowwise: tuple[str, ...]
    """Linear layers that are sharded by inputs."""
    full_sequence: tuple[str, ...]
    """Modules that read all tokens if the tokens are sharded outside of them (sequence parallelism, Korthikanti et al.
    2022, arXiv:2205.05198)."""
    norms: tuple[str, ...]
    """Normalizations, which then read a worker's own tokens."""
    fused_outputs: Mapping[str, int] = field(default_factory=dict)
    """Layers of `colwise` whose output concatenates several vectors: how many. A worker has its share of each."""
    inner_dropout: tuple[str, ...] = ()
    """Dropout between two linear layers: on a worker's own numbers, with local masks."""


_BERT = TPPlan(
    (*(f"attention.self.{name}" for name in ("query", "key", "value")), "intermediate.dense"),
    ("attention.output.dense", "output.dense"),
    ("attention.self", "intermediate"),
    ("attention.output.LayerNorm", "output.LayerNorm"),
)
TP_PLANS: Mapping[str, TPPlan] = {
    **dict.fromkeys(("bert", "electra", "roberta", "xlm-roberta", "camembert"), _BERT),
    "distilbert": TPPlan(
        ("attention.q_lin", "attention.k_lin", "attention.v_lin", "ffn.lin1"),
        ("attention.out_lin", "ffn.lin2"),
        ("attention", "ffn"),
        ("sa_layer_norm", "output_layer_norm"),
    ),
    "modernbert": TPPlan(
        ("attn.Wqkv", "mlp.Wi"),
        ("attn.Wo", "mlp.Wo"),
        ("attn", "mlp"),
        ("attn_norm", "mlp_norm"),
        fused_outputs={"attn.Wqkv": 3, "mlp.Wi": 2},
        inner_dropout=("mlp.drop",),
    ),
}
"""Model type -> plan."""


def use_local_dropout(layers: "torch.nn.Module", tp_rank: int) -> None:
    """Make dropout between layers' products act on a worker's own tokens, with local masks."""
    dropout.replace_dropout(layers, _drop_local_tokens, tp_rank=tp_rank)


def use_local_inner_dropout(network: Any, layers: "torch.nn.Module", tp_rank: int) -> None:
    """Make dropout between two sharded linear layers use local masks."""
    draw = MASK_SAMPLERS.get(getattr(network, unpadded.ENABLED_ATTRIBUTE, None), dropout.draw_salted_torch_mask)
    for layer in layers.children():
        for name in TP_PLANS[network.config.model_type].inner_dropout:
            dropout.replace_dropout(layer.get_submodule(name), dropout.apply_dropout, salt=tp_rank, draw=draw)


def _drop_local_tokens(layer: "torch.nn.Dropout", values: "torch.Tensor", tp_rank: int) -> "torch.Tensor":
    from torch.distributed.tensor import DTensor

    if not isinstance(values, DTensor):
        return dropout.apply_dropout(layer, values)
    local_values = dropout.apply_dropout(layer, values.to_local(), tp_rank)
    output: torch.Tensor = DTensor.from_local(
        local_values, values.device_mesh, values.placements, run_check=False, shape=values.shape, stride=values.stride()
    )
    return output


def keep_tp_shard(network: "transformers.PreTrainedModel", layers: "torch.nn.Module", table: Any, tp_size: int) -> None:
    """Keep only the first worker's shard of the layers and of the embedding `table`, without communication. For
    estimates that need shapes only."""
    import torch

    plan = TP_PLANS[network.config.model_type]

    def shorten(module: Any, name: str, dim: int) -> None:
        weight = getattr(module, name)
        size = -(-weight.shape[dim] // tp_size)
        shard = weight.detach().narrow(dim, 0, size).clone()
        setattr(module, name, torch.nn.Parameter(shard, requires_grad=weight.requires_grad))

    for layer in layers.children():
        for path in plan.colwise:
            for name, _ in list(layer.get_submodule(path).named_parameters()):
                shorten(layer.get_submodule(path), name, 0)
        for path in plan.rowwise:
            shorten(layer.get_submodule(path), "weight", 1)
    if table is not None:
        shorten(table, "weight", 0)
    _set_head_count(network, tp_size)


def shard_tokens(network: "transformers.PreTrainedModel", cp_size: int, cp_rank: int, attend: Any) -> None:
    """Configure a network for context parallelism: this worker holds shard `cp_rank` of `cp_size` of the tokens.

    Dropout of the encoder uses local masks, since its tokens are local; the head uses the same masks on all workers.

    Args:
        attend: An attention function. It is called with the pack's attention function and then like it, and passes it a
            share of the heads.
    """
    draw = MASK_SAMPLERS[getattr(network, unpadded.ENABLED_ATTRIBUTE)]
    dropout.replace_dropout(network.base_model, dropout.apply_dropout, salt=cp_rank, draw=draw)
    _register_attention(network, f"tokens_{cp_rank}_of_{cp_size}", partial(attend, _salted_attention(network, cp_rank)))
    _set_head_count(network, cp_size)


def shard_heads(network: "transformers.PreTrainedModel", tp_size: int, tp_rank: int) -> None:
    """Configure a network for tensor parallelism: this worker holds shard `tp_rank` of `tp_size` of the attention
    heads.

    Dropout masks of attention are local, since workers hold different heads. All other masks are the same on all
    workers of a replica.
    """
    if not unpadded.is_packed(network):
        return
    _register_attention(network, f"{tp_rank}_of_{tp_size}", _salted_attention(network, tp_rank))
    _set_head_count(network, tp_size)


def _salted_attention(network: Any, rank: int) -> Any:
    return partial(
        attention.packed_attention, draw=partial(MASK_SAMPLERS[getattr(network, unpadded.ENABLED_ATTRIBUTE)], salt=rank)
    )


def _register_attention(network: Any, suffix: str, attend: Any) -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    name = f"{getattr(network, unpadded.ENABLED_ATTRIBUTE)}_{suffix}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, unpadded.make_mask)
    network.set_attn_implementation(name)


def _set_head_count(network: Any, size: int) -> None:
    setattr(network, unpadded.HEADS_ATTRIBUTE, network.config.num_attention_heads // size)
