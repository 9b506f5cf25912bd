"""Masked language models: which tokens are guessed, blocks of documents, perplexity, and the artefact's answers."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from rtrain import config
from rtrain.config import DistillConfig
from rtrain.core.errors import UserError
from rtrain.core.ragged import IGNORE_INDEX, Head, TokenBatch, single_window_batch
from rtrain.data.row_reader import SourceRow
from rtrain.data.store import builder as store_builder, shards
from rtrain.inference.predictor import Predictor
from rtrain.metrics import registry
from rtrain.models import builder as models_builder
from rtrain.parallel.ddp import DDPStrategy
from rtrain.runs import predictions
from rtrain.tasks.encode import load_tokenizer
from rtrain.tasks.masked_lm import MaskedLM
from rtrain.trainer import evaluate, losses, step
from serve.app import build_app
from tests.support.causes import caused_by
from tests.support.micro_batches import assert_same_step
from tests.support.serving import call
from tests.support.tiny import CORPUS, VOCABULARY, make_encoder, make_masked, make_store, make_task_artifact
from tests.unit.trainer.test_step import make_still_encoder

TASK = MaskedLM()
HEAD = Head((), {"mask": "[MASK]", "mask_id": 4, "special": [0, 1, 2, 3, 4], "vocabulary": VOCABULARY})


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_still_encoder(tmp_path_factory.mktemp("encoder") / "encoder")


def rows(count: int, length: int = 100, first: int = 0) -> TokenBatch:
    """Rows of one window, [CLS] and [SEP] round random tokens."""
    random = np.random.default_rng(first)
    ids = random.integers(5, VOCABULARY, (count, length)).astype(np.int32)
    ids[:, 0], ids[:, -1] = 2, 3
    lengths = np.full(count, length, dtype=np.int32)
    row_ids = np.arange(first, first + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return single_window_batch(ids.ravel(), lengths, lengths, np.zeros(count), row_ids)


def test_masking_is_bert_s() -> None:
    """15 %: 80 % of them masked, 10 % other tokens, 10 % unchanged; within five standard deviations."""
    before = rows(1000)
    after = TASK.prepare(before, HEAD, seed=1, epoch=0)
    guessed = after.targets != IGNORE_INDEX
    words = 98 * 1000
    assert abs(guessed.sum() - 0.15 * words) < 5 * math.sqrt(words * 0.15 * 0.85)
    count = int(guessed.sum())
    masked = (after.ids[guessed] == 4).mean()
    share = (after.ids[guessed] == before.ids[guessed]).mean()
    assert abs(masked - 0.8) < 5 * math.sqrt(0.16 / count)
    assert abs(share - 0.1) < 5 * math.sqrt(0.09 / count) + 1 / VOCABULARY
    assert (after.targets[guessed] == before.ids[guessed]).all()
    assert (after.ids[~guessed] == before.ids[~guessed]).all()
    other_values = after.ids[guessed & (after.ids != 4) & (after.ids != before.ids)]
    assert len(np.unique(other_values)) > VOCABULARY * 0.9
    assert not guessed.reshape(1000, 100)[:, [0, -1]].any()  # special tokens
    assert after.targets_per_row.tolist() == after.row_lengths.tolist()


def test_a_mask_is_a_function_of_seed_epoch_and_row_alone() -> None:
    full = rows(20)
    first = TASK.prepare(full, HEAD, seed=3, epoch=1)
    parts = [TASK.prepare(full.take(part), HEAD, seed=3, epoch=1) for part in ([7], [19, 2, 3])]
    for part, indices in zip(parts, ([7], [19, 2, 3]), strict=True):
        assert np.array_equal(part.ids, first.take(indices).ids)
        assert np.array_equal(part.targets, first.take(indices).targets)
    draws = {
        (seed, epoch): (TASK.prepare(full, HEAD, seed, epoch).targets != IGNORE_INDEX).tobytes()
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(set(draws.values())) == 16
    twice = [np.frombuffer(draws[0, epoch], dtype=bool).mean() for epoch in range(4)]
    combined = np.logical_and(*(np.frombuffer(draws[0, epoch], dtype=bool) for epoch in (0, 1))).mean()
    assert combined == pytest.approx(twice[0] * twice[1], abs=0.02)  # epochs are independent


def test_an_update_is_divided_by_its_masked_tokens(encoder: Path) -> None:
    network: Any = models_builder.build_network(encoder, TASK, (), seed=0)
    network = network.double().train()
    tokens = TASK.prepare(rows(6, length=30), HEAD, 0, 0)
    loss = assert_same_step(TASK, HEAD, network, tokens, ([[0, 1, 2, 3, 4, 5]], [[5], [0, 2], [1, 3, 4]]))
    logits = step.forward(network, tokens, 0, "fp64").detach()
    by_hand = [
        float(torch.logsumexp(row, 0) - row[int(target)])
        for row, target in zip(logits, tokens.targets, strict=True)
        if target != IGNORE_INDEX
    ]
    assert loss == pytest.approx(np.mean(by_hand), rel=1e-12)
    assert TASK.count_targets(tokens, HEAD) == {"loss": len(by_hand)}
    outputs = TASK.row_outputs(logits.numpy()[TASK.logit_positions(tokens, HEAD)], tokens, HEAD)
    scores = registry.METRICS["tokens"].main_scores(TASK.row_results(outputs, tokens, HEAD), tokens.row_targets, HEAD)
    assert scores["perplexity"] == pytest.approx(math.exp(np.mean(by_hand)))
    assert scores["neg_loss"] == pytest.approx(-np.mean(by_hand))
    assert scores["rows"] == 6


def test_the_head_is_tied_to_the_embeddings(encoder: Path) -> None:
    network: Any = models_builder.build_network(encoder, TASK, (), seed=0)
    assert network.get_output_embeddings().weight is network.get_input_embeddings().weight


# ------------------------------------------------------------------------------------------ the head on guessed tokens


def ragged() -> TokenBatch:
    """Prepared rows of several lengths, the last one without anything to guess."""
    parts = [rows(2, length=length, first=length) for length in (30, 7, 19)]
    full = single_window_batch(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.window_lengths for part in parts]),
        np.concatenate([part.pair_start for part in parts]),
        np.zeros(6),
        np.concatenate([part.row_ids for part in parts]),
    )
    tokens = TASK.prepare(full, HEAD, 0, 0)
    tokens.targets[-19:] = IGNORE_INDEX
    return tokens


@pytest.mark.parametrize("kind", ["bert", "distilbert", "roberta"])
def test_the_head_on_guessed_tokens_gives_the_loss_and_gradient_of_all(tmp_path: Path, kind: str) -> None:
    make_masked(tmp_path, kind)
    network: Any = models_builder.build_network(tmp_path, TASK, (), seed=0)
    network, tokens = network.double().train(), ragged()
    guessed = np.flatnonzero(tokens.targets != IGNORE_INDEX)
    every = step.forward(network, tokens, 0, "fp64")
    assert len(every) == int(tokens.window_lengths.sum()) > 3 * len(guessed) > 0
    words = torch.from_numpy(tokens.targets[guessed].astype(np.int64))
    expected = torch.nn.functional.cross_entropy(every[guessed], words)
    expected.backward()
    gradients = {name: value.grad.clone() for name, value in network.named_parameters()}
    widths: list[tuple[int, ...]] = []
    hook = network.get_output_embeddings().register_forward_hook(
        lambda module, inputs, output: widths.append(tuple(output.shape))
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    # In two micro-batches, one of them without anything to guess.
    micro_batches = [tokens.take(part) for part in ([0, 1, 2, 3, 4], [5])]
    done = step.StepRunner(
        DDPStrategy(network), optimizer, losses.make_loss(TASK, DistillConfig(), HEAD), pad_id=0
    ).run_step(micro_batches)
    hook.remove()
    assert widths == [(1, len(guessed), VOCABULARY), (1, 0, VOCABULARY)]
    assert done.loss == pytest.approx(expected.item(), rel=1e-12)
    max_difference = max(
        float((value.grad - gradients[name]).abs().max()) for name, value in network.named_parameters()
    )
    assert max_difference < 1e-12 < max(float(value.abs().max()) for value in gradients.values())
    selected = step.forward(network.eval(), tokens, 0, "fp64", TASK.logit_positions(tokens, HEAD))
    assert (selected - every[guessed]).abs().max() < 1e-12


# -------------------------------------------------------------------------------------------------------------- blocks


def whole_tokens(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    row = tokenizer.encode(text, add_special_tokens=False)
    return [token for window in [row, *row.overflowing] for token in window.ids]


def test_documents_become_full_blocks_and_lose_no_word(encoder: Path) -> None:
    tokenizer = load_tokenizer(encoder, 32)
    documents = [" ".join(CORPUS[number : number + 1 + number % 5]) for number in range(12)]
    source_rows = [SourceRow(number, text, None, "", None) for number, text in enumerate(documents)]
    source_rows.insert(3, SourceRow(99, "", None, "", "empty"))
    splits = ["train", "valid"]
    rows = list(shards.pack_documents(source_rows, tokenizer, 32, lambda row: splits[row.line % 2]))
    assert [row.line for row in rows if row.reason] == [99]
    blocks = [row for row in rows if not row.reason]
    for parity in (0, 1):
        subset = " ".join(row.text for row in blocks if row.line % 2 == parity).split()
        assert subset == " ".join(text for number, text in enumerate(documents) if number % 2 == parity).split()
    lengths = [len(whole_tokens(tokenizer, row.text)) for row in blocks]
    assert max(lengths) <= 30
    assert np.mean(lengths) > 20


def test_a_word_longer_than_a_block_is_cut(encoder: Path) -> None:
    tokenizer = load_tokenizer(encoder, 16)
    parts = shards.split_document("ab " + "c" * 80 + " de", tokenizer, 14)
    assert "".join(text for text, _ in parts).replace(" ", "") == "ab" + "c" * 80 + "de" or len(parts) == 1


def test_windows_that_share_tokens_are_refused_since_blocks_would_not_be_full(encoder: Path) -> None:
    overrides = {"data.path": "notes.csv", "data.window": 32, "data.stride": 8}
    [problem] = store_builder.find_problems(config.load_config("domain-adapt", overrides).recipe)
    assert (problem.field, problem.value, problem.fix) == ("data.stride", 8, "write 0")
    assert store_builder.find_problems(config.load_config("domain-adapt", {**overrides, "data.stride": 0}).recipe) == []
    text, sizes = " ".join(["parcel"] * 200), {}
    for stride in (0, 8):
        tokenizer = load_tokenizer(encoder, 32, stride)
        blocks = [text for text, _ in shards.split_document(text, tokenizer, 30)]
        sizes[stride] = [len(whole_tokens(tokenizer, entry)) for entry in blocks[:-1]]
    assert set(sizes[0]) == {30}
    assert min(sizes[8]) < 25


# ------------------------------------------------------------------------------------------------------- the whole way


def test_from_documents_to_answers(encoder: Path, tmp_path: Path) -> None:
    lines = [" ".join(CORPUS[number % 13 :][: 1 + number % 4]).replace(",", " ") for number in range(150)]
    path = tmp_path / "notes.csv"
    path.write_text("text\n" + "\n".join(f"{line} note {number}" for number, line in enumerate(lines)) + "\n")
    recipe = config.load_config("domain-adapt", {"data.path": str(path), "data.max_tokens": 32}).recipe
    store = make_store(recipe, encoder, tmp_path)
    assert store.manifest.labels == ()
    head, files = store.manifest.head, load_tokenizer(encoder, 32).get_vocab_size()
    assert head.facts == {**HEAD.facts, "vocabulary": files}  # the tiny model has room for more
    assert store.manifest.truncated == 0
    assert store.manifest.tokens["train"] / store.num_rows("train") > 24
    network: Any = models_builder.build_network(encoder, TASK, (), seed=0)
    strategy = DDPStrategy(network)
    row_results = evaluate.gather_row_results(strategy, TASK, store, "valid", pad_id=0, precision="fp32")
    scores = evaluate.score_rows(strategy, TASK, store, "valid", row_results)
    second_result = evaluate.evaluate(DDPStrategy(network), TASK, store, "valid", pad_id=0, precision="fp32")
    assert scores == second_result  # the same tokens are guessed each time
    assert scores["perplexity"] > 1
    predictions.write_predictions(
        tmp_path / "predictions.parquet",
        "valid",
        store,
        TASK,
        head,
        row_results,
        load_tokenizer(encoder, 32),
    )
    folder = make_task_artifact(tmp_path / "artifact", "masked_lm", head)
    predictor = Predictor.load(folder, threads=1)
    app = build_app(predictor, config.ServeConfig())
    inputs = {"inputs": ["where is my [MASK]", "no mask", "[MASK] and [MASK]"], "parameters": {"top_k": 3}}
    first, none, two = call(app, "POST", "/predict", json=inputs).json()
    assert ([len(first), len(none), len(two)], len(first[0])) == ([1, 0, 2], 3)
    chances = [entry["score"] for entry in first[0]]
    assert chances == sorted(chances, reverse=True)


def test_a_tokenizer_without_a_mask_is_refused(tmp_path: Path) -> None:
    make_encoder(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace("[MASK]", "[OTHER]"))
    with pytest.raises(UserError, check=caused_by("no_mask_token")):
        TASK.build_head({}, load_tokenizer(tmp_path, 16))
