"""Paraphrase and back-translation by a tiny T5 that is trained here to translate six sentences."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from rtrain import config
from rtrain.core.errors import UserError
from rtrain.data import paraphrase, row_reader, splits
from rtrain.data.store import builder
from tests.conftest import labelled_rows, write_rows
from tests.support.causes import caused_by
from tests.support.tiny import make_tokenizer

ENGLISH = [
    "the parcel is late",
    "the parcel is lost",
    "my card is lost",
    "my card is late",
    "the card is lost",
    "my parcel is late",
]
GERMAN = [
    "das paket ist spaet",
    "das paket ist weg",
    "meine karte ist weg",
    "meine karte ist spaet",
    "die karte ist weg",
    "mein paket ist spaet",
]
# Back comes another wording, as from a real pair of models.
BACK_TRANSLATED = [text.replace("is late", "has not come").replace("is lost", "has gone") for text in ENGLISH]
BACK_TRANSLATED[0] = ENGLISH[0]
WORDS = sorted({word for text in ENGLISH + GERMAN + BACK_TRANSLATED for word in text.split()})

Maker = Callable[[list[str], list[str]], str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """A function that trains a model on pairs of texts and gives the folder it was saved in."""

    def make(sources: list[str], targets: list[str]) -> str:
        folder = tmp_path_factory.mktemp("seq2seq")
        tokenizer = tiny_tokenizer()
        torch.manual_seed(0)
        settings: dict[str, Any] = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
        # It begins with the end token, as BART does: that one is no sign of a complete output.
        settings |= {"decoder_start_token_id": 1, "dropout_rate": 0.0}
        config = transformers.T5Config(vocab_size=len(tokenizer), **settings)
        model = transformers.T5ForConditionalGeneration(config)
        inputs = tokenizer(sources, return_tensors="pt", padding=True)
        labels = tokenizer(targets, return_tensors="pt", padding=True).input_ids
        labels[labels == 0] = -100
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(120):
            loss = model(**inputs, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert loss.item() < 0.05, "the tiny model has not learnt its six sentences"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    return make


def tiny_tokenizer() -> Any:
    vocabulary = {word: index for index, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", return_token_type_ids=False
    )


@pytest.fixture(scope="module")
def rewriter_folder(trained: Maker) -> str:
    return trained(ENGLISH, GERMAN)


@pytest.fixture(scope="module")
def back_rewriter_folder(trained: Maker) -> str:
    return trained(GERMAN, BACK_TRANSLATED)


def test_paraphrases_are_what_the_model_says(rewriter_folder: str) -> None:
    model = paraphrase.load_rewriter(rewriter_folder)
    assert paraphrase.paraphrase_texts(model, ENGLISH) == [[text] for text in GERMAN]
    assert paraphrase.paraphrase_texts(model, []) == []


def test_batches_and_their_order_do_not_matter(rewriter_folder: str) -> None:
    model = paraphrase.load_rewriter(rewriter_folder, batch_size=4)
    mixed = ["my card is late", "", "the parcel is late", "   "]
    assert paraphrase.paraphrase_texts(model, mixed) == [["meine karte ist spaet"], [], ["das paket ist spaet"], []]
    one_by_one = paraphrase.load_rewriter(rewriter_folder, batch_size=1)
    assert paraphrase.paraphrase_texts(one_by_one, mixed) == paraphrase.paraphrase_texts(model, mixed)


def test_back_translations_leave_out_what_comes_back_unchanged(rewriter_folder: str, back_rewriter_folder: str) -> None:
    result = paraphrase.back_translate(
        paraphrase.load_rewriter(rewriter_folder), paraphrase.load_rewriter(back_rewriter_folder), [*ENGLISH, ""]
    )
    assert result == [[], *([text] for text in BACK_TRANSLATED[1:]), []]


def test_several_variants_are_beams_each_once_the_best_first(rewriter_folder: str) -> None:
    model = paraphrase.load_rewriter(rewriter_folder, num_variants=3)
    for text, variants in zip(ENGLISH, paraphrase.paraphrase_texts(model, ENGLISH), strict=True):
        assert variants[0] == GERMAN[ENGLISH.index(text)]
        assert len(variants) == len(set(variants)) <= 3
    assert paraphrase.paraphrase_texts(model, ENGLISH) == paraphrase.paraphrase_texts(model, ENGLISH)


def test_a_text_that_is_too_long_is_not_rewritten(rewriter_folder: str) -> None:
    assert paraphrase.paraphrase_texts(paraphrase.load_rewriter(rewriter_folder, max_tokens=4), [ENGLISH[0]]) == [[]]
    assert paraphrase.paraphrase_texts(paraphrase.load_rewriter(rewriter_folder, max_tokens=5), [ENGLISH[0]]) == [
        [GERMAN[0]]
    ]


def test_a_model_that_cannot_rewrite_is_refused_before_a_task_starts(rewriter_folder: str, tmp_path: Path) -> None:
    """An actor of Ray Data would raise the same error inside a traceback of Ray's."""
    paraphrase.check_model(rewriter_folder)
    no_weights = shutil.copytree(rewriter_folder, tmp_path / "t5")
    (no_weights / "model.safetensors").unlink()
    marian = transformers.MarianConfig(vocab_size=9, d_model=8, encoder_layers=1, decoder_layers=1, pad_token_id=0)
    marian.save_pretrained(tmp_path / "marian")  # without a tokenizer
    settings: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    settings |= {"intermediate_size": 8, "vocab_size": 40}
    transformers.BertModel(transformers.BertConfig(**settings)).save_pretrained(tmp_path / "bert")
    tiny_tokenizer().save_pretrained(tmp_path / "bert")
    for name in ("t5", "marian", "bert", "missing"):
        with pytest.raises(UserError, check=caused_by("unsupported_model")):
            paraphrase.check_model(str(tmp_path / name))
    for name in ("bert", "missing"):
        with pytest.raises(UserError, check=caused_by("unsupported_model")):
            paraphrase.load_rewriter(str(tmp_path / name))


def test_the_prefix_stands_before_each_text(rewriter_folder: str) -> None:
    model = paraphrase.load_rewriter(rewriter_folder, prefix="the parcel is ")
    assert paraphrase.paraphrase_texts(model, ["late"]) == [["das paket ist spaet"]]


@pytest.mark.ray
@pytest.mark.slow
def test_paraphrases_of_training_rows_become_rows(trained: Maker, ray_session: Path, tmp_path: Path) -> None:
    rows = [*labelled_rows(60), *((text, "refund") for text in ENGLISH)]
    overrides = {"data.path": str(write_rows(tmp_path / "rows.csv", rows))}
    recipe = config.load_config("intent", {**overrides, "augment.paraphrase": trained(ENGLISH, BACK_TRANSLATED)}).recipe
    encoder = make_tokenizer(tmp_path / "encoder")
    store, _ = builder.build_or_open(recipe, row_reader.inspect_source(recipe.data), encoder, tmp_path)

    def key(text: str) -> int:
        return splits.hash_content(row_reader.SourceRow(0, text, None, "refund", None))[1]

    def trains(text: str) -> bool:
        remaining, _ = splits.hash_content(row_reader.SourceRow(0, text, None, "refund", None))
        return splits.Splits(False, 0.1).assign_by_hash("train", remaining) == "train"

    written = paraphrase.read_rewritten(store.folder, 0)
    pairs = [(text, variant) for text, variant in zip(ENGLISH, BACK_TRANSLATED, strict=True) if trains(text)]
    assert len(pairs) >= 2
    for text, variant in pairs:
        assert written[key(text)] == ([variant] if variant != text else [])
    assert len(written) == store.num_rows("train") - store.manifest.copies
    new = sum(trains(variant) for text, variant in pairs if variant != text)
    assert store.manifest.copies >= new >= 1
