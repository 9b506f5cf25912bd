"""The tokenizer files of a model folder: what rtrain reads, and what other programs make of them.

rtrain reads tokenizer.json alone. `AutoTokenizer` loads a class that may change its normalizer, by `do_lower_case` of
tokenizer_config.json for one, and knows lengths and the side of truncation from there.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from rtrain.core import json_files
from rtrain.tasks.encode import load_tokenizer

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
CONFIG = "tokenizer_config.json"
CLASS = "PreTrainedTokenizerFast"
"""The class of Transformers that takes tokenizer.json as it is."""
STRANGE_TEXTS = (
    "WHERE IS MY CARD",
    "Grüße aus São Paulo, ça va?",
    "Cafe\u0301 re\u0301sume\u0301",
    "\u1112\u1161\u11ab\u1100\u116e\u11a8",
    "東京都に住んでいます",
    "नमस्ते दुनिया",
    "السَّلَامُ عَلَيْكُمْ",
    "ﬁne ½ ² Ⅷ \uff21\uff22\uff23",
    "1234567890 3.14 10,000",
    "a  b\tc\nd\u00a0e\u200bf",
    " leading and trailing ",
    "don't can't it's",
    "👩\u200d👩\u200d👧 🇫🇷 ❤\ufe0f",
    "[MASK] <mask> [SEP] </s> <pad>",
    "\u0130stanbul \u0131ss\u0131z STRASSE ß",
    "x\u0000y\ufeffz\u00ad",
    "user@example.com https://example.com/a?b=c#d",
    "supercalifragilisticexpialidocious" * 3,
)
"""Texts that tokenizers of other normalizers or pre-tokenizers read as other tokens: case, accents, composed and
decomposed signs, scripts, compatibility forms, numbers, blanks, special tokens, control characters, long words."""


def differing_texts(folder: Path) -> list[str]:
    """The strange texts that `AutoTokenizer` reads as other tokens than tokenizer.json says. None without a
    tokenizer_config.json, which would say otherwise."""
    if not (folder / CONFIG).is_file():
        return []
    ours, theirs = load_tokenizer(folder, 1 << 20), _load(folder, split_special_tokens=True)
    return [text for text in STRANGE_TEXTS if ours.encode(text).ids != theirs(text).input_ids]


def write(source: Path, folder: Path, max_tokens: int, stride: int = 0, reads_special: bool = False) -> None:
    """Copy the tokenizer's files into an artifact, so that other programs read texts as the run did: the same tokens,
    at most `max_tokens`, the end cut off, padded after the text. `reads_special` as `Task` has it."""
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    document = json_files.read(source / "tokenizer.json")
    cut = {"direction": "Right", "max_length": max_tokens, "strategy": "LongestFirst", "stride": stride}
    _write(folder / "tokenizer.json", {**document, "truncation": cut, "padding": None})
    loaded, pieces = _load(source), load_tokenizer(source, max_tokens)
    # A class may name tokens that tokenizer.json lacks; Transformers would add them.
    special = {
        name: token
        for name, token in loaded.special_tokens_map.items()
        if isinstance(token, str) and pieces.token_to_id(token) is not None
    }
    settings = {
        "tokenizer_class": CLASS,
        "model_max_length": max_tokens,
        "model_input_names": loaded.model_input_names,
        "padding_side": "right",
        "truncation_side": "right",
        "clean_up_tokenization_spaces": False,
        # The name of a special token in a text is text, but for a model that fills masks.
        "split_special_tokens": not reads_special,
        **special,
    }
    _write(folder / CONFIG, settings)


def _load(folder: Path, **options: Any) -> Any:
    """Of a class of Transformers that this package does not import until then."""
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **options
        )
    except Exception:  # of any kind, for want of a library or of a file that rtrain does not need
        return transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **options)


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
