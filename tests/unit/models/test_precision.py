"""Which number format a run computes in: by the device's own word, decided once."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rtrain.core.errors import ConfigError
from rtrain.core.run_folder import Run
from rtrain.models import precision
from rtrain.models.precision import NativeFormats
from rtrain.runs import worker
from tests.unit.parallel.test_collectives import ended, join_group, start_group

INTEL = "processor\t: 0\nflags\t\t: fpu sse2 avx2 avx512f {}\nbugs\t\t: none\n\nprocessor\t: 1\nflags\t\t: fpu\n"
ARM = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd {}\nCPU part\t: 0xd40\n"


def processor(*formats: str) -> NativeFormats:
    return NativeFormats("cpu", frozenset(formats))


QUICK, SLOW = {"bfloat16": 1.0, "float32": 1.5}, {"bfloat16": 1.5, "float32": 1.0}
"""Seconds of a product on two kinds of processors that compute bf16."""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """This processor's products are quicker in bf16."""
    monkeypatch.setattr(precision, "time_product", QUICK.get)


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
    assert precision.cpu_formats(path) == NativeFormats("cpu", frozenset(formats))


@pytest.mark.parametrize(
    ("capability", "formats"),
    [((7, 0), {"fp16"}), ((7, 5), {"fp16"}), ((8, 0), {"fp16", "bf16"}), ((9, 0), {"fp16", "bf16"})],
)
def test_a_gpu_computes_what_its_generation_does(capability: tuple[int, int], formats: set[str]) -> None:
    assert precision.gpu_formats(capability) == NativeFormats("cuda", frozenset(formats))


@pytest.mark.parametrize(
    ("requested", "native", "expected"),
    [
        ("auto", processor("bf16"), "bf16"),
        ("auto", processor(), "fp32"),
        ("auto", processor("fp16"), "fp32"),
        ("auto", precision.gpu_formats((7, 5)), "fp16"),
        ("auto", precision.gpu_formats((8, 0)), "bf16"),
        ("fp32", processor("bf16"), "fp32"),
        ("bf16", processor("bf16"), "bf16"),
        ("bf16", processor(), "bf16"),
        ("fp16", precision.gpu_formats((9, 0)), "fp16"),
    ],
)
def test_auto_is_resolved_by_the_device(requested: str, native: NativeFormats, expected: str) -> None:
    assert precision.resolve_precision(requested, native) == expected


@pytest.mark.parametrize("requested", ["bf16", "fp16"])
def test_formats_that_a_processor_emulates_are_refused(requested: str) -> None:
    [problem] = precision.check_precision(requested, processor())
    assert (problem.field, problem.code) == ("train.precision", "unsupported")
    assert precision.check_precision(requested, processor(requested)) == []
    assert precision.check_precision("auto", processor()) == precision.check_precision("fp32", processor()) == []


def test_bf16_is_refused_on_a_gpu_that_emulates_it() -> None:
    [problem] = precision.check_precision("bf16", precision.gpu_formats((7, 5)))
    assert problem.code == "unsupported"
    assert precision.check_precision("fp16", precision.gpu_formats((7, 5))) == []
    assert precision.check_precision("bf16", precision.gpu_formats((8, 0))) == []


def test_float64_is_for_processors_alone() -> None:
    assert precision.check_precision("fp64", processor()) == []
    assert precision.resolve_precision("fp64", processor("bf16")) == "fp64"
    [problem] = precision.check_precision("fp64", precision.gpu_formats((9, 0)))
    assert problem.code == "unsupported"


def test_weights_are_as_wide_as_the_format_and_an_artefact_s_are_not() -> None:
    network = torch.nn.Linear(3, 2)
    precision.to_fp64_(network, "bf16")
    assert network.weight.dtype == torch.float32
    before = network.weight.detach().clone()
    precision.to_fp64_(network, "fp64")
    assert (network.weight.dtype, network.bias.dtype) == (torch.float64, torch.float64)
    weights = precision.as_fp32({**network.state_dict(), "counts": torch.ones(2, dtype=torch.int64)})
    assert {name: item.dtype for name, item in weights.items()} == {
        **{"weight": torch.float32, "bias": torch.float32, "counts": torch.int64}
    }
    assert weights["weight"].equal(before)
    precision.to_fp32_(network)
    assert network.weight.dtype == torch.float32


@pytest.mark.parametrize(("seconds", "expected"), [(QUICK, "bf16"), (SLOW, "fp32")])
def test_auto_is_bf16_where_its_products_are_no_slower(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds: dict[str, float], expected: str
) -> None:
    monkeypatch.setattr(precision, "time_product", seconds.get)
    monkeypatch.setattr(precision, "cpu_formats", lambda: processor("bf16"))
    assert (
        precision.decide_precision(Run(tmp_path), "auto", processor("bf16"))
        == precision.local_precision("auto")
        == expected
    )
    assert precision.local_precision("bf16") == "bf16"  # as it is asked for
    # Decided once: a resume on another processor does not measure again.
    monkeypatch.setattr(precision, "time_product", None)
    assert precision.decide_precision(Run(tmp_path), "auto", processor("bf16")) == expected
    assert precision.decide_precision(Run(tmp_path), "bf16", processor("bf16")) == expected


# ------------------------------------------------------------------------------------------------------ several workers

KINDS = ((), ("bf16",))
"""The choices of the processors of ranks 0 and 1."""


def decide_in_process(rank: int, world: int, folder: Path) -> list[str]:
    """In a process: the choice of a rank with its own view of the run folder, like a mounted folder
    that still hides rank 0's file; in three runs. An earlier attempt decided the last one."""
    watch = join_group(rank, world, folder)
    actual: list[str] = []
    device = torch.device("cpu")
    for run, kinds in (("one", KINDS), ("two", KINDS[::-1]), ("three", (("bf16", "fp16"), ("bf16", "fp16")))):
        precision.device_formats = lambda device, kinds=kinds: processor(*kinds[rank])  # type: ignore[misc]
        precision.time_product = QUICK.get  # type: ignore[assignment]
        view = folder / f"{run}-{rank}"
        view.mkdir()
        if run == "three" and rank == 0:
            Run(view).decide_once("precision", "fp16")
        try:
            actual.append(worker.decide_precision(watch, device, Run(view), "auto"))
        except ConfigError as error:
            actual.append(error.problems[0].code)
    actual.append(str(_fits(rank, watch, folder)))
    watch.stop()
    return actual


def _fits(rank: int, watch: Any, folder: Path) -> int | None:
    """What fits into a pass by rank 0's decision, which is in its view alone."""
    run = Run(folder / f"three-{rank}")
    if rank == 0:
        run.decide_once(worker.MICRO_BATCH_TOKENS_KEY, 4096)
    return worker.load_micro_batch_tokens(watch, run)


def test_workers_that_do_not_see_what_was_decided_compute_in_rank_zero_s_choice_or_refuse(tmp_path: Path) -> None:
    (_, first, errors), (_, second, more) = ended(start_group(decide_in_process, 2, tmp_path))
    assert first == str(["fp32", "bf16", "fp16", "4096"]), errors
    assert second == str(["fp32", "unsupported", "fp16", "4096"]), more
    assert [Run(tmp_path / f"{run}-0").decisions for run in ("one", "two")] == [
        {"precision": "fp32"},
        {"precision": "bf16"},
    ]
    assert [Run(tmp_path / f"{run}-1").decisions for run in ("one", "two", "three")] == [{}, {}, {}]
