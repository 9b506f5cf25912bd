"""The same training in every layout: shown by two figures, and seen to fail where a bug is planted."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from rtrain import config
from rtrain.config import Config
from rtrain.core.errors import UserError
from rtrain.data.order import RowOrder, assign_micro_batches, chain_digest, hash_step_rows
from rtrain.data.store.store import Store
from rtrain.trainer.trainer import INITIAL_LEDGER
from rtrain.verification import layout_runs, planted_bugs, verify
from rtrain.verification.layout_runs import (
    SINGLE_WORKER,
    CaseMeasurement,
    SkippedLayout,
    TrainingSlice,
    VerificationCase,
)
from tests.conftest import labelled_rows, write_rows
from tests.support.tiny import make_encoder

BUGS = ["mean of means", "dropped tail row", "double exchange", "k ignored", "stale embedding row"]
SHARED_BUGS = ["gradient twice", "replica left out", "edge gradient lost", "scale_grads left on"]
WEIGHTS_BUG = "weights per micro-batch"
WEIGHTED = ["1 x 8, weighted", "2 x 3, weighted"]
USED_ROWS = ["1 x 3, used rows", "2 x 3, used rows", "2 x 3, zero 3, used rows"]
LAID_OUT = [f"2 x 3, {name}" for name in ("zero 2", "zero 3", "tensor 2", "sequence", "gpipe", "pipeline", "context")]
LAID_OUT += ["2 x 3, zero 3, resumed from zero 2", "2 x 3, tensor 2, resumed from zero 3"]
LAID_OUT += ["2 x 3, sequence, resumed from tensor 2", "2 x 3, gpipe, resumed from sequence"]
LAID_OUT += ["2 x 3, pipeline, resumed from gpipe", "2 x 3, context, resumed from pipeline"]
LAID_OUT += ["2 x 3, resumed from context"]
"""Without `interleaved`, for which the encoder has too few layers."""
ROUNDED = ["1 x 8, fp32", "1 x 3, fp32", "2 x 3, zero 3, fp32"]


pytestmark = pytest.mark.timeout(900)
"""Six trainings before the first test: on a machine that is busy otherwise they take longer than a test may."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Rows in three uneven files, and an encoder of two layers."""
    folder = tmp_path_factory.mktemp("verify")
    rows = labelled_rows(240)
    (folder / "rows").mkdir()
    for name, part in (("a", rows[:7]), ("b", rows[7:190]), ("c", rows[190:])):
        write_rows(folder / "rows" / f"{name}.csv", part)
    overrides = {"data.path": str(folder / "rows"), "model.name": str(make_encoder(folder / "encoder"))}
    return config.load_config("intent", {**overrides, "train.global_batch_size": 13})


@pytest.fixture(scope="module")
def report(ray_session: Path, settings: Config) -> verify.VerificationReport:
    folder = ray_session / "verify" / "scratch"
    actual = verify.run(settings, folder, plant_bugs=True, cores=2)
    assert not folder.exists()
    return actual


def of(report: verify.VerificationReport, name: str) -> CaseMeasurement:
    [measured] = [measured for case, measured in report.cases if case.name == name]
    return measured


@pytest.mark.ray
def test_every_layout_trains_the_same(report: verify.VerificationReport) -> None:
    assert report.problems == []
    document = report.to_document()
    assert (document["passed"], len(document["cases"])) == (True, 5 + 14 + 9 + 3 + 3 + 4)
    assert max(document["weights_ratio"], document["gradient_ratio"]) <= 1e-8
    # Sums in another order part by rounding: a figure of zero would mean that nothing was compared.
    for name in ("1 x 3", "2 x 8", "2 x 3", "2 x 3, resized from 1", *LAID_OUT, WEIGHTED[1], *USED_ROWS):
        measured = of(report, name)
        assert 0 < measured.weights_ratio <= 1e-8
        assert 0 < measured.gradient_ratio <= 1e-8
        assert measured.differing_workers == 0
    assert [(item.workers, item.layout) for item in report.skipped_layouts] == [
        *((4, layout) for layout in layout_runs.GRID_LAYOUTS),
        (2, "interleaved"),
    ]


@pytest.mark.ray
def test_in_fp32_shares_part_from_one_worker_as_rounding_does(report: verify.VerificationReport) -> None:
    """Its exchanges are others than in float64."""
    [(case, *times)] = report.noise_ratios
    assert case.name == ROUNDED[-1]
    assert all(0.1 < item < verify.MAX_NOISE_RATIO for item in times)
    for name in ROUNDED[1:]:
        assert of(report, name).weights_ratio > 1e-6
        assert 1e-9 < of(report, name).gradient_ratio < 1e-4


@pytest.mark.ray
def test_layouts_differ_in_passes_and_nothing_else(
    report: verify.VerificationReport, settings: Config, ray_session: Path
) -> None:
    assert (report.rows, report.global_batch_size, report.steps) == (53, 13, 5)
    passes = {case.name: measured.max_micro_batches for case, measured in report.cases if not case.bug}
    # Those of rank 0, which has 7 of the 13 rows of an update where there are two workers.
    several = ("2 x 3", "2 x 3, resized from 1", *LAID_OUT, ROUNDED[-1])
    expected = {"1 x 8": 2, "1 x 3": 5, "2 x 8": 1, **dict.fromkeys(several, 3), ROUNDED[0]: 2, ROUNDED[1]: 5}
    expected |= {WEIGHTED[0]: 2, WEIGHTED[1]: 3, USED_ROWS[0]: 5, **dict.fromkeys(USED_ROWS[1:], 3)}
    # Two workers of one replica have all of an update's rows.
    replica = tuple(f"2 x 3, {name}" for name in ("tensor 2", "sequence", "gpipe", "pipeline", "context"))
    assert passes == expected | {name: 5 for name in several if name.startswith(replica)}
    store = Store(next((ray_session / "verify" / ".tokens").iterdir()))
    order, link = RowOrder(store.manifest.digest, 53, 13, 1, settings.recipe.train.seed), INITIAL_LEDGER
    for number in range(order.num_steps):
        link = chain_digest(link, hash_step_rows(number, store.column("train", "row_id")[order.positions(number)]))
    assert {measured.order_digest for case, measured in report.cases if not case.is_weighted} == {link.hex()}
    [digest] = {measured.order_digest for case, measured in report.cases if case.is_weighted}
    assert digest != link.hex()
    rows = {case.name: measured.rows for case, measured in report.cases if not case.bug}
    assert rows == {name: 27 if "from" in name else 53 for name in passes}


@pytest.mark.ray
def test_every_planted_bug_is_seen(report: verify.VerificationReport) -> None:
    seen = [
        case.bug
        for case, measured in report.cases
        if case.bug and max(measured.weights_ratio, measured.gradient_ratio) > 1e-2
    ]
    seen_with_used_rows = [BUGS[-1]]
    assert list(planted_bugs.BUGS) == [*BUGS, *SHARED_BUGS, WEIGHTS_BUG]
    assert sorted(seen) == sorted([*planted_bugs.BUGS, *seen_with_used_rows])
    assert report.missed_bugs == []
    assert of(report, "2 x 3, dropped tail row").rows < 53
    assert of(report, "2 x 3, stale embedding row").differing_workers == 1
    # Why there are two figures: AdamW hardly heeds that a gradient is twice as large as it should be.
    for name in ("double exchange", "zero 3, gradient twice"):
        assert of(report, f"2 x 3, {name}").weights_ratio < of(report, f"2 x 3, {name}").gradient_ratio


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(3600)
def test_the_large_matrix_has_every_layout_by_as_many_workers_as_it_takes(settings: Config, tmp_path: Path) -> None:
    """By the command, which starts a Ray with room for all of them, however few cores there are."""
    deep = make_encoder(tmp_path / "encoder", layers=4)
    command = [sys.executable, "-m", "rtrain", "verify", "intent", "--full", "--json", "--out", str(tmp_path / "full")]
    command += ["--data", str(settings.recipe.data.path), "--model", str(deep), "--set", "train.global_batch_size=13"]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    actual = json.loads(done.stdout)
    assert (actual["problems"], done.returncode) == ([], 0)
    assert {case["layout"] for case in actual["cases"]} == {
        "",
        *layout_runs.PAIR_LAYOUTS,
        *layout_runs.GRID_LAYOUTS,
        *layout_runs.CUBE_LAYOUTS,
    }
    assert {(item["workers"], item["layout"]) for item in actual["skipped_layouts"]} == {
        (3, layout) for layout in layout_runs.PAIR_LAYOUTS if not layout.startswith("zero")
    }


@pytest.mark.ray
def test_a_folder_in_use_is_refused_and_left_alone(ray_session: Path, settings: Config, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("text")
    with pytest.raises(UserError) as error:
        verify.run(settings, tmp_path)
    assert error.value.code == "already_exists"
    assert (tmp_path / "mine").read_text() == "text"


# ----------------------------------------------------------------------------------------------------- plan, judgement


def with_train(settings: Config, **train: object) -> Config:
    return config.with_overrides(settings, {f"train.{name}": value for name, value in train.items()})


def test_four_workers_are_in_the_plan_where_they_have_cores(settings: Config) -> None:
    few, many = (layout_runs.make_plan(settings, (10_000, 20.0), cores=cores) for cores in (3, 4))
    assert [item.layout for item in few.skipped_layouts] == list(layout_runs.GRID_LAYOUTS)
    assert (few.workers, many.workers, many.skipped_layouts) == (2, 4, ())
    assert {case.layout for case in many.groups[-1]} == {"", *layout_runs.GRID_LAYOUTS}
    assert [layout_runs.max_group_workers(settings.recipe.train, False, cores) for cores in (3, 4)] == [2, 4]


def test_a_frozen_embedding_has_no_gradient_to_be_stale(settings: Config) -> None:
    frozen = config.with_overrides(settings, {"model.freeze": "encoder"})
    todo = layout_runs.make_plan(frozen, (10_000, 20.0), plant_bugs=True)
    assert [case.bug for group in todo.groups for case in group if case.bug] == [*BUGS[:-1], *SHARED_BUGS, WEIGHTS_BUG]


@pytest.mark.parametrize(("asked", "per_update", "rows"), [(64, 49, 1030), (256, 97, 1068)])
def test_every_replica_of_the_full_plan_is_idle_once_and_makes_another_number_of_passes(
    settings: Config, asked: int, per_update: int, rows: int
) -> None:
    todo = layout_runs.make_plan(with_train(settings, global_batch_size=asked), (10_000, 20.0), full=True)
    assert (todo.rows, todo.global_batch_size) == (rows, per_update)
    lengths = np.random.default_rng(0).integers(4, 60, todo.rows).astype(np.int32)
    seen = set[str]()
    for case in (case for group in todo.groups for case in group):
        train = layout_runs.case_train_config(settings.recipe.train, case.layout, case.workers)
        replicas = case.workers // (
            train.tensor_parallel_size * train.pipeline_parallel_size * train.context_parallel_size
        )
        if replicas == 1 or replicas > 3:
            continue
        seen.add(case.layout)
        for first, counts in ((0, None), (todo.rows - 1, 0)):
            local_part = lengths[first : first + todo.global_batch_size]
            passes = [
                len(assign_micro_batches(local_part, replicas, rank, case.micro_batch_size)) for rank in range(replicas)
            ]
            assert min(passes) < max(passes), case.name
            assert counts is None or min(passes) == counts
    assert seen == {"", "zero 2", "zero 3", *layout_runs.GRID_LAYOUTS, *layout_runs.CUBE_LAYOUTS} - {
        "pipeline, tensor 2"
    }  # of all workers


def test_a_tensor_whose_gradient_is_lost_is_seen(tmp_path: Path) -> None:
    """Weights would hardly show it: AdamW moves what has a small gradient as far as what has a large one."""
    network = torch.nn.Linear(3, 2)
    network(torch.ones(1, 3)).sum().backward()
    exchange: Any = SimpleNamespace(module=network, gather_full_tensors=lambda tensors: tensors)
    case, of = VerificationCase(1, 8), cast(TrainingSlice, SimpleNamespace(scratch=tmp_path, steps=4))
    first = layout_runs._ReferenceFiles(case, of, is_active=True)
    first.compare_gradient(exchange, 1, CaseMeasurement())
    complete, lost = CaseMeasurement(), CaseMeasurement()
    first.is_writer = False
    first.compare_gradient(exchange, 1, complete)
    network.bias.grad = None
    first.compare_gradient(exchange, 1, lost)
    assert complete.gradient_ratio == 0.0
    assert (lost.gradient_ratio, lost.worst_tensor, lost.worst_step) == (math.inf, "bias", 1)


def layouts(todo: layout_runs.VerificationPlan, group: int = 1) -> list[str]:
    """Those that are trained from the start, and the bugs."""
    return [
        case.bug or case.layout for case in todo.groups[group] if not case.resumed_from and case.precision == "fp64"
    ]


def planned(settings: Config, model: Path, **how: bool) -> layout_runs.VerificationPlan:
    return layout_runs.make_plan(
        settings,
        (10_000, 20.0),
        cores=4,
        find_problems=partial(layout_runs.check_layout, settings.recipe, model),
        **how,
    )


def test_layouts_that_workers_or_the_model_do_not_allow_are_left_out_by_name(settings: Config, tmp_path: Path) -> None:
    tiny = Path(settings.recipe.model.name)  # of two layers, which are too few for two parts on each of two workers
    full = planned(settings, tiny, full=True)
    assert "interleaved" not in layouts(full)
    assert [item.layout for item in full.skipped_layouts if item.workers < 3] == ["interleaved"]
    assert [item.layout for item in full.skipped_layouts if item.workers == 3] == [
        *("tensor 2", "sequence", "gpipe", "pipeline", "interleaved", "context")
    ]
    (tmp_path / "config.json").write_text('{"model_type": "electric"}')
    other = planned(settings, tmp_path, plant_bugs=True)
    assert layouts(other) == [
        *("", "", "", "zero 2", "zero 3", "zero 3", *BUGS, *SHARED_BUGS[:2]),
        *("", WEIGHTS_BUG, BUGS[-1]),
    ]
    missing = [item for item in other.skipped_layouts if item.workers == 2]
    assert [item.layout for item in missing] == ["tensor 2", "sequence", "gpipe", "pipeline", "interleaved", "context"]
    assert missing[0] == SkippedLayout(2, "tensor 2", other.skipped_layouts[0].reason)
    assert [item.bugs for item in missing if item.bugs] == [tuple(SHARED_BUGS[2:])]
    # What is left out has no hole behind it: the next layout goes on from the one before.
    assert [case.name for case in other.groups[1] if case.resumed_from] == [
        "2 x 3, resized from 1",
        "2 x 3, zero 3, resumed from zero 2",
        "2 x 3, resumed from zero 3",
    ]
    odd = with_train(settings, workers=3)
    assert layouts(planned(odd, tiny)) == ["", "", "", "zero 2", "zero 3", "zero 3", ""]


def test_only_tasks_with_weights_and_no_teacher_have_weighted_cases(settings: Config) -> None:
    def weighted(recipe: str, **overrides: Any) -> list[str]:
        weighted_config = config.load_config(recipe, {"data.path": settings.recipe.data.path, **overrides})
        todo = layout_runs.make_plan(weighted_config, (10_000, 20.0), cores=2)
        return [case.name for group in todo.groups for case in group if case.is_weighted]

    assert weighted("intent") == WEIGHTED
    assert len(weighted("essay")) == 2
    assert weighted("squad") == weighted("intent", **{"distill.teacher": "v1"}) == []


def test_how_rows_are_dealt_and_whole_gradients_are_sent_leaves_no_layout_out(settings: Config) -> None:
    tiny = Path(settings.recipe.model.name)
    local_part = {"gradient_compression": "bf16", "min_workers": 1, "load_balancing": "auto"}
    sent = with_train(settings, **local_part)
    assert planned(sent, tiny) == planned(settings, tiny)
    options = [layout_runs.case_train_config(sent.recipe.train, layout, 2) for layout in ("", "zero 3")]
    assert [item.load_balancing for item in options] == ["auto", "off"]
    frozen = planned(config.with_overrides(settings, {"model.freeze": "encoder"}), tiny)
    assert {item.layout for item in frozen.skipped_layouts} == {
        *("gpipe", "pipeline", "interleaved"),
        *("pipeline of 2", "pipeline, zero 3", "pipeline, tensor 2"),
    }


def test_what_was_left_out_is_told_and_not_passed_over() -> None:
    cases = [
        (VerificationCase(1, 8), CaseMeasurement(order_digest="aa", rows=129)),
        (VerificationCase(2, 3, bug="k ignored"), CaseMeasurement(1.0, 1.0)),
    ]
    missed = [SkippedLayout(2, "pipeline", "model.freeze=encoder: no", ("edge gradient lost", "scale_grads left on"))]
    report = verify.VerificationReport(129, 32, 5, cases, missed)
    assert report.problems == []
    assert all(name in report.format_text() for name in ("pipeline", "edge gradient lost", "scale_grads left on"))
    assert report.to_document()["skipped_layouts"][0]["bugs"] == ("edge gradient lost", "scale_grads left on")


@pytest.mark.parametrize("workers", [1, 2, 5, 16])
@pytest.mark.parametrize("mean_tokens", [4.0, 60.0, 512.0])
@pytest.mark.parametrize("rows", [90, 1003, 10**6])
def test_every_plan_has_ragged_passes_and_a_short_last_update(
    settings: Config, workers: int, mean_tokens: float, rows: int
) -> None:
    todo = layout_runs.make_plan(
        with_train(settings, workers=workers, global_batch_size=64), (rows, mean_tokens), plant_bugs=True
    )
    entry = todo.global_batch_size // todo.workers
    assert entry >= 4
    assert any(entry % case.micro_batch_size for case in todo.groups[-1])
    assert todo.rows % todo.global_batch_size
    assert todo.rows <= rows
    assert all(len({case.workers for case in group}) == 1 for group in todo.groups)
    assert todo.groups[0][0].workers == 1


def test_a_slice_in_whose_middle_nothing_can_be_resumed_is_refused_with_the_rows_that_it_takes(
    settings: Config,
) -> None:
    """Four workers have four rows each in an update: 16 rows are one, and no checkpoint lies before its end."""
    few, enough = (layout_runs.make_plan(settings, (rows, 20.0), cores=4) for rows in (16, 17))
    [problem] = layout_runs.check_plan(settings, few)
    assert (problem.field, problem.code) == ("data.path", "too_few_rows")
    assert layout_runs.check_plan(settings, enough) == []


def test_a_layout_beyond_fp32_s_noise_is_a_problem() -> None:
    near = CaseMeasurement(weights_ratio=1e-3, gradient_ratio=1e-7, order_digest="aa", rows=129)
    sizes = ((8, replace(near, weights_ratio=0.0)), (3, near))
    reference = [(VerificationCase(1, size, precision="fp32"), actual) for size, actual in sizes]
    for times, problems in ((2.9, 0), (3.1, 1)):
        apart = replace(near, gradient_ratio=times * 1e-7)
        rounded = [*reference, (VerificationCase(2, 3, "zero 3", precision="fp32"), apart)]
        actual = verify.VerificationReport(
            129, 32, 5, [(VerificationCase(1, 8), CaseMeasurement(order_digest="aa", rows=129)), *rounded]
        )
        assert len(actual.problems) == problems
        assert (actual.weights_ratio, actual.gradient_ratio) == (0.0, 0.0)


GOOD = CaseMeasurement(weights_ratio=1e-13, gradient_ratio=1e-12, worst_tensor="head", order_digest="aa", rows=129)


@pytest.mark.parametrize(
    ("wrong", "case", "count"),
    [
        ({}, VerificationCase(2, 3), 0),
        ({"gradient_ratio": 2e-8}, VerificationCase(2, 3), 1),
        ({"weights_ratio": 2e-8}, VerificationCase(2, 3), 1),
        ({"order_digest": "bb"}, VerificationCase(2, 3), 1),
        ({"differing_workers": 1}, VerificationCase(2, 3), 1),
        ({"rows": 128}, VerificationCase(2, 3), 1),
        ({"rows": 65}, VerificationCase(2, 3, resumed_from=SINGLE_WORKER), 0),
        ({"weights_ratio": math.nan, "gradient_ratio": math.nan}, VerificationCase(2, 3), 2),
        ({"weights_ratio": 0.02}, VerificationCase(2, 3, bug="k ignored"), 0),
        ({}, VerificationCase(2, 3, bug="k ignored"), 1),
    ],
)
def test_each_thing_that_is_wrong_is_a_problem(wrong: dict[str, Any], case: VerificationCase, count: int) -> None:
    reference = (VerificationCase(1, 8), CaseMeasurement(order_digest="aa", rows=129))
    assert len(verify.VerificationReport(129, 32, 5, [reference, (case, replace(GOOD, **wrong))]).problems) == count
