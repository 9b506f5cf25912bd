"""A search over the students of one teacher."""

from pathlib import Path
from typing import Any

import pytest

from rtrain import config
from rtrain.cli import app as cli
from rtrain.compress import distill, quantize, teacher as teaching
from rtrain.config import Config
from rtrain.config.deploy import SPACE
from rtrain.core.errors import ConfigError
from rtrain.inference import artifact
from rtrain.runs import run_folders
from tests.trained import Trained
from tune import search, space, student_costs, students

FEW = {"distill.layers": 1, "distill.epochs": 2, "distill.lr": 5e-3}
SEARCH = {
    "tune.space": {"distill.temperature": [1.0, 4.0], "distill.alpha": [0.3, 0.9]},
    "tune.trials": 2,
    "tune.concurrent": 1,
    "tune.final_rows": 0,
    "tune.first_rung": 0.5,
    "tune.objective": "front",
    "tune.cost": "bytes",
}

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


def begun(trained: Trained, root: Path, **settings: Any) -> Config:
    return students.begun(run_folders.stored(trained.run, {**FEW, **settings}), taught(trained), root)


def taught(trained: Trained) -> distill.Teacher:
    return distill.Teacher.read(trained.run / "artifact")


@pytest.fixture(scope="module")
def found(trained: Trained, ray_session: Path) -> search.Found:
    root = ray_session / "students"
    root.mkdir()
    chosen = begun(trained, root, **SEARCH)
    students.check(chosen, taught(trained), root)
    return search.run(chosen, root / "search", teacher=trained.run / "artifact")


@pytest.mark.slow
def test_its_trials_are_students_of_that_teacher_with_the_settings_asked_for(
    found: search.Found, trained: Trained
) -> None:
    version = taught(trained).made.version
    for trial in found.history.own:
        assert trial.error is None
        made = config.load(str(found.search.trial(trial.number).config)).recipe
        assert (made.distill.teacher, made.optim.lr, made.train.epochs) == (version, 5e-3, 2)
        for name in ("temperature", "alpha"):
            expected = trial.settings.get(f"distill.{name}", getattr(config.load("intent").recipe.distill, name))
            assert getattr(made.distill, name) == expected
    assert len({tuple(sorted(trial.settings.items())) for trial in found.history.own}) == 2
    start = config.load(str(found.winner.config)).recipe.model.name
    assert {trial.cost for trial in found.history.own} == {student_costs.megabytes(Path(start))}  # all have one layer


@pytest.mark.slow
def test_the_winner_is_the_student_that_distill_makes_by_its_settings(
    found: search.Found, trained: Trained, ray_session: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any, **named: Any) -> bool:
        raise AssertionError("the teacher was asked again")

    monkeypatch.setattr(teaching, "ensure_answers", never)  # the search's answers are there
    settings = found.best.settings
    chosen = run_folders.stored(trained.run, {**FEW, **settings})
    made, _ = distill.run(chosen, trained.run, found.search.folder.parent / "by-hand")
    weights = "artifact/model.safetensors"
    assert (made / weights).read_bytes() == (found.winner.folder / weights).read_bytes()


@pytest.mark.slow
def test_the_winner_is_gated_against_its_teacher(found: search.Found, trained: Trained) -> None:
    assert found.gate is not None
    assert found.gate["against"]["version"] == taught(trained).made.version
    assert artifact.read(found.winner.artifact).lineage["teacher"] == taught(trained).made.version


@pytest.mark.slow
def test_the_verb_does_nothing_again_and_tells_both_verdicts(
    found: search.Found, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    before = found.search.trials.read_bytes()
    cli.main(["distill", str(trained.run), "--search", "--resume", "--out", str(found.search.folder)])
    assert found.search.trials.read_bytes() == before
    out, _ = capsys.readouterr()
    assert str(found.winner) in out
    assert "rtrain quantize" in out


def test_what_is_searched_where_nothing_is_said(trained: Trained, tmp_path: Path) -> None:
    assert run_folders.stored(trained.run).deploy.tune.space == SPACE
    names = {one.name for one in space.dimensions(begun(trained, tmp_path))}
    assert names == {"distill.lr", "distill.temperature", "distill.alpha"}
    assert quantize.store_of(trained.run).is_dir()


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
        students.check(begun(trained, tmp_path, **{"tune.space": searched}), taught(trained), tmp_path)
    assert [one.field for one in caught.value.problems] == [f"tune.space.{name}" for name in searched]
