"""A real training beside another model of the same rows: its answers are asked for anew, and some are changed."""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from rtrain.core.run_folder import Run
from rtrain.evaluation import compare, page
from tests.trained import TEST_ROWS, Trained

pytestmark = pytest.mark.ray

CHANGED = 12


def test_a_trained_run_beside_itself_and_beside_worse_answers(trained: Trained, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained.run, run, ignore=shutil.ignore_patterns("checkpoints", "ray"))
    kept = pyarrow.parquet.read_table(Run(run).predictions("test"))
    same = tmp_path / "same"
    shutil.copytree(run, same)
    Run(same).predictions("test").unlink()  # to be asked of the artefact: what serves gives the answers of training
    found = compare.compare([run, same])
    assert found.measured is not None
    (one,) = found.measured.against
    assert (found.measured.rows, one.headline.difference, one.headline.p) == (TEST_ROWS, 0.0, 1.0)
    assert [kind.rows for kind in one.kinds] == [0, 0, 0]
    assert found.settings.weights == found.settings.versions == found.settings.digests == ()

    right = [row["target"] == row["prediction"] for row in kept.to_pylist()]
    assert sum(right) >= CHANGED, "the fixture's model has learned"
    lost = [row for row, fine in enumerate(right) if fine][:CHANGED]
    said = ["something else" if row in lost else value for row, value in enumerate(kept["prediction"].to_pylist())]
    place = kept.column_names.index("prediction")
    pyarrow.parquet.write_table(kept.set_column(place, "prediction", pa.array(said)), Run(same).predictions("test"))
    worse = compare.compare([run, same])
    assert worse.measured is not None
    (one,) = worse.measured.against
    assert one.headline.difference == pytest.approx(-CHANGED / TEST_ROWS)
    assert worse.verdict.startswith("B (same) is worse: accuracy")
    assert one.kinds[0].rows == CHANGED
    assert {flip.where for flip in one.kinds[0].shown} == {
        f"{kept['source'][row].as_py()}:{kept['line'][row].as_py()}" for row in lost
    }
    first, other = worse.curves
    assert first == other
    assert len(first.loss) > 20
    assert [point.seconds for point in first.loss] == sorted(point.seconds for point in first.loss)
    assert "Training loss over seconds" in page.page(worse)
