"""The successive halving of `rtrain tune` as a scheduler of Ray Tune."""

from dataclasses import replace
from typing import Any

from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import FIFOScheduler

from rtrain.core.errors import UserError
from tune.history import RungResult, Trial
from tune.successive_halving import FINALISTS, Objective, num_survivors


class FreezeThaw(FIFOScheduler):
    """Pauses the trials of a `RecipeTrainable` at their rungs. The better half resumes from its checkpoints and trains
    to the next rung, and so on, until two are left, which train to their ends. The others are stopped; their run
    folders stay. Metric and mode are those of the Tuner. Limits, which are those of Tune:

    - Use `reuse_actors=True`: otherwise each resume starts new workers. Tune keeps those of one waiting trial only.
    - `max_concurrent_trials` counts paused trials as running and would block the search for ever, which is refused:
      write `tune.max_concurrent_trials` in the recipe's settings.
    - `get_best_result` compares scores of different rungs, and its lead may be chance: there are no finals.
    - After `Tuner.restore`, the remaining trials are halved by their last results.
    """

    _supports_buffered_results = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._metric, self._mode = "score", "max"
        self._trials: dict[str, Trial] = {}
        self._competitors: set[str] = set()
        """Ids of the trials that no rung has eliminated."""
        self._rung, self._num_rungs = 0, 0
        """The rung that the competitors are trained to, and the number of rungs, from the trials' results."""
        self._is_final = False
        """Whether the halving is over: the competitors are trained to their ends."""

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        self._metric, self._mode = metric or self._metric, mode or self._mode
        return True

    def on_trial_add(self, tune_controller: Any, trial: TuneTrial) -> None:
        """Add a new, restarted or restored trial."""
        if trial.is_finished():
            return
        is_new = trial.trial_id not in self._trials
        self._trials.setdefault(trial.trial_id, Trial(len(self._trials)))
        self._competitors.add(trial.trial_id)
        if is_new and "rung" in trial.last_result:
            self._record(trial, trial.last_result)

    def on_trial_result(self, tune_controller: Any, trial: TuneTrial, result: dict[str, Any]) -> str:
        self._record(trial, result)
        self._close_rungs(tune_controller)
        if trial.trial_id not in self._competitors:
            return self.STOP
        return self.CONTINUE if self._is_due(trial) else self.PAUSE

    def on_trial_complete(self, tune_controller: Any, trial: TuneTrial, result: dict[str, Any] | None = None) -> None:
        self._competitors.discard(trial.trial_id)

    on_trial_error = on_trial_remove = on_trial_complete

    def choose_trial_to_run(self, tune_controller: Any) -> TuneTrial | None:
        """Stop eliminated trials; return a waiting one. Raises `UserError` if the search would wait for ever."""
        trials = list(tune_controller.get_trials())
        self._close_rungs(tune_controller)  # an error may have removed the last awaited trial
        for trial in trials:
            if trial.status == TuneTrial.PAUSED and trial.trial_id not in self._competitors:
                tune_controller.stop_trial(trial)
        paused = [trial for trial in trials if trial.status == TuneTrial.PAUSED]
        due = [trial for trial in trials if trial.status == TuneTrial.PENDING] + list(filter(self._is_due, paused))
        if not due and paused and all(trial.status != TuneTrial.RUNNING for trial in trials):
            message = "max_concurrent_trials counts paused trials, so that no further trial starts; leave it out, and"
            raise UserError(
                f"{message} write tune.max_concurrent_trials in the recipe's settings", code="search_blocked"
            )
        return next(iter(due), None)

    def debug_string(self) -> str:
        return f"FreezeThaw: {len(self._competitors)} of {len(self._trials)} trials left, rung {self._rung + 1}"

    def _record(self, trial: TuneTrial, result: dict[str, Any]) -> None:
        metric = str(self._metric)
        if missing := {"rung", "rungs", "step", "rows", metric} - result.keys():
            message = f"FreezeThaw needs the results of a RecipeTrainable; these lack {', '.join(sorted(missing))}"
            raise UserError(f"{message}; write another scheduler", code="unsupported")
        score = result[metric] * (-1 if self._mode == "min" else 1)
        rung_result = RungResult(result["rung"], result["step"], result["rows"], score, result.get("loss"))
        entry, self._num_rungs = self._trials[trial.trial_id], result["rungs"]
        # A trial that restarts without a checkpoint reports its rungs again.
        earlier_results = [known for known in entry.rung_results if known.rung != rung_result.rung]
        self._trials[trial.trial_id] = replace(entry, rung_results=(*earlier_results, rung_result))

    def _last_rung(self, trial_id: str) -> int:
        return max((result.rung for result in self._trials[trial_id].rung_results), default=-1)

    def _is_due(self, trial: TuneTrial) -> bool:
        """Return whether a trial at a rung continues now."""
        is_behind = self._is_final or self._last_rung(trial.trial_id) < self._rung
        return trial.trial_id in self._competitors and is_behind

    def _close_rungs(self, tune_controller: Any) -> None:
        """Halve the competitors at each rung that all of them have reached, once no further trials are created."""
        while not self._is_final and self._competitors and tune_controller.search_alg.is_finished():
            last_rungs = [self._last_rung(trial_id) for trial_id in self._competitors]
            if min(last_rungs) < self._rung:
                return
            # Competitors beyond a rung have survived it: before an experiment was restored.
            if len(self._competitors) > FINALISTS and max(last_rungs) == self._rung:
                best_first = Objective().rank([self._trials[trial_id] for trial_id in self._competitors], self._rung)
                is_last = self._rung + 1 == self._num_rungs
                survivors = best_first[: FINALISTS if is_last else num_survivors(len(best_first))]
                self._competitors = {name for name in self._competitors if self._trials[name] in survivors}
            self._rung += 1
            self._is_final = len(self._competitors) <= FINALISTS or self._rung >= self._num_rungs
