"""Tokenizer files of a model folder: compatibility with other programs.

rtrain reads only tokenizer.json. `AutoTokenizer` loads a class that may change the normalizer, e.g. by `do_lower_case`
of tokenizer_config.json, and reads length limits and the truncation side from there.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from rtrain.core import json_files
from rtrain.tasks.encode import load_tokenizer

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""The class of Transformers that uses tokenizer.json unchanged."""
PROBE_TEXTS = (
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
"""Texts that normalizers and pre-tokenizers treat differently: case, accents, composed and decomposed characters,
scripts, compatibility forms, numbers, whitespace, special tokens, control characters, long words."""


def find_differing_texts(folder: Path) -> list[str]:
    """The probe texts that `AutoTokenizer` tokenizes differently from tokenizer.json. None without a
    tokenizer_config.json, which alone can cause a difference."""
    if not (folder / CONFIG_FILE).is_file():
        return []
    ours, theirs = load_tokenizer(folder, 1 << 20), _load_tokenizer(folder, split_special_tokens=True)
    return [text for text in PROBE_TEXTS if ours.encode(text).ids != theirs(text).input_ids]


def write_tokenizer_files(
    source: Path, folder: Path, max_tokens: int, stride: int = 0, reads_special: bool = False
) -> None:
    """Copy the tokenizer's files into an artifact, so that other programs tokenize texts as the run did: the same
    tokens, at most `max_tokens`, truncated and padded on the right. `reads_special`: see `Task`."""
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    document = json_files.load_json_object(source / "tokenizer.json")
    truncation = {"direction": "Right", "max_length": max_tokens, "strategy": "LongestFirst", "stride": stride}
    _write_json(folder / "tokenizer.json", {**document, "truncation": truncation, "padding": None})
    hf_tokenizer, tokenizer = _load_tokenizer(source), load_tokenizer(source, max_tokens)
    # A class may name tokens that tokenizer.json lacks; Transformers would add them.
    special_tokens = {
        name: token
        for name, token in hf_tokenizer.special_tokens_map.items()
        if isinstance(token, str) and tokenizer.token_to_id(token) is not None
    }
    settings = {
        "tokenizer_class": TOKENIZER_CLASS,
        "model_max_length": max_tokens,
        "model_input_names": hf_tokenizer.model_input_names,
        "padding_side": "right",
        "truncation_side": "right",
        "clean_up_tokenization_spaces": False,
        # The name of a special token in a text is plain text, except for a model that fills masks.
        "split_special_tokens": not reads_special,
        **special_tokens,
    }
    _write_json(folder / CONFIG_FILE, settings)


def _load_tokenizer(folder: Path, **options: Any) -> Any:
    """Load a Transformers class that this package otherwise does not import."""
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **options
        )
    except Exception:  # of any type, for a missing library or a file that rtrain does not need
        return transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **options)


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
