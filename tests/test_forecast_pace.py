"""How fast a worker computes, by the log of a finished run."""

from dataclasses import replace
from pathlib import Path

import pytest

from rtrain import config as configuration, events
from rtrain.doctor.forecast import facts, pace
from rtrain.doctor.forecast.links import PRESETS, Link
from rtrain.errors import UserError
from rtrain.run import Run
from tests.test_forecast_plan import configured
from tests.tiny import make_encoder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


def test_a_finished_run_tells_its_pace(tmp_path: Path, encoder: Path) -> None:
    """50 updates of 8 rows in 20 s, on one worker: the pace by which the same run is foretold to take as long."""
    run = Run(tmp_path / "run")
    run.folder.mkdir()
    config = configured(model__name=str(encoder), train__workers=1, train__rows_per_update=8)
    run.config.write_text(configuration.to_yaml(config))
    started = {"update": 0, "of": 50, "workers": 1, "device": "cpu", "precision": "fp32", "rows_per_update": 8}
    events.append(run.folder, "started", **started)
    with pytest.raises(UserError, match="has not come to its end"):
        pace.of_run(run)
    events.append(
        run.folder, "trained", updates=50, rows_seen=400, real_tokens=400 * 20, seconds={"train": 20.0}, exchange=None
    )
    seen = pace.of_run(run)
    assert (seen.update_s, seen.workers) == (0.4, 1)
    shape = facts.of_model(encoder)
    work = pace.work(config.recipe, shape, facts.given(1, 20))
    assert seen.pace.compute(work).seconds(pace.passes(config.recipe, 1)) == pytest.approx(0.4, rel=0.01)
    # The run goes on for ten updates: each start counts its own seconds and rows.
    events.append(run.folder, "started", **{**started, "update": 50})
    last = {"updates": 60, "rows_seen": 80, "real_tokens": 80 * 20, "seconds": {"train": 4.0}, "exchange": None}
    events.append(run.folder, "trained", **last)
    assert pace.of_run(run) == seen
    # How unequal its passes were, of each worker.
    spreads = [{"spread": 0.03}, {"spread": 0.05}]
    events.append(run.folder, "started", **{**started, "update": 50})
    events.append(run.folder, "trained", **last, stages=spreads)
    assert pace.of_run(run).pace == replace(seen.pace, spread=0.04)


@pytest.mark.parametrize(("device", "link"), [("cpu", pace.HOST), ("NVIDIA A100-SXM4-40GB", None)])
def test_a_run_on_one_gpu_tells_nothing_of_how_several_exchange(
    tmp_path: Path, encoder: Path, device: str, link: Link | None
) -> None:
    """That is by the links of the planned nodes' GPUs; processes on a machine's processors have its sockets."""
    run = Run(tmp_path / "run")
    run.folder.mkdir()
    run.config.write_text(configuration.to_yaml(configured(model__name=str(encoder), train__workers=1)))
    events.append(run.folder, "started", update=0, of=50, workers=1, device=device, precision="bf16")
    told = {"rows_seen": 400, "real_tokens": 8000, "seconds": {"train": 20.0}, "exchange": None}
    events.append(run.folder, "trained", updates=50, **told)
    found = pace.of_run(run).pace
    assert found.exchange == link
    inside = pace.wires(found, None if link else "A100", 8, 0, 8).inside
    assert inside == (link or PRESETS["nvlink"])


def test_the_pace_of_a_run_that_computes_layers_again_is_that_of_its_processor(tmp_path: Path, encoder: Path) -> None:
    """In the same seconds it has made one forward pass more, a third of the others' products."""
    found = list[pace.Pace]()
    for name, again in (("plain", False), ("again", True)):
        run = Run(tmp_path / name)
        run.folder.mkdir()
        settings = {"model__name": str(encoder), "train__workers": 1, "train__gradient_checkpointing": again}
        run.config.write_text(configuration.to_yaml(configured(**settings)))
        events.append(run.folder, "started", update=0, of=50, workers=1, device="cpu", precision="fp32")
        told = {"rows_seen": 400, "real_tokens": 8000, "seconds": {"train": 20.0}, "exchange": None}
        events.append(run.folder, "trained", updates=50, **told)
        found.append(pace.of_run(run).pace)
    assert found[1].flops_per_s == pytest.approx(4 / 3 * found[0].flops_per_s)


def test_a_gpu_that_no_table_has_is_no_processor() -> None:
    """It is taken for an A10G, and fp32 for what it is on each: TF32 is off."""
    unknown, known = pace.assumed("g5.xlarge"), pace.assumed("A10G")
    assert (unknown.flops_per_s, unknown.memory_per_s, unknown.exchange) == (0.3 * 70e12, 0.8 * 600e9, None)
    assert unknown == replace(known, why=unknown.why)
    assert "g5.xlarge" in unknown.why
    assert pace.assumed("A100", "bf16").flops_per_s == pytest.approx(0.3 * 312e12)
    assert pace.assumed("A100", "fp32").flops_per_s == pytest.approx(0.3 * 19.5e12)
