"""Seconds of training until an accuracy on banking77's test rows: rtrain, and Transformers in the same precision.

Both train the same epochs at the same settings, are scored at the same updates, and stop at the last of the goals.
Evaluations, checkpoints and the start are outside of the clock. Transformers pools in its own way, and by the mean of
tokens.
"""

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gpu import trainings
from benchmarks.gpu.bench import Bench, forget
from benchmarks.gpu.speed import rows_of
from benchmarks.peers import common, one_device

if TYPE_CHECKING:
    from rtrain.data.stores.store import Store

GOALS = (0.90, 0.93)
SEEDS = (0, 1, 2)
EPOCHS, TINY_EPOCHS = 8, 2
ROWS_PER_UPDATE = 64
Seen = list[tuple[float, float]]
"""Pairs of seconds, and the accuracy at that time."""


def run(bench: Bench) -> None:
    found: dict[str, list[Seen]] = {"ours": [], "hf_grouped": [], "hf_grouped_mean": []}
    longest = 0.0
    for seed in SEEDS[: bench.size.rounds]:
        if bench.left < longest:
            bench.report.line(f"seed_{seed}", None, note="not begun: too little of the section's time is left")
            continue
        before = bench.left
        for side, seen in found.items():
            with bench.report.attempt(f"{side}.seed_{seed}"):
                seen.append(_ours(bench, seed) if side == "ours" else _hf(bench, seed, side == "hf_grouped_mean"))
                _tell(bench, side, seed, seen[-1])
            forget(bench)
        longest = max(longest, before - bench.left)
    for goal in GOALS:
        for side in ("hf_grouped", "hf_grouped_mean"):
            pairs = [
                (until(theirs, goal), until(own, goal)) for own, theirs in zip(found["ours"], found[side], strict=False)
            ]
            ratios = [theirs / own for theirs, own in pairs if theirs and own]
            note: dict[str, Any] = {} if ratios else {"note": "in no seed did both get there"}
            values = ratios or None
            bench.report.line(f"to_{goal}.over_{side}", values=values, unit="x", seconds=pairs, **note)


def until(seen: Seen, goal: float) -> float | None:
    """Seconds until the accuracy; None if it was not reached. Pure."""
    return next((seconds for seconds, score in seen if score >= goal), None)


def _tell(bench: Bench, side: str, seed: int, seen: Seen) -> None:
    reached: dict[str, Any] = {f"seconds_to_{goal}": until(seen, goal) for goal in GOALS}
    about: dict[str, Any] = {} if side == "ours" else {"peer": one_device.peer()}
    best = max(score for _, score in seen)
    bench.report.line(f"{side}.seed_{seed}.best", best, **reached, precision=bench.precision, seen=seen, **about)


def _size(bench: Bench) -> tuple[int, int, int]:
    """Rows an update, epochs, and updates between two evaluations: a quarter of an epoch."""
    rows = bench.store("banking77").rows("train")
    per_update = min(ROWS_PER_UPDATE, max(8, rows // 8))
    return per_update, EPOCHS if bench.gpu else TINY_EPOCHS, max(1, rows // per_update // 4)


def _ours(bench: Bench, seed: int) -> Seen:
    per_update, epochs, every = _size(bench)
    folder = bench.scratch / "score"
    shutil.rmtree(folder, ignore_errors=True)
    settings = {
        "optim.lr": common.LEARNING_RATE,
        "optim.weight_decay": common.WEIGHT_DECAY,
        "optim.clip_norm": common.CLIP_NORM,
        "optim.warmup": common.WARMUP,
        "train.rows_per_update": per_update,
        "train.epochs": epochs,
        "train.evaluate_every": every,
        "train.save_every": 10**6,
        "train.keep": 1,
        "train.seed": seed,
    }
    ran = trainings.start(bench, folder, settings, enough=lambda score: score >= GOALS[-1])
    found = [one for one in ran.reporter.of("evaluated") if one["split"] == "valid"]
    shutil.rmtree(folder)
    return [(one["seconds"], one["scores"]["accuracy"]) for one in found]


def _hf(bench: Bench, seed: int, mean: bool) -> Seen:
    import torch
    import transformers

    from rtrain.network import pooling

    store = bench.store("banking77")
    per_update, epochs, every = _size(bench)
    torch.manual_seed(seed)
    made: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
        bench.model,
        trust_remote_code=False,
        num_labels=len(store.manifest.labels),
        dtype=torch.float32,
        local_files_only=True,
    )
    if mean:
        pooling.pool_by_mean(made)
    made.to(bench.device)
    tokens = store.read("train", np.arange(store.rows("train")))
    seen: Seen = []

    def after(seconds: float) -> bool:
        seen.append((seconds, _accuracy(made, store, bench)))
        return seen[-1][1] >= GOALS[-1]

    plan = one_device.Plan(
        updates=epochs * (len(tokens) // per_update),
        rows_per_pass=per_update,
        precision=bench.precision,
        seed=seed,
        loader_workers=4 if bench.gpu else 0,
        after=after,
        every=every,
    )
    one_device.train(made, rows_of(tokens), made.config.pad_token_id, plan)
    return seen


def _accuracy(made: Any, store: "Store", bench: Bench) -> float:
    """The accuracy on all test rows, by autocast in the precision of the training."""
    import torch

    from rtrain.training import evaluate, step

    training = made.training
    made.eval()
    right = 0
    with torch.inference_mode():
        order = np.argsort(store.column("valid", "length"), kind="stable")
        for chosen in evaluate.passes(store, "valid", order, 512):
            tokens = store.read("valid", chosen)
            logits = step.forward(made, tokens, made.config.pad_token_id, bench.precision)
            right += int((logits.argmax(-1).cpu().numpy() == tokens.targets).sum())
    made.train(training)
    return right / store.rows("valid")
