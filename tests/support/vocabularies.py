"""Tokenizers of each kind, made from `tests.support.tiny.CORPUS` in a moment, and their cuts for a part of it."""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from rtrain.models import vocab_trimming
from tests.support.tiny import CORPUS, make_tokenizer

ROWS = CORPUS[:6]
"""The training rows: a part of what the tokenizers were made from, so that there is something to cut."""
STRANGE = (
    "日本語のテキスト",
    "Привет, мир",
    "😀 🏳️‍🌈 👩‍👩‍👧",
    "مرحبا بالعالم",
    "\u0000\u200b\ufeff",
    "à\u0301\u0302",
    "x" * 300,
    "\U0001d518\U0001d52b\U0001d526",
)
"""Texts of which a tokenizer of `CORPUS` knows little or nothing."""
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def word_piece() -> tokenizers.Tokenizer:
    return _loaded(make_tokenizer)


def byte_bpe() -> tokenizers.Tokenizer:
    """As RoBERTa's: every byte has a piece, so that nothing is unknown."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(made, trainers.BpeTrainer(vocab_size=480, special_tokens=SPECIAL, initial_alphabet=alphabet))
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return made


def word_bpe() -> tokenizers.Tokenizer:
    """With a sign for the end of a word, and a piece for what is unknown."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, end_of_word_suffix="</w>")
    _train(made, trainer)
    made.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> $B </s>", [("<s>", 0), ("</s>", 2)])
    return made


def unigram() -> tokenizers.Tokenizer:
    """As XLM-R's."""
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    _train(made, trainers.UnigramTrainer(vocab_size=260, special_tokens=SPECIAL, unk_token="<unk>"))
    template = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> </s> $B </s>", [("<s>", 0), ("</s>", 2)])
    made.post_processor = processors.Sequence([template])
    made.enable_padding(pad_id=1, pad_token="<pad>")
    made.no_padding()
    return made


def byte_unigram() -> tokenizers.Tokenizer:
    """A character without a piece is its bytes."""
    pieces: list[tuple[str, float]] = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    words = {word for text in CORPUS for word in text.split()}
    pieces += [(f"▁{word}", -5.0 - len(word) / 10) for word in sorted(words)]
    pieces += [(letter, -8.0) for letter in sorted(set("".join(CORPUS)) - {" "} | {"▁"})]
    made = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    made.__name__: made for made in (word_piece, byte_bpe, word_bpe, unigram, byte_unigram)
}


def _train(made: tokenizers.Tokenizer, trainer: Any) -> None:
    trainer.show_progress = False
    made.train_from_iterator(CORPUS, trainer)


def _loaded(make: Callable[[Path], Path]) -> tokenizers.Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return tokenizers.Tokenizer.from_file(str(make(Path(folder)) / "tokenizer.json"))


class Cut:
    """A tokenizer and its cut for `ROWS`."""

    def __init__(self, whole: tokenizers.Tokenizer, at_least: int = 0):
        self.whole, self.document = whole, json.loads(whole.to_str())
        self.used = vocab_trimming.sort_by_frequency(vocab_trimming.count_tokens(whole, ROWS))
        self.ids = vocab_trimming.select_ids(self.document, self.used, at_least)
        self.after = vocab_trimming.renumber(self.document, self.ids)
        self.small = tokenizers.Tokenizer.from_str(json.dumps(self.after))

    def old(self, text: str) -> list[int]:
        """The small tokenizer's pieces of a text, as the whole one numbers them."""
        return [self.ids[number] for number in self.small.encode(text).ids]


CUTS: dict[str, Cut] = {}


def cut_of(kind: str) -> Cut:
    """The cut of a kind, made once in a process."""
    if kind not in CUTS:
        CUTS[kind] = Cut(KINDS[kind]())
    return CUTS[kind]


def trimmed(folder: Path, out: Path, texts: Sequence[str] = ROWS, at_least: int = 0) -> tuple[Path, list[int]]:
    """A folder cut for texts, and the old ids of its pieces."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    used_ids = vocab_trimming.sort_by_frequency(vocab_trimming.count_tokens(tokenizer, texts))
    ids = vocab_trimming.select_folder_ids(folder, used_ids, at_least)
    return vocab_trimming.trim(folder, ids, out), ids
