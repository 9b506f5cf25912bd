"""The loop: when it evaluates and saves, what it reports, and which rows, rates and seeds its updates have."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from rtrain import config
from rtrain.checkpoint import format as checkpoint_format
from rtrain.checkpoint.remote_copy import Replica
from rtrain.config import Distill, Model
from rtrain.core.run_folder import Run
from rtrain.data.order import Order, chain, rows_digest
from rtrain.data.store.store import Store
from rtrain.data.stream import Share, Update, plan_update
from rtrain.models import builder, precision as formats
from rtrain.parallel import factory
from rtrain.parallel.ddp import Replicated
from rtrain.parallel.watchdog import Watch
from rtrain.tasks import base
from rtrain.trainer import evaluate, losses, rung_predictions, step, trainer
from tests.conftest import labelled_rows, write_rows
from tests.tiny import make_encoder, make_store

TASK = base.get("classification")
UPDATES = 6
"""Updates of the whole run: two epochs of three, the last one of each short."""
Scores = Callable[..., dict[str, float]]


class Killed(Exception):
    """As if the process had ended here."""


@dataclass
class Recorder:
    """A Reporter that keeps what it is told."""

    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    scores: list[dict[str, Any]] = field(default_factory=list)
    noticed: int | None = None
    """The update before which a notice is given."""
    asked: int = 0

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def score(self, metrics: dict[str, Any]) -> None:
        self.events.append(("score", metrics))
        self.scores.append(metrics)

    def notice(self) -> bool:
        self.asked += 1
        return self.asked == self.noticed

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for found, fields in self.events if found == kind]


@dataclass(frozen=True)
class Ran:
    """What a start leaves."""

    outcome: trainer.Outcome | None
    network: torch.nn.Module
    recorder: Recorder
    clock: trainer.Clock
    folders: list[list[str]]
    """Names under checkpoints/ before each update, and at the end."""


def make_ground(folder: Path) -> None:
    """An encoder with dropout, and 66 rows."""
    make_encoder(folder / "encoder")
    write_rows(folder / "rows.csv", labelled_rows(66))
    make_store(recipe_of(folder), folder / "encoder", folder)


def recipe_of(folder: Path, rules: Mapping[str, Any] | None = None, **train: Any) -> config.Recipe:
    """`rules` of the optimizer, `train` settings."""
    settings = {"rows_per_update": 19, "epochs": 2, "micro_batch": 4, "seed": 3, **train}
    overrides = {f"train.{name}": value for name, value in settings.items()}
    overrides |= {f"optim.{name}": value for name, value in (rules or {}).items()}
    return config.load("intent", {"data.path": str(folder / "rows.csv"), "optim.lr": 5e-3, **overrides}).recipe


def start(
    ground: Path,
    run: Path,
    *,
    until: int | None = None,
    kill: int | None = None,
    noticed: int | None = None,
    rung: bool = False,
    world: int = 1,
    rank: int = 0,
    replica: Replica | None = None,
    freeze: Literal["none", "encoder"] = "none",
    rules: Mapping[str, Any] | None = None,
    precision: str = "fp32",
    watch: Watch | None = None,
    on_update: Callable[[int], None] = lambda number: None,
    **train: Any,
) -> Ran:
    """One start of the run at `run`; `kill` ends it when update number `kill` is asked for, which `on_update` hears
    first. `noticed` is the update before which a notice is given."""
    recipe = recipe_of(ground, rules, **train)
    store = Store(next((ground / ".tokens").iterdir()))
    order = Order(store.manifest.digest, store.rows("train"), recipe.rows_per_update, recipe.train.epochs, 3)
    assert (order.updates, order.rows % order.rows_per_update > 0) == (UPDATES, True)
    network = builder.build(ground / "encoder", TASK, store.manifest.labels, recipe.train.seed, Model(freeze=freeze))
    formats.widen(network, precision)
    job = trainer.Job(
        recipe=recipe,
        run=Run(run),
        store=store,
        task=TASK,
        loss=losses.for_run(TASK, Distill()),
        order=order,
        pad_id=0,
        precision=precision,
        until=order.updates if until is None else until,
        rung=rung,
        replica=replica,
    )
    recorder, clock, folders = Recorder(noticed=noticed), trainer.Clock(), []
    exchange = factory.build(network, recipe.train, watch, recorder.event)
    within = recipe.train.within
    assert (exchange.world, exchange.rank) == (world // within, rank // within)
    share = Share(store.folder, order, exchange.world, exchange.rank, recipe.train.micro_batch)

    def updates(first: int, stop: int) -> Iterator[Update]:
        for number in range(first, stop):
            folders.append(names(run))
            on_update(number)
            if number == kill:
                raise Killed
            yield plan_update(store, share, number)

    outcome = None
    try:
        outcome = trainer.train(job, exchange, updates, recorder, clock)
    except Killed:
        assert kill is not None
    folders.append(names(run))
    return Ran(outcome, network, recorder, clock, folders)


def names(run: Path) -> list[str]:
    folder = run / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def update_name(update: int) -> str:
    return f"update-{update:08d}"


def fingerprint(run: Path, update: int) -> dict[str, str]:
    """SHA-256 of each file of a checkpoint: weights, optimizer, state."""
    folder = run / "checkpoints" / update_name(update)
    found = {path.name: sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}
    assert set(found) == {"model.safetensors", "optim.safetensors", "state.json", "MANIFEST.json"}
    return found


def weights_digest(network: torch.nn.Module) -> str:
    total = sha256()
    for name, value in network.state_dict().items():
        total.update(name.encode() + value.numpy().tobytes())
    return total.hexdigest()


def straight_and_resumed(ground: Path, world: int, rank: int) -> dict[str, Any]:
    """For worker processes: a run undisturbed, and one that is killed in its third update and resumed."""
    runs = ground / f"{world}-straight", ground / f"{world}-killed"
    start(ground, runs[0], save_every=1, world=world, rank=rank)
    start(ground, runs[1], save_every=1, world=world, rank=rank, kill=2)
    resumed = start(ground, runs[1], save_every=1, world=world, rank=rank)
    assert resumed.outcome is not None
    return {
        "from": resumed.recorder.of("started")[0]["update"],
        "ledger": resumed.outcome.ledger,
        "weights": weights_digest(resumed.network),
        "files": [fingerprint(run, UPDATES) if rank == 0 else {} for run in runs],
    }


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ground")
    make_ground(folder)
    return folder


@pytest.fixture(scope="module")
def straight(ground: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Path]:
    """The undisturbed run, with a checkpoint after each update."""
    torch.set_num_threads(1)  # as in processes of their own; a predictor of an earlier test may have asked for more
    run = tmp_path_factory.mktemp("straight")
    return start(ground, run, save_every=1), run


def scripted(monkeypatch: pytest.MonkeyPatch, *accuracies: float) -> None:
    """Evaluations on the validation rows give these accuracies, one after another; on the test rows, 0.25."""
    left = iter(accuracies)

    def evaluate(exchange: Replicated, task: base.Task, store: Store, split: str, **_: Any) -> dict[str, float]:
        return {"accuracy": 0.25 if split == "test" else next(left), "macro_f1": 0.0, "rows": store.rows(split)}

    monkeypatch.setattr(trainer, "evaluate", evaluate)


# ------------------------------------------------------------------------------------------------------------- cadence


@pytest.mark.parametrize(
    ("last", "until", "every", "save_every", "evaluates", "saves"),
    [
        (7, 7, 3, None, [3, 6, 7], [3, 6, 7]),
        (6, 6, 3, None, [3, 6], [3, 6]),
        (7, 7, 3, 2, [3, 6, 7], [2, 3, 4, 6, 7]),
        (7, 7, 100, 1, [7], [1, 2, 3, 4, 5, 6, 7]),
        (7, 5, 100, None, [], [5]),
        (7, 5, 3, None, [3], [3, 5]),
        (1, 1, 1, 1, [1], [1]),
    ],
)
def test_when_to_evaluate_and_save(
    last: int, until: int, every: int, save_every: int | None, evaluates: list[int], saves: list[int]
) -> None:
    chosen = trainer.Cadence(last, until, every, save_every)
    due = {done: chosen.due(done) for done in range(1, until + 1)}
    assert [done for done, found in due.items() if "evaluate" in found] == evaluates
    assert [done for done, found in due.items() if "save" in found] == saves


def test_a_rung_is_no_evaluation_and_leaves_the_answers(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were it one, a run that paused might choose other best weights than one that did not."""
    scripted(monkeypatch, 0.2, 0.3)
    paused = start(ground, tmp_path, until=1, rung=True)
    assert paused.outcome is not None
    assert (paused.outcome.finished, paused.recorder.scores) == (False, [])
    kept = rung_predictions.read(Run(tmp_path), 1)
    assert kept is not None
    assert len(kept) == Store(next((ground / ".tokens").iterdir())).rows("valid")
    ended = start(ground, tmp_path, rung=True)
    assert [fields["update"] for fields in ended.recorder.scores] == [3, 6]
    assert ended.outcome is not None
    assert ended.outcome.best_update == 6
    assert [fields["update"] for kind, fields in ended.recorder.events if kind == "rung"] == [6]


# -------------------------------------------------------------------------------------------------------------- events


def test_events_come_in_order(ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, 0.5, 0.75)
    ran = start(ground, tmp_path, log_every=4)
    store = Store(next((ground / ".tokens").iterdir()))
    told = [(kind, fields.get("split", ""), fields.get("update")) for kind, fields in ran.recorder.events]
    assert told == [
        ("started", "", 0),
        ("evaluated", "valid", 3),  # the end of the first epoch
        ("score", "", 3),
        ("progress", "", 4),
        ("progress", "", 6),  # the last update, though not a multiple of four
        ("evaluated", "valid", 6),
        ("score", "", 6),
        ("best", "", 6),
        ("evaluated", "test", 6),
        ("trained", "", None),
    ]
    started = {"update": 0, "of": 6, "workers": 1, "device": "cpu", "precision": "fp32", "lr": 5e-3}
    started["rows_per_update"] = 19
    assert ran.recorder.of("started") == [started]
    assert ran.recorder.scores == [
        {"update": 3, "percent": 50.0, "score": 0.5},
        {"update": 6, "percent": 100.0, "score": 0.75},
    ]
    assert [fields["of"] for fields in ran.recorder.of("progress")] == [6, 6]
    assert ran.recorder.of("progress")[-1]["ledger"] == ran.recorder.of("trained")[0]["order_digest"]
    valid, test = {"rows": store.rows("valid")}, {"rows": store.rows("test")}
    assert [fields["scores"] for fields in ran.recorder.of("evaluated")] == [
        {"accuracy": 0.5, "macro_f1": 0.0} | valid,
        {"accuracy": 0.75, "macro_f1": 0.0} | valid,
        {"accuracy": 0.25, "macro_f1": 0.0} | test,
    ]


def test_float64_goes_into_the_checkpoints_and_out_of_them(ground: Path, tmp_path: Path) -> None:
    runs = tmp_path / "straight", tmp_path / "killed"
    straight = start(ground, runs[0], precision="fp64", save_every=1)
    start(ground, runs[1], precision="fp64", save_every=1, kill=2)
    resumed = start(ground, runs[1], precision="fp64", save_every=1)
    assert straight.recorder.of("started")[0]["precision"] == "fp64"
    assert {value.dtype for value in resumed.network.parameters()} == {torch.float64}
    assert fingerprint(runs[0], UPDATES) == fingerprint(runs[1], UPDATES)
    single = start(ground, tmp_path / "single", save_every=1)
    assert single.outcome is not None
    off = max(
        float((one - other).detach().abs().max())
        for one, other in zip(straight.network.parameters(), single.network.parameters(), strict=True)
    )
    assert 0 < off < 0.05  # Adam magnifies what float32 rounds away; the learning rate is 5e-3


def test_a_start_that_ends_early_tells_at_once_that_its_checkpoint_is_on_the_disk(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the disk is slow: what is told of a notice is when the node could have gone."""
    write, told = checkpoint_format.write, Recorder.event

    def slowly(folder: Path, snapshot: checkpoint_format.Snapshot) -> Path:
        time.sleep(0.3)
        return write(folder, snapshot)

    def event(recorder: Recorder, kind: str, **fields: Any) -> None:
        told(recorder, kind, **fields, there=names(tmp_path))

    monkeypatch.setattr(checkpoint_format, "write", slowly)
    monkeypatch.setattr(Recorder, "event", event)
    ran = start(ground, tmp_path, noticed=2)
    assert ran.recorder.of("saved") == [{"update": 2, "there": [update_name(2)]}]
    kinds = [kind for kind, _ in ran.recorder.events]
    assert kinds.index("saved") < kinds.index("trained")
    assert start(ground, tmp_path).recorder.of("saved") == []  # the end of a run is told by itself


def test_sums_of_a_run(ground: Path, straight: tuple[Ran, Path]) -> None:
    ran, _ = straight
    store = Store(next((ground / ".tokens").iterdir()))
    [trained] = ran.recorder.of("trained")
    rows, lengths = store.rows("train"), store.column("train", "length")
    assert trained["rows_seen"] == 2 * rows
    last = ran.recorder.of("progress")[-1]
    assert (last["rows"], last["real_tokens"]) == (trained["rows_seen"], trained["real_tokens"])
    assert trained["real_tokens"] == 2 * int(lengths.sum()) == 2 * store.manifest.tokens["train"]
    assert trained["padded_tokens"] == trained["real_tokens"]  # none is padding
    # Updates of 19, 19 and the rest of the rows, in passes of four.
    passes = 2 * (5 + 5 + -(-(rows - 38) // 4))
    assert trained["passes_per_update"] == round(passes / UPDATES, 3)
    assert (trained["updates"], trained["finished"]) == (UPDATES, True)
    assert set(trained["seconds"]) == {"first_batch", "input_wait", "train", "evaluate", "checkpoint"}
    assert trained["seconds"] == {name: round(value, 3) for name, value in ran.clock.seconds.items()}


def test_the_ledger_is_the_chain_over_the_rows_of_all_updates(ground: Path, straight: tuple[Ran, Path]) -> None:
    ran, _ = straight
    store = Store(next((ground / ".tokens").iterdir()))
    order = Order(store.manifest.digest, store.rows("train"), 19, 2, 3)
    ledger = bytes(32)
    for number in range(UPDATES):
        ledger = chain(ledger, rows_digest(number, store.column("train", "row_id")[order.positions(number)]))
    assert ran.outcome is not None
    assert ran.outcome.ledger == ran.recorder.of("trained")[0]["order_digest"] == ledger.hex()


def test_other_rows_under_an_update_s_number_stop_the_run(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = plan_update

    def mixed_up(store: Store, share: Share, number: int) -> Update:
        return replace(whole(store, share, number), passes=whole(store, share, max(number, 1)).passes)

    monkeypatch.setattr("tests.test_training_loop.plan_update", mixed_up)
    with pytest.raises(step.WrongRows, match=r"^update 0 \("):
        start(ground, tmp_path)


@pytest.mark.parametrize("kill", [None, 5])
def test_outcomes_are_those_of_the_best_weights(kill: int | None, ground: Path, tmp_path: Path) -> None:
    """Validation rows too, unless the best weights are an earlier start's."""
    # At this rate the last weights are not the best ones.
    rates: dict[str, Any] = {"evaluate_every": 1, "save_every": 1, "rules": {"lr": 0.02}}
    if kill is not None:
        start(ground, tmp_path, kill=kill, **rates)
    ran = start(ground, tmp_path, **rates)
    assert ran.outcome is not None
    scores = {event["update"]: event["scores"]["accuracy"] for event in ran.recorder.of("evaluated")[:-1]}
    best = ran.outcome.best_update
    assert best < UPDATES
    assert (best in scores) == (kill is None)
    known = {"valid", "test"} if kill is None else {"test"}
    assert set(ran.outcome.outcomes) == known
    store = Store(next((ground / ".tokens").iterdir()))
    for split in known:
        again = evaluate.gathered(Replicated(ran.network), TASK, store, split, pad_id=0, precision="fp32")
        assert np.array_equal(ran.outcome.outcomes[split].values, again.values)
