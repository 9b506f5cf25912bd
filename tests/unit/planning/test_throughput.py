"""How fast a worker computes, by the log of a finished run."""

from pathlib import Path
from typing import Any

import pytest

from rtrain import config as configuration
from rtrain.core import events
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.planning import run_facts, throughput
from tests.support.tiny import make_encoder
from tests.unit.planning.test_plan import configured

STARTED: dict[str, Any] = {"step": 0, "total_steps": 50, "workers": 1, "device": "cpu", "precision": "fp32"}
TRAINED: dict[str, Any] = {"steps": 50, "rows_seen": 400, "real_tokens": 400 * 20, "seconds": {"train": 20.0}}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


def trained(folder: Path, encoder: Path, exchange: Any = None, started: Any = STARTED, **settings: Any) -> Run:
    """A run of 50 updates of 8 rows of 20 tokens, in 20 s."""
    run = Run(folder)
    run.folder.mkdir()
    selected = {"model__name": str(encoder), "train__workers": started["workers"], **settings}
    run.config.write_text(configuration.to_yaml(configured(train__global_batch_size=8, **selected)))
    events.append_event(run.folder, "started", **started)
    events.append_event(run.folder, "trained", **TRAINED, gradient_sync=exchange)
    return run


def test_a_finished_run_tells_its_pace(tmp_path: Path, encoder: Path) -> None:
    """The measured throughput reproduces the run's own step time."""
    run = trained(tmp_path / "run", encoder)
    measured = throughput.measure_throughput(run)
    recipe = configuration.load_config(str(run.config)).recipe
    work = throughput.estimate_work(recipe, run_facts.read_encoder_shape(encoder), run_facts.uniform_row_stats(1, 20))
    assert measured.compute_time(work).step_seconds(throughput.micro_batches_per_step(recipe, 1)) == pytest.approx(
        0.4, rel=0.01
    )
    assert measured.all_reduce_s_per_byte is None
    # The run resumes for ten steps: each attempt counts its own seconds and rows.
    events.append_event(run.folder, "started", **{**STARTED, "step": 50})
    with pytest.raises(UserError) as error:
        throughput.measure_throughput(
            trained(tmp_path / "none", encoder, {**STARTED, "step": 50}, {**STARTED, "step": 50})
        )
    assert error.value.code == "not_finished"
    last = {"steps": 60, "rows_seen": 80, "real_tokens": 80 * 20, "seconds": {"train": 4.0}, "gradient_sync": None}
    events.append_event(run.folder, "trained", **last)
    assert throughput.measure_throughput(run) == measured


def test_what_workers_waited_for_the_exchange_is_told_by_the_byte(tmp_path: Path, encoder: Path) -> None:
    two = {**STARTED, "workers": 2}
    single, waiting = (
        throughput.measure_throughput(
            trained(tmp_path / str(seconds), encoder, {"seconds": seconds, "bytes": 1000}, two)
        )
        for seconds in (0.0, 0.1)
    )
    assert (single.all_reduce_s_per_byte, waiting.all_reduce_s_per_byte) == (None, 0.1 / 1000)
    assert waiting.flops_per_s > single.flops_per_s


def test_the_pace_of_a_run_that_computes_layers_again_is_that_of_its_processor(tmp_path: Path, encoder: Path) -> None:
    """In the same seconds it has made one forward pass more, a third of the others' products."""
    plain, repeated = (
        throughput.measure_throughput(
            trained(tmp_path / str(repeated), encoder, train__gradient_checkpointing=repeated)
        )
        for repeated in (False, True)
    )
    assert repeated.flops_per_s == pytest.approx(4 / 3 * plain.flops_per_s, rel=0.01)


def test_a_gpu_that_no_table_has_is_no_processor() -> None:
    """It counts as an A10G; fp32 is without TF32."""
    unknown, known_values = throughput.assumed_throughput("g5.xlarge"), throughput.assumed_throughput("A10G")
    assert (unknown.flops_per_s, unknown.bandwidth) == (known_values.flops_per_s, known_values.bandwidth)
    assert (known_values.flops_per_s, known_values.bandwidth) == (0.3 * 70e12, 0.8 * 600e9)
    assert "g5.xlarge" in unknown.source
    assert throughput.assumed_throughput("A100", "bf16").flops_per_s == pytest.approx(0.3 * 312e12)
    assert throughput.assumed_throughput("A100", "fp32").flops_per_s == pytest.approx(0.3 * 19.5e12)
