"""A run on a smaller vocabulary: its model is cut to its training rows, and its teacher is not."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain import config as configuration
from rtrain.checkpoint import format as checkpoint_format
from rtrain.compress import distill
from rtrain.config import Config, with_overrides
from rtrain.core import events
from rtrain.core.errors import ConfigError
from rtrain.core.run_folder import Run
from rtrain.data import row_reader
from rtrain.data.store.store import SPLITS, Store
from rtrain.inference import artifact
from rtrain.inference.predictor import Predictor
from rtrain.models import vocab_trimming
from rtrain.runs import controller, prepare, run_folders, trim_vocabulary
from rtrain.runs.store import scan
from tests.conftest import write_rows
from tests.support import stock
from tests.support.tiny import CORPUS, make_store
from tests.support.trained import Trained, settings

TRIM = {"compress.vocabulary": "trim", "compress.min_vocab_size": 0}


# ------------------------------------------------------------------------------------------------------- without Ray


def stored_twice(folder: Path, **overrides: Any) -> tuple[Config, row_reader.DataSource, Path, Store]:
    """A configuration that trims, and the store of its rows by the whole tokenizer."""
    config = with_overrides(settings(folder), {**TRIM, **overrides})
    # Words of the corpus that the tokenizer has pieces for, in the test rows alone.
    write_rows(folder / "test.csv", [(text, "refund") for text in CORPUS[:5]])
    model = Path(config.recipe.model.name)
    return config, row_reader.inspect_source(config.recipe.data), model, make_store(config.recipe, model, folder)


def test_a_model_is_cut_to_the_pieces_of_its_training_rows(tmp_path: Path) -> None:
    config, source, model, full = stored_twice(tmp_path)
    instance = trim_vocabulary.trim_model(config.recipe, source, model, tmp_path)
    assert instance.parent == tmp_path / ".vocabularies"
    history = vocab_trimming.read_trimmed(instance)
    assert history is not None
    ids = vocab_trimming.original_ids(history.kept_ids)
    used = trim_vocabulary.count_ids(full)
    assert set(used) <= set(history.kept_ids) < set(range(history.original_size))
    assert not set(trim_vocabulary.count_ids(full, "test")) <= set(history.kept_ids)
    store = make_store(config.recipe, instance, tmp_path)
    assert store.folder != full.folder
    changed = {split: trim_vocabulary.count_changed_rows(full, store, split, ids) for split in SPLITS}
    assert changed["train"] == 0 < changed["test"] <= 5
    rows = np.arange(full.num_rows("train"))
    before, after = full.read_tokens("train", rows), store.read_tokens("train", rows)
    assert np.array_equal(before.ids, ids[after.ids])
    assert np.array_equal(before.row_ids, after.row_ids)
    stamp = instance.stat().st_mtime_ns
    assert trim_vocabulary.trim_model(config.recipe, source, model, tmp_path) == instance
    assert instance.stat().st_mtime_ns == stamp  # made once


def test_other_rows_or_another_size_make_another_model(tmp_path: Path) -> None:
    config, source, model, _ = stored_twice(tmp_path)
    element = trim_vocabulary.trim_model(config.recipe, source, model, tmp_path)
    larger = with_overrides(config, {"compress.min_vocab_size": 190})
    other = trim_vocabulary.trim_model(larger.recipe, source, model, tmp_path)
    assert (vocab_trimming.vocabulary_size(element), vocab_trimming.vocabulary_size(other)) == (
        vocab_trimming.embedding_rows(element),
        190,
    )
    keep = with_overrides(config, {"compress.vocabulary": "keep"})
    full = with_overrides(config, {"compress.min_vocab_size": 10_000})
    assert trim_vocabulary.trim_model(keep.recipe, source, model, tmp_path) == model
    assert trim_vocabulary.trim_model(full.recipe, source, model, tmp_path) == model  # there are no other pieces


def test_the_rarest_pieces_of_the_rows_go_where_they_are_too_many(tmp_path: Path) -> None:
    config, source, model, full = stored_twice(tmp_path)
    every = trim_vocabulary.trim_model(config.recipe, source, model, tmp_path)
    needed = vocab_trimming.vocabulary_size(every)
    capped = with_overrides(config, {"compress.max_vocab_size": needed - 10})
    instance = trim_vocabulary.trim_model(capped.recipe, source, model, tmp_path)
    history = vocab_trimming.read_trimmed(instance)
    assert history is not None
    assert vocab_trimming.vocabulary_size(instance) == needed - 10
    counts = trim_vocabulary.count_ids(full)
    lost = [number for number in counts if number not in history.kept_ids]
    assert len(lost) == 10
    words = [
        number
        for number in counts
        if number in history.kept_ids and number not in vocab_trimming.select_folder_ids(model, [])
    ]
    assert max(counts[number] for number in lost) <= min(counts[number] for number in words)
    store = make_store(capped.recipe, instance, tmp_path)
    assert (
        trim_vocabulary.count_changed_rows(full, store, "train", vocab_trimming.original_ids(history.kept_ids)) > 0
    )  # and a run's log says so
    assert config.recipe.recipe_digest() != capped.recipe.recipe_digest()


def test_pieces_of_unlabelled_rows_stay_too(tmp_path: Path) -> None:
    further = tmp_path / "requests.jsonl"
    further.write_text("".join(json.dumps({"text": text}) + "\n" for text in (*CORPUS[:5], "")))
    config, source, model, full = stored_twice(tmp_path, **{"compress.unlabeled_rows_path": str(further)})
    instance = trim_vocabulary.trim_model(config.recipe, source, model, tmp_path)
    history = vocab_trimming.read_trimmed(instance)
    assert history is not None
    assert set(trim_vocabulary.count_ids(full, "test")) <= set(history.kept_ids)  # the same texts
    store = make_store(config.recipe, instance, tmp_path)
    assert [
        trim_vocabulary.count_changed_rows(full, store, split, vocab_trimming.original_ids(history.kept_ids))
        for split in ("train", "test")
    ] == [0, 0]
    further.write_text(json.dumps({"text": CORPUS[0]}) + "\n")
    assert trim_vocabulary.trim_model(config.recipe, source, model, tmp_path) != instance
    absent = with_overrides(config, {"compress.unlabeled_rows_path": str(tmp_path / "absent.csv")})
    with pytest.raises(ConfigError, check=lambda error: error.problems[0].field == "compress.unlabeled_rows_path"):
        trim_vocabulary.trim_model(absent.recipe, source, model, tmp_path)


def test_the_setting_is_a_part_of_a_run_only_where_it_trims() -> None:
    plain = configuration.load_config("intent").recipe
    keep = configuration.load_config("intent", {"compress.min_vocab_size": 7}).recipe
    trim = configuration.load_config("intent", {"compress.vocabulary": "trim"}).recipe
    more = configuration.load_config("intent", {"compress.vocabulary": "trim", "compress.min_vocab_size": 7}).recipe
    assert plain.recipe_digest() == keep.recipe_digest()
    assert "compress" not in plain.weight_settings()
    assert "max_vocab_size" not in trim.weight_settings()["compress"]  # older runs have no such setting
    assert len({plain.recipe_digest(), trim.recipe_digest(), more.recipe_digest()}) == 3


def test_a_trimmed_model_goes_with_the_runs_that_use_it(tmp_path: Path) -> None:
    for name in ("used", "unused"):
        stock.age(stock.artifact(tmp_path / ".vocabularies" / name, "model"))
    run = stock.make(tmp_path / "run")
    stock.log(run, "vocabulary", 1_700_000_000.0, pieces=5, of=9, changed={}, model="/moved/.vocabularies/used")
    result = {
        item.name: (item.category, [user.name for user in item.users]) for item in scan.scan_folder(tmp_path).shared
    }
    assert result == {".vocabularies/used": ("trimmed model", ["run"]), ".vocabularies/unused": ("trimmed model", [])}


# ------------------------------------------------------------------------------------------------------------ with Ray


@pytest.fixture(scope="module")
def student(trained: Trained) -> Path:
    teacher = trained.run
    requested_settings = {**TRIM, "distill.layers": 1, "distill.epochs": 8, "distill.lr": 5e-3}
    run, _ = distill.run_distillation(
        with_overrides(run_folders.load_config(teacher), requested_settings), teacher, teacher.parent / "small-student"
    )
    return run


@pytest.mark.ray
@pytest.mark.slow
def test_a_student_has_fewer_pieces_and_its_teacher_all(trained: Trained, student: Path) -> None:
    event = Run(student).first_event("vocabulary")
    assert event is not None
    assert event["changed_rows"]["train"] == 0
    assert event["size"] < event["original_size"] == vocab_trimming.vocabulary_size(trained.run / "artifact")
    assert (
        vocab_trimming.vocabulary_size(student / "artifact")
        == vocab_trimming.embedding_rows(student / "artifact")
        == event["size"]
    )
    assert vocab_trimming.vocabulary_size(trained.run / "artifact") == event["original_size"]
    instance = artifact.read_artifact(student / "artifact")
    assert instance.lineage["vocabulary"] == {name: event[name] for name in ("size", "original_size", "changed_rows")}
    assert instance.metrics["test"]["accuracy"] >= 0.8
    assert len(Predictor.load(student / "artifact")(["日本語 😀", "xyzzy"])) == 2


@pytest.mark.ray
@pytest.mark.slow
def test_a_trimmed_training_is_resumed_by_its_own_command(trained: Trained) -> None:
    folder = trained.run.parent
    config = with_overrides(settings(folder), {**TRIM, "train.epochs": 1})
    paused = controller.fit(prepare.prepare_run(config, folder / "small"), end_step=5)
    assert (paused["status"], paused["steps"]) == ("paused", 5)
    with pytest.raises(
        ConfigError, check=lambda error: [problem.code for problem in error.problems] == ["changed_setting"]
    ):
        prepare.prepare_run(with_overrides(config, {"compress.min_vocab_size": 170}), folder / "small", "resume")
    ended = controller.fit(prepare.prepare_run(config, folder / "small", "resume"))
    full = controller.fit(prepare.prepare_run(config, folder / "small-at-once"))
    assert (ended["status"], ended["order_digest"]) == ("finished", full["order_digest"])
    # The last checkpoints: the artefact has the best evaluation's weights, and a pause adds an evaluation.
    element, other = (
        (
            checkpoint_format.checkpoint_path(folder / name / "checkpoints", ended["steps"]) / "model.safetensors"
        ).read_bytes()
        for name in ("small", "small-at-once")
    )
    assert element == other
    messages = [event for event in events.read_events(folder / "small") if event["kind"] == "vocabulary"]
    assert len(messages) == 2
    assert messages[0]["changed_rows"] == messages[1]["changed_rows"]
