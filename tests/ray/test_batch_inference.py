"""Rows answered on a Ray cluster: the same bytes as in this process, resumed by the same portions."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rtrain.inference.batch import chunks, pipeline, predict_files
from rtrain.inference.batch.chunks import Chunk
from rtrain.inference.batch.pipeline import AnsweredChunk, BatchPredictJob
from tests.support.answering import asked, read_csv, texts, write_csv
from tests.support.refusing import refused
from tests.support.tiny import make_artifact

pytestmark = pytest.mark.ray


class Stopped(Exception):
    pass


def test_a_cluster_leaves_the_bytes_of_one_process_and_goes_on_from_its_portions(
    ray_session: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "MAX_CHUNK_ROWS", 16)
    artifact = make_artifact(tmp_path / "artifact")
    rows = texts(100)
    rows[50] = " "
    work = asked(artifact, write_csv(tmp_path / "rows.csv", rows))
    predict_files.answer_to_file(work, tmp_path / "here.csv")
    numbers: list[int] = []

    def stopped(arguments: BatchPredictJob, portions: list[Chunk]) -> Iterator[AnsweredChunk]:
        for answered in pipeline.answer_on_cluster(arguments, portions):
            yield answered
            numbers.append(answered.number)
            if len(numbers) == 2:
                raise Stopped

    with pytest.raises(Stopped):
        predict_files.answer_to_file(work, tmp_path / "there.csv", answer_chunks=stopped)
    report = predict_files.answer_to_file(work, tmp_path / "there.csv", "resume", pipeline.answer_on_cluster)
    assert len(set(numbers)) == 2
    assert report["reused_rows"] == sum(16 if number < 6 else 4 for number in numbers)
    assert (report["rows"], report["answered"], report["empty"]) == (100, 99, 1)
    assert [row["text"] for row in read_csv(tmp_path / "there.csv")] == rows
    assert (tmp_path / "there.csv").read_bytes() == (tmp_path / "here.csv").read_bytes()


def test_an_artefact_that_the_nodes_cannot_read_is_told_in_a_line(ray_session: Path, tmp_path: Path) -> None:
    work = asked(make_artifact(tmp_path / "artifact"), write_csv(tmp_path / "rows.csv", texts(3)))

    def damaged(arguments: BatchPredictJob, portions: list[Chunk]) -> Iterator[AnsweredChunk]:
        (tmp_path / "artifact" / "model.safetensors").write_bytes(b"")
        yield from pipeline.answer_on_cluster(arguments, portions)

    with refused("failed_on_node"):
        predict_files.answer_to_file(work, tmp_path / "a.csv", answer_chunks=damaged)
    assert not list(tmp_path.glob(".a.csv*"))
