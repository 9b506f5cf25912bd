"""Which number format a run computes in: by the device's own word, decided once."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rtrain.core.errors import ConfigError
from rtrain.core.run_folder import Run
from rtrain.models import precision
from rtrain.models.precision import Native
from rtrain.runs import decisions
from tests.test_exchange_ranks import begun, ended, joined

INTEL = "processor\t: 0\nflags\t\t: fpu sse2 avx2 avx512f {}\nbugs\t\t: none\n\nprocessor\t: 1\nflags\t\t: fpu\n"
ARM = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd {}\nCPU part\t: 0xd40\n"


def processor(*formats: str) -> Native:
    return Native("cpu", frozenset(formats))


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
    assert precision.of_processor(path) == Native("cpu", frozenset(formats))


@pytest.mark.parametrize(
    ("capability", "formats"),
    [((7, 0), {"fp16"}), ((7, 5), {"fp16"}), ((8, 0), {"fp16", "bf16"}), ((9, 0), {"fp16", "bf16"})],
)
def test_a_gpu_computes_what_its_generation_does(capability: tuple[int, int], formats: set[str]) -> None:
    assert precision.of_gpu(capability) == Native("cuda", frozenset(formats))


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
    assert (problem.field, problem.code) == ("train.precision", "unsupported")
    assert precision.problems(wanted, processor(wanted)) == []
    assert precision.problems("auto", processor()) == precision.problems("fp32", processor()) == []


def test_bf16_is_refused_on_a_gpu_that_emulates_it() -> None:
    [problem] = precision.problems("bf16", precision.of_gpu((7, 5)))
    assert problem.code == "unsupported"
    assert precision.problems("fp16", precision.of_gpu((7, 5))) == []
    assert precision.problems("bf16", precision.of_gpu((8, 0))) == []


def test_float64_is_for_processors_alone() -> None:
    assert precision.problems("fp64", processor()) == []
    assert precision.resolve("fp64", processor("bf16")) == "fp64"
    [problem] = precision.problems("fp64", precision.of_gpu((9, 0)))
    assert problem.code == "unsupported"


def test_weights_are_as_wide_as_the_format_and_an_artefact_s_are_not() -> None:
    network = torch.nn.Linear(3, 2)
    precision.widen(network, "bf16")
    assert network.weight.dtype == torch.float32
    before = network.weight.detach().clone()
    precision.widen(network, "fp64")
    assert (network.weight.dtype, network.bias.dtype) == (torch.float64, torch.float64)
    weights = precision.narrowed({**network.state_dict(), "counts": torch.ones(2, dtype=torch.int64)})
    assert {name: one.dtype for name, one in weights.items()} == {
        **{"weight": torch.float32, "bias": torch.float32, "counts": torch.int64}
    }
    assert weights["weight"].equal(before)
    precision.narrow(network)
    assert network.weight.dtype == torch.float32


@pytest.mark.parametrize(("seconds", "chosen"), [(QUICK, "bf16"), (SLOW, "fp32")])
def test_auto_is_bf16_where_its_products_are_no_slower(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds: dict[str, float], chosen: str
) -> None:
    monkeypatch.setattr(precision, "time_product", seconds.get)
    monkeypatch.setattr(precision, "of_processor", lambda: processor("bf16"))
    assert precision.decide(Run(tmp_path), "auto", processor("bf16")) == precision.here("auto") == chosen
    assert precision.here("bf16") == "bf16"  # as it is asked for
    # Decided once: a resume on another processor does not measure again.
    monkeypatch.setattr(precision, "time_product", None)
    assert precision.decide(Run(tmp_path), "auto", processor("bf16")) == chosen
    assert precision.decide(Run(tmp_path), "bf16", processor("bf16")) == chosen


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
        precision.time_product = QUICK.get  # type: ignore[assignment]
        view = folder / f"{run}-{rank}"
        view.mkdir()
        if run == "three" and rank == 0:
            Run(view).decide("precision", "fp16")
        try:
            found.append(decisions.precision(watch, device, Run(view), "auto"))
        except ConfigError as error:
            found.append(error.problems[0].code)
    found.append(str(_fits(rank, watch, folder)))
    watch.stop()
    return found


def _fits(rank: int, watch: Any, folder: Path) -> int | None:
    """What fits into a pass by rank 0's decision, which is in its view alone."""
    run = Run(folder / f"three-{rank}")
    if rank == 0:
        run.decide(decisions.PASS, 4096)
    return decisions.size(watch, run)


def test_workers_that_do_not_see_what_was_decided_compute_in_rank_zero_s_choice_or_refuse(tmp_path: Path) -> None:
    (_, first, errors), (_, second, more) = ended(begun(apart, 2, tmp_path))
    assert first == str(["fp32", "bf16", "fp16", "4096"]), errors
    assert second == str(["fp32", "unsupported", "fp16", "4096"]), more
    assert [Run(tmp_path / f"{run}-0").decisions for run in ("one", "two")] == [
        {"precision": "fp32"},
        {"precision": "bf16"},
    ]
    assert [Run(tmp_path / f"{run}-1").decisions for run in ("one", "two", "three")] == [{}, {}, {}]
