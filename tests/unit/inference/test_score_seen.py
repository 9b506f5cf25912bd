"""Rows from which a model has learned say little of others: they are counted, and no verdict rests on them."""

import csv
import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rtrain import config
from rtrain.core import manifest
from rtrain.core.run_folder import Run
from rtrain.data.store.store import Store
from rtrain.evaluation import gate
from rtrain.inference import artifact
from tests.conftest import write_rows
from tests.support.tiny import CORPUS, make_artifact, make_encoder, make_store
from tests.unit.cli.test_cli import Cli, run
from tests.unit.evaluation.test_gate_rows import owned

__all__ = ["run"]
LABELS = ("a", "b")
TEXTS = [f"{text} number {place}" for place, text in enumerate(CORPUS * 4)]
NEW = [f"{text} letter {place}" for place, text in enumerate(CORPUS * 2)]
SPLITS = ("train", "train", "valid", "test")


class Made(NamedTuple):
    folder: Path
    store: Store
    rows: Path


def labelled(path: Path, texts: list[str]) -> Path:
    return write_rows(path, list(zip(texts, itertools.cycle(LABELS), strict=False)))


def split_rows(path: Path, texts: list[str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label", "part"])
        writer.writerows(zip(texts, itertools.cycle(LABELS), itertools.cycle(SPLITS), strict=False))
    return path


def make_run(folder: Path, path: Path, **overrides: Any) -> Made:
    """A run's folder with an artefact, a further one, and the token store that both were trained from."""
    encoder = make_encoder(folder / "encoder")
    given = {"model.name": str(encoder), "data.path": str(path), **overrides}
    chosen = config.load_config("intent", given)
    recipe = chosen.recipe
    store = make_store(recipe, encoder, folder)
    run = Run(folder / "run")
    run.folder.mkdir()
    run.config.write_text(config.to_yaml(chosen))
    run.append_event("tokenized", store=str(store.folder))
    for seed, target in enumerate((run.artifact, run.int8_artifact)):
        made = make_artifact(folder / f"made-{seed}", LABELS, seed=seed)
        owned(made, target, store)
        document = json.loads((target / artifact.FILE_NAME).read_text())
        document["data"] = recipe.data.model_dump(mode="json", include=set(artifact.ROW_FORMAT_SETTINGS))
        (target / artifact.FILE_NAME).write_text(json.dumps(document))
        (target / "MANIFEST.json").unlink()
        manifest.write_manifest(target)
    return Made(run.folder, store, path)


@pytest.fixture
def hashed(tmp_path: Path) -> Made:
    """Split by a hash of the texts."""
    return make_run(tmp_path, labelled(tmp_path / "rows.csv", TEXTS))


@pytest.fixture
def by_column(tmp_path: Path) -> Made:
    return make_run(tmp_path, split_rows(tmp_path / "rows.csv", TEXTS), **{"data.split_column": "part"})


def evaluated(run: Cli, *words: object) -> dict[str, Any]:
    code, out, err = run("evaluate", *words, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_training_and_validation_rows_of_a_file_are_counted(run: Cli, hashed: Made, tmp_path: Path) -> None:
    found = evaluated(run, hashed.folder, "--data", hashed.rows)
    assert found["rows"] == len(TEXTS)
    assert found["seen_rows"] == {"train": hashed.store.num_rows("train"), "valid": hashed.store.num_rows("valid")}
    assert found["unseen"]["rows"] == hashed.store.num_rows("test") > 0
    new = evaluated(run, hashed.folder, "--data", labelled(tmp_path / "new.csv", NEW))
    assert new["seen_rows"] == {"train": 0, "valid": 0}
    assert "unseen" not in new


def test_rows_of_a_model_without_its_store_are_not_called_unseen(run: Cli, hashed: Made) -> None:
    shutil.rmtree(hashed.store.folder)
    assert evaluated(run, hashed.folder, "--data", hashed.rows)["seen_rows"] is None


def test_the_column_that_split_the_run_splits_its_rows_again(run: Cli, by_column: Made, tmp_path: Path) -> None:
    tested, count = TEXTS[3::4], {split: len(TEXTS) // 4 * SPLITS.count(split) for split in ("train", "valid")}
    found = evaluated(run, by_column.folder, "--data", by_column.rows)
    assert (found["rows"], found["seen_rows"]) == (len(tested), {"train": 0, "valid": 0})
    assert (found["excluded_rows"], found["bad_rows"]) == (count, 0)
    every = evaluated(run, by_column.folder, "--data", by_column.rows, "--set", "data.split_column=null")
    assert (every["rows"], every["excluded_rows"], every["seen_rows"]) == (len(TEXTS), {}, count)
    # Rows without the column are all test rows.
    assert evaluated(run, by_column.folder, "--data", labelled(tmp_path / "new.csv", NEW))["rows"] == len(NEW)


def test_a_file_without_a_test_row_is_refused(run: Cli, by_column: Made, tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("".join(line for line in by_column.rows.read_text().splitlines(True) if "test" not in line))
    code, _, err = run("evaluate", by_column.folder, "--data", path)
    assert code == 2
    assert "data.split_column" in err


def judged(made: Made, path: Path) -> dict[str, Any]:
    folder = Run(made.folder)
    chosen, limits = gate.prepare_request(
        folder.int8_artifact, folder.artifact, {"data.path": str(path), "gate.latency_seconds": 0.01}
    )
    return gate.run_gate(replace(chosen, measures_latency=False), limits)


def test_the_gate_judges_by_unseen_rows_alone(hashed: Made, tmp_path: Path) -> None:
    labelled(path := tmp_path / "both.csv", [*TEXTS, *NEW])
    found, seen = judged(hashed, path), hashed.store.num_rows("train") + hashed.store.num_rows("valid")
    assert (found["rows"], found["excluded_rows"]) == (len(TEXTS) + len(NEW) - seen, seen)
    assert {one["class"] for one in found["classes"]} == set(LABELS)
    assert sum(one["support"] for one in found["classes"]) == found["rows"]
    found = judged(hashed, labelled(path, NEW))
    assert (found["rows"], found["excluded_rows"]) == (len(NEW), 0)


def test_the_gate_gives_no_verdict_on_seen_rows(run: Cli, by_column: Made, tmp_path: Path) -> None:
    folder = Run(by_column.folder).int8_artifact
    before = (folder / artifact.FILE_NAME).read_bytes()
    seen = [text for place, text in enumerate(TEXTS) if SPLITS[place % 4] != "test"]
    code, _, err = run("gate", folder, "--data", labelled(tmp_path / "seen.csv", seen))
    assert code == 2, err
    assert (folder / artifact.FILE_NAME).read_bytes() == before
    # The column of the run keeps its training rows out by itself.
    found = judged(by_column, by_column.rows)
    assert (found["rows"], found["excluded_rows"]) == (len(TEXTS) - len(seen), 0)
