"""Which number format a run computes in: by the processor's own word, decided once."""

import json
from pathlib import Path

import pytest

from rtrain.training import precision

INTEL = "processor\t: 0\nflags\t\t: fpu sse2 avx2 avx512f {}\nbugs\t\t: none\n\nprocessor\t: 1\nflags\t\t: fpu\n"
ARM = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd {}\nCPU part\t: 0xd40\n"


@pytest.mark.parametrize(
    ("text", "native"),
    [
        (INTEL.format("avx512_bf16"), True),
        (INTEL.format("amx_bf16 amx_tile"), True),
        (INTEL.format("avx512_vnni"), False),
        (INTEL.format("noavx512_bf16"), False),  # a whole word, not a part of one
        (ARM.format("bf16"), True),
        (ARM.format("sve"), False),
        ("", False),
        ("model name\t: bf16 avx512_bf16\n", False),
    ],
)
def test_bf16_is_native_where_the_processor_says_so(tmp_path: Path, text: str, native: bool) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert precision.has_native_bf16(path) is native


def test_without_cpuinfo_nothing_is_native(tmp_path: Path) -> None:
    assert precision.has_native_bf16(tmp_path / "none") is False


@pytest.mark.parametrize(
    ("wanted", "native", "chosen"),
    [
        ("auto", True, "bf16"),
        ("auto", False, "fp32"),
        ("fp32", True, "fp32"),
        ("bf16", True, "bf16"),
        ("bf16", False, "bf16"),
    ],
)
def test_auto_is_resolved_by_the_processor(wanted: str, native: bool, chosen: str) -> None:
    assert precision.resolve(wanted, native) == chosen


def test_emulated_bf16_is_refused() -> None:
    [problem] = precision.problems("bf16", native_bf16=False)
    assert str(problem) == (
        "train.precision=bf16: this processor has no native bf16 (avx512_bf16 or amx_bf16); "
        "write train.precision=fp32, or auto to choose by processor"
    )
    assert precision.problems("bf16", native_bf16=True) == []
    assert precision.problems("auto", native_bf16=False) == precision.problems("fp32", native_bf16=False) == []


def test_a_run_keeps_its_first_decision(tmp_path: Path) -> None:
    assert precision.decide(tmp_path, "auto", native_bf16=True) == "bf16"
    assert json.loads((tmp_path / "decisions.json").read_text()) == {"precision": "bf16"}
    assert precision.decide(tmp_path, "auto", native_bf16=False) == "bf16"
    assert precision.decide(tmp_path, "fp32", native_bf16=False) == "bf16"
