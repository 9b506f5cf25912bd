"""Number format of a run: decided once by rank 0, stored in the run, and read by rank 0 of every resume; and int8
instructions of this processor."""

import platform
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from rtrain.core.errors import Problem
from rtrain.core.run_folder import Run

if TYPE_CHECKING:
    import torch

FP64 = "fp64"
"""The format that weights and moments have too."""

CPUINFO = Path("/proc/cpuinfo")
FORMAT_FLAGS = {"bf16": {"avx512_bf16", "amx_bf16", "bf16"}, "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"}}
"""CPU flags of each format; the last of each is Arm's name."""
FORMATS = ("fp32", *FORMAT_FLAGS, FP64)
"""The formats of `train.precision`."""
DECISION_NAME = "precision"
"""Key of the decision in the run folder."""
PRODUCT_SHAPES, TIMING_ROUNDS = ((1024, 384), (1536, 384)), 5
"""A product of a small encoder's layer, which takes some 15 ms, and the number of timings."""
AMPERE = (8, 0)
"""Compute capability of the first GPUs with bf16."""
INSTRUCTION_FLAGS = {"AMX": {"amx_int8"}, "VNNI": {"avx512_vnni", "avx_vnni"}, "dot products": {"asimddp", "i8mm"}}
"""Families of instructions that add four int8 products at once, the fastest first, with the CPU flags of each. The last
families are Arm's."""


@dataclass(frozen=True)
class NativeFormats:
    """Formats that a device computes natively. An emulated format runs at a fraction of fp32's speed: bf16 ran at a
    hundredth on a CPU."""

    device: str
    """`cpu` or `cuda`."""
    formats: frozenset[str]
    slow_formats: frozenset[str] = frozenset()
    """Native formats whose products are slower than in fp32, as `measure_slow_formats` finds."""


def cpu_formats(cpuinfo: Path = CPUINFO) -> NativeFormats:
    flags = read_cpu_flags(cpuinfo)
    return NativeFormats("cpu", frozenset(name for name, names in FORMAT_FLAGS.items() if flags & names))


def read_cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Native formats of the CPU by its flags; empty if the system is not Linux."""
    for line in cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []:
        if line.lower().startswith(("flags", "features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def gpu_formats(capability: tuple[int, int]) -> NativeFormats:
    """Native formats of a GPU by compute capability. Every GPU that torch supports computes fp16."""
    return NativeFormats("cuda", frozenset({"fp16", "bf16"} if capability >= AMPERE else {"fp16"}))


def device_formats(device: "torch.device") -> NativeFormats:
    """Native formats of a worker's device."""
    import torch

    return gpu_formats(torch.cuda.get_device_capability(device)) if device.type == "cuda" else cpu_formats()


def measure_slow_formats(native: NativeFormats) -> NativeFormats:
    """Measure which native formats of a CPU are slower than fp32. An Intel Xeon with avx512_bf16 and
    without AMX computes 82 billion bf16 operations a second and 151 billion in fp32. GPUs are not measured."""
    if native.device != "cpu" or "bf16" not in native.formats:
        return native
    return replace(
        native, slow_formats=frozenset({"bf16"} if time_product("bfloat16") > time_product("float32") else ())
    )


@cache
def time_product(dtype: str) -> float:
    """Shortest processor time of a layer's product over several runs, nearly independent of other load."""
    import torch

    inputs, weights = (torch.ones(*size, dtype=getattr(torch, dtype)) for size in PRODUCT_SHAPES)
    seconds = []
    for _ in range(TIMING_ROUNDS):
        start = time.process_time()
        torch.nn.functional.linear(inputs, weights)
        seconds.append(time.process_time() - start)
    return min(seconds)


def resolve_precision(requested: str, native: NativeFormats) -> str:
    """Resolve `auto`: bf16 if the device computes it at least as fast as fp32, since it needs no loss scaling;
    otherwise fp16 on a GPU and fp32 on a CPU."""
    if requested != "auto":
        return requested
    return "bf16" if "bf16" in native.formats - native.slow_formats else "fp16" if native.device == "cuda" else "fp32"


def check_precision(requested: str, native: NativeFormats) -> list[Problem]:
    if requested == FP64 and native.device == "cuda":
        reason = "is for comparisons on CPUs: most GPUs compute it at a small fraction of their speed"
        fix = "write train.device=cpu beside it, or another format"
        return [Problem("train.precision", requested, reason, fix, code="unsupported")]
    if requested not in FORMAT_FLAGS or requested in native.formats:
        return []
    if native.device == "cuda":
        reason = f"this GPU has no native {requested} (compute capability {AMPERE[0]}.{AMPERE[1]})"
        fix = "write train.precision=fp16, or auto to choose by GPU"
        return [Problem("train.precision", requested, reason, fix, code="unsupported")]
    reason = f"this processor has no native {requested} (avx512_{requested} or amx_{requested})"
    fix = "write train.precision=fp32, or auto to choose by processor"
    return [Problem("train.precision", requested, reason, fix, code="unsupported")]


def check_local_precision(requested: str) -> list[Problem]:
    """Problems that can be found before the workers start. This machine's CPU is not checked if it has a GPU."""
    problems = check_precision(requested, cpu_formats())
    if problems:
        import torch

        if torch.cuda.is_available():
            return []
    return problems


def local_precision(requested: str) -> str:
    native = cpu_formats()
    return resolve_precision(requested, measure_slow_formats(native) if requested == "auto" else native)


def decide_precision(run: Run, requested: str, native: NativeFormats) -> str:
    """The precision of the run: an earlier decision, or the choice for this device, which is stored."""
    if requested == "auto" and DECISION_NAME not in run.decisions:
        native = measure_slow_formats(native)
    return str(run.decide_once(DECISION_NAME, resolve_precision(requested, native)))


def to_fp64_(network: "torch.nn.Module", precision: str) -> None:
    """Convert a network to fp64 in place for a run in fp64, so that its forward passes and the optimizer's moments are
    in fp64."""
    if precision == FP64:
        for tensor in (*network.parameters(), *network.buffers()):
            if tensor.is_floating_point():
                tensor.data = (
                    tensor.data.double()
                )  # network.double() swaps whole tensors, which fake tensors do not support


def to_fp32_(network: "torch.nn.Module") -> None:
    """Convert fp64 weights to fp32 in place, as an artifact's configuration states."""
    import torch

    if any(parameter.dtype == torch.float64 for parameter in network.parameters()):
        network.float()


def as_fp32(weights: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Weights in fp32, the format of artifacts."""
    import torch

    return {name: tensor.float() if tensor.dtype == torch.float64 else tensor for name, tensor in weights.items()}


@dataclass(frozen=True)
class Int8Support:
    instructions: tuple[str, ...]
    """Supported families of `INSTRUCTION_FLAGS`, the fastest first."""
    is_known: bool = True
    """Whether the flags of the processor are known."""

    @property
    def summary(self) -> str:
        if self.instructions:
            return f"processor: int8 by {' and '.join(self.instructions)}"
        if not self.is_known:
            return "processor: unknown; the gate has measured what int8 costs here"
        return (
            "processor: neither VNNI nor AMX, so int8 products are widened before they are added: expect little or no "
            "speed of int8 here; the gate has measured it. A processor with VNNI serves the same artifact faster"
        )


def int8_support_from_flags(flags: Collection[str]) -> Int8Support:
    """Detect the instruction families in a processor's flags from /proc/cpuinfo; empty flags mean unknown. Pure."""
    return Int8Support(
        tuple(name for name, names in INSTRUCTION_FLAGS.items() if names.intersection(flags)), is_known=bool(flags)
    )


def detect_int8(cpuinfo: Path = CPUINFO) -> Int8Support:
    return int8_support_from_flags(read_cpu_flags(cpuinfo))


def read_cpu_name(cpuinfo: Path = CPUINFO) -> str:
    """Name of this machine's processor, as the operating system reports it."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:  # not on Linux
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def slower_latency_warning(measured_instructions: Sequence[str] | None, local_support: Int8Support) -> str | None:
    """A note about a latency that was measured with instructions which this processor lacks; None if the latency may be
    the same. Pure. `measured_instructions`: None if unknown."""
    if not measured_instructions or not local_support.is_known or local_support.instructions:
        return None
    return (
        f"its latency was measured by a processor with int8 by {' and '.join(measured_instructions)}, which this one "
        "lacks: here int8 may be slower than the float model"
    )
