"""Which number format a run computes in: decided once by rank 0, kept in the run, read by rank 0 of every resume."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from rtrain.core.errors import Problem
from rtrain.core.run_folder import Run

if TYPE_CHECKING:
    import torch

WIDE = "fp64"
"""The format that weights and moments have too."""

CPUINFO = Path("/proc/cpuinfo")
FLAGS = {"bf16": {"avx512_bf16", "amx_bf16", "bf16"}, "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"}}
"""Flags by which a processor says that it computes a format; the last of each is Arm's name."""
FORMATS = ("fp32", *FLAGS, WIDE)
"""The formats that a run may compute in."""
NAME = "precision"
"""The name under which a run keeps the decision."""
PRODUCT, ROUNDS = ((1024, 384), (1536, 384)), 5
"""A product of a small encoder's layer, which takes some 15 ms, and how often it is timed."""
AMPERE = (8, 0)
"""The compute capability of the first GPUs that compute bf16."""


@dataclass(frozen=True)
class Native:
    """The formats that a device computes by itself. An emulated format runs at a fraction of fp32's speed: on a CPU
    bf16 was seen at a hundredth."""

    device: str
    """`cpu` or `cuda`."""
    formats: frozenset[str]
    slower: frozenset[str] = frozenset()
    """Those of them in which products take longer than in fp32, as `measured`."""


def of_processor(cpuinfo: Path = CPUINFO) -> Native:
    flags = flags_of(cpuinfo)
    return Native("cpu", frozenset(name for name, names in FLAGS.items() if flags & names))


def flags_of(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """What the processor says that it has; empty where it is not Linux that asks it."""
    for line in cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []:
        if line.lower().startswith(("flags", "features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def of_gpu(capability: tuple[int, int]) -> Native:
    """The formats of a GPU with that compute capability. Every GPU that torch still runs on computes fp16."""
    return Native("cuda", frozenset({"fp16", "bf16"} if capability >= AMPERE else {"fp16"}))


def of(device: "torch.device") -> Native:
    """What the device of a worker computes."""
    import torch

    return of_gpu(torch.cuda.get_device_capability(device)) if device.type == "cuda" else of_processor()


def measured(native: Native) -> Native:
    """The same, and whether this processor's products take longer in bf16 than in fp32, as on an Intel Xeon that has
    avx512_bf16 and no AMX: 82 of 151 billion operations a second. A GPU is not asked."""
    if native.device != "cpu" or "bf16" not in native.formats:
        return native
    return replace(native, slower=frozenset({"bf16"} if time_product("bfloat16") > time_product("float32") else ()))


@cache
def time_product(kind: str) -> float:
    """Processor time of a layer's product, the least of some: other work of the machine hardly changes it."""
    import torch

    inputs, weights = (torch.ones(*size, dtype=getattr(torch, kind)) for size in PRODUCT)
    found = []
    for _ in range(ROUNDS):
        start = time.process_time()
        torch.nn.functional.linear(inputs, weights)
        found.append(time.process_time() - start)
    return min(found)


def resolve(wanted: str, native: Native) -> str:
    """`auto` is bf16 where the device computes it, no slower than fp32, since it needs no loss scaling; else fp16 on a
    GPU, fp32 on a CPU."""
    if wanted != "auto":
        return wanted
    return "bf16" if "bf16" in native.formats - native.slower else "fp16" if native.device == "cuda" else "fp32"


def problems(wanted: str, native: Native) -> list[Problem]:
    if wanted == WIDE and native.device == "cuda":
        reason = "is for comparisons on CPUs: most GPUs compute it at a small fraction of their speed"
        fix = "write train.device=cpu beside it, or another format"
        return [Problem("train.precision", wanted, reason, fix, code="unsupported")]
    if wanted not in FLAGS or wanted in native.formats:
        return []
    if native.device == "cuda":
        reason = f"this GPU has no native {wanted} (compute capability {AMPERE[0]}.{AMPERE[1]})"
        fix = "write train.precision=fp16, or auto to choose by GPU"
        return [Problem("train.precision", wanted, reason, fix, code="unsupported")]
    reason = f"this processor has no native {wanted} (avx512_{wanted} or amx_{wanted})"
    fix = "write train.precision=fp32, or auto to choose by processor"
    return [Problem("train.precision", wanted, reason, fix, code="unsupported")]


def refused_here(wanted: str) -> list[Problem]:
    """What can be said before the workers start: this machine's processor is not asked where it has a GPU."""
    found = problems(wanted, of_processor())
    if found:
        import torch

        if torch.cuda.is_available():
            return []
    return found


def here(wanted: str) -> str:
    """What a run would compute in on this machine's processor."""
    native = of_processor()
    return resolve(wanted, measured(native) if wanted == "auto" else native)


def decide(run: Run, wanted: str, native: Native) -> str:
    """The run's precision: what was decided before, else what fits this device, which is then kept."""
    if wanted == "auto" and NAME not in run.decisions:
        native = measured(native)
    return str(run.decide(NAME, resolve(wanted, native)))


def widen(network: "torch.nn.Module", chosen: str) -> None:
    """Have a network's weights, and so its passes and the optimizer's moments, in the format that a run computes in,
    where that is a wider one than fp32."""
    if chosen == WIDE:
        for one in (*network.parameters(), *network.buffers()):
            if one.is_floating_point():
                one.data = one.data.double()  # network.double() swaps whole tensors, which fake ones do not bear


def narrow(network: "torch.nn.Module") -> None:
    """Have weights that are wider in fp32, as an artefact's configuration says that they are."""
    import torch

    if any(one.dtype == torch.float64 for one in network.parameters()):
        network.float()


def narrowed(weights: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Weights as an artefact has them: in fp32."""
    import torch

    return {name: one.float() if one.dtype == torch.float64 else one for name, one in weights.items()}
