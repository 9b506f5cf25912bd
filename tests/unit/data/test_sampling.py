"""The mix of rows by a column, and the weights of rows: the draws, the store, the refusals and the ledger."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain import config
from rtrain.config import Config, DeployConfig, Recipe
from rtrain.core import events
from rtrain.core.errors import ConfigError, UserError
from rtrain.core.run_folder import Run
from rtrain.data import row_reader, sampling
from rtrain.data.order import RowOrder, chain_digest, hash_step_rows
from rtrain.data.sampling import SampledOrder, compute_quotas
from rtrain.data.store import builder
from rtrain.data.store.store import Store
from rtrain.data.stream import StreamSpec, decode_tables, materialize_steps, plan_worker_batch
from rtrain.runs import run_folders
from rtrain.trainer.trainer import INITIAL_LEDGER
from rtrain.verification import verify
from tests.conftest import labelled_rows, write_rows
from tests.support.causes import caused_by
from tests.support.tiny import make_encoder, make_store

SIZES = (60, 9, 31)


def order_of(temperature: float, epochs: int = 3, batch: int = 16, seed: int = 0) -> SampledOrder:
    """Rows 0 to 59 have the first value, and so on."""
    return SampledOrder("digest", sum(SIZES), batch, epochs, seed, SIZES, temperature, None)


def draws_of(order: SampledOrder, first: int, last: int) -> list[int]:
    """How often each row is drawn in the epochs `first` to `last - 1`."""
    steps = range(first * order.steps_per_epoch, last * order.steps_per_epoch)
    rows = np.concatenate([order.positions(step) for step in steps])
    return np.bincount(rows, minlength=order.rows).tolist()  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------------------- the order


@pytest.mark.parametrize(("temperature", "quotas"), [(1.0, [60, 9, 31]), (0.0, [34, 33, 33]), (0.5, [48, 18, 34])])
def test_shares_follow_the_temperature_and_add_up(temperature: float, quotas: list[int]) -> None:
    powers = np.array(SIZES) ** temperature
    actual = compute_quotas(SIZES, temperature)
    assert sorted(actual.tolist()) == sorted(quotas)
    assert int(actual.sum()) == sum(SIZES)
    assert np.abs(actual - powers / powers.sum() * sum(SIZES)).max() < 1


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_an_epoch_draws_each_value_as_planned(temperature: float) -> None:
    order = order_of(temperature)
    for epoch in range(3):
        by_value = np.split(np.array(draws_of(order, epoch, epoch + 1)), np.cumsum(SIZES)[:-1])
        assert [int(part.sum()) for part in by_value] == order.quotas.tolist()


def test_natural_shares_draw_every_row_once_per_epoch() -> None:
    assert all(draws_of(order_of(1.0), epoch, epoch + 1) == [1] * 100 for epoch in range(3))


def test_rows_of_a_value_are_drawn_equally_often_over_epochs() -> None:
    order = order_of(0.0, epochs=7)
    for last in range(1, 8):
        by_value = np.split(np.array(draws_of(order, 0, last)), np.cumsum(SIZES)[:-1])
        assert max(int(part.max() - part.min()) for part in by_value) <= 1


def test_epochs_and_seeds_differ_and_batch_sizes_do_not() -> None:
    def rows_of(order: SampledOrder, epoch: int) -> list[int]:
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        return np.concatenate([order.positions(step) for step in steps]).tolist()  # type: ignore[no-any-return]

    assert rows_of(order_of(0.5, batch=16), 1) == rows_of(order_of(0.5, batch=7), 1)
    assert rows_of(order_of(0.5), 0) != rows_of(order_of(0.5), 1)
    assert rows_of(order_of(0.5), 0) != rows_of(order_of(0.5, seed=1), 0)


def test_values_are_mixed_within_steps() -> None:
    """A quarter of an epoch has each value in about its share: 8 or 9 of 25 rows of each, if drawn independently with a
    deviation of 2.4."""
    order = order_of(0.0, epochs=40, batch=25)
    rare = [int(((order.positions(step) >= 60) & (order.positions(step) < 69)).sum()) for step in range(160)]
    assert 1.5 < float(np.std(rare)) < 3.0


def test_plans_differ_by_temperature_and_from_the_plain_order() -> None:
    plain = RowOrder("digest", 100, 16, 3, 0)
    assert len({order_of(t).planned_digest for t in (0.0, 0.5, 1.0)} | {plain.planned_digest}) == 4


def test_wrong_draws_are_counted() -> None:
    order = order_of(0.5)
    draws = np.array(draws_of(order, 0, 3))
    assert order.find_wrong_draws(draws, order.num_steps) == (0, 0)
    changed_draws = draws.copy()
    changed_draws[0] -= 1
    changed_draws[61] += 1
    too_many, too_few = order.find_wrong_draws(changed_draws, order.num_steps)
    assert min(too_many, too_few) > 0
    assert order.find_wrong_draws(np.array(draws_of(order, 0, 1)), order.steps_per_epoch + 1)[1] == 0


# ---------------------------------------------------------------------------------------------------------- the store


def write(path: Path, **columns: Any) -> Path:
    """100 rows of three languages; `columns` are functions of the row's number."""
    with path.open("w") as file:
        for number in range(100):
            row = {
                "text": f"row {number} of {number % 7}",
                "label": "ab"[number % 2],
                "lang": "de" if number < 20 else "en",
            }
            file.write(json.dumps(row | {name: value(number) for name, value in columns.items()}) + "\n")
    return path


def recipe_of(path: Path, **data: Any) -> Recipe:
    settings = {f"data.{name}": value for name, value in data.items()}
    return config.load_config("intent", {"data.path": str(path), "train.global_batch_size": 16, **settings}).recipe


MIX = {"column": "lang", "temperature": 0.0}


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    make_encoder(folder / "encoder")
    write(folder / "rows.jsonl", weight=lambda number: number / 10)
    return folder


@pytest.fixture(scope="module")
def store(ground: Path) -> Store:
    recipe = recipe_of(ground / "rows.jsonl", weight_column="weight", sampling=MIX)
    return make_store(recipe, ground / "encoder", ground)


def test_the_store_keeps_weights_and_values(store: Store) -> None:
    lines = np.array(store.origins("train")["line"].to_pylist())
    weights, groups = store.row_weights("train"), store.sampling_groups
    assert weights is not None
    assert weights.tolist() == pytest.approx(((lines - 1) / 10).tolist())
    assert (groups.values, groups.sizes) == (("de", "en"), (int((lines <= 20).sum()), int((lines > 20).sum())))
    assert sorted(groups.members.tolist()) == list(range(len(lines)))
    assert set(lines[groups.members[: groups.sizes[0]]]) == {line for line in lines if line <= 20}
    tokens = store.read_tokens("train", np.array([5, 1, 5]))
    assert tokens.row_weights is not None
    assert tokens.row_weights.tolist() == weights[[5, 1, 5]].tolist()
    assert tokens.take([2, 0]).row_weights.tolist() == weights[[5, 5]].tolist()  # type: ignore[union-attr]


def test_weights_travel_with_their_rows(ground: Path, store: Store) -> None:
    order = sampling.make_order(recipe_of(ground / "rows.jsonl", sampling=MIX), store)
    spec = StreamSpec(store.folder, order, 2, 1, 4)
    [batch] = decode_tables([materialize_steps({"id": np.array([0])}, spec=spec, start=1)])
    weights = store.row_weights("train")
    assert weights is not None
    by_id = dict(zip(store.column("train", "row_id").tolist(), weights.tolist(), strict=True))
    for tokens in batch.micro_batches:
        assert tokens.row_weights is not None
        assert tokens.row_weights.tolist() == [by_id[row] for row in tokens.row_ids.tolist()]


def test_the_rows_of_a_step_are_the_same_on_any_number_of_workers(ground: Path, store: Store) -> None:
    order = sampling.make_order(recipe_of(ground / "rows.jsonl", sampling=MIX), store)
    for workers in (1, 3):
        specs = [StreamSpec(store.folder, order, workers, rank, 4) for rank in range(workers)]
        batches = [plan_worker_batch(store, spec, 2) for spec in specs]
        rows = [int(row) for batch in batches for tokens in batch.micro_batches for row in tokens.row_ids]
        assert sorted(rows) == sorted(store.column("train", "row_id")[order.positions(2)].tolist())


def test_addresses_of_stores_change_with_the_columns_alone(ground: Path) -> None:
    def digest(**data: Any) -> str:
        recipe = recipe_of(ground / "rows.jsonl", **data)
        return builder.compute_digest(recipe, row_reader.inspect_source(recipe.data), ground / "encoder")

    mixed = digest(sampling=MIX)
    assert digest(sampling={"column": "lang", "temperature": 1.0}) == mixed
    assert len({digest(), mixed, digest(sampling={"column": "label"}), digest(weight_column="weight")}) == 4


# --------------------------------------------------------------------------------------------------------- refused rows


@pytest.mark.parametrize("value", [-0.5, "heavy", None, "", "inf", "nan", "1_000", True])
def test_a_bad_weight_makes_a_bad_row(tmp_path: Path, value: Any) -> None:
    path = write(tmp_path / "rows.jsonl", weight=lambda number: value if number == 3 else 1)
    data = recipe_of(path, weight_column="weight").data
    [source_file] = row_reader.inspect_source(data).files
    reasons = [row.reason is not None for row in row_reader.read_rows(source_file, data)]
    assert [number for number, is_bad in enumerate(reasons) if is_bad] == [3]


@pytest.mark.parametrize("value", [0, 2, "2.5", " 3 ", 1e-3])
def test_a_weight_may_be_any_number_of_zero_or_more(tmp_path: Path, value: Any) -> None:
    data = recipe_of(write(tmp_path / "rows.jsonl", weight=lambda _: value), weight_column="weight").data
    [source_file] = row_reader.inspect_source(data).files
    rows = list(row_reader.read_rows(source_file, data))
    assert {(row.reason, row.weight) for row in rows} == {(None, float(value))}


def test_all_missing_columns_are_named(ground: Path) -> None:
    data = recipe_of(ground / "rows.jsonl", weight_column="weigth", sampling={"column": "tongue"}).data
    with pytest.raises(ConfigError) as error:
        row_reader.inspect_source(data)
    assert [(problem.field, problem.value, problem.code) for problem in error.value.problems] == [
        ("data.weight_column", "weigth", "unknown_column"),
        ("data.sampling", "tongue", "unknown_column"),
    ]


def test_evaluation_files_need_neither_column(ground: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "test.csv", labelled_rows(30))
    data = recipe_of(ground / "rows.jsonl", weight_column="weight", sampling=MIX, test=str(tmp_path / "test.csv")).data
    source = row_reader.inspect_source(data)
    [test_file] = [file for file in source.files if file.role == "test"]
    assert {(row.reason, row.weight) for row in row_reader.read_rows(test_file, data)} == {(None, 1.0)}


def test_weights_that_are_all_zero_are_refused(ground: Path, tmp_path: Path) -> None:
    recipe = recipe_of(write(tmp_path / "rows.jsonl", weight=lambda _: 0), weight_column="weight")
    with pytest.raises(UserError, check=caused_by("no_weight")):
        make_store(recipe, ground / "encoder", tmp_path)


def test_a_student_s_unlabeled_rows_cannot_be_mixed(ground: Path) -> None:
    with pytest.raises(ConfigError) as error:
        config.load_config("intent", {"data.sampling": MIX, "distill.unlabeled_rows_path": "more.csv"})
    assert [problem.field for problem in error.value.problems] == ["data.sampling"]


# ----------------------------------------------------------------------------------------------------------- the ledger


def record(ground: Path, store: Store, run: Path, steps: int, order: RowOrder) -> None:
    """A run's log as after `steps` steps of `order`."""
    recipe = recipe_of(ground / "rows.jsonl", weight_column="weight", sampling=MIX)
    run_folders.write_frozen_config(Run(run), Config(recipe, DeployConfig()))
    events.append_event(run, "created", store=str(store.folder), data_digest=store.manifest.digest)
    link, row_ids = INITIAL_LEDGER, store.column("train", "row_id")
    for step in range(steps):
        link = chain_digest(link, hash_step_rows(step, row_ids[order.positions(step)]))
        events.append_event(run, "progress", step=step + 1, ledger=link.hex())


@pytest.mark.parametrize("extra_steps", [0, 2])
def test_the_ledger_shows_the_drawn_rows(ground: Path, store: Store, tmp_path: Path, extra_steps: int) -> None:
    order = sampling.make_order(recipe_of(ground / "rows.jsonl", sampling=MIX), store)
    assert isinstance(order, SampledOrder)
    record(ground, store, tmp_path, 2 * order.steps_per_epoch + extra_steps, order)
    report = verify.check_ledger(Run(tmp_path))
    assert (report.passed, report.repeated_rows, report.missing_rows) == (True, 0, 0)
    quotas = {value: (counts["rows"], counts["per_epoch"]) for value, counts in report.drawn_rows.items()}
    assert quotas == dict(zip(("de", "en"), zip(order.sizes, order.quotas.tolist(), strict=True), strict=True))
    total = sum(counts["drawn"] for counts in report.drawn_rows.values())
    assert total == order.rows_until(2 * order.steps_per_epoch + extra_steps)


def test_a_ledger_of_other_draws_does_not_pass(ground: Path, store: Store, tmp_path: Path) -> None:
    order = sampling.make_order(recipe_of(ground / "rows.jsonl", sampling=MIX), store)
    assert isinstance(order, SampledOrder)
    record(ground, store, tmp_path, 3, replace(order, temperature=1.0))
    report = verify.check_ledger(Run(tmp_path))
    assert (report.passed, sorted(report.mismatching_records)) == (False, [1, 2, 3])
