"""The section `needs`: versions, the device, and the needed packages that are missing."""

import importlib.metadata
import importlib.util
import inspect
import platform
from typing import Any

from benchmarks.gpu.bench import PEAKS, Bench

NEEDED = (
    "torch",
    "transformers",
    "numpy",
    "scipy",
    "pyarrow",
    "pydantic",
    "PyYAML",
    "tokenizers",
    "safetensors",
    "regex",
)
ELSE = ("accelerate", "flash_attn", "openvino", "triton", "ray")
"""Packages that are used if they are installed; rtrain's training must do without the last."""


def version(name: str) -> str | None:
    """A package's version; None if the package cannot be imported, even if it is installed."""
    if importlib.util.find_spec({"PyYAML": "yaml"}.get(name, name)) is None:
        return None
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "without a version"


def run(bench: Bench) -> None:
    report = bench.report
    missing = [name for name in NEEDED if version(name) is None]
    found: dict[str, Any] = {name: version(name) for name in (*NEEDED, *ELSE)}
    report.line("packages", not missing, missing=missing, python=platform.python_version(), **found)
    if "torch" in missing:
        return
    import torch

    with report.attempt("device"):
        if bench.gpu:
            facts = torch.cuda.get_device_properties(0)
            report.line(
                "device",
                facts.name,
                capability=f"{facts.major}.{facts.minor}",
                memory_gb=round(facts.total_memory / 1e9, 1),
                processors=facts.multi_processor_count,
                cuda=torch.version.cuda,
                known_peak=any(part in facts.name for part in PEAKS),
            )
        else:
            report.line("device", "cpu", threads=torch.get_num_threads())
    with report.attempt("precision"):
        report.line("precision", bench.precision, note="what `auto` comes to")
    with report.attempt("varlen_attn"):
        from torch.nn.attention.varlen import varlen_attn

        taken = inspect.signature(varlen_attn).parameters
        report.line("varlen_attn", "scale" in taken, parameters=list(taken))
    with report.attempt("rtrain"):
        from rtrain.checkpoints import checkpoint
        from rtrain.network import model
        from rtrain.training import evaluate, loop, pass_size, step

        rooms = (checkpoint, evaluate, loop, pass_size, model, step)
        report.line("rtrain", True, imported=[room.__name__ for room in rooms])
    with report.attempt("model"):
        from rtrain.tasks import base

        network: Any = model.build(bench.model, base.get("classification"), ("a", "b"), 0)
        count = sum(one.numel() for one in network.parameters())
        report.line("model", count, "weights", note="carried in fp16, widened to fp32")
    with report.attempt("stores"):
        for name in ("banking77", "squadshifts"):
            made = bench.store(name).manifest
            report.line(f"store.{name}", made.rows["train"], "rows", rows=made.rows, tokens=made.tokens)
