"""The page about models without rtrain: its blocks, run as they stand, answer as rtrain does."""

import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from rtrain.inference.predictor import Predictor
from rtrain.models import model_files
from tests.support import quantizing
from tests.support.tiny import make_encoder
from tests.unit.inference.test_artifact_elsewhere import made

PAGE = Path(__file__).resolve().parents[3] / "docs" / "without-rtrain.md"
TEXTS = ["Where is my card?", "Please cancel my subscription."]
BLOCKS = re.findall(r"^## ([^\n]*)\n(?:(?!^## ).)*?^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of the names that the page has."""
    root = tmp_path_factory.mktemp("without")
    encoder = make_encoder(root / "encoder")
    _, own = made(root / "runs" / "own" / "artifact", "classification", encoder)
    made(root / "runs" / "mean" / "artifact", "classification", encoder, **{"model.pooling": "mean"})
    store = quantizing.make(root / "rows", longest=6).store  # rows that the model reads whole
    int8 = root / "runs" / "intent" / "artifact-int8"
    int8.parent.mkdir(parents=True)
    quantizing.complete(quantizing.Made(own, store), int8)
    return root


@pytest.mark.parametrize(("title", "block"), BLOCKS, ids=[title for title, _ in BLOCKS])
def test_a_block_answers_as_rtrain_does(title: str, block: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [artifact] = re.findall(r'"(runs/[\w/-]+)"', block)
    expected = Predictor.load(folder / artifact)(TEXTS, {"top_k": 3})
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(compile(block, f"{PAGE.name}: {title}", "exec"), names)
    for answer, ours in zip(names["answers"], expected, strict=True):
        assert answer == pytest.approx({entry["label"]: entry["score"] for entry in ours}, abs=1e-4)


def test_transformers_reads_texts_for_an_int8_graph_as_rtrain_does(folder: Path) -> None:
    int8 = folder / "runs" / "intent" / "artifact-int8"
    assert model_files.find_differing_texts(int8) == []
    loaded = transformers.AutoTokenizer.from_pretrained(int8)
    predictor = Predictor.load(int8)
    long = " ".join(TEXTS) * 9
    assert loaded(long, truncation=True).input_ids == predictor.encode([long])[0].ids


def test_the_page_has_a_block_for_each_program() -> None:
    assert len(BLOCKS) == 3
