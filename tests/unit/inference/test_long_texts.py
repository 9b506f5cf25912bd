"""Texts of up to 8,192 tokens: trained, stopped and resumed, exported to int8 and served; or refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from rtrain import config
from rtrain.compress import calibrate
from rtrain.config import ServeConfig
from rtrain.data.store.store import Store
from rtrain.inference import artifact, predictor
from rtrain.inference.artifact import Artifact
from rtrain.models import builder, unpadded
from serve.app import build_app
from tests.conftest import labelled_rows, write_rows
from tests.support import quantizing, serving
from tests.support.tiny import CORPUS, make_modern, make_store, modern
from tests.unit.trainer.test_trainer import TASK, UPDATES, fingerprint, start

LONGEST = 8192
WORDS = " ".join(CORPUS).split()


def text_of(tokens: int, seed: int = 0) -> str:
    """A text of about so many tokens, or a few more."""
    return " ".join(np.random.default_rng(seed).choice(WORDS, tokens))


def make_ground(folder: Path, *lengths: int, most: int = LONGEST, **settings: Any) -> Path:
    """An encoder and a store of rows of many lengths, among them these; `most` tokens are read of a text."""
    make_modern(folder / "encoder", **settings)
    rows = [
        (f"{text} {text_of(10 * number % 170, number)}", label)
        for number, (text, label) in enumerate(labelled_rows(58))
    ]
    for number, length in enumerate(lengths):
        rows[7 * number] = (f"{rows[7 * number][0]} {text_of(length, number)}", rows[7 * number][1])
    write_rows(folder / "rows.csv", rows)
    read = {"data.path": str(folder / "rows.csv"), "data.max_tokens": most}
    make_store(config.load_config("intent", read).recipe, folder / "encoder", folder)
    return folder


# ------------------------------------------------------------------------------------------------------------ training


def test_a_killed_run_over_long_texts_resumes_bit_for_bit(tmp_path: Path) -> None:
    """With dropout, by local and by global attention, in windows of both kernels that train on a CPU."""
    ground = make_ground(tmp_path / "ground", 1100, 700, 1500, 400, embedding_dropout=0.1, mlp_dropout=0.1)
    straight = start(ground, tmp_path / "straight", save_every=1)
    assert straight.outcome is not None
    assert unpadded.is_packed(straight.network)
    assert start(ground, tmp_path / "killed", save_every=1, kill=4).outcome is None
    resumed = start(ground, tmp_path / "killed", save_every=1)
    assert resumed.recorder.of("started")[0]["step"] == 4
    assert resumed.outcome == straight.outcome
    assert fingerprint(tmp_path / "killed", UPDATES) == fingerprint(tmp_path / "straight", UPDATES)


# ------------------------------------------------------------------------------------------------------------ answers


def make_artifact(encoder: Path, folder: Path, labels: tuple[str, ...], most: int = LONGEST, **facts: Any) -> Path:
    """With random weights, for texts of at most so many tokens."""
    builder.build_network(encoder, TASK, labels, seed=1).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((encoder / "tokenizer.json").read_bytes())
    artifact.write_artifact(
        folder, Artifact("long", TASK.name, labels, most, "torch", facts=facts), predictor.compute_golden_logits
    )
    return folder


@pytest.mark.parametrize(
    ("longest", "bucket"),
    [(1500, "up to 2048 tokens"), pytest.param(LONGEST, "more than 4096 tokens", marks=pytest.mark.slow)],
)
def test_a_long_text_is_exported_and_served_by_int8(tmp_path: Path, longest: int, bucket: str) -> None:
    """The float graph answers training rows of every length as PyTorch does (`export_check`), or nothing is made."""
    folder = make_ground(tmp_path, longest, 900, longest // 3, most=longest)
    store = Store(next((folder / ".tokens").iterdir()))
    names = [name for name, _ in calibrate.group_by_length(store.column("train", "length"))]
    assert names[-1] == bucket
    head = store.manifest.head
    made = make_artifact(folder / "encoder", folder / "artifact", head.labels, longest, **head.facts)
    int8 = quantizing.complete(quantizing.Made(made, store), folder / "int8", calibration_rows=8)
    predictors = [predictor.Predictor.load(folder, threads=1) for folder in (made, int8)]
    text = text_of(longest)
    assert [len(one.encode([text])[0].ids) for one in predictors] == [longest, longest]
    exact, told = (one([text])[0] for one in predictors)
    assert told[0]["label"] == exact[0]["label"]
    assert told[0]["score"] == pytest.approx(exact[0]["score"], abs=0.05)
    [served] = serving.predict(build_app(predictors[1], ServeConfig()), text)
    assert [one["label"] for one in served] == [one["label"] for one in told]
    assert [one["score"] for one in served] == pytest.approx([one["score"] for one in told], abs=1e-6)


# ------------------------------------------------------------------------------------------------------------- refusals


def test_more_tokens_than_the_model_has_positions_are_refused_by_name(tmp_path: Path) -> None:
    modern(max_position_embeddings=4096).save_pretrained(tmp_path / "modern")
    transformers.RobertaConfig(max_position_embeddings=514).save_pretrained(tmp_path / "roberta")
    for name, most in (("modern", 4096), ("roberta", 512)):
        assert builder.check_architecture(tmp_path / name, most) == []
        [problem] = builder.check_architecture(tmp_path / name, most + 1)
        assert (problem.field, problem.code) == ("data.max_tokens", "out_of_range")
