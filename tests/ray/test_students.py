"""A search over the students of one teacher."""

from pathlib import Path
from typing import Any

import pytest

from rtrain import config
from rtrain.cli import app as cli
from rtrain.compress import distill, quantize, teacher as teaching
from rtrain.config import Config
from rtrain.config.tune import DEFAULT_SPACE
from rtrain.core.errors import ConfigError
from rtrain.inference import artifact
from rtrain.runs import run_folders
from tests.support.trained import Trained
from tune import search, space, students

FEW = {"distill.layers": 1, "distill.epochs": 2, "distill.lr": 5e-3}
SEARCH = {
    "tune.space": {"distill.temperature": [1.0, 4.0], "distill.alpha": [0.3, 0.9]},
    "tune.trials": 2,
    "tune.max_concurrent_trials": 1,
    "tune.final_budget_rows": 0,
    "tune.min_resource_fraction": 0.5,
    "tune.objective": "pareto",
    "tune.cost": "bytes",
}

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


def initial(trained: Trained, root: Path, **settings: Any) -> Config:
    return students.derive_search_config(
        run_folders.load_config(trained.run, {**FEW, **settings}), taught(trained), root
    )


def taught(trained: Trained) -> distill.Teacher:
    return distill.Teacher.load(trained.run / "artifact")


@pytest.fixture(scope="module")
def result(trained: Trained, ray_session: Path) -> search.SearchResult:
    root = ray_session / "students"
    root.mkdir()
    selection = initial(trained, root, **SEARCH)
    search.check_students(selection, taught(trained), root)
    return search.run_search(selection, root / "search", teacher=trained.run / "artifact")


@pytest.mark.slow
def test_its_trials_are_students_of_that_teacher_with_the_settings_asked_for(
    result: search.SearchResult, trained: Trained
) -> None:
    version = taught(trained).metadata.version
    for trial in result.history.original_trials:
        assert trial.error is None
        instance = config.load_config(str(result.search.trial(trial.number).config)).recipe
        assert (instance.distill.teacher, instance.optim.lr, instance.train.epochs) == (version, 5e-3, 2)
        for name in ("temperature", "alpha"):
            expected = trial.settings.get(f"distill.{name}", getattr(config.load_config("intent").recipe.distill, name))
            assert getattr(instance.distill, name) == expected
    assert len({tuple(sorted(trial.settings.items())) for trial in result.history.original_trials}) == 2
    start = config.load_config(str(result.winner.config)).recipe.model.name
    assert {trial.cost for trial in result.history.original_trials} == {
        students.measure_megabytes(Path(start))
    }  # all have one layer


@pytest.mark.slow
def test_the_winner_is_the_student_that_distill_makes_by_its_settings(
    result: search.SearchResult, trained: Trained, ray_session: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any, **named_settings: Any) -> bool:
        raise AssertionError("the teacher was asked again")

    monkeypatch.setattr(teaching, "ensure_answers", never)  # the search's answers are there
    settings = result.best_trial.settings
    selection = run_folders.load_config(trained.run, {**FEW, **settings})
    instance, _ = distill.run_distillation(selection, trained.run, result.search.folder.parent / "by-hand")
    weights = "artifact/model.safetensors"
    assert (instance / weights).read_bytes() == (result.winner.folder / weights).read_bytes()


@pytest.mark.slow
def test_the_winner_is_gated_against_its_teacher(result: search.SearchResult, trained: Trained) -> None:
    assert result.gate_verdict is not None
    assert result.gate_verdict["baseline"]["version"] == taught(trained).metadata.version
    assert artifact.read_artifact(result.winner.artifact).lineage["teacher"] == taught(trained).metadata.version


@pytest.mark.slow
def test_the_verb_does_nothing_again_and_tells_both_verdicts(
    result: search.SearchResult, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    before = result.search.trials.read_bytes()
    cli.main(["distill", str(trained.run), "--search", "--resume", "--out", str(result.search.folder)])
    assert result.search.trials.read_bytes() == before
    out, _ = capsys.readouterr()
    assert str(result.winner) in out
    assert "rtrain quantize" in out


def test_what_is_searched_where_nothing_is_said(trained: Trained, tmp_path: Path) -> None:
    assert run_folders.load_config(trained.run).deploy.tune.space == DEFAULT_SPACE
    names = {dimension.name for dimension in space.build_dimensions(initial(trained, tmp_path))}
    assert names == {"distill.lr", "distill.temperature", "distill.alpha"}
    assert quantize.find_token_store(trained.run).is_dir()


@pytest.mark.parametrize(
    "searched",
    [
        {"distill.layers": [1, 2]},
        {"optim.lr": [1e-3, 1e-4]},
        {"distill.width": {"low": 8, "high": 16}},
        {"distill.epochs": [1, 2]},
        {"distill.confidence": [0.1, 0.2]},
        {"distill.student": ["a", "b"]},
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_starts(
    trained: Trained, tmp_path: Path, searched: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        search.check_students(initial(trained, tmp_path, **{"tune.space": searched}), taught(trained), tmp_path)
    assert [problem.field for problem in caught.value.problems] == [f"tune.space.{name}" for name in searched]
