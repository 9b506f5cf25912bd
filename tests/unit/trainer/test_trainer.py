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
from rtrain.checkpoint.remote_copy import RemoteCopy
from rtrain.config import DistillConfig, ModelConfig
from rtrain.core.run_folder import Run
from rtrain.data.order import RowOrder, chain_digest, hash_step_rows
from rtrain.data.store.store import Store
from rtrain.data.stream import StreamSpec, WorkerBatch, plan_worker_batch
from rtrain.models import builder, precision as formats
from rtrain.parallel import layout
from rtrain.parallel.ddp import DDPStrategy
from rtrain.parallel.watchdog import Watchdog
from rtrain.tasks import base
from rtrain.trainer import evaluate, losses, step, trainer
from tests.conftest import labelled_rows, write_rows
from tests.support.tiny import make_encoder, make_store

TASK = base.get_task("classification")
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

    def stop_requested(self) -> bool:
        self.asked += 1
        return self.asked == self.noticed

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for actual, fields in self.events if actual == kind]


@dataclass(frozen=True)
class Ran:
    """What a start leaves."""

    outcome: trainer.TrainingResult | None
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
    settings = {"global_batch_size": 19, "epochs": 2, "micro_batch_size": 4, "seed": 3, **train}
    overrides = {f"train.{name}": value for name, value in settings.items()}
    overrides |= {f"optim.{name}": value for name, value in (rules or {}).items()}
    return config.load_config("intent", {"data.path": str(folder / "rows.csv"), "optim.lr": 5e-3, **overrides}).recipe


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
    replica: RemoteCopy | None = None,
    freeze: Literal["none", "encoder"] = "none",
    rules: Mapping[str, Any] | None = None,
    precision: str = "fp32",
    watch: Watchdog | None = None,
    on_update: Callable[[int], None] = lambda number: None,
    plan: Callable[[Store, StreamSpec, int], WorkerBatch] = plan_worker_batch,
    now: Callable[[], int] = time.perf_counter_ns,
    profile: Path | None = None,
    **train: Any,
) -> Ran:
    """One start of the run at `run`; `kill` ends it when update number `kill` is asked for, which `on_update` hears
    first. `noticed` is the update before which a notice is given."""
    recipe = recipe_of(ground, rules, **train)
    store = Store(next((ground / ".tokens").iterdir()))
    order = RowOrder(store.manifest.digest, store.num_rows("train"), recipe.global_batch_size, recipe.train.epochs, 3)
    assert (order.num_steps, order.rows % order.global_batch_size > 0) == (UPDATES, True)
    network = builder.build_network(
        ground / "encoder", TASK, store.manifest.labels, recipe.train.seed, ModelConfig(freeze=freeze)
    )
    formats.to_fp64_(network, precision)
    job = trainer.TrainingContext(
        recipe=recipe,
        run=Run(run),
        store=store,
        task=TASK,
        loss=losses.make_loss(TASK, DistillConfig()),
        order=order,
        pad_id=0,
        precision=precision,
        end_step=order.num_steps if until is None else until,
        is_rung=rung,
        remote_copy=replica,
        profile_path=profile,
    )
    recorder, clock, folders = Recorder(noticed=noticed), trainer.Clock(), []
    exchange = layout.build_strategy(network, recipe.train, watch, recorder.event)
    exchange.timeline.now = now
    within = recipe.train.workers_per_replica
    assert (exchange.num_replicas, exchange.replica_rank) == (world // within, rank // within)
    share = StreamSpec(store.folder, order, exchange.num_replicas, exchange.replica_rank, recipe.train.micro_batch_size)

    def updates(first: int, stop: int) -> Iterator[WorkerBatch]:
        for number in range(first, stop):
            folders.append(names(run))
            on_update(number)
            if number == kill:
                raise Killed
            yield plan(store, share, number)

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
    return f"step-{update:08d}"


def fingerprint(run: Path, update: int) -> dict[str, str]:
    """SHA-256 of each file of a checkpoint: weights, optimizer, state."""
    folder = run / "checkpoints" / update_name(update)
    actual = {path.name: sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}
    assert set(actual) == {"model.safetensors", "optim.safetensors", "state.json", "MANIFEST.json"}
    return actual


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
        "from": resumed.recorder.of("started")[0]["step"],
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

    def score_rows(exchange: DDPStrategy, task: base.Task, store: Store, split: str, *_: Any) -> dict[str, float]:
        return {"accuracy": 0.25 if split == "test" else next(left), "macro_f1": 0.0, "rows": store.num_rows(split)}

    monkeypatch.setattr(evaluate, "score_rows", score_rows)


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
    options = trainer.Cadence(last, until, every, save_every)
    due = {done: options.due_actions(done) for done in range(1, until + 1)}
    assert [done for done, actual in due.items() if "evaluate" in actual] == evaluates
    assert [done for done, actual in due.items() if "save" in actual] == saves


def test_a_rung_is_no_evaluation_and_leaves_the_answers(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were it one, a run that paused might choose other best weights than one that did not."""
    scripted(monkeypatch, 0.2, 0.3)
    paused = start(ground, tmp_path, until=1, rung=True)
    assert paused.outcome is not None
    assert (paused.outcome.is_finished, paused.recorder.scores) == (False, [])
    stored = evaluate.read_rung(Run(tmp_path), 1)
    assert stored is not None
    assert len(stored) == Store(next((ground / ".tokens").iterdir())).num_rows("valid")
    ended = start(ground, tmp_path, rung=True)
    assert [fields["step"] for fields in ended.recorder.scores] == [3, 6]
    assert ended.outcome is not None
    assert ended.outcome.best_step == 6
    assert [fields["step"] for kind, fields in ended.recorder.events if kind == "rung"] == [6]


# -------------------------------------------------------------------------------------------------------------- events


def test_events_come_in_order(ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, 0.5, 0.75)
    ran = start(ground, tmp_path, log_every=4)
    store = Store(next((ground / ".tokens").iterdir()))
    output = [(kind, fields.get("split", ""), fields.get("step")) for kind, fields in ran.recorder.events]
    assert output == [
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
    started = {"step": 0, "total_steps": 6, "workers": 1, "device": "cpu", "precision": "fp32", "lr": 5e-3}
    started["global_batch_size"] = 19
    assert ran.recorder.of("started") == [started]
    assert ran.recorder.scores == [
        {"step": 3, "percent": 50.0, "score": 0.5},
        {"step": 6, "percent": 100.0, "score": 0.75},
    ]
    assert [fields["total_steps"] for fields in ran.recorder.of("progress")] == [6, 6]
    assert ran.recorder.of("progress")[-1]["ledger"] == ran.recorder.of("trained")[0]["order_digest"]
    valid, test = {"rows": store.num_rows("valid")}, {"rows": store.num_rows("test")}
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


def test_a_start_that_ends_early_tells_at_once_that_its_checkpoint_is_on_the_disk(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the disk is slow: what is told of a notice is when the node could have gone."""
    write, output = checkpoint_format.write_checkpoint, Recorder.event

    def slowly(folder: Path, snapshot: checkpoint_format.Snapshot) -> Path:
        time.sleep(0.3)
        return write(folder, snapshot)

    def event(recorder: Recorder, kind: str, **fields: Any) -> None:
        output(recorder, kind, **fields, there=names(tmp_path))

    monkeypatch.setattr(checkpoint_format, "write_checkpoint", slowly)
    monkeypatch.setattr(Recorder, "event", event)
    ran = start(ground, tmp_path, noticed=2)
    assert ran.recorder.of("saved") == [{"step": 2, "there": [update_name(2)]}]
    kinds = [kind for kind, _ in ran.recorder.events]
    assert kinds.index("saved") < kinds.index("trained")
    assert start(ground, tmp_path).recorder.of("saved") == []  # the end of a run is told by itself


def test_sums_of_a_run(ground: Path, straight: tuple[Ran, Path]) -> None:
    ran, _ = straight
    store = Store(next((ground / ".tokens").iterdir()))
    [trained] = ran.recorder.of("trained")
    rows, lengths = store.num_rows("train"), store.column("train", "length")
    assert trained["rows_seen"] == 2 * rows
    last = ran.recorder.of("progress")[-1]
    assert (last["rows"], last["real_tokens"]) == (trained["rows_seen"], trained["real_tokens"])
    assert trained["real_tokens"] == 2 * int(lengths.sum()) == 2 * store.manifest.tokens["train"]
    assert trained["padded_tokens"] == trained["real_tokens"]  # none is padding
    # Updates of 19, 19 and the rest of the rows, in passes of four.
    passes = 2 * (5 + 5 + -(-(rows - 38) // 4))
    assert trained["micro_batches_per_step"] == round(passes / UPDATES, 3)
    assert (trained["steps"], trained["finished"]) == (UPDATES, True)
    assert set(trained["seconds"]) == {"first_batch", "input_wait", "train", "evaluate", "checkpoint"}
    assert trained["seconds"] == {name: round(value, 3) for name, value in ran.clock.seconds.items()}


def test_the_ledger_is_the_chain_over_the_rows_of_all_updates(ground: Path, straight: tuple[Ran, Path]) -> None:
    ran, _ = straight
    store = Store(next((ground / ".tokens").iterdir()))
    order = RowOrder(store.manifest.digest, store.num_rows("train"), 19, 2, 3)
    ledger = bytes(32)
    for number in range(UPDATES):
        ledger = chain_digest(ledger, hash_step_rows(number, store.column("train", "row_id")[order.positions(number)]))
    assert ran.outcome is not None
    assert ran.outcome.ledger == ran.recorder.of("trained")[0]["order_digest"] == ledger.hex()


def test_other_rows_under_an_update_s_number_stop_the_run(ground: Path, tmp_path: Path) -> None:
    def mixed_up(store: Store, share: StreamSpec, number: int) -> WorkerBatch:
        other = plan_worker_batch(store, share, max(number, 1))
        return replace(plan_worker_batch(store, share, number), micro_batches=other.micro_batches)

    with pytest.raises(step.WrongRows, match=r"^step 1 \("):
        start(ground, tmp_path, plan=mixed_up)


@pytest.mark.parametrize("kill", [None, 5])
def test_outcomes_are_those_of_the_best_weights(kill: int | None, ground: Path, tmp_path: Path) -> None:
    """Validation rows too, unless the best weights are an earlier start's."""
    # At this rate the last weights are not the best ones.
    rates: dict[str, Any] = {"evaluate_every": 1, "save_every": 1, "rules": {"lr": 0.02}}
    if kill is not None:
        start(ground, tmp_path, kill=kill, **rates)
    ran = start(ground, tmp_path, **rates)
    assert ran.outcome is not None
    scores = {event["step"]: event["scores"]["accuracy"] for event in ran.recorder.of("evaluated")[:-1]}
    best = ran.outcome.best_step
    assert best is not None
    assert best < UPDATES
    assert (best in scores) == (kill is None)
    facts = {"valid", "test"} if kill is None else {"test"}
    assert set(ran.outcome.row_results) == facts
    store = Store(next((ground / ".tokens").iterdir()))
    for split in facts:
        repeated = evaluate.gather_row_results(DDPStrategy(ran.network), TASK, store, split, pad_id=0, precision="fp32")
        assert np.array_equal(ran.outcome.row_results[split].values, repeated.values)
