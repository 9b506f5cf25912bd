"""Tags and masked words beside HF Trainer without padding: DataCollatorWithFlattening and flash attention.

Both sides train the same questions as they are, with equally many rows an update, in bf16. The peer's flash attention
is torch's kernel, which rtrain calls too, registered with Transformers' interface.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import figures
from benchmarks.gpu import bench as common
from benchmarks.gpu.bench import CARRIED, Bench, forget, texts
from benchmarks.gpu.speed import Ours
from benchmarks.peers import one_device
from rtrain.batch import IGNORED, Head

if TYPE_CHECKING:
    from rtrain.batch import Tokens

OVER_PEER = {"floor": 1.0, "goal": 1.3}
TAGS = ("O", "B-A", "I-A", "B-B", "I-B")
SHARE = 0.15
"""Share of tokens that are guessed."""
VARLEN = "flattened_varlen"
"""Name of the peer's attention in Transformers' interface."""


def run(bench: Bench) -> None:
    if one_device.peer() != one_device.TRAINER:
        bench.report.line("peer", None, note="accelerate is not here, which HF Trainer needs")
        return
    for model, task in (
        (CARRIED, "token_tags"),
        ("bert-base", "token_tags"),
        (CARRIED, "masked_lm"),
        ("bert-base", "masked_lm"),
    ):
        with bench.report.attempt(f"{model}.{task}"):
            _compare(bench, model, task)
        forget(bench)


def _compare(bench: Bench, model: str, task: str) -> None:
    of = _targets(texts(bench, "squadshifts"), task)
    rows = common.rows_per_update(bench.size, of)
    most = min(bench.size.largest_pass // 2, int(of.lengths.sum()))
    labels = tuple(TAGS) if task == "token_tags" else ()
    per_pass = max(1, 1 << (int(most / float(of.lengths.mean())).bit_length() - 1))
    per_pass = min(per_pass, rows)
    plan = one_device.Plan(
        8, per_pass, rows // per_pass, grouped=False, precision=bench.precision, warm=2, loader_workers=4 * bench.gpu
    )
    peer_rows = _rows(of)

    def ours() -> float:
        made = _network(bench, model, task)
        _pack(made)
        side = Ours(made.to(bench.device), of, rows, most, bench.precision, (task, Head(labels)))
        return side.measure(bench).tokens

    def flattened() -> float:
        made = _network(bench, model, task)
        _register()
        made.set_attn_implementation(VARLEN if bench.gpu else "sdpa")
        done = one_device.train(made.to(bench.device), peer_rows, made.config.pad_token_id, plan, _collator(bench))
        return done.real_tokens / done.seconds

    sides: dict[str, Callable[[], float]] = {"rtrain": ours, "hf_flattened": flattened}
    found: list[dict[str, float]] = []
    for number in range(bench.size.rounds):
        one = {}
        for name in figures.turn(list(sides), number):
            one[name] = sides[name]()
            forget(bench)
        found.append(one)
    for name in sides:
        bench.report.line(
            f"{model}.{task}.{name}.tokens_per_s", values=[one[name] for one in found], rows_per_update=rows
        )
    ratios = [one["rtrain"] / one["hf_flattened"] for one in found]
    bounds = OVER_PEER if bench.gpu else {}
    bench.report.line(f"{model}.{task}.over_hf_flattened", values=ratios, unit="x", **bounds)


def _targets(of: "Tokens", task: str) -> "Tokens":
    """Random tags of half of the tokens; or a share of the tokens to be guessed."""
    draw, count = np.random.default_rng(1), len(of.ids)
    if task == "token_tags":
        values = np.where(draw.random(count) < 0.5, draw.integers(0, len(TAGS), count), IGNORED)
    else:
        values = np.where(draw.random(count) < SHARE, of.ids, IGNORED)
    return replace(of, targets=values.astype(np.float32), counts=of.lengths)


def _rows(of: "Tokens") -> list[dict[str, Any]]:
    ends = np.cumsum(of.lengths)
    return [
        {"input_ids": of.ids[end - size : end].tolist(), "labels": of.targets[end - size : end].astype(int).tolist()}
        for end, size in zip(ends, of.lengths, strict=True)
    ]


def _network(bench: Bench, model: str, task: str) -> Any:
    """The network as Transformers makes it, with random weights and no dropout of attention's weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(bench.model, local_files_only=True, trust_remote_code=False)
    if (shape := bench.size.models[model]) is not None:
        for name, value in shape.items():
            setattr(config, name, value)
    config.num_labels, config.attention_probs_dropout_prob = len(TAGS), 0.0
    config.max_position_embeddings = max(config.max_position_embeddings, bench.size.long)
    auto = transformers.AutoModelForTokenClassification if task == "token_tags" else transformers.AutoModelForMaskedLM
    with torch.device(bench.device):
        made: Any = auto.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    return made


def _pack(made: Any) -> None:
    from rtrain.network import packed

    packed.enable(made, "tokens")


def _collator(bench: Bench) -> Callable[[Any], Any]:
    import transformers

    if bench.gpu:
        return transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    # On a CPU no kernel reads the ends of rows: one row is one batch, as a test of all else.
    flatten = transformers.DataCollatorWithFlattening()
    return lambda rows: flatten(rows[:1])


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    def attend(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, **named: Any
    ) -> tuple[Any, None]:
        from rtrain.torch_internals import flash_attention

        q, k, v = (part.squeeze(0).transpose(0, 1) for part in (query, key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        answer = flash_attention(
            q, k, v, named["cu_seq_lens_q"], int(named["max_length_q"]), scale=scale, dropout=0.0, reach=None
        )
        return answer[None], None

    AttentionInterface.register(VARLEN, attend)
    AttentionMaskInterface.register(VARLEN, lambda **named: None)
