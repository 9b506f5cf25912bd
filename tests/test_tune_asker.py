"""What a search asks for next: by its configuration and its journal alone."""

import json
from pathlib import Path

import pytest

from rtrain import config
from rtrain.config import Config
from rtrain.core.run_folder import Run
from rtrain.parallel import gradient_noise
from tests.histories import Event, asked, configured, make_search, reached, score_of
from tests.test_tune_budget import started
from tune import space
from tune.history import replay
from tune.points import Dimension
from tune.search_policy import Asker

K = "train.aggregation_frequency"
SPACE = {"optim.lr": [1e-4, 2e-4, 4e-4], K: [1, 2, 4, 8]}
ON_TWO = {"train.workers": 2, "train.micro_batch": 32, K: 1, "tune.space": SPACE}
TRIED = [(2e-4, 1), (1e-4, 1), (4e-4, 1), (1e-4, 2), (4e-4, 2), (2e-4, 2)]


def journal(chosen: Config) -> list[Event]:
    """Trial 0 and five others at the first rung: all points of up to 128 rows an update."""
    points = [space.overrides(chosen, {"optim.lr": lr, K: k}) for lr, k in TRIED]
    known = [asked(number, one if number else {}) for number, one in enumerate(points)]
    return known + [reached(number, 0, score_of(lr, k, 1280)) for number, (lr, k) in enumerate(TRIED)]


def test_the_space_of_a_resumed_search_ends_where_that_of_an_undisturbed_one_does(tmp_path: Path) -> None:
    """128 rows: k = 2 is the last one, at the first question of a process as at its later ones."""
    chosen = configured(tmp_path, **ON_TWO)
    before, after = replay(journal(chosen)), replay([*journal(chosen), {"kind": "noise", "rows": 128, "chosen": 128}])
    first, later = Asker(chosen, 12), Asker(chosen, 12)
    assert later.dimensions(before)[1].choices == (1, 2, 4, 8)
    assert first.gain(after) == later.gain(after) == 0.0  # all six points were tried
    assert first.dimensions(after) == later.dimensions(after)
    assert first.dimensions(after)[1].choices == (1, 2)
    assert first.gain(before)  # at k = 4 and 8


def measured(run: Run, *updates: int) -> None:
    """A start with the gradients' noise at these updates, of 0.5 s each, a fifth of it for the exchange."""
    run.append("started", update=0, of=80, workers=2, precision="fp32", device="cpu", rows_per_update=64)
    for update in updates:
        run.append(gradient_noise.KIND, update=update, trace=900.0 + 50 * (update % 3), square=9.0, rows=64)
    run.append("trained", updates=80, seconds={"train": 40.0}, exchange={"seconds": 0.1, "bytes": 1}, stages=[])


def test_how_far_the_space_goes_is_written_down_once(tmp_path: Path) -> None:
    found = make_search(tmp_path, journal(configured(tmp_path, **ON_TWO)), **ON_TWO)
    one = started(found, config.load(str(found.config)))

    def noted() -> tuple[int | None, int | None]:
        one.note_noise()
        return one.history.noise, one.history.rows

    assert noted() == (None, None)  # nothing was measured
    measured(found.trial(0), 5, 13)
    assert noted() == (None, None)  # too little was
    measured(found.trial(0), 21, 29, 37)
    rows, chosen = noted()
    assert rows is not None
    assert chosen is not None
    assert chosen <= rows
    measured(found.trial(0), 1000)
    assert noted() == (rows, chosen)
    told = [json.loads(line) for line in found.trials.read_text().splitlines() if '"noise"' in line]
    assert [(event["rows"], event["chosen"]) for event in told] == [(rows, chosen)]
    again = started(found, config.load(str(found.config))).history
    assert (again.noise, again.rows) == (rows, chosen)


def test_the_first_spread_point_has_the_updates_that_trial_0_asks_for(tmp_path: Path) -> None:
    """Once: a second one would only repeat their number of rows."""
    chosen = configured(tmp_path, **ON_TWO)
    known = [*journal(chosen)[:1], reached(0, 0, 0.5), {"kind": "noise", "rows": 256, "chosen": 128}]
    one = Asker(chosen, 12)
    settings, by = one.proposal(replay(known)) or ({}, "")
    assert (settings[K], by) == (2, "prior")
    assert (one.proposal(replay(known[:2])) or ({}, ""))[1] == "spread"  # where trial 0 has told nothing
    known += [asked(1, settings, by="prior"), reached(1, 0, 0.6)]
    assert (one.proposal(replay(known)) or ({}, ""))[1] == "spread"


@pytest.mark.parametrize(
    ("rows", "kept"), [(1, (1,)), (64, (1,)), (65, (1, 2)), (200, (1, 2, 4)), (512, (1, 2, 4, 8)), (9999, (1, 2, 4, 8))]
)
def test_frequencies_end_with_the_first_that_has_the_rows_of_the_noise_scale(
    rows: int, kept: tuple[int, ...], tmp_path: Path
) -> None:
    """2 workers of 32 rows: 64, 128, 256 and 512 rows of an update."""
    chosen = configured(tmp_path, **{"train.workers": 2, "train.micro_batch": 32})
    rate, frequency = space.dimensions(chosen)
    assert space.under(chosen, (rate, frequency), rows) == (rate, Dimension(frequency.name, choices=kept))


def test_a_range_of_rows_ends_at_the_noise_scale(tmp_path: Path) -> None:
    searched = {"train.rows_per_update": {"low": 16, "high": 256, "log": True}}
    chosen = configured(tmp_path, **{"tune.space": searched})
    (rows,) = space.dimensions(chosen)
    ends = [space.under(chosen, (rows,), scale)[0].high for scale in (4, 100, 1000)]
    assert ends == [16, 100, 256]
