"""Texts a second of an endpoint's engine and batcher on a GPU, beside sentence-transformers in half precision.

rtrain answers one text a client, of as many clients as are in flight, by its own batcher and tokenizer. The peer is
given what no server could do better: all texts in flight in one call of `encode`, again and again. Both sides have the
same encoder and the same texts. The clock holds tokenization, copies and the answer on the host; HTTP is on no side.
"""

import asyncio
import importlib.util
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gpu.bench import MODEL_NAME, Bench, forget, synchronize

if TYPE_CHECKING:
    from rtrain.inference.predictor import Predictor

IN_FLIGHT = (1, 8, 32, 256)
MAX_DIFFERENCE = 0.002
"""Goal for the largest difference of scores from those of the same network in float64 on a CPU."""
ROUNDS = 3
LOGIT = 10.0
MODERN = "modernbert-base"
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
Timed = tuple[float, list[float]]
"""Texts per second, and the seconds of each request or call."""


def run(bench: Bench) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # on every side
    messages: list[str] = json.loads((bench.data / "texts.json").read_text(encoding="utf-8"))
    # About 20 tokens a message: 40 of them are cut at 512.
    long = [" ".join(np.roll(messages, -place)[:40]) for place in range(0, len(messages), 2)]
    cells = [(MODEL_NAME, "messages", messages), (MODERN, "messages", messages)]
    if bench.gpu:  # a processor takes minutes for them
        cells += [(MODEL_NAME, "512", long), (MODERN, "512", long)]
    for model, kind, texts in cells:
        with bench.report.attempt(f"{model}.{kind}"):
            _measure(bench, model, kind, texts)
        forget(bench)


def _measure(bench: Bench, model: str, kind: str, texts: Sequence[str]) -> None:
    from rtrain.inference.predictor import Predictor
    from rtrain.metrics.classification import softmax

    folder = _artifact(bench, model, texts)
    device = bench.device.type
    sides: dict[str, Callable[[int, float], Timed]] = {}
    exact = _float64(folder, texts[:16])
    for precision in ("fp16", "fp32") if bench.gpu else ("fp32",):
        predictor = Predictor.load(folder, device=device, precision=precision)
        logits = np.stack(predictor.logits(list(texts[:16]), 16))
        bench.report.line(
            f"{model}.{kind}.rtrain.{precision}.difference",
            float(np.abs(softmax(logits) - softmax(exact)).max()),
            "of scores",
            maximum=MAX_DIFFERENCE,
            of_logits=float(np.abs(logits - exact).max()),
            largest_logit=float(np.abs(exact).max()),
            is_unpadded=predictor.is_unpadded,
        )
        if precision == "fp16" or not bench.gpu:
            sides[f"rtrain.{precision}"] = _batched(predictor, texts)
    if all(importlib.util.find_spec(name) for name in ("sentence_transformers", "sklearn")):
        with bench.report.attempt(f"{model}.{kind}.sentence_transformers"):
            sides["sentence_transformers"] = _peer(bench, folder, texts)
    else:
        bench.report.line(f"{model}.{kind}.sentence_transformers", None, note="sentence-transformers is not here")
    for clients in IN_FLIGHT if bench.gpu else IN_FLIGHT[:2]:
        rates: dict[str, list[float]] = {name: [] for name in sides}
        times: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(ROUNDS):
            for name in list(sides)[:: -1 if number % 2 else 1]:
                rate, requests = sides[name](clients, bench.size.seconds / 3)
                rates[name].append(rate)
                times[name] += requests
        key = f"{model}.{kind}.in_flight_{clients}"
        for name in sides:
            p50, p99 = (1e3 * float(np.quantile(times[name], at)) for at in (0.5, 0.99))
            bench.report.line(f"{key}.{name}", values=rates[name], unit="texts/s", p50_ms=p50, p99_ms=p99)
        if len(sides) > 1 and "sentence_transformers" in sides:
            best = "rtrain.fp16" if bench.gpu else "rtrain.fp32"
            ratios = [a / b for a, b in zip(rates[best], rates["sentence_transformers"], strict=True)]
            bench.report.line(f"{key}.over_peer", values=ratios, unit="x", **({"floor": 1.0} if bench.gpu else {}))


def _batched(predictor: "Predictor", texts: Sequence[str]) -> Callable[[int, float], Timed]:
    """rtrain's tokenizer, batcher and engine, asked by clients that each send the next text when one is answered."""
    from rtrain.config import ServeConfig
    from serve.batching.batcher import Batcher, Encoder
    from serve.batching.scheduler import BatchLimits

    settings = ServeConfig(max_batch_size=256)
    limits = BatchLimits(
        max_batch_size=settings.max_batch_size,
        max_batch_tokens=1 << 17,
        max_batch_latency_s=settings.max_batch_latency_s,
    )

    async def serve(clients: int, seconds: float) -> Timed:
        batcher, encoder = Batcher(predictor.run, limits, is_unpadded=predictor.is_unpadded), Encoder(predictor)
        loop, times, warm = asyncio.get_running_loop(), list[float](), asyncio.Event()
        places, ends = iter(range(10**9)), [float("inf")]

        async def client() -> None:
            while (started_at := loop.time()) < ends[0]:
                encoded = await encoder.encode([texts[next(places) % len(texts)]])
                await batcher.submit(encoded, started_at + 60)
                times.append(loop.time() - started_at)
                if len(times) == 5 * clients:
                    warm.set()

        tasks = [loop.create_task(client()) for _ in range(clients)]
        await warm.wait()
        times.clear()
        started_at = loop.time()
        ends[0] = started_at + seconds
        await asyncio.gather(*tasks)
        elapsed = loop.time() - started_at
        batcher.close()
        return len(times) / elapsed, times

    return lambda clients, seconds: asyncio.run(serve(clients, seconds))


def _peer(bench: Bench, folder: Path, texts: Sequence[str]) -> Callable[[int, float], Timed]:
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer  # type: ignore[import-not-found]

    half = {"dtype": torch.float16} if bench.gpu else {}
    words = Transformer(str(folder), max_seq_length=512, model_kwargs={**half, "attn_implementation": "sdpa"})
    encoder = SentenceTransformer(
        modules=[words, Pooling(words.get_embedding_dimension(), "mean")], device=bench.device.type
    )

    def ask(clients: int, seconds: float) -> Timed:
        draw, times, started_at = 0, list[float](), float("inf")
        for number in range(10**9):
            batch = [texts[(draw + place) % len(texts)] for place in range(clients)]
            draw += clients
            start = time.perf_counter()
            encoder.encode(batch, batch_size=clients, show_progress_bar=False)
            times.append(time.perf_counter() - start)
            if number == 4:
                synchronize(bench)
                times, started_at = [], time.perf_counter()
            if time.perf_counter() - started_at > seconds:
                break
        return clients / statistics.fmean(times), times

    return ask


def _float64(folder: Path, texts: Sequence[str]) -> "np.ndarray[Any, Any]":
    """Logits of the artifact's network in float64 on the CPU, one text a call."""
    import torch

    from rtrain.inference.predictor import Predictor

    predictor = Predictor.load(folder)
    network, accepted = predictor.network
    network.double()
    answers = []
    for row in predictor.encode(list(texts)):
        ids = torch.as_tensor(row.ids, dtype=torch.int64)[None]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
        with torch.inference_mode():
            output = network(**{name: value for name, value in inputs.items() if name in accepted})
        answers.append(output.logits[0].numpy())
    return np.stack(answers)


def _artifact(bench: Bench, model: str, texts: Sequence[str]) -> Path:
    """A complete float artifact that reads 512 tokens: of the carried model, or of ModernBERT-base's shape with random
    weights. Its new head is scaled so that the largest logit is about `LOGIT`, as a trained one's is."""
    import safetensors.torch
    import torch
    import transformers

    from rtrain.inference import artifact as artifacts, predictor as inference_predictor
    from rtrain.models import builder as networks
    from rtrain.tasks import base

    folder = bench.scratch / "serving_peers" / model
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    labels, task = bench.store("banking77").manifest.labels, base.get_task("classification")
    if model == MODEL_NAME:
        networks.build_network(bench.model, task, labels, 0, pack=False).save_pretrained(folder)
    else:
        base_config = transformers.AutoConfig.from_pretrained(
            bench.model, local_files_only=True, trust_remote_code=False
        )
        small = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
        overrides: dict[str, Any] = {
            **({} if bench.gpu else small),
            **dict.fromkeys(TOKENS, 0),
            "num_labels": len(labels),
        }
        config = transformers.ModernBertConfig(vocab_size=base_config.vocab_size, **overrides)
        torch.manual_seed(0)
        transformers.ModernBertForSequenceClassification(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (bench.model / name).is_file():
            shutil.copyfile(bench.model / name, folder / name)
    artifact = artifacts.Artifact(name="gpu", task=task.name, labels=labels, max_tokens=512, engine="torch")
    largest = float(
        np.abs(np.stack(inference_predictor.Predictor(folder, artifact).logits(list(texts[:16]), 16))).max()
    )
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    for name in ("classifier.weight", "classifier.bias"):
        weights[name] = weights[name] * (LOGIT / largest)
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    artifacts.write_artifact(folder, artifact, inference_predictor.compute_golden_logits)
    return folder
