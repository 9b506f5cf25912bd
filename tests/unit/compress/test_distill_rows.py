"""Unlabeled rows in a student's store, the teacher's answers to them, and refused settings."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain import config as configuration
from rtrain.compress import distill, teacher as teaching
from rtrain.config import Config, Recipe, with_overrides
from rtrain.core.errors import ConfigError, UserError
from rtrain.core.ragged import Head
from rtrain.data import unlabeled
from rtrain.data.store import builder
from rtrain.data.store.store import Store
from rtrain.inference import artifact
from rtrain.models import vocab_trimming
from rtrain.report import data_stats
from rtrain.tasks import base
from tests.conftest import labelled_rows, write_rows
from tests.ray import test_tasks
from tests.support.tiny import make_artifact, make_encoder, make_store
from tune import search, students

ROWS, TEST_ROWS, NEW = 60, 12, 24
LABELS = ("login", "parcel", "refund")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


def settings(folder: Path, encoder: Path, **overrides: Any) -> Config:
    """A student's: 60 training rows; 24 new texts, three that are trained on, one of the test, one without words."""
    rows = labelled_rows(ROWS + TEST_ROWS + NEW)
    further = folder / "further.jsonl"
    texts = [text for text, _ in [*rows[-NEW:], *rows[:3], rows[ROWS]]]
    texts[-1] = texts[-1].upper() + "!"  # the same but for case and punctuation
    further.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, " "]))
    arguments = {
        "data.path": str(write_rows(folder / "train.csv", rows[:ROWS])),
        "data.test": str(write_rows(folder / "test.csv", rows[ROWS : ROWS + TEST_ROWS])),
        "data.valid_share": 0,
        "data.max_bad_rows": 0.1,
        "data.slices": ["label"],
        "model.name": str(encoder),
        "distill.teacher": "v1",
        "distill.unlabeled_rows_path": str(further),
    }
    return configuration.load_config("intent", {**arguments, **overrides})


def stores(recipe: Recipe, encoder: Path, root: Path) -> tuple[Store, Store]:
    """The labelled rows and the others, with answers of a teacher `v1` that were drawn."""
    values = make_store(recipe, encoder, root)
    rows = make_store(unlabeled.make_unlabeled_recipe(recipe), encoder, root, values.manifest.head)
    for number, store in enumerate((values, rows)):
        samples = np.random.default_rng(number).normal(size=(store.num_rows("train"), len(LABELS)))
        np.save(store.teacher_file("v1"), samples.astype(np.float32))
    return values, rows


def join(labeled_store: Store, rows: Store, recipe: Recipe, root: Path) -> Store:
    task, confidence = base.get_task(recipe.task), recipe.distill.confidence
    config = unlabeled.select_rows(rows, labeled_store, task, "v1", confidence)
    left_out = {"low_confidence": config.num_low_confidence, "duplicates": config.num_duplicates}
    return unlabeled.merge_stores(
        root / ".tokens" / "0123456789abcdef", labeled_store, rows, config.positions, left_out, "v1"
    )


def sureness(logits: Any) -> Any:
    powers = np.exp(logits.astype(np.float64))
    return (powers / powers.sum(axis=1, keepdims=True)).max(axis=1)


@pytest.mark.parametrize(
    ("file_name", "format"),
    [("more.tsv", "conll"), ("more.tsv.gz", "conll"), ("more.json", "conll"), ("more.jsonl", None), (None, "conll")],
)
def test_further_rows_are_read_as_the_labelled_ones_unless_their_name_tells_another_format(
    file_name: str | None, format: str | None
) -> None:
    data = configuration.DataConfig(path="/rows/train.tsv", format="conll", text="tokens", label="tags")
    assert unlabeled.without_labels(data, file_name).format == format


# ---------------------------------------------------------------------------------------------------- a student's store


def test_a_joined_store_has_the_rows_and_answers_of_both(tmp_path: Path, encoder: Path) -> None:
    recipe = settings(tmp_path, encoder).recipe
    values, rows = stores(recipe, encoder, tmp_path)
    created = join(values, rows, recipe, tmp_path)
    created.check(size_only=False)
    assert created.manifest.unlabeled == {"rows": NEW, "low_confidence": 0, "duplicates": 4, "bad": 1}
    assert (created.num_rows("train"), created.num_labeled("train"), created.num_rows("test")) == (
        ROWS + NEW,
        ROWS,
        TEST_ROWS,
    )
    assert created.num_labeled("test") == TEST_ROWS
    before, after = values.read_tokens("train", np.arange(ROWS)), created.read_tokens("train", np.arange(ROWS))
    assert np.array_equal(before.ids, after.ids)
    assert np.array_equal(before.row_ids, after.row_ids)
    assert after.is_unlabeled is not None
    assert not after.is_unlabeled.any()
    further, remaining_items = (
        created.read_tokens("train", np.arange(ROWS, ROWS + NEW)),
        rows.read_tokens("train", np.arange(NEW)),
    )
    assert np.array_equal(further.ids, remaining_items.ids)
    assert further.is_unlabeled is not None
    assert further.is_unlabeled.all()
    expected = np.concatenate([values.open_teacher_logits("v1"), rows.open_teacher_logits("v1")[:NEW]])
    assert np.array_equal(created.open_teacher_logits("v1"), expected)
    assert created.manifest.tokens["train"] == created.column("train", "length").sum()
    assert np.array_equal(
        created.read_tokens("test", np.arange(TEST_ROWS)).ids, values.read_tokens("test", np.arange(TEST_ROWS)).ids
    )
    origins = created.origins("train").to_pylist()
    assert {Path(row["source"]).name for row in origins[:ROWS]} == {"train.csv"}
    assert [(Path(row["source"]).name, row["line"]) for row in origins[ROWS:]] == [
        ("further.jsonl", number + 1) for number in range(NEW)
    ]


def test_labels_are_counted_without_what_stands_in_for_them(tmp_path: Path, encoder: Path) -> None:
    recipe = settings(tmp_path, encoder).recipe
    values, rows = stores(recipe, encoder, tmp_path)
    created = join(values, rows, recipe, tmp_path)
    assert data_stats.describe_labels(created, "classes") == data_stats.describe_labels(values, "classes")
    assert len(created.targets("train")) == ROWS
    assert len(created.targets("train", np.arange(ROWS + NEW))) == ROWS + NEW


def test_rows_that_the_teacher_is_less_sure_of_are_left_out(tmp_path: Path, encoder: Path) -> None:
    recipe = settings(tmp_path, encoder, **{"distill.confidence": 0.6}).recipe
    values, rows = stores(recipe, encoder, tmp_path)
    created, sure = join(values, rows, recipe, tmp_path), sureness(rows.open_teacher_logits("v1")[:NEW]) >= 0.6
    assert 0 < sure.sum() < NEW
    assert created.manifest.unlabeled == {
        "rows": sure.sum(),
        "low_confidence": (~sure).sum(),
        "duplicates": 4,
        "bad": 1,
    }
    selected = created.column("train", "row_id")[ROWS:]
    assert selected.tolist() == rows.column("train", "row_id")[:NEW][sure].tolist()
    assert np.array_equal(
        created.teacher_logits("v1", np.arange(ROWS, created.num_rows("train"))),
        rows.open_teacher_logits("v1")[:NEW][sure],
    )


def test_answers_to_tokens_are_joined_row_by_row(tmp_path: Path) -> None:
    """And of rows in windows; a file of tags is read without them."""
    config = test_tasks.settings("token_tags", tmp_path)
    further = {
        "distill.teacher": "v1",
        "distill.unlabeled_rows_path": config.recipe.data.path,
        "distill.confidence": 0.3,
    }
    recipe, encoder = with_overrides(config, further).recipe, Path(config.recipe.model.name)
    values = make_store(recipe, encoder, tmp_path)
    rows = make_store(unlabeled.make_unlabeled_recipe(recipe), encoder, tmp_path, values.manifest.head)
    for number, store in enumerate((values, rows)):
        shape = (store.manifest.tokens["train"], len(store.manifest.labels))
        np.save(store.teacher_file("v1"), np.random.default_rng(number).normal(size=shape).astype(np.float32))
    # The file has the store's own rows: for an empty store all of them are new.
    settings_used = np.arange(1, rows.num_rows("train"), 3)
    created = unlabeled.merge_stores(tmp_path / ".tokens" / "0123456789abcdef", values, rows, settings_used, {}, "v1")
    assert created.open_teacher_logits("v1").shape == (created.manifest.tokens["train"], len(created.manifest.labels))
    first = values.num_rows("train")
    for place, position in enumerate(settings_used):
        ours, theirs = np.array([first + place]), np.array([position])
        assert np.array_equal(created.read_tokens("train", ours).ids, rows.read_tokens("train", theirs).ids)
        assert np.array_equal(created.teacher_logits("v1", ours), rows.teacher_logits("v1", theirs))
    own_rows = np.arange(first)
    assert np.array_equal(created.teacher_logits("v1", own_rows), values.open_teacher_logits("v1"))
    result = unlabeled.select_rows(rows, values, base.get_task("token_tags"), "v1", 0.3)
    assert result.num_duplicates == rows.num_rows("train")
    assert len(result.positions) == result.num_low_confidence == 0


def test_rows_that_were_cut_are_those_of_the_store(tmp_path: Path, encoder: Path) -> None:
    """Not the others of the file without labels, which were left out."""
    recipe = settings(tmp_path, encoder, **{"data.max_tokens": 8}).recipe
    values, rows = stores(recipe, encoder, tmp_path)
    assert rows.manifest.truncated == rows.num_rows("train") > 4
    created = unlabeled.merge_stores(
        tmp_path / ".tokens" / "0123456789abcdef", values, rows, np.array([2, 5, 3]), {}, "v1"
    )
    assert created.manifest.truncated == values.manifest.truncated + 3
    assert created.num_source_rows == sum(values.manifest.rows.values()) == sum(created.manifest.rows.values()) - 3


def test_the_address_of_a_joined_store_names_what_it_was_made_of(tmp_path: Path, encoder: Path) -> None:
    config = settings(tmp_path, encoder)

    def address(**overrides: Any) -> str:
        recipe = with_overrides(config, overrides).recipe
        return builder.compute_digest(recipe, unlabeled.inspect_all_sources(recipe), encoder)

    values = address(**{"distill.unlabeled_rows_path": None})
    assert values == address(**{"distill.teacher": None})  # no other run has these rows
    assert (
        values
        == make_store(
            with_overrides(config, {"distill.unlabeled_rows_path": None}).recipe, encoder, tmp_path
        ).folder.name
    )
    different = [address(), address(**{"distill.confidence": 0.5}), address(**{"distill.teacher": "v2"}), values]
    assert len({*different}) == 4
    assert address() == address(**{"distill.alpha": 0.1, "train.seed": 3})
    Path(str(config.recipe.distill.unlabeled_rows_path)).write_text('{"text": "another one"}\n')
    assert address() not in different


def test_files_are_told_apart_by_their_role(tmp_path: Path, encoder: Path) -> None:
    recipe = settings(tmp_path, encoder).recipe
    labelled, further = unlabeled.split_source(unlabeled.inspect_all_sources(recipe))
    assert [(Path(piece.uri).name, piece.role) for piece in labelled.files] == [
        ("train.csv", "train"),
        ("test.csv", "test"),
    ]
    assert [(Path(piece.uri).name, piece.role) for piece in further.files] == [("further.jsonl", "train")]
    assert (
        unlabeled.inspect_all_sources(with_overrides(settings(tmp_path, encoder), {"distill.teacher": None}).recipe)
        == labelled
    )


def test_a_student_s_copies_are_rows_without_labels_like_others(
    teacher: distill.Teacher, tmp_path: Path, encoder: Path
) -> None:
    """They follow from the rows and their number, wherever they lie, and are made again where they are gone."""
    config = settings(tmp_path, encoder, **{"distill.layers": 1, "distill.augmented_copies": 2})
    started = distill.derive_student_config(config, teacher, tmp_path)
    copies = Path(str(started.recipe.distill.augmented_rows_path))
    further = unlabeled.split_source(unlabeled.inspect_all_sources(started.recipe))[1]
    assert [Path(piece.uri).name for piece in further.files] == ["further.jsonl", copies.name]
    without = distill.derive_student_config(
        with_overrides(config, {"distill.augmented_copies": 0}), teacher, tmp_path
    ).recipe
    assert without.distill.augmented_rows_path is None
    keywords = with_overrides(
        config, {"distill.augmented_copies": 0, "distill.augmented_rows_path": str(copies)}
    ).recipe
    assert [
        Path(piece.uri).name for piece in unlabeled.split_source(unlabeled.inspect_all_sources(keywords))[1].files
    ] == ["further.jsonl"]
    assert started.recipe.recipe_digest() != without.recipe_digest()
    changed = with_overrides(started, {"distill.augmented_rows_path": str(tmp_path / "elsewhere.jsonl")})
    assert changed.recipe.recipe_digest() == started.recipe.recipe_digest()
    assert distill.derive_student_config(changed, teacher, tmp_path).recipe.distill.augmented_rows_path == str(copies)


def test_a_run_keeps_from_how_many_layers_its_student_began(tmp_path: Path, encoder: Path) -> None:
    deep = distill.Teacher.load(make_artifact(tmp_path / "deep", LABELS, layers=4))
    inputs = settings(tmp_path, encoder, **{"distill.layers": 2})
    started = distill.derive_student_config(inputs, deep, tmp_path).recipe
    assert (started.distill.teacher_layers, started.model.name.endswith("-2-of3")) == (3, True)
    full = distill.derive_student_config(with_overrides(inputs, {"distill.teacher_layers": 4}), deep, tmp_path).recipe
    assert (full.distill.teacher_layers, full.model.name.endswith("-2")) == ("all", True)
    assert "teacher_layers" not in full.weight_settings()["distill"]
    assert started.weight_settings()["distill"]["teacher_layers"] == 3


def test_a_missing_file_is_named_with_all_else_that_is_wrong(tmp_path: Path, encoder: Path) -> None:
    config = settings(
        tmp_path, encoder, **{"distill.unlabeled_rows_path": str(tmp_path / "nowhere.csv"), "data.text": "txet"}
    )
    with pytest.raises(ConfigError) as caught:
        unlabeled.inspect_all_sources(config.recipe)
    assert [problem.field for problem in caught.value.problems] == [
        "data.text",
        "data.text",
        "distill.unlabeled_rows_path",
    ]


# ---------------------------------------------------------------------------------------------------- carried answers


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory, encoder: Path) -> Path:
    """A model with half of the pieces."""
    ids = vocab_trimming.select_folder_ids(encoder, range(0, vocab_trimming.vocabulary_size(encoder), 2))
    created = vocab_trimming.trim(encoder, ids, tmp_path_factory.mktemp("stranger") / "model")
    (created / vocab_trimming.VOCABULARY_FILE).unlink()
    return created


def test_answers_are_carried_to_the_rows_of_another_tokenizer(tmp_path: Path, encoder: Path, stranger: Path) -> None:
    recipe = settings(tmp_path, encoder).recipe
    values, _ = stores(recipe, encoder, tmp_path)
    other = make_store(recipe, stranger, tmp_path / "other")
    assert not np.array_equal(
        other.read_tokens("train", np.arange(ROWS)).ids, values.read_tokens("train", np.arange(ROWS)).ids
    )
    teaching.copy_answers(values, other, "v1")
    by_row = dict(
        zip(values.column("train", "row_id").tolist(), values.open_teacher_logits("v1").tolist(), strict=True)
    )
    result = dict(zip(other.column("train", "row_id").tolist(), other.open_teacher_logits("v1").tolist(), strict=True))
    assert result == by_row
    assert [path.name for path in other.folder.glob("*teacher*")] == ["teacher-v1.npy"]


def test_answers_to_other_rows_are_not_carried(tmp_path: Path, encoder: Path) -> None:
    recipe = settings(tmp_path, encoder).recipe
    values, rows = stores(recipe, encoder, tmp_path)
    with pytest.raises(UserError) as error:
        teaching.copy_answers(rows, values, "v1")
    assert error.value.code == "row_mismatch"


def test_a_store_with_answers_asks_nobody(tmp_path: Path, encoder: Path) -> None:
    """A second student, another seed and a resume use the same store, without Ray."""
    values, _ = stores(settings(tmp_path, encoder).recipe, encoder, tmp_path)
    teacher = make_artifact(tmp_path / "teacher", LABELS)
    created = artifact.read_artifact(teacher)
    shutil.copyfile(values.teacher_file("v1"), values.teacher_file(created.version))
    before = values.teacher_file(created.version).stat().st_mtime_ns
    teaching.answer_with_teacher(teaching.TeacherQuery(teacher, created, True), values, encoder, Store)
    assert values.teacher_file(created.version).stat().st_mtime_ns == before


# --------------------------------------------------------------------------------------------------- refused settings


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> distill.Teacher:
    """Two layers of 2 heads of 16."""
    return distill.Teacher.load(make_artifact(tmp_path_factory.mktemp("teacher") / "artifact", LABELS))


def refused(config: Config, teacher: distill.Teacher, root: Path) -> list[str]:
    started = distill.derive_student_config(config, teacher, root)
    return [problem.field for problem in distill.find_problems(started, teacher, Path(started.recipe.model.name))]


@pytest.mark.parametrize(
    ("overrides", "fields"),
    [
        ({"distill.relation_loss_weight": 1.0}, ["distill.relation_heads"]),
        (
            {"distill.relation_loss_weight": 1.0, "distill.relation_heads": 4, "distill.relation_layer": 3},
            ["distill.relation_layer"],
        ),
        ({"distill.hidden_loss_weight": 1.0, "train.gradient_checkpointing": True}, ["train.gradient_checkpointing"]),
        ({"distill.confidence": 0.5, "distill.unlabeled_rows_path": None}, ["distill.confidence"]),
        ({"distill.confidence": 0.5, "distill.unlabeled_rows_path": None, "distill.augmented_copies": 1}, []),
        ({"distill.hidden_loss_weight": 1.0}, []),
        ({"distill.relation_loss_weight": 1.0, "distill.relation_heads": 4, "distill.width": 16}, []),
    ],
)
def test_settings_that_do_not_fit_the_teacher_are_refused(
    overrides: dict[str, Any], fields: list[str], teacher: distill.Teacher, tmp_path: Path, encoder: Path
) -> None:
    assert refused(settings(tmp_path, encoder, **{"distill.layers": 1, **overrides}), teacher, tmp_path) == fields


@pytest.mark.parametrize(
    ("overrides", "settings_named"),
    [
        ({}, []),
        (
            {"distill.relation_loss_weight": 1.0, "distill.relation_heads": 4, "distill.hidden_loss_weight": 1.0},
            ["relation_loss_weight", "hidden_loss_weight"],
        ),
        ({"task": "token_tags"}, ["student"]),
    ],
)
def test_another_tokenizer_is_refused_where_tokens_are_compared(
    overrides: dict[str, Any],
    settings_named: list[str],
    teacher: distill.Teacher,
    tmp_path: Path,
    encoder: Path,
    stranger: Path,
) -> None:
    config = settings(tmp_path, encoder, **{"distill.student": str(stranger), **overrides})
    assert refused(config, teacher, tmp_path) == [f"distill.{name}" for name in settings_named]


def test_a_student_by_name_starts_from_it_with_a_pooling_of_its_own(
    teacher: distill.Teacher, tmp_path: Path, encoder: Path
) -> None:
    config = settings(tmp_path, encoder, **{"distill.student": str(encoder), "model.pooling": "own"})
    started = distill.derive_student_config(with_overrides(config, {}), teacher, tmp_path).recipe
    assert (started.model.name, started.distill.teacher) == (str(encoder), teacher.metadata.version)
    keywords = distill.derive_student_config(
        configuration.with_overrides(config, {"model.pooling": "mean"}), teacher, tmp_path
    )
    assert keywords.recipe.model.pooling == "mean"


def test_both_a_name_and_a_width_are_refused(tmp_path: Path, encoder: Path) -> None:
    with pytest.raises(ConfigError) as error:
        settings(tmp_path, encoder, **{"distill.student": "minilm", "distill.width": 16})
    assert [problem.field for problem in error.value.problems] == ["distill.width"]


def test_other_architectures_are_refused_where_something_inside_is_learned(
    teacher: distill.Teacher, tmp_path: Path, encoder: Path
) -> None:
    import transformers

    folder = tmp_path / "albert"
    transformers.AlbertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((teacher.folder / "tokenizer.json").read_bytes())
    config = settings(tmp_path, encoder, **{"distill.student": str(folder), "distill.hidden_loss_weight": 1.0})
    assert [problem.field for problem in distill.find_problems(config, teacher, folder)] == [
        "distill.hidden_loss_weight"
    ]


@pytest.mark.parametrize(("max_tokens", "refuses"), [(128, False), (129, True)])
def test_longer_texts_than_the_teacher_reads_are_refused(
    max_tokens: int, refuses: bool, teacher: distill.Teacher, tmp_path: Path, encoder: Path
) -> None:
    """The student's own positions reach them: it is another model."""
    folder = shutil.copytree(encoder, tmp_path / "longer")
    (folder / "config.json").write_text(
        json.dumps({**json.loads((encoder / "config.json").read_text()), "max_position_embeddings": 512})
    )
    config = settings(tmp_path, encoder, **{"distill.student": str(folder), "data.max_tokens": max_tokens})
    assert refused(config, teacher, tmp_path) == (["data.max_tokens"] if refuses else [])
    if refuses:
        searched = students.derive_search_config(with_overrides(config, {"data.valid_share": 0.2}), teacher, tmp_path)
        with pytest.raises(ConfigError) as error:
            search.check_students(searched, teacher, tmp_path)
        assert [(problem.field, problem.code) for problem in error.value.problems] == [
            ("data.max_tokens", "out_of_range")
        ]


def test_a_masked_language_model_teaches_what_is_inside_it_alone(tmp_path: Path, encoder: Path) -> None:
    from tests.support.tiny import make_task_artifact

    facts = {"mask": "[MASK]", "mask_id": 4, "vocabulary": 300, "special": [0, 1, 2, 3, 4]}
    teacher = distill.Teacher.load(make_task_artifact(tmp_path / "words", "masked_lm", Head((), facts)))
    config = masked(tmp_path, encoder)
    assert distill.derive_student_config(config, teacher, tmp_path).recipe.teacher_logits_key is None
    for values, field in (
        ({"distill.hidden_loss_weight": 0.0}, "distill.alpha"),
        ({"distill.alpha": 0.7}, "distill.alpha"),
        ({"distill.unlabeled_rows_path": "rows.jsonl"}, "distill.unlabeled_rows_path"),
        ({"distill.teachers": ["runs/other"]}, "distill.teachers"),
        ({"compress.vocabulary": "trim"}, "compress.vocabulary"),
    ):
        with pytest.raises(ConfigError) as caught:
            distill.derive_student_config(with_overrides(config, values), teacher, tmp_path)
        assert [problem.field for problem in caught.value.problems] == [field]


def masked(folder: Path, encoder: Path) -> Config:
    """A student of a masked language model that learns its hidden states."""
    path = write_rows(folder / "texts.csv", labelled_rows(60))
    inside = {"distill.alpha": 0.0, "distill.hidden_loss_weight": 1.0, "distill.layers": 1}
    return configuration.load_config(
        "domain-adapt", {"data.path": str(path), "model.name": str(encoder), "data.label": None, **inside}
    )
