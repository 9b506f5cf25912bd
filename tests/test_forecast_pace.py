"""How fast a worker computes, by the log of a finished run."""

from pathlib import Path
from typing import Any

import pytest

from rtrain import config as configuration
from rtrain.core import events
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.planning import run_facts, throughput
from tests.test_forecast_plan import configured
from tests.tiny import make_encoder

STARTED: dict[str, Any] = {"update": 0, "of": 50, "workers": 1, "device": "cpu", "precision": "fp32"}
TRAINED: dict[str, Any] = {"updates": 50, "rows_seen": 400, "real_tokens": 400 * 20, "seconds": {"train": 20.0}}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


def trained(folder: Path, encoder: Path, exchange: Any = None, started: Any = STARTED, **settings: Any) -> Run:
    """A run of 50 updates of 8 rows of 20 tokens, in 20 s."""
    run = Run(folder)
    run.folder.mkdir()
    chosen = {"model__name": str(encoder), "train__workers": started["workers"], **settings}
    run.config.write_text(configuration.to_yaml(configured(train__rows_per_update=8, **chosen)))
    events.append(run.folder, "started", **started)
    events.append(run.folder, "trained", **TRAINED, exchange=exchange)
    return run


def test_a_finished_run_tells_its_pace(tmp_path: Path, encoder: Path) -> None:
    """The pace by which the same run is foretold to take as long."""
    run = trained(tmp_path / "run", encoder)
    found = throughput.of_run(run)
    recipe = configuration.load(str(run.config)).recipe
    work = throughput.work(recipe, run_facts.of_model(encoder), run_facts.given(1, 20))
    assert found.compute(work).seconds(throughput.passes(recipe, 1)) == pytest.approx(0.4, rel=0.01)
    assert found.exchange_s is None
    # The run goes on for ten updates: each start counts its own seconds and rows.
    events.append(run.folder, "started", **{**STARTED, "update": 50})
    with pytest.raises(UserError) as error:
        throughput.of_run(trained(tmp_path / "none", encoder, {**STARTED, "update": 50}, {**STARTED, "update": 50}))
    assert error.value.code == "not_finished"
    last = {"updates": 60, "rows_seen": 80, "real_tokens": 80 * 20, "seconds": {"train": 4.0}, "exchange": None}
    events.append(run.folder, "trained", **last)
    assert throughput.of_run(run) == found


def test_what_workers_waited_for_the_exchange_is_told_by_the_byte(tmp_path: Path, encoder: Path) -> None:
    two = {**STARTED, "workers": 2}
    alone, waiting = (
        throughput.of_run(trained(tmp_path / str(seconds), encoder, {"seconds": seconds, "bytes": 1000}, two))
        for seconds in (0.0, 0.1)
    )
    assert (alone.exchange_s, waiting.exchange_s) == (None, 0.1 / 1000)
    assert waiting.flops_per_s > alone.flops_per_s


def test_the_pace_of_a_run_that_computes_layers_again_is_that_of_its_processor(tmp_path: Path, encoder: Path) -> None:
    """In the same seconds it has made one forward pass more, a third of the others' products."""
    plain, again = (
        throughput.of_run(trained(tmp_path / str(again), encoder, train__gradient_checkpointing=again))
        for again in (False, True)
    )
    assert again.flops_per_s == pytest.approx(4 / 3 * plain.flops_per_s, rel=0.01)


def test_a_gpu_that_no_table_has_is_no_processor() -> None:
    """It is taken for an A10G, and fp32 for what it is on each: TF32 is off."""
    unknown, known = throughput.assumed("g5.xlarge"), throughput.assumed("A10G")
    assert (unknown.flops_per_s, unknown.memory_per_s) == (known.flops_per_s, known.memory_per_s)
    assert (known.flops_per_s, known.memory_per_s) == (0.3 * 70e12, 0.8 * 600e9)
    assert "g5.xlarge" in unknown.why
    assert throughput.assumed("A100", "bf16").flops_per_s == pytest.approx(0.3 * 312e12)
    assert throughput.assumed("A100", "fp32").flops_per_s == pytest.approx(0.3 * 19.5e12)
