"""The scheduler for a user's own Tuner: whom it pauses, resumes and stops, by the calls that Tune makes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rtrain.core.errors import UserError
from tune import FreezeThaw
from tune.history import replay_journal
from tune.successive_halving import Objective, RungSchedule, next_promotions

RUNGS = (200, 400, 800)
SCHEDULE = RungSchedule(RUNGS, 1000)


@dataclass
class Trial:
    """What the scheduler reads of a trial of Tune."""

    trial_id: str
    status: str = "PENDING"
    last_result: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    errors: bool = False
    """Whether its second step fails."""

    def is_finished(self) -> bool:
        return self.status in ("TERMINATED", "ERROR")


class Tune:
    """A controller with one slot, which makes the calls of `TuneController` in its order."""

    def __init__(self, scheduler: FreezeThaw, trials: Sequence[Trial], *, created: int | None = None):
        self.scheduler, self.trials, self.search_alg = scheduler, list[Trial](), self
        self.waiting, self.created = list(trials), len(trials) if created is None else created
        self.pauses = list[str]()

    def is_finished(self) -> bool:
        return len(self.trials) >= len(self.waiting)

    def get_trials(self) -> list[Trial]:
        return self.trials

    def stop_trial(self, trial: Trial) -> None:
        assert trial.status == "PAUSED"
        self.scheduler.on_trial_remove(self, trial)  # type: ignore[arg-type]
        trial.status = "TERMINATED"

    def run(self, score: Any, mode: str = "max") -> list[Trial]:
        scheduler: Any = self.scheduler
        scheduler.set_search_properties("score", mode)
        while len(self.trials) < self.created and self.waiting[len(self.trials)].last_result:  # of a restored search
            self.trials.append(self.waiting[len(self.trials)])
            scheduler.on_trial_add(self, self.trials[-1])
        while any(not trial.is_finished() for trial in self.trials) or not self.trials:
            if len(self.trials) < self.created and not any(trial.status == "PENDING" for trial in self.trials):
                self.trials.append(self.waiting[len(self.trials)])
                scheduler.on_trial_add(self, self.trials[-1])
            trial = scheduler.choose_trial_to_run(self)
            if trial is None:  # it has stopped the last ones
                continue
            trial.status = "RUNNING"
            while trial.status == "RUNNING":
                self._step(trial, score)
        return self.trials

    def _step(self, trial: Trial, score: Any) -> None:
        scheduler: Any = self.scheduler
        trial.steps += 1
        if trial.errors and trial.steps == 2:
            trial.status = "ERROR"
            scheduler.on_trial_error(self, trial)
            return
        rung = trial.steps - 1
        is_last = rung == len(RUNGS)
        rows = SCHEDULE.full_rows if is_last else RUNGS[rung]
        trial.last_result = {"score": score(trial), "rung": rung, "rungs": len(RUNGS), "rows": rows, "step": rows // 10}
        if is_last:
            trial.status = "TERMINATED"
            scheduler.on_trial_complete(self, trial, trial.last_result)
            return
        decision = scheduler.on_trial_result(self, trial, trial.last_result)
        if decision == scheduler.PAUSE:
            trial.status = "PAUSED"
            self.pauses.append(trial.trial_id)
        elif decision == scheduler.STOP:
            trial.status = "TERMINATED"
            scheduler.on_trial_complete(self, trial, trial.last_result)


def make_trials(count: int) -> list[Trial]:
    return [Trial(f"{number:02d}") for number in range(count)]


def halve(scores: Sequence[float]) -> list[int]:
    """Number of rungs of each trial in `rtrain tune`, by its own function."""
    history = replay_journal({"kind": "created", "trial": number} for number in range(len(scores)))
    while promotions := next_promotions(history, SCHEDULE, Objective(), accepts_trials=False):
        for target in promotions:
            assert target.rung is not None
            result = {"rung": target.rung, "step": 1, "rows": RUNGS[target.rung], "score": scores[target.trial]}
            history = history.with_event({"kind": "rung_result", "trial": target.trial, **result})
    return [len(trial.rung_results) for trial in history.trials]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20))
@settings(deadline=None, max_examples=50)
def test_trials_come_as_far_as_in_a_search_and_the_two_best_to_their_ends(scores: list[int]) -> None:
    trials = Tune(FreezeThaw(), make_trials(len(scores))).run(lambda trial: scores[int(trial.trial_id)])
    expected = halve(scores)
    ended = [number for number, trial in enumerate(trials) if trial.last_result["rung"] == len(RUNGS)]
    assert len(ended) == min(2, len(scores))
    assert all(max(expected) == expected[number] for number in ended)
    assert [trial.steps for number, trial in enumerate(trials) if number not in ended] == [
        rungs for number, rungs in enumerate(expected) if number not in ended
    ]


def test_the_lowest_are_left_where_less_is_better() -> None:
    trials = Tune(FreezeThaw(), make_trials(6)).run(lambda trial: float(trial.trial_id), "min")
    assert [trial.trial_id for trial in trials if trial.steps == 4] == ["00", "01"]


def test_every_trial_is_paused_until_all_have_come_to_the_first_rung() -> None:
    tune = Tune(FreezeThaw(), make_trials(4))
    tune.run(lambda trial: float(trial.trial_id))
    assert tune.pauses[:3] == ["00", "01", "02"]


def test_a_trial_that_fails_makes_room_for_no_one_and_the_others_go_on() -> None:
    trials = make_trials(6)
    trials[5].errors = True  # the best one, on its way to the second rung
    Tune(FreezeThaw(), trials).run(lambda trial: float(trial.trial_id))
    assert [trial.steps for trial in trials] == [1, 1, 1, 4, 4, 2]
    assert [trial.status for trial in trials] == ["TERMINATED"] * 5 + ["ERROR"]


def test_trials_of_a_restored_search_are_halved_on() -> None:
    trials = make_trials(6)
    for trial in trials:  # three have survived the first rung; one of them has not come to the second
        trial.steps = 2 if trial.trial_id in ("03", "05") else 1
        rows = RUNGS[trial.steps - 1]
        trial.last_result = {"score": 0.5, "rung": trial.steps - 1, "rungs": 3, "rows": rows, "step": rows // 10}
        trial.status = "PAUSED" if trial.trial_id in ("03", "04", "05") else "TERMINATED"
    Tune(FreezeThaw(), trials).run(lambda trial: float(trial.trial_id))
    assert [trial.steps for trial in trials] == [1, 1, 1, 4, 4, 2]


def test_a_search_that_would_wait_for_ever_is_refused() -> None:
    """A limit on concurrent trials that counts the paused ones creates no further trial."""
    with pytest.raises(UserError) as raised:
        Tune(FreezeThaw(), make_trials(4), created=2).run(lambda trial: 0.5)
    assert raised.value.code == "search_blocked"


def test_results_of_another_trainable_are_refused() -> None:
    scheduler: Any = FreezeThaw()
    scheduler.set_search_properties("score", "max")
    tune = Tune(scheduler, make_trials(1))
    scheduler.on_trial_add(tune, tune.waiting[0])
    with pytest.raises(UserError) as raised:
        scheduler.on_trial_result(tune, tune.waiting[0], {"score": 0.5, "training_iteration": 1})
    assert raised.value.code == "unsupported"
