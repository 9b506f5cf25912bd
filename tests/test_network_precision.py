"""Which number format a run computes in: by the device's own word, decided once."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rtrain.errors import ConfigError
from rtrain.network import precision
from rtrain.network.precision import Native
from rtrain.run import Run
from rtrain.runs import agreed
from tests.test_exchange_ranks import begun, ended, joined

INTEL = "processor\t: 0\nflags\t\t: fpu sse2 avx2 avx512f {}\nbugs\t\t: none\n\nprocessor\t: 1\nflags\t\t: fpu\n"
ARM = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd {}\nCPU part\t: 0xd40\n"


def processor(*formats: str) -> Native:
    return Native("cpu", frozenset(formats))


@pytest.mark.parametrize(
    ("text", "formats"),
    [
        (INTEL.format("avx512_bf16"), {"bf16"}),
        (INTEL.format("amx_bf16 amx_tile"), {"bf16"}),
        (INTEL.format("avx512_vnni"), set()),
        (INTEL.format("noavx512_bf16"), set()),  # a whole word, not a part of one
        (INTEL.format("avx512_fp16 amx_bf16"), {"bf16", "fp16"}),
        (INTEL.format("amx_fp16"), {"fp16"}),
        (ARM.format("bf16"), {"bf16"}),
        (ARM.format("asimdhp bf16"), {"bf16", "fp16"}),
        (ARM.format("sve"), set()),
        ("", set()),
        ("model name\t: bf16 avx512_bf16\n", set()),
    ],
)
def test_a_format_is_native_where_the_processor_says_so(tmp_path: Path, text: str, formats: set[str]) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert precision.of_processor(path) == Native("cpu", frozenset(formats))


def test_without_cpuinfo_nothing_is_native(tmp_path: Path) -> None:
    assert precision.of_processor(tmp_path / "none") == processor()


@pytest.mark.parametrize(
    ("capability", "formats"),
    [((7, 0), {"fp16"}), ((7, 5), {"fp16"}), ((8, 0), {"fp16", "bf16"}), ((9, 0), {"fp16", "bf16"})],
)
def test_a_gpu_computes_what_its_generation_does(capability: tuple[int, int], formats: set[str]) -> None:
    assert precision.of_gpu(capability) == Native("cuda", frozenset(formats))


def test_a_worker_on_a_processor_asks_it() -> None:
    assert precision.of(torch.device("cpu")) == precision.of_processor()


@pytest.mark.parametrize(
    ("wanted", "native", "chosen"),
    [
        ("auto", processor("bf16"), "bf16"),
        ("auto", processor(), "fp32"),
        ("auto", processor("fp16"), "fp32"),
        ("auto", precision.of_gpu((7, 5)), "fp16"),
        ("auto", precision.of_gpu((8, 0)), "bf16"),
        ("fp32", processor("bf16"), "fp32"),
        ("bf16", processor("bf16"), "bf16"),
        ("bf16", processor(), "bf16"),
        ("fp16", precision.of_gpu((9, 0)), "fp16"),
    ],
)
def test_auto_is_resolved_by_the_device(wanted: str, native: Native, chosen: str) -> None:
    assert precision.resolve(wanted, native) == chosen


@pytest.mark.parametrize("wanted", ["bf16", "fp16"])
def test_formats_that_a_processor_emulates_are_refused(wanted: str) -> None:
    [problem] = precision.problems(wanted, processor())
    assert str(problem) == (
        f"train.precision={wanted}: this processor has no native {wanted} (avx512_{wanted} or amx_{wanted}); "
        "write train.precision=fp32, or auto to choose by processor"
    )
    assert precision.problems(wanted, processor(wanted)) == []
    assert precision.problems("auto", processor()) == precision.problems("fp32", processor()) == []


def test_bf16_is_refused_on_a_gpu_that_emulates_it() -> None:
    [problem] = precision.problems("bf16", precision.of_gpu((7, 5)))
    assert str(problem) == (
        "train.precision=bf16: this GPU has no native bf16 (compute capability 8.0); "
        "write train.precision=fp16, or auto to choose by GPU"
    )
    assert precision.problems("fp16", precision.of_gpu((7, 5))) == []
    assert precision.problems("bf16", precision.of_gpu((8, 0))) == []


def test_a_processor_is_not_asked_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "of_processor", processor)
    for gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        assert len(precision.refused_here("fp16")) == (not gpu)
        assert precision.refused_here("auto") == []


def test_a_run_keeps_its_first_decision(tmp_path: Path) -> None:
    assert precision.decide(Run(tmp_path), "auto", processor("bf16")) == "bf16"
    assert json.loads((tmp_path / "decisions.json").read_text()) == {"precision": "bf16"}
    assert precision.decide(Run(tmp_path), "auto", processor()) == "bf16"
    assert precision.decide(Run(tmp_path), "fp32", processor()) == "bf16"


def test_a_decision_leaves_the_others_alone(tmp_path: Path) -> None:
    assert Run(tmp_path).decisions == {}
    assert Run(tmp_path).decide("tokens_per_pass", 4096) == 4096
    assert precision.decide(Run(tmp_path), "auto", processor()) == "fp32"
    assert Run(tmp_path).decide("tokens_per_pass", 1024) == 4096
    assert Run(tmp_path).decisions == {"tokens_per_pass": 4096, "precision": "fp32"}


# ------------------------------------------------------------------------------------------------------ several workers

KINDS = ((), ("bf16",))
"""What the processors of ranks 0 and 1 compute by themselves."""


def apart(rank: int, world: int, folder: Path) -> list[str]:
    """In a process of its own: what a rank computes in whose view of the run folder is its own, as of a mounted one
    that still hides the file that rank 0 wrote; in three runs, of which the last was decided by an earlier start."""
    watch = joined(rank, world, folder)
    found: list[str] = []
    device = torch.device("cpu")
    for run, kinds in (("one", KINDS), ("two", KINDS[::-1]), ("three", (("bf16", "fp16"), ("bf16", "fp16")))):
        precision.of = lambda device, kinds=kinds: processor(*kinds[rank])  # type: ignore[misc]
        view = folder / f"{run}-{rank}"
        view.mkdir()
        if run == "three" and rank == 0:
            Run(view).decide("precision", "fp16")
        try:
            found.append(agreed.precision(watch, device, Run(view), "auto"))
        except ConfigError as error:
            found.append(str(error.problems[0]))
    found.append(str(_fits(rank, watch, folder)))
    watch.stop()
    return found


def _fits(rank: int, watch: Any, folder: Path) -> int | None:
    """What fits into a pass by rank 0's decision, which is in its view alone."""
    run = Run(folder / f"three-{rank}")
    if rank == 0:
        run.decide(agreed.PASS, 4096)
    return agreed.known_pass(watch, run)


def test_workers_that_do_not_see_what_was_decided_compute_in_rank_zero_s_choice_or_refuse(tmp_path: Path) -> None:
    (_, first, errors), (_, second, more) = ended(begun(apart, 2, tmp_path))
    assert first == str(["fp32", "bf16", "fp16", "4096"]), errors
    refused = "train.precision=bf16: this processor has no native bf16"
    assert second.startswith(f"['fp32', '{refused}"), more
    assert second.endswith("'fp16', '4096']")
    assert [Run(tmp_path / f"{run}-0").decisions for run in ("one", "two")] == [
        {"precision": "fp32"},
        {"precision": "bf16"},
    ]
    assert [Run(tmp_path / f"{run}-1").decisions for run in ("one", "two", "three")] == [{}, {}, {}]
