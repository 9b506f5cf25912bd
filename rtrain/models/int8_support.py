"""Detection of int8 matrix instructions of this processor."""

import platform
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from rtrain.models.precision import CPUINFO, read_cpu_flags

INSTRUCTION_FLAGS = {"AMX": {"amx_int8"}, "VNNI": {"avx512_vnni", "avx_vnni"}, "dot products": {"asimddp", "i8mm"}}
"""Families of instructions that add four int8 products at once, the fastest first, with the CPU flags of each. The last
families are Arm's."""


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
        "lacks: here "
        "int8 may be slower than the float model"
    )
