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
from tests import stock
from tests.conftest import write_rows
from tests.tiny import CORPUS, make_store
from tests.trained import Trained, settings

TRIM = {"compress.vocabulary": "trim", "compress.vocabulary_pieces": 0}


# ------------------------------------------------------------------------------------------------------- without Ray


def stored_twice(folder: Path, **overrides: Any) -> tuple[Config, row_reader.Source, Path, Store]:
    """A configuration that trims, and the store of its rows by the whole tokenizer."""
    chosen = with_overrides(settings(folder), {**TRIM, **overrides})
    # Words of the corpus that the tokenizer has pieces for, in the test rows alone.
    write_rows(folder / "test.csv", [(text, "refund") for text in CORPUS[:5]])
    model = Path(chosen.recipe.model.name)
    return chosen, row_reader.inspect(chosen.recipe.data), model, make_store(chosen.recipe, model, folder)


def test_a_model_is_cut_to_the_pieces_of_its_training_rows(tmp_path: Path) -> None:
    chosen, source, model, whole = stored_twice(tmp_path)
    made = trim_vocabulary.trimmed(chosen.recipe, source, model, tmp_path)
    assert made.parent == tmp_path / ".vocabularies"
    known = vocab_trimming.read(made)
    assert known is not None
    ids = vocab_trimming.old_ids(known.kept)
    used = trim_vocabulary.counted(whole)
    assert set(used) <= set(known.kept) < set(range(known.of))
    assert not set(trim_vocabulary.counted(whole, "test")) <= set(known.kept)
    store = make_store(chosen.recipe, made, tmp_path)
    assert store.folder != whole.folder
    changed = {split: trim_vocabulary.changed(whole, store, split, ids) for split in SPLITS}
    assert changed["train"] == 0 < changed["test"] <= 5
    rows = np.arange(whole.rows("train"))
    before, after = whole.read("train", rows), store.read("train", rows)
    assert np.array_equal(before.ids, ids[after.ids])
    assert np.array_equal(before.row_ids, after.row_ids)
    stamp = made.stat().st_mtime_ns
    assert trim_vocabulary.trimmed(chosen.recipe, source, model, tmp_path) == made
    assert made.stat().st_mtime_ns == stamp  # made once


def test_other_rows_or_another_size_make_another_model(tmp_path: Path) -> None:
    chosen, source, model, _ = stored_twice(tmp_path)
    one = trim_vocabulary.trimmed(chosen.recipe, source, model, tmp_path)
    larger = with_overrides(chosen, {"compress.vocabulary_pieces": 190})
    other = trim_vocabulary.trimmed(larger.recipe, source, model, tmp_path)
    assert (vocab_trimming.size(one), vocab_trimming.size(other)) == (vocab_trimming.lines(one), 190)
    keep = with_overrides(chosen, {"compress.vocabulary": "keep"})
    whole = with_overrides(chosen, {"compress.vocabulary_pieces": 10_000})
    assert trim_vocabulary.trimmed(keep.recipe, source, model, tmp_path) == model
    assert trim_vocabulary.trimmed(whole.recipe, source, model, tmp_path) == model  # there are no other pieces


def test_the_rarest_pieces_of_the_rows_go_where_they_are_too_many(tmp_path: Path) -> None:
    chosen, source, model, whole = stored_twice(tmp_path)
    every = trim_vocabulary.trimmed(chosen.recipe, source, model, tmp_path)
    needed = vocab_trimming.size(every)
    capped = with_overrides(chosen, {"compress.vocabulary_most": needed - 10})
    made = trim_vocabulary.trimmed(capped.recipe, source, model, tmp_path)
    known = vocab_trimming.read(made)
    assert known is not None
    assert vocab_trimming.size(made) == needed - 10
    counts = trim_vocabulary.counted(whole)
    lost = [number for number in counts if number not in known.kept]
    assert len(lost) == 10
    words = [number for number in counts if number in known.kept and number not in vocab_trimming.kept(model, [])]
    assert max(counts[number] for number in lost) <= min(counts[number] for number in words)
    store = make_store(capped.recipe, made, tmp_path)
    assert (
        trim_vocabulary.changed(whole, store, "train", vocab_trimming.old_ids(known.kept)) > 0
    )  # and a run's log says so
    assert chosen.recipe.identity() != capped.recipe.identity()


def test_pieces_of_unlabelled_rows_stay_too(tmp_path: Path) -> None:
    further = tmp_path / "requests.jsonl"
    further.write_text("".join(json.dumps({"text": text}) + "\n" for text in (*CORPUS[:5], "")))
    chosen, source, model, whole = stored_twice(tmp_path, **{"compress.unlabelled": str(further)})
    made = trim_vocabulary.trimmed(chosen.recipe, source, model, tmp_path)
    known = vocab_trimming.read(made)
    assert known is not None
    assert set(trim_vocabulary.counted(whole, "test")) <= set(known.kept)  # the same texts
    store = make_store(chosen.recipe, made, tmp_path)
    assert [
        trim_vocabulary.changed(whole, store, split, vocab_trimming.old_ids(known.kept)) for split in ("train", "test")
    ] == [0, 0]
    further.write_text(json.dumps({"text": CORPUS[0]}) + "\n")
    assert trim_vocabulary.trimmed(chosen.recipe, source, model, tmp_path) != made
    absent = with_overrides(chosen, {"compress.unlabelled": str(tmp_path / "absent.csv")})
    with pytest.raises(ConfigError, check=lambda error: error.problems[0].field == "compress.unlabelled"):
        trim_vocabulary.trimmed(absent.recipe, source, model, tmp_path)


def test_the_setting_is_a_part_of_a_run_only_where_it_trims() -> None:
    plain = configuration.load("intent").recipe
    keep = configuration.load("intent", {"compress.vocabulary_pieces": 7}).recipe
    trim = configuration.load("intent", {"compress.vocabulary": "trim"}).recipe
    more = configuration.load("intent", {"compress.vocabulary": "trim", "compress.vocabulary_pieces": 7}).recipe
    assert plain.identity() == keep.identity()
    assert "compress" not in plain.weights()
    assert "vocabulary_most" not in trim.weights()["compress"]  # older runs have no such setting
    assert len({plain.identity(), trim.identity(), more.identity()}) == 3


def test_a_trimmed_model_goes_with_the_runs_that_use_it(tmp_path: Path) -> None:
    for name in ("used", "unused"):
        stock.age(stock.artifact(tmp_path / ".vocabularies" / name, "model"))
    run = stock.make(tmp_path / "run")
    stock.log(run, "vocabulary", 1_700_000_000.0, pieces=5, of=9, changed={}, model="/moved/.vocabularies/used")
    found = {one.name: (one.what, [known.name for known in one.users]) for one in scan.look(tmp_path).shared}
    assert found == {
        ".vocabularies/used": ("trimmed model", ["run"]),
        ".vocabularies/unused": ("trimmed model", []),
    }


# ------------------------------------------------------------------------------------------------------------ with Ray


@pytest.fixture(scope="module")
def student(trained: Trained) -> Path:
    teacher = trained.run
    asked = {**TRIM, "distill.layers": 1, "distill.epochs": 8, "distill.lr": 5e-3}
    run, _ = distill.run(with_overrides(run_folders.stored(teacher), asked), teacher, teacher.parent / "small-student")
    return run


@pytest.mark.ray
@pytest.mark.slow
def test_a_student_has_fewer_pieces_and_its_teacher_all(trained: Trained, student: Path) -> None:
    event = Run(student).first("vocabulary")
    assert event is not None
    assert event["changed"]["train"] == 0
    assert event["pieces"] < event["of"] == vocab_trimming.size(trained.run / "artifact")
    assert vocab_trimming.size(student / "artifact") == vocab_trimming.lines(student / "artifact") == event["pieces"]
    assert vocab_trimming.size(trained.run / "artifact") == event["of"]
    made = artifact.read(student / "artifact")
    assert made.lineage["vocabulary"] == {name: event[name] for name in ("pieces", "of", "changed")}
    assert made.metrics["test"]["accuracy"] >= 0.8
    assert len(Predictor.load(student / "artifact")(["日本語 😀", "xyzzy"])) == 2


@pytest.mark.ray
@pytest.mark.slow
def test_a_trimmed_training_is_resumed_by_its_own_command(trained: Trained) -> None:
    folder = trained.run.parent
    chosen = with_overrides(settings(folder), {**TRIM, "train.epochs": 1})
    paused = controller.fit(prepare.prepare(chosen, folder / "small"), until=5)
    assert (paused["status"], paused["updates"]) == ("paused", 5)
    with pytest.raises(ConfigError, check=lambda error: [one.code for one in error.problems] == ["changed_setting"]):
        prepare.prepare(with_overrides(chosen, {"compress.vocabulary_pieces": 170}), folder / "small", "resume")
    ended = controller.fit(prepare.prepare(chosen, folder / "small", "resume"))
    whole = controller.fit(prepare.prepare(chosen, folder / "small-at-once"))
    assert (ended["status"], ended["order_digest"]) == ("finished", whole["order_digest"])
    # The last checkpoints: the artefact has the best evaluation's weights, and a pause adds an evaluation.
    one, other = (
        (checkpoint_format.path_of(folder / name / "checkpoints", ended["updates"]) / "model.safetensors").read_bytes()
        for name in ("small", "small-at-once")
    )
    assert one == other
    told = [event for event in events.read(folder / "small") if event["kind"] == "vocabulary"]
    assert len(told) == 2
    assert told[0]["changed"] == told[1]["changed"]
