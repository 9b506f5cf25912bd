"""A real training beside another model of the same rows: its answers are asked for anew, and some are changed."""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from rtrain.core.run_folder import Run
from rtrain.evaluation import compare, page
from tests.support.trained import TEST_ROWS, Trained

pytestmark = pytest.mark.ray

CHANGED = 12


def test_a_trained_run_beside_itself_and_beside_worse_answers(trained: Trained, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained.run, run, ignore=shutil.ignore_patterns("checkpoints", "ray"))
    remaining = pyarrow.parquet.read_table(Run(run).predictions("test"))
    same = tmp_path / "same"
    shutil.copytree(run, same)
    Run(same).predictions("test").unlink()  # to be asked of the artefact: what serves gives the answers of training
    result = compare.compare_runs([run, same])
    assert result.answer_comparison is not None
    (item,) = result.answer_comparison.results
    assert (result.answer_comparison.rows, item.headline.difference, item.headline.p) == (TEST_ROWS, 0.0, 1.0)
    assert [kind.rows for kind in item.change_groups] == [0, 0, 0]
    assert result.settings.weight_settings == result.settings.versions == result.settings.digests == ()

    right = [row["target"] == row["prediction"] for row in remaining.to_pylist()]
    assert sum(right) >= CHANGED, "the fixture's model has learned"
    lost = [row for row, fine in enumerate(right) if fine][:CHANGED]
    messages = [
        "something else" if row in lost else value for row, value in enumerate(remaining["prediction"].to_pylist())
    ]
    place = remaining.column_names.index("prediction")
    pyarrow.parquet.write_table(
        remaining.set_column(place, "prediction", pa.array(messages)), Run(same).predictions("test")
    )
    worse = compare.compare_runs([run, same])
    assert worse.answer_comparison is not None
    (item,) = worse.answer_comparison.results
    assert item.headline.difference == pytest.approx(-CHANGED / TEST_ROWS)
    assert worse.verdict.startswith("B (same) is worse: accuracy")
    assert item.change_groups[0].rows == CHANGED
    assert {flip.location for flip in item.change_groups[0].shown} == {
        f"{remaining['source'][row].as_py()}:{remaining['line'][row].as_py()}" for row in lost
    }
    first, other = worse.curves
    assert first == other
    assert len(first.loss) > 20
    assert [point.seconds for point in first.loss] == sorted(point.seconds for point in first.loss)
    assert "Training loss over seconds" in page.render_comparison(worse)
