"""The search: what is tried next, by whom, and when it is over. Ray Tune runs what is decided here (`slots`).

Everything that is known is in the journal. A search that was killed reads it again, takes up the trials that were in
flight, and asks what it would have asked.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.cluster import preflight
from rtrain.config import Config
from rtrain.core import atomic_write, env
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.core.run_folder import Run
from rtrain.data import row_reader
from rtrain.inference import artifact
from rtrain.models import builder
from rtrain.planning import frequency_model
from rtrain.runs import controller, prepare, run_folders
from tune import finals, gate_winner, holdout_scores, sampler, space, student_costs, successive_halving, trial_pool
from tune.history import SEED, History, Trial, numbered
from tune.objective import Aim
from tune.report import optuna_export, page
from tune.search_log import Record
from tune.search_policy import Asker
from tune.successive_halving import Go, Ladder
from tune.trainable import LOG_EVERY, Order, Task, headline_of, held, refused

FINAL_RUNS = 4
"""Full runs whose rows the end may take, where `tune.final_rows` does not say."""

SPENT_S = 10.0
"""Seconds of a search that a kill may lose."""


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    search: Run
    history: History

    @property
    def best(self) -> Trial:
        assert self.history.chosen is not None  # the search has ended
        return numbered(self.history.trials, self.history.chosen)

    @property
    def winner(self) -> Run:
        return self.search.trial(self.best.number)

    @property
    def gate(self) -> dict[str, Any] | None:
        """The verdict on the winner's artefact beside trial 0's; None where trial 0 has won."""
        kept = artifact.read(self.winner.artifact, verify=False).gate
        return None if kept is None else dict(kept)

    @property
    def rows(self) -> int:
        """Rows that all trials were trained on."""
        ends = (trial.finished or (trial.reached[-1] if trial.reached else None) for trial in self.history.trials)
        return sum(end.rows for end in ends if end is not None)

    def to_document(self) -> dict[str, Any]:
        trials = [{**asdict(trial), "status": trial.status} for trial in self.history.trials]
        verdict = dict(self.history.verdict)
        return {"trials": trials, "best": self.history.chosen, "verdict": verdict, "gate": self.gate}


def check(config: Config, students: bool = False) -> None:
    """Everything about a search, of `students` or of runs, that can be refused before anything starts, all at once.
    Raises `ConfigError`."""
    data, problems = config.recipe.data, [*refused(config), *preflight.overbooked(config, env.cores())]
    if config.deploy.tune.cost != "training" and not students:
        reason = "all trials have the same model; students differ (rtrain distill --search)"
        problems.append(Problem("tune.cost", config.deploy.tune.cost, reason, "leave it out", code="not_students"))
    if data.valid_share == 0 and not (data.valid or data.split):
        reason = "trials are compared on validation rows, and there are none"
        fix = "give a share, e.g. 0.1; train the winner's settings on all rows afterwards"
        problems.append(Problem("data.valid_share", 0, reason, fix, code="no_rows"))
    if data.valid_part:
        reason = "each seed of a search's end is judged on a part of its own"
        problems.append(Problem("data.valid_part", data.valid_part, reason, "leave it out", code="unsupported"))
    tune, name = config.deploy.tune, headline_of(config)
    if tune.objective == "time" and name.startswith("neg_") and tune.target is not None and tune.target > 0:
        reason = f"the score is {name}, an error below 0 that a target above 0 is never reached by"
        problems.append(Problem("tune.target", tune.target, reason, f"write {-tune.target:g}", code="out_of_range"))
    try:
        space.dimensions(config)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    sampler.check(config.deploy.tune.sampler)


def check_model(config: Config, folder: Path) -> None:
    """Raise `ConfigError` where the space or a point has a value that the model in a folder cannot read: each trial
    with it would fail."""
    tune, problems = config.deploy.tune, list[Problem]()
    ends = [(one.name, value) for one in space.dimensions(config) for value in one.choices or (one.low, one.high)]
    tried = [(f"tune.space.{name}", {name: value}) for name, value in ends]
    tried += [(f"tune.points.{place}", dict(point)) for place, point in enumerate(tune.points)]
    for field, point in tried:
        if any(name.startswith(("data.", "model.")) for name in point):
            recipe = configuration.with_overrides(config, space.overrides(config, point)).recipe
            found = builder.check_architecture(folder, recipe.data.window_tokens, chosen=recipe.model)
            problems += [replace(one, field=field, reason=f"{one.field}: {one.reason}") for one in found]
    if problems:
        raise ConfigError(problems)


def run(
    config: Config,
    folder: Path,
    reuse: run_folders.Reuse = "refuse",
    on_event: controller.OnEvent | None = None,
    tokens_root: Path | None = None,
    teacher: Path | None = None,
) -> Found:
    """Search, and train what is left to its end. Every trial keeps its run folder; `trials.jsonl` is the journal.

    `tokens_root`: see `trial.held`. With a `teacher`, an artefact, the trials are its students, and `config` is that of
    the first one (`distill.started`). A resumed search does nothing twice. Raises `ConfigError` if a resumed search
    would be another one, and `UserError` if no trial came to a score.
    """
    check(config, students=teacher is not None)
    count = _room(config, folder, reuse)
    with held(config, folder, reuse, tokens_root, teacher) as (settled, task):
        return SearchStart(settled, task, count, on_event).run()


def _room(config: Config, folder: Path, reuse: run_folders.Reuse) -> int:
    """How many slots there will be; none for a search that has ended. It is asked before a folder is made or a row is
    read: whoever is refused can write the command anew. Raises what `slots.number` raises."""
    if reuse == "resume" and Run(folder).winner is not None:
        return 0
    return trial_pool.number(config, prepare.device_of(config, Run(folder).trial(0)).device)


Due = Callable[[set[Go], bool], list[Go] | None]
"""(orders that were given, whether a slot is idle) -> what is to be done, given orders among it; None: all is done."""


class SearchStart:
    """One start of a search."""

    def __init__(self, config: Config, task: Task, count: int, on_event: controller.OnEvent | None):
        """`count`: how many slots there will be."""
        self._config, self._task, self._count, self._tune = config, task, count, config.deploy.tune
        self._search = Run(task.search)
        self.record = Record(self._search, on_event, config.deploy.cluster)
        self._aim, self._seed = Aim.of(self._tune), config.recipe.train.seed
        self._costs = None if self._tune.cost == "training" else student_costs.Costs(task.search, self._tune.cost)
        self._counted, self.slot_count = time.monotonic(), 0
        """Until when seconds were counted, and how many slots are there."""

    @property
    def history(self) -> History:
        return self.record.history

    def run(self) -> Found:
        try:
            if self.history.chosen is None:
                try:
                    self.decide()
                finally:
                    with suppress(OSError):  # of a full disk, which has been told: the seconds are an estimate
                        self.spend()
            self._leave()
        finally:  # of a search that is interrupted too
            with suppress(OSError):
                self._export()
        return Found(self._search, self.history)

    def decide(self) -> None:
        if not self.history.trials:
            self.ask({}, "recipe")
        self.reopen()
        self.measure()
        # The rows are read before the slots start: they would all read them.
        prepared = self._task.prepared(0, {})
        self.ladder = Ladder.of(self._tune.first_rung, prepared.order.rows_until(prepared.updates))
        self.asker = Asker.of(self._config, self.ladder)
        source = row_reader.inspect(prepared.config.recipe.data, self._task.tokens_root)
        self.parts = holdout_scores.parts(prepared.config, source, prepared.store)
        with self.record.following(), trial_pool.opened(self._config, self._task, self._count) as open_slots:
            self.spend()
            self.slot_count = self._count
            self.phases(open_slots)

    # --------------------------------------------------------------------------------------------------------- phases

    def phases(self, open_slots: trial_pool.Slots) -> None:
        """The halving, and the end. One that has begun is gone on with: its trials are trained past the rungs to which
        a halving in a larger field, or in one that a trial has failed in since, would order them."""
        if not self.history.ending:
            self.work(open_slots, self.halving)
            self.record.write("ending")
        self.work(open_slots, self.ending)

    def work(self, open_slots: trial_pool.Slots, due: Due) -> None:
        """Keep the slots busy until `due` says that nothing is left to do."""
        while True:
            for slot in open_slots.idle:
                given = {Go(order.trial, order.rung) for order in open_slots.orders.values()}
                if (go := next((go for go in due(given, True) or [] if go not in given), None)) is None:
                    break
                self.record.give(open_slots, slot, self._order(go))
            if not open_slots.orders and due(set(), False) is None:
                return
            self.record.hear(open_slots, self._spend_now_and_then)
            self.spend()

    def spend(self) -> None:
        """Write down the seconds since this was done last: those of a search that is killed count too."""
        now = time.monotonic()
        seconds, self._counted = now - self._counted, now
        self.record.write("spent", seconds=round(seconds, 3), slot_seconds=round(seconds * self.slot_count, 3))

    def _spend_now_and_then(self) -> None:
        """The same while a trial trains to its rung, which may take hours."""
        if time.monotonic() - self._counted >= SPENT_S:
            self.spend()

    def _order(self, go: Go) -> Order:
        rows = self.ladder.full if go.rung is None else self.ladder.rungs[go.rung]
        trial = numbered(self.history.trials, go.trial)
        return Order(go.trial, trial.settings, go.rung, rows, trial.of)

    def halving(self, given: set[Go], idle: bool) -> list[Go] | None:
        """Trials go to their next rung, the first ones first; another one is asked for where a slot is idle."""
        asking = self.history.stopped is None
        found = successive_halving.due(self.history, self.ladder, self._aim, asking)
        if not (asking and idle and found is not None and given.issuperset(found)):
            return found
        self.note_noise()
        new = [] if self._stop() else self._next(found)
        if self.history.stopped is not None:
            return successive_halving.due(self.history, self.ladder, self._aim, asking=False)
        return [*found, *new]

    def _next(self, waiting: list[Go]) -> list[Go]:
        """What is begun beside the trials that are on their way; nothing where these have to be there first, and where
        no further trial is asked for, which is written down."""
        look = self.asker.is_look(self.history)
        if look and waiting:
            return []
        if look and (best := self.asker.repeat(self.history)) is not None:
            return [Go(self._seeded(finals.Run(best.number, self._seed + 1), parts=1), 0)]
        why = self.asker.enough(self.history) if look else None
        proposal = None if why else self.asker.proposal(self.history)
        if proposal is None:
            self.record.write("stopped", why=why or "every point of the space was tried")
            return []
        return [Go(self.ask(*proposal), 0)]

    def ending(self, given: set[Go], idle: bool) -> list[Go] | None:
        """The two best and trial 0 go to their ends, and again with other seeds, until it is clear which is best."""
        if self.history.chosen is not None:
            return None
        if not any(trial.sound for trial in self.history.own):
            text = f"no trial of the search came to a score; {finals.failures(self.history)}"
            raise UserError(text, code="no_score")
        budget = FINAL_RUNS * self.ladder.full if self._tune.final_rows is None else self._tune.final_rows
        wanted = finals.next_runs(
            self.history,
            self.ladder.full,
            budget,
            holdout_scores.every(self._search, self.history, self._tune.held_back, self.parts),
            seed=self._seed,
            parts=self.parts,
            aim=self._aim,
            steered=not self._tune.held_back,
            further=self.over() is None,
        )
        if isinstance(wanted, finals.Verdict):
            self.record.write("chosen", best=wanted.best, verdict=wanted.to_document())
            return None
        return [Go(self._seeded(one, self.parts), None) for one in wanted]

    # -------------------------------------------------------------------------------------------------------- deciding

    def _stop(self) -> bool:
        """Whether trials, time or money are used up; what, is written down."""
        own, why, by = len(self.history.own), None, dict[str, Any]()
        if own >= self.asker.planned:
            asked = self.asker.planned == self._tune.trials
            why = f"tune.trials={self.asker.planned}" if asked else f"the budget pays for {self.asker.planned} trials"
        elif own > 1 and (over := self.over()):
            why, by = over, {"budget": self._budget}
        if why is not None:
            self.record.write("stopped", why=why, **by)
        return why is not None

    def reopen(self) -> None:
        """Ask for further trials again where time or money had run out, this start may take more, and the end has not
        begun."""
        before = self.history.budget
        if not self.history.ending and before is not None and before != self._budget and self.over() is None:
            self.record.write("reopened", budget=self._budget)

    @property
    def _budget(self) -> dict[str, float | None]:
        return {"minutes": self._tune.minutes, "money": self._tune.money, "price": self._tune.price}

    def over(self) -> str | None:
        """Why no further trial is begun, by time and money."""
        tune, workers, since = self._tune, self._config.recipe.train.workers, time.monotonic() - self._counted
        now = self.history.after({"kind": "spent", "seconds": since, "slot_seconds": since * self.slot_count})
        if tune.minutes is not None and now.seconds > 60 * tune.minutes:
            return f"{tune.minutes:g} minutes are over"
        if tune.money is not None and tune.price is not None and (money := now.money(workers, tune.price)) > tune.money:
            return f"{money:.2f} of {tune.money:g} are spent"
        return None

    def note_noise(self) -> None:
        """Write down how far the space goes, and with which updates training ends soonest, once trial 0's log tells
        that: whoever goes on with the search asks for trials of the same space."""
        if self.history.noise is not None:
            return
        recipe = self._task.of({}).recipe
        weights = frequency_model.weights(builder.resolve(recipe.model.name, self._task.tokens_root))
        if (told := frequency_model.prior(self._search.trial(0).events(), recipe, weights)) is not None:
            self.record.write("noise", rows=told.most_rows, chosen=told.rows)

    def ask(self, settings: Mapping[str, Any], by: str, **more: Any) -> int:
        number = len(self.history.trials)
        if self._costs is not None:
            more["cost"] = self._cost(self._costs, settings)
        self.record.write("asked", trial=number, settings=dict(settings), by=by, **more)
        return number

    def measure(self) -> None:
        """Measure what students of the space cost before the slots start: beside a training a model takes longer than
        trial 0's has, and is known by that for ever."""
        if self._costs is not None:
            for size in space.sizes(self._config):
                self._cost(self._costs, size)

    def _cost(self, known: student_costs.Costs, settings: Mapping[str, Any]) -> float:
        started = self._task.of(settings).recipe.model.name
        return known.of(builder.resolve(started, self._task.tokens_root))

    def _seeded(self, one: finals.Run, parts: int) -> int:
        """The number of the trial that repeats another one with a seed; a new one where there is none yet. `parts` of
        the rows validate, another one for each seed."""
        if one.seed is None:
            return one.of
        base = numbered(self.history.trials, one.of)
        settings = {**base.settings, **finals.overrides(one, seed=self._seed, parts=parts)}
        known = (trial for trial in self.history.trials if trial.of == one.of and trial.settings == settings)
        if (found := next(known, None)) is not None:
            return found.number
        return self.ask(settings, SEED, of=one.of, seed=one.seed)

    # --------------------------------------------------------------------------------------------------------- the end

    def _leave(self) -> None:
        """Write down what others read: the winner's settings, its report, and the search's page."""
        history, best = self.history, self.history.chosen
        assert best is not None
        winner = self._search.trial(best)
        config = configuration.load(str(winner.config))
        text = configuration.to_yaml(replayed_config(config, self._config))
        atomic_write.write_text(self._search.best, text)
        if self._search.winner is None:
            self._search.append("searched", best=best, trials=len(history.trials))
        say = self.record.say
        teacher = self._task.teacher
        controller.add(self._search, "gate", lambda run: gate_winner.run(run, best, self._config, say, teacher), say)
        if not winner.report.is_file():
            controller.report(winner, lambda event: say({**event, "trial": best}))
        controller.add(self._search, "page", page.write, say)
        controller.copy_out(winner, config.deploy.cluster)  # the storage may have been away when it was finished
        self.record.finish_copy()

    def _export(self) -> None:
        """Write down what Optuna's own tools read, where it is installed."""
        if sampler.installed():
            history, say = self.history, self.record.say
            controller.add(
                self._search, "study", lambda run: optuna_export.export(run.folder, self._config, history), say
            )


def replayed_config(config: Config, search: Config) -> Config:
    """A trial's configuration for another run: what belongs to the search's place, or served the search, is the
    search's."""
    own = {"cluster.storage": search.deploy.cluster.storage, LOG_EVERY: search.recipe.train.log_every}
    return replace(configuration.with_overrides(config, own), named=config.named)
