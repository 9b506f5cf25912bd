"""Whether this processor multiplies int8 matrices by instructions of its own."""

import platform
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from rtrain.models.precision import CPUINFO, flags_of

FLAGS = {"AMX": {"amx_int8"}, "VNNI": {"avx512_vnni", "avx_vnni"}, "dot products": {"asimddp", "i8mm"}}
"""Families of instructions that add four products of int8 at once, the fastest first, with the flags by which a
processor says that it has them; the last are Arm's."""


@dataclass(frozen=True)
class Int8:
    instructions: tuple[str, ...]
    """Those of `FLAGS` that it has, the fastest first."""
    known: bool = True
    """Whether the processor could be asked."""

    @property
    def text(self) -> str:
        if self.instructions:
            return f"processor: int8 by {' and '.join(self.instructions)}"
        if not self.known:
            return "processor: unknown; the gate has measured what int8 costs here"
        return (
            "processor: neither VNNI nor AMX, so int8 products are widened before they are added: expect little or no "
            "speed of int8 here; the gate has measured it. A processor with VNNI serves the same artefact faster"
        )


def of_flags(flags: Collection[str]) -> Int8:
    """By the flags of a processor, as /proc/cpuinfo has them; none: it could not be asked. Pure."""
    return Int8(tuple(name for name, names in FLAGS.items() if names.intersection(flags)), known=bool(flags))


def of_processor(cpuinfo: Path = CPUINFO) -> Int8:
    return of_flags(flags_of(cpuinfo))


def processor(cpuinfo: Path = CPUINFO) -> str:
    """The name of this machine's processor, as its system tells it."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:  # not on Linux
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def slower_here(measured: Sequence[str] | None, here: Int8) -> str | None:
    """What is to be said of a latency that was measured on a processor with the instructions `measured` (None: nobody
    knows), where `here` has none of them; None where it may be as it was. Pure."""
    if not measured or not here.known or here.instructions:
        return None
    return (
        f"its latency was measured by a processor with int8 by {' and '.join(measured)}, which this one lacks: here "
        "int8 may be slower than the float model"
    )
