"""Long texts are read in windows: nothing is cut, and training, evaluation and serving pool them alike."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rtrain import config
from rtrain.config import DistillConfig
from rtrain.core.errors import ConfigError
from rtrain.data.store.builder import find_problems
from rtrain.data.store.store import Store
from rtrain.inference import artifact, predictor as inference_predictor
from rtrain.inference.artifact import Artifact
from rtrain.inference.predictor import Predictor
from rtrain.models import builder
from rtrain.parallel.ddp import DDPStrategy
from rtrain.tasks import base
from rtrain.tasks.encode import load_tokenizer
from rtrain.trainer import evaluate, losses, step
from serve.app import build_app
from tests.conftest import labelled_rows
from tests.support.causes import caused_by
from tests.support.serving import call
from tests.support.tiny import make_store
from tests.unit.trainer.test_step import make_still_encoder

TASK = base.get_task("classification")


def settings(folder: Path, **data: Any) -> dict[str, Any]:
    results = {"text": "text", "label": "label", "group_column": None, "window": 16, "stride": 4, **data}
    return {"data.path": str(folder / "rows.csv"), **{f"data.{name}": value for name, value in results.items()}}


def texts() -> list[tuple[str, str]]:
    """One to five repetitions of a message: from one window to a dozen."""
    return [(" and ".join([text] * (1 + number % 5)), label) for number, (text, label) in enumerate(labelled_rows(150))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windows")
    make_still_encoder(folder / "encoder")
    lines = [f"{text},{label}" for text, label in texts()]
    (folder / "rows.csv").write_text("text,label\n" + "\n".join(lines) + "\n")
    return folder


def store_of(folder: Path, root: Path, **data: Any) -> Store:
    recipe = config.load_config("contract-clauses", settings(folder, **data)).recipe
    return make_store(recipe, folder / "encoder", root)


def test_no_token_of_a_long_text_is_lost(folder: Path, tmp_path: Path) -> None:
    import tokenizers

    store = store_of(folder, tmp_path)
    assert store.manifest.truncated == 0
    assert store.manifest.facts == {"stride": 4, "max_windows": 32, "pooling": "mean"}
    full = tokenizers.Tokenizer.from_file(str(folder / "encoder" / "tokenizer.json"))
    lines, ids = store.origins("train")["line"].to_pylist(), []
    for row in range(store.num_rows("train")):
        tokens = store.read_tokens("train", np.array([row]))
        assert tokens.window_lengths.max() <= 16
        parts = np.split(tokens.ids, np.cumsum(tokens.window_lengths)[:-1])
        inner = [part[1:-1].tolist() for part in parts]  # without [CLS] and [SEP]
        assert all(entry[-4:] == other[:4] for entry, other in itertools.pairwise(inner))
        result = inner[0] + [token for part in inner[1:] for token in part[4:]]
        expected = full.encode(texts()[lines[row] - 2][0], add_special_tokens=False).ids
        assert result == expected
        ids.append(len(parts))
    assert min(ids) <= 2 < 5 < max(ids)


def test_what_is_beyond_the_last_window_is_counted(folder: Path, tmp_path: Path) -> None:
    store = store_of(folder, tmp_path, max_windows=2)
    tokens = store.read_tokens("train", np.arange(store.num_rows("train")))
    assert tokens.windows_per_row.max() == 2
    assert 0 < store.manifest.truncated < sum(store.manifest.rows.values())


def test_windows_that_overlap_by_half_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, check=caused_by("out_of_range")):
        config.load_config("contract-clauses", settings(folder, stride=8))


def test_a_stride_that_two_long_texts_cannot_have_is_refused(folder: Path) -> None:
    """The tokenizer would end the process: each text has half of the window that the special tokens leave."""
    overrides = settings(folder, text_pair="other", window=32, stride=14)
    [problem] = find_problems(config.load_config("contract-clauses", overrides).recipe)
    assert (problem.field, problem.fix) == ("data.stride", "write 13 or less")
    assert find_problems(config.load_config("contract-clauses", {**overrides, "data.text_pair": None}).recipe) == []
    assert find_problems(config.load_config("squad", {"data.window": 32, "data.stride": 15}).recipe) == []
    as_told = config.load_config("contract-clauses", {**overrides, "data.stride": 13}).recipe
    assert find_problems(as_told) == []
    tokenizer = load_tokenizer(folder / "encoder", 32, 13)
    long = " ".join(["a"] * 30)  # each window of one text stands beside each of the other
    assert len(TASK.encode(tokenizer, [long], [long], 4)[0].windows) == 4


@pytest.mark.parametrize("pooling", ["mean", "max", "first"])
def test_training_evaluation_and_serving_give_one_answer(folder: Path, tmp_path: Path, pooling: str) -> None:
    store = store_of(folder, tmp_path, pooling=pooling)
    network: Any = builder.build_network(folder / "encoder", TASK, store.manifest.labels, seed=0)
    row_results = evaluate.gather_row_results(DDPStrategy(network), TASK, store, "test", pad_id=0, precision="fp32")
    evaluated = row_results.to_matrix(3)
    tokens = store.read_tokens("test", np.arange(store.num_rows("test")))
    assert tokens.windows_per_row.max() > 2
    head = store.manifest.head
    with torch.inference_mode():
        logits = step.forward(network.eval(), tokens, 0, "fp32")
        loss = losses.make_loss(TASK, DistillConfig(), head)(logits, tokens).item()
    by_hand = np.logaddexp.reduce(evaluated, axis=1) - evaluated[np.arange(len(tokens)), tokens.targets.astype(int)]
    assert loss == pytest.approx(by_hand.sum(), rel=1e-5)
    built = tmp_path / "artifact"
    network.save_pretrained(built)
    (built / "tokenizer.json").write_bytes((folder / "encoder" / "tokenizer.json").read_bytes())
    report = Artifact("tiny", "classification", head.labels, 16, "torch", facts=head.facts)
    artifact.write_artifact(built, report, inference_predictor.compute_golden_logits)
    predictor = Predictor.load(built, threads=1)
    lines = store.origins("test")["line"].to_pylist()
    inputs: list[base.Input] = [texts()[line - 2][0] for line in lines]
    assert np.abs(np.stack(predictor.logits(inputs)) - evaluated).max() < 1e-5
    reply = call(build_app(predictor, config.ServeConfig()), "POST", "/predict", json={"inputs": inputs[:3]})
    best = [answer[0]["label"] for answer in reply.json()]
    assert best == [head.labels[place] for place in evaluated[:3].argmax(axis=1)]
    assert "x-truncated-inputs" not in reply.headers
