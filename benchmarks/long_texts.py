"""Long texts through ModernBERT with random weights: packed beside padded, and int8 beside float.

    python -m benchmarks.long_texts --tokens 8192 --rounds 3

Padded is Transformers' own way, by torch's fused attention under a mask for each pair of tokens. Every figure is of a
process of its own, in turns; memory is the most that the process held, over what it held before the pass.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rtrain.batch import Tokens

SIDES = ("packed", "padded")
ENGINES = ("torch", "openvino", "int8")
VOCABULARY, LABELS = 5000, 4


def network(width: int, layers: int, heads: int, packs: bool) -> Any:
    """A classifier of ModernBERT's form: local attention of 64 tokens on either side in two layers of three."""
    import torch
    import transformers

    from rtrain.network import packed

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        **{"hidden_size": width, "intermediate_size": 3 * width // 2, "num_hidden_layers": layers},
        **{"num_attention_heads": heads, "vocab_size": VOCABULARY, "num_labels": LABELS},
        **{"pad_token_id": 0, "cls_token_id": 2, "bos_token_id": 2, "sep_token_id": 3, "eos_token_id": 3},
    }
    chosen = transformers.ModernBertConfig(**sizes)
    made = transformers.ModernBertForSequenceClassification(chosen)
    made.set_attn_implementation("sdpa")
    if packs:
        packed.enable(made, "first")
    return made


def rows(lengths: list[int]) -> "Tokens":
    from rtrain.batch import single

    sizes = np.array(lengths, dtype=np.int32)
    ids = np.random.default_rng(0).integers(5, VOCABULARY, int(sizes.sum())).astype(np.int32)
    return single(ids, sizes, sizes, np.zeros(len(sizes)), np.arange(len(sizes), dtype=np.uint64))


def _begin() -> tuple[float, float]:
    """MiB of this process, and its processor time; what it held at most counts from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return _mib("VmRSS"), time.process_time()


def _taken(begun: tuple[float, float]) -> dict[str, float]:
    seconds = time.process_time() - begun[1]
    return {"seconds": seconds, "mib": _mib("VmHWM") - begun[0]}


def _mib(what: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:")) / 1024


def trained(side: str, lengths: list[int], sizes: tuple[int, int, int]) -> dict[str, float]:
    """Seconds of processor time of a forward and backward pass, and MiB that it took."""
    from rtrain.training import step

    made, tokens = network(*sizes, packs=side == "packed").train(), rows(lengths)
    step.forward(made, rows([64]), 0, "fp32").sum().backward()
    begun = _begin()
    step.forward(made, tokens, 0, "fp32").square().sum().backward()
    return _taken(begun)


def equal(lengths: list[int], sizes: tuple[int, int, int]) -> dict[str, float]:
    """How far packed and padded are apart in float64: logits, and the gradient relative to its norm."""
    from rtrain.training import step

    answers, gradients = [], []
    for side in SIDES:
        made = network(*sizes, packs=side == "packed").double().eval()
        answers.append(step.forward(made, rows(lengths), 0, "fp32"))
        answers[-1].square().sum().backward()
        gradients.append([one.grad for one in made.parameters() if one.grad is not None])
    apart = sum(float((one - other).square().sum()) for one, other in zip(*gradients, strict=True))
    norm = sum(float(one.square().sum()) for one in gradients[1])
    return {"logits": float((answers[0] - answers[1]).abs().max()), "gradient": (apart / norm) ** 0.5}


def answered(engine: str, tokens: int, sizes: tuple[int, int, int]) -> dict[str, float]:
    """Seconds of processor time for one text, MiB, and the largest difference of a logit from PyTorch's."""
    import torch

    from rtrain.batch import padded
    from rtrain.compress import openvino_graph

    made = network(*sizes, packs=False).eval()
    asked = [
        {name: value for name, value in padded(rows([length]), 0).items() if name != "token_type_ids"}
        for length in (tokens, tokens // 2, 512, 64)
    ]

    def by_torch() -> Any:
        with torch.inference_mode():
            return made(**{name: torch.from_numpy(value) for name, value in asked[0].items()}).logits.numpy()

    if engine == "torch":
        ask = by_torch
    else:
        graph = openvino_graph.export(made, asked[-1])
        ready = graph.calibrated(asked).answering(1) if engine == "int8" else graph.answering(1)

        def ask() -> Any:
            return ready.logits(asked[0])

    begun = _begin()
    found = ask()
    return {**_taken(begun), "apart": float(np.abs(found - by_torch()).max())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="of the longest text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = given.width, given.layers, given.heads
    # One text of the full length; and with it one of half its length, of a quarter, and so on, as texts are.
    passes = {"one": [given.tokens], "uneven": [given.tokens >> place for place in range(5)]}
    works: dict[str, Callable[[], dict[str, float]]] = {
        f"{side} {name}": partial(trained, side, lengths, sizes) for name, lengths in passes.items() for side in SIDES
    }
    works |= {engine: partial(answered, engine, given.tokens, sizes) for engine in ENGINES}
    works["equal"] = partial(equal, [given.tokens, given.tokens // 3], (48, 3, 3))
    if given.one:
        import torch

        torch.set_num_threads(1)
        print(json.dumps(works[given.one]()))
        return

    def ask(name: str) -> dict[str, float]:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.long_texts", *sys.argv[1:], "--one", name],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
            stdout=subprocess.PIPE,
        )
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found

    found: dict[str, Any] = {"load": os.getloadavg(), "sizes": sizes, "passes": passes, "equal": ask("equal")}
    del works["equal"]  # the same every time
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in works}
    for _ in range(given.rounds):
        for name in works:
            taken[name].append(ask(name))
    for name, each in taken.items():
        found[name] = {key: statistics.median(one[key] for one in each) for key in each[0]}
    for name in passes:
        pairs = zip(*(taken[f"{side} {name}"] for side in SIDES[::-1]), strict=True)
        ratios = sorted(padded["seconds"] / packed["seconds"] for padded, packed in pairs)
        found[f"padded over packed, {name}"] = [ratios[0], statistics.median(ratios), ratios[-1]]
    print(json.dumps({**found, "load after": os.getloadavg()}, indent=1))


if __name__ == "__main__":
    main()
