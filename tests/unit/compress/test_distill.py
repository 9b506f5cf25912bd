"""The student's start: evenly spaced layers of the teacher, everything else as it is, in a folder of its own name."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file

from rtrain import config as configuration
from rtrain.compress import distill, student as starting
from rtrain.config import DistillConfig
from rtrain.core.errors import ConfigError
from rtrain.core.ragged import single_window_batch
from rtrain.core.run_folder import Run
from rtrain.inference import artifact
from rtrain.models import builder, network_parts
from rtrain.runs import run_folders
from rtrain.tasks import base
from rtrain.trainer.step import forward
from tests.support.tiny import make_artifact


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, labels a, b and c."""
    return make_artifact(tmp_path_factory.mktemp("teacher") / "artifact")


@pytest.mark.parametrize(
    ("depth", "layers", "kept_layers"),
    [
        (6, 3, [1, 3, 5]),
        (6, 2, [2, 5]),
        (6, 1, [5]),
        (6, 4, [1, 2, 4, 5]),  # ceil(6 / 4 x 1, 2, 3, 4) - 1
        (6, 5, [1, 2, 3, 4, 5]),
        (12, 3, [3, 7, 11]),
        (12, 5, [2, 4, 7, 9, 11]),
        (2, 1, [1]),
    ],
)
def test_layers_are_evenly_spaced_and_end_with_the_last(depth: int, layers: int, kept_layers: list[int]) -> None:
    assert network_parts.spaced_layers(depth, layers) == kept_layers


def test_any_choice_is_rising_and_in_range() -> None:
    for depth in range(1, 25):
        for layers in range(1, depth + 1):
            config = network_parts.spaced_layers(depth, layers)
            assert len(config) == layers
            assert config == sorted(set(config))
            assert (config[0] >= 0, config[-1]) == (True, depth - 1)


@pytest.mark.parametrize("prefix", ["bert.encoder.layer", "distilbert.transformer.layer", "model.layers"])
def test_kept_layers_are_renumbered(prefix: str) -> None:
    numbers = {f"{prefix}.{layer}.attention.{kind}": layer for layer in range(12) for kind in ("weight", "bias")}
    other = {"embeddings.word.weight": 100, "classifier.weight": 101, "encoder.layer_norm.7.weight": 102}
    weights = {name: torch.tensor(value) for name, value in (numbers | other).items()}
    remaining = {name: int(value) for name, value in starting.keep_layers(weights, [3, 7, 11]).items()}
    assert remaining == other | {
        f"{prefix}.{place}.attention.{kind}": layer
        for place, layer in enumerate((3, 7, 11))
        for kind in ("weight", "bias")
    }


def test_the_student_has_the_weights_of_the_teacher(teacher: Path, tmp_path: Path) -> None:
    start = starting.create_student(teacher, DistillConfig(layers=1), tmp_path / ".students")
    teachers, students = load_file(teacher / "model.safetensors"), load_file(start / "model.safetensors")
    layer = "bert.encoder.layer."
    assert {name for name in students if layer in name} == {name for name in teachers if f"{layer}0." in name}
    for name, value in students.items():
        origin = name.replace(f"{layer}0.", f"{layer}1.")  # the last of two
        assert torch.equal(value, teachers[origin]), name
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (teacher, start))
    assert after == before | {"num_hidden_layers": 1}
    assert (start / "tokenizer.json").read_bytes() == (teacher / "tokenizer.json").read_bytes()
    assert not (start / artifact.FILE_NAME).exists()  # a start is no artefact


def test_the_student_is_the_teacher_without_its_first_layer(teacher: Path, tmp_path: Path) -> None:
    """Built as a run builds it: with the teacher's head, since the labels are the same."""
    start = starting.create_student(teacher, DistillConfig(layers=1), tmp_path)
    task = base.get_task("classification")
    student = builder.build_network(start, task, ("a", "b", "c"), seed=3).eval()
    cut = builder.build_network(teacher, task, ("a", "b", "c"), seed=4).eval()
    encoder = cut.get_submodule("bert.encoder")
    encoder.layer = torch.nn.ModuleList([cut.get_submodule("bert.encoder.layer.1")])
    lengths = np.array([5, 3], dtype=np.int32)
    nothing = np.zeros(2, dtype=np.int64)
    ids = np.arange(10, 18, dtype=np.int32)
    rows = single_window_batch(
        ids, lengths, lengths, nothing, nothing.astype(np.uint64), np.empty((2, 0), dtype=np.float32)
    )
    with torch.inference_mode():
        assert torch.equal(forward(student, rows, 0, "fp32"), forward(cut, rows, 0, "fp32"))


def test_a_start_is_made_once_for_a_teacher_and_a_depth(teacher: Path, tmp_path: Path) -> None:
    start = starting.create_student(teacher, DistillConfig(layers=1), tmp_path)
    created = (start / "model.safetensors").stat().st_mtime_ns
    assert starting.create_student(teacher, DistillConfig(layers=1), tmp_path) == start
    assert (start / "model.safetensors").stat().st_mtime_ns == created
    assert start.name == f"{artifact.read_artifact(teacher).version}-1"
    other = make_artifact(tmp_path / "other", seed=7)
    assert starting.create_student(other, DistillConfig(layers=1), tmp_path / "starts").name != start.name
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []  # no draft is left


@pytest.mark.parametrize(
    ("depth", "layers", "source_layers"),
    [(6, 3, 4), (6, 1, 4), (6, 5, 5), (12, 3, 8), (12, 6, 8), (2, 1, 2), (6, None, 6)],
)
def test_a_student_s_layers_are_those_of_two_thirds_of_its_teacher(
    depth: int, layers: int | None, source_layers: int
) -> None:
    alike = {"layer_types": ["full_attention"] * depth}
    for document in ({}, alike):
        assert starting.count_source_layers(DistillConfig(layers=layers), document, depth) == source_layers
        assert (
            starting.count_source_layers(DistillConfig(layers=layers, teacher_layers="all"), document, depth) == depth
        )
    mixed = {"layer_types": [*["sliding_attention"] * (depth - 1), "full_attention"]}
    assert starting.count_source_layers(DistillConfig(layers=layers), mixed, depth) == depth
    assert starting.count_source_layers(DistillConfig(layers=layers, teacher_layers=5), mixed, depth) == 5


@pytest.mark.parametrize(
    ("layers", "source_layers", "expected_layers"), [(1, 1, [0]), (1, 2, [1]), (2, 3, [1, 2]), (2, "all", [1, 3])]
)
def test_a_student_may_begin_with_the_first_layers_of_its_teacher(
    layers: int, source_layers: Any, expected_layers: list[int], tmp_path: Path
) -> None:
    teacher = make_artifact(tmp_path / "teacher", layers=4)
    start = starting.create_student(
        teacher, DistillConfig(layers=layers, teacher_layers=source_layers), tmp_path / "starts"
    )
    full, cut = (load_file(folder / "model.safetensors") for folder in (teacher, start))
    query = "bert.encoder.layer.{}.attention.self.query.weight"
    for place, layer in enumerate(expected_layers):
        assert torch.equal(cut[query.format(place)], full[query.format(layer)])
    assert query.format(layers) not in cut
    assert start.name == f"{artifact.read_artifact(teacher).version}-{layers}" + (
        "" if source_layers == "all" else f"-of{source_layers}"
    )


@pytest.mark.parametrize(
    ("kept_layers", "field"),
    [
        *(({"layers": layers}, "distill.layers") for layers in (2, 3, 12)),
        ({"layers": 3, "unlabeled_rows_path": "more.csv"}, "distill.layers"),
        *(
            ({"layers": 1, "width": width}, "distill.width") for width in (32, 24, 64)
        ),  # not whole heads, or not narrower
        ({"layers": 1, "teacher_layers": 3}, "distill.teacher_layers"),
    ],
)
def test_a_student_that_cannot_be_made_of_its_teacher_is_refused(
    teacher: Path, tmp_path: Path, kept_layers: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as error:
        starting.create_student(teacher, DistillConfig(**kept_layers), tmp_path)
    assert [(problem.field, problem.code) for problem in error.value.problems] == [(field, "out_of_range")]
    assert list(tmp_path.iterdir()) == []


def test_a_student_may_be_as_deep_where_it_learns_other_rows(teacher: Path, tmp_path: Path) -> None:
    start = starting.create_student(teacher, DistillConfig(layers=None, unlabeled_rows_path="more.csv"), tmp_path)
    assert start.name == f"{artifact.read_artifact(teacher).version}-2"
    item, other = (load_file(folder / "model.safetensors") for folder in (start, teacher))
    assert item.keys() == other.keys()
    assert all(torch.equal(item[name], other[name]) for name in item)


@pytest.mark.parametrize(
    ("old", "new", "block", "places"),
    [
        (6, 4, 2, [2, 3, 4, 5]),
        (12, 6, 2, [2, 3, 6, 7, 10, 11]),
        (8, 4, 1, [1, 3, 5, 7]),
        (10, 5, 4, [1, 3, 5, 7, 9]),  # no whole blocks
    ],
)
def test_places_that_stay_are_evenly_spaced_blocks(old: int, new: int, block: int, places: list[int]) -> None:
    assert starting.space_evenly(old, new, block) == places


@pytest.mark.parametrize("layers", [1, None])
def test_a_narrow_student_keeps_whole_heads_of_its_teacher(teacher: Path, layers: int | None, tmp_path: Path) -> None:
    """The second of 2 heads of 16, in every matrix that reads or writes the width."""
    start = starting.create_student(teacher, DistillConfig(layers=layers, width=16), tmp_path)
    assert start.name == f"{artifact.read_artifact(teacher).version}-{layers or 2}-w16"
    full, cut = (load_file(folder / "model.safetensors") for folder in (teacher, start))
    settings = json.loads((start / "config.json").read_text())
    assert (settings["hidden_size"], settings["num_attention_heads"], settings["intermediate_size"]) == (16, 1, 32)
    last, remaining = f"bert.encoder.layer.{(layers or 2) - 1}.", list(range(16, 32))
    query = full["bert.encoder.layer.1.attention.self.query.weight"]
    assert torch.equal(cut[f"{last}attention.self.query.weight"], query[remaining][:, remaining])
    words = full["bert.embeddings.word_embeddings.weight"]
    assert torch.equal(cut["bert.embeddings.word_embeddings.weight"], words[:, remaining])
    network = builder.build_network(start, base.get_task("classification"), ("a", "b", "c"), seed=0)
    assert {name: tuple(value.shape) for name, value in network.state_dict().items()} == {
        name: tuple(value.shape) for name, value in cut.items()
    }


def test_a_draft_that_a_crash_left_is_not_used(teacher: Path, tmp_path: Path) -> None:
    name = f"{artifact.read_artifact(teacher).version}-1"
    shutil.copytree(teacher, tmp_path / f".{name}.12345678")
    (tmp_path / f".{name}.12345678" / "model.safetensors").write_bytes(b"half")
    start = starting.create_student(teacher, DistillConfig(layers=1), tmp_path)
    assert load_file(start / "model.safetensors")


def test_two_distillations_at_once_make_one_start(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one ends while this one writes its weights."""
    write = safetensors.torch.save_file

    def overtaken(*arguments: Any) -> None:
        monkeypatch.setattr(safetensors.torch, "save_file", write)
        starting.create_student(teacher, DistillConfig(layers=1), tmp_path)
        write(*arguments)

    monkeypatch.setattr(safetensors.torch, "save_file", overtaken)
    start = starting.create_student(teacher, DistillConfig(layers=1), tmp_path)
    assert load_file(start / "model.safetensors")
    assert list(tmp_path.iterdir()) == [start]


def test_a_start_that_cannot_be_written_leaves_nothing(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        starting.create_student(teacher, DistillConfig(layers=1), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_fused_matrices_are_not_made_narrower(tmp_path: Path) -> None:
    """Parts of one would be kept that the next one does not read."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "modernbert", "num_hidden_layers": 4}))
    with pytest.raises(ConfigError) as error:
        starting.create_student(tmp_path, DistillConfig(layers=2, width=32), tmp_path)
    assert [(problem.field, problem.code) for problem in error.value.problems] == [("distill.width", "unsupported")]


def test_a_student_is_resumed_where_its_folder_of_runs_was_moved_to(teacher: Path, tmp_path: Path) -> None:
    """Its start is named by its whole path, and is the same one by its address."""
    arguments = {"data.path": str(tmp_path / "rows.csv"), "distill.layers": 1}

    shutil.copytree(teacher, tmp_path / "old" / "teacher" / "artifact")
    model = distill.Teacher.load(tmp_path / "old" / "teacher" / "artifact")
    first = distill.derive_student_config(configuration.load_config("intent", arguments), model, tmp_path / "old")
    run_folders.write_frozen_config(Run(tmp_path / "old" / "student"), first)
    shutil.move(tmp_path / "old", tmp_path / "new")
    root = tmp_path / "new"
    start = root / run_folders.STUDENTS_FOLDER / Path(first.recipe.model.name).name
    assert start.is_dir()
    inputs = distill.resolve_config(configuration.load_config("intent", arguments), root / "student", "resume")
    started = distill.derive_student_config(inputs, distill.Teacher.load(root / "teacher" / "artifact"), root)
    assert run_folders.choose_folder(root / "student", started, "resume")[1].recipe.model.name == str(start)
    for other in (start.with_name("0123456789ab-1"), tmp_path / start.name):
        with pytest.raises(ConfigError):
            run_folders.choose_folder(
                root / "student", configuration.with_overrides(started, {"model.name": str(other)}), "resume"
            )
