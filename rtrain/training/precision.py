"""Which number format a run computes in: decided once, kept in the run, read by every rank and every resume."""

import json
from pathlib import Path

from rtrain.errors import Problem

NAME = "decisions.json"
_NATIVE = {"avx512_bf16", "amx_bf16", "bf16"}  # the last is Arm's name


def has_native_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor computes bf16. Where it only emulates it, bf16 was seen at a hundredth of fp32's speed."""
    if not cpuinfo.is_file():
        return False
    flags: set[str] = set()
    for line in cpuinfo.read_text().splitlines():
        if line.lower().startswith(("flags", "features")):
            flags = set(line.partition(":")[2].split())
            break
    return bool(flags & _NATIVE)


def resolve(wanted: str, native_bf16: bool) -> str:
    if wanted == "auto":
        return "bf16" if native_bf16 else "fp32"
    return wanted


def problems(wanted: str, native_bf16: bool) -> list[Problem]:
    if wanted == "bf16" and not native_bf16:
        fix = "write train.precision=fp32, or auto to choose by processor"
        return [Problem("train.precision", wanted, "this processor has no native bf16 (avx512_bf16 or amx_bf16)", fix)]
    return []


def decide(run: Path, wanted: str, native_bf16: bool) -> str:
    """The run's precision: what was decided before, else what fits this machine, which is then kept."""
    path = run / NAME
    if path.is_file():
        return str(json.loads(path.read_text())["precision"])
    chosen = resolve(wanted, native_bf16)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({"precision": chosen}))
    draft.rename(path)  # at once: another rank may read it at any moment
    return chosen
