"""The next trial of a search, by its configuration and journal alone."""

from pathlib import Path

import pytest

from rtrain import config
from rtrain.config import Config
from rtrain.core.run_folder import Run
from rtrain.parallel import gradient_noise
from tests.support.histories import Event, configured, created, make_search, rung_result, score_of
from tests.unit.tune.test_budget import started
from tune import space
from tune.history import History, Journal, read_journal, replay_journal
from tune.sampler import SearchPolicy
from tune.space import Dimension

K = "train.aggregation_frequency"
SPACE = {"optim.lr": [1e-4, 2e-4, 4e-4], K: [1, 2, 4, 8]}
ON_TWO = {"train.workers": 2, "train.micro_batch_size": 32, K: 1, "tune.space": SPACE}
TRIED = [(2e-4, 1), (1e-4, 1), (4e-4, 1), (1e-4, 2), (4e-4, 2), (2e-4, 2)]


def journal(selection: Config) -> list[Event]:
    """Trial 0 and five others at the first rung: all points of up to 128 rows an update."""
    points = [space.trial_overrides(selection, {"optim.lr": lr, K: k}) for lr, k in TRIED]
    history = [created(number, point if number else {}) for number, point in enumerate(points)]
    return history + [rung_result(number, 0, score_of(lr, k, 1280)) for number, (lr, k) in enumerate(TRIED)]


def test_the_space_of_a_resumed_search_ends_where_that_of_an_undisturbed_one_does(tmp_path: Path) -> None:
    """128 rows: k = 2 is the last one, at the first question of a process as at its later ones."""
    selection = configured(tmp_path, **ON_TWO)
    before = replay_journal(journal(selection))
    after = before.with_event({"kind": "noise", "max_useful_batch_size": 128, "fastest_batch_size": 128})
    first, later = SearchPolicy(selection, 12), SearchPolicy(selection, 12)
    assert later.dimensions(before)[1].choices == (1, 2, 4, 8)
    assert first.expected_gain(after) == later.expected_gain(after) == 0.0  # all six points were tried
    assert first.dimensions(after) == later.dimensions(after)
    assert first.dimensions(after)[1].choices == (1, 2)
    assert first.expected_gain(before)  # at k = 4 and 8


def measured(run: Run, *updates: int) -> None:
    """A start with the gradients' noise at these updates, of 0.5 s each, a fifth of it for the exchange."""
    run.append_event("started", step=0, total_steps=80, workers=2, precision="fp32", device="cpu", global_batch_size=64)
    for update in updates:
        run.append_event(gradient_noise.EVENT_KIND, step=update, trace=900.0 + 50 * (update % 3), square=9.0, rows=64)
    run.append_event(
        "trained", steps=80, seconds={"train": 40.0}, gradient_sync={"seconds": 0.1, "bytes": 1}, stages=[]
    )


def test_how_far_the_space_goes_is_written_down_once(tmp_path: Path) -> None:
    result = make_search(tmp_path, journal(configured(tmp_path, **ON_TWO)), **ON_TWO)
    item = started(result, config.load_config(str(result.config)))

    def noted(history: History) -> tuple[int | None, int | None]:
        return history.max_useful_batch_size, history.fastest_batch_size

    sizes = []
    for updates in ((), (5, 13), (21, 29, 37), (1000,)):  # nothing, too little, enough, and more
        if updates:
            measured(result.trial(0), *updates)
        item.log_noise_scale()
        sizes.append(noted(item.history))
    assert sizes[:2] == [(None, None)] * 2
    assert sizes[2] == sizes[3]
    useful, fastest = sizes[3]
    assert useful is not None
    assert fastest is not None
    assert fastest <= useful
    assert [event["kind"] for event in read_journal(result.trials)].count("noise") == 1
    assert noted(Journal(result.trials).history) == sizes[3]


def test_the_first_spread_point_has_the_updates_that_trial_0_asks_for(tmp_path: Path) -> None:
    """Once: a second one would only repeat their number of rows."""
    selection = configured(tmp_path, **ON_TWO)
    history = [
        *journal(selection)[:1],
        rung_result(0, 0, 0.5),
        {"kind": "noise", "max_useful_batch_size": 256, "fastest_batch_size": 128},
    ]
    item = SearchPolicy(selection, 12)
    settings, by = item.propose(replay_journal(history)) or ({}, "")
    assert (settings[K], by) == (2, "prior")
    assert (item.propose(replay_journal(history[:2])) or ({}, ""))[1] == "spread"  # where trial 0 has told nothing
    history += [created(1, settings, by="prior"), rung_result(1, 0, 0.6)]
    assert (item.propose(replay_journal(history)) or ({}, ""))[1] == "spread"


@pytest.mark.parametrize(
    ("rows", "remaining"),
    [(1, (1,)), (64, (1,)), (65, (1, 2)), (200, (1, 2, 4)), (512, (1, 2, 4, 8)), (9999, (1, 2, 4, 8))],
)
def test_frequencies_end_with_the_first_that_has_the_rows_of_the_noise_scale(
    rows: int, remaining: tuple[int, ...], tmp_path: Path
) -> None:
    """2 workers of 32 rows: 64, 128, 256 and 512 rows of an update."""
    selection = configured(tmp_path, **{"train.workers": 2, "train.micro_batch_size": 32})
    rate, frequency = space.build_dimensions(selection)
    assert space.prune_by_noise(selection, (rate, frequency), rows) == (
        rate,
        Dimension(frequency.name, choices=remaining),
    )


def test_a_range_of_rows_ends_at_the_noise_scale(tmp_path: Path) -> None:
    searched = {"train.global_batch_size": {"low": 16, "high": 256, "log": True}}
    selection = configured(tmp_path, **{"tune.space": searched})
    (rows,) = space.build_dimensions(selection)
    ends = [space.prune_by_noise(selection, (rows,), scale)[0].high for scale in (4, 100, 1000)]
    assert ends == [16, 100, 256]
