"""Trim a Transformers folder to the vocabulary that its rows need.

The tokenizer, the word embedding, the output embedding with its bias and the ids in the settings are renumbered
together. A text whose tokens are all kept has the same output, bit for bit.
"""

import hashlib
import json
import shutil
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rtrain.core import atomic_write
from rtrain.core.errors import UserError
from rtrain.core.ragged import Ints
from rtrain.models import vocabulary
from rtrain.models.auto_classes import auto_class
from rtrain.models.sentence_transformers_format import MODULES_FILE, POOLING_FOLDER

if TYPE_CHECKING:
    import torch

VOCABULARY_FILE = "vocabulary.json"
"""File of a trimmed folder: its part of the original vocabulary, for teachers with that vocabulary."""
SCHEMA_VERSION = 2
"""Version of vocabulary.json."""
TOKENIZER_FILE, VOCAB_FILE, CONFIG_FILE = "tokenizer.json", "vocab.txt", "config.json"
COPIED_FILES = (
    "special_tokens_map.json",  # names tokens by their text
    MODULES_FILE,
    f"{POOLING_FOLDER}/config.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)
AUTO_CLASSES = ("AutoModel", "AutoModelForMaskedLM")
"""Classes whose weights may have a row for each token."""


class TrimmedVocabulary(NamedTuple):
    """The contents of vocabulary.json."""

    original_size: int
    """Number of tokens in the original vocabulary."""
    kept_ids: tuple[int, ...]
    """The original id of each kept token."""


def count_tokens(tokenizer: Any, texts: Iterable[str]) -> Counter[int]:
    """Count the occurrences of each id in texts. `tokenizer` is a `tokenizers.Tokenizer` without truncation."""
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(tokenizer.encode(text).ids)
    return counts


def find_used_ids(tokenizer: Any, texts: Iterable[str]) -> list[int]:
    """The ids that occur in texts, the most frequent first."""
    return sort_by_frequency(count_tokens(tokenizer, texts))


def sort_by_frequency(counts: Mapping[int, int]) -> list[int]:
    """Ids by descending frequency; ties in the order of the vocabulary."""
    return sorted(counts, key=lambda number: (-counts[number], number))


def select_folder_ids(
    folder: Path, used_ids: Iterable[int], min_size: int = 0, max_size: int | None = None
) -> list[int]:
    """The ids that a trimmed vocabulary of a model folder keeps for `used_ids` (`vocabulary.select_ids`)."""
    document, settings = _read_json(folder / TOKENIZER_FILE), _read_json(folder / CONFIG_FILE)
    pad = settings.get("pad_token_id")
    return vocabulary.select_ids(
        document, used_ids, min_size, _special_ids(settings), 0 if pad is None else pad, max_size
    )


def vocabulary_size(folder: Path) -> int:
    """Number of tokens in a model folder's vocabulary."""
    return len(vocabulary.tokens_by_id(_read_json(folder / TOKENIZER_FILE)))


def embedding_rows(folder: Path) -> int:
    """Rows of the word embedding. Some models pad them to a round number."""
    return int(_read_json(folder / CONFIG_FILE)["vocab_size"])


def trim(folder: Path, ids: Sequence[int], out: Path) -> Path:
    """Write the Transformers folder with only the tokens `ids` to `out`, atomically.

    Raises `UserError` if the weights do not fit the tokenizer.
    """
    from safetensors.torch import save_file

    draft = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}")
    draft.mkdir(parents=True)
    try:
        original_size = len(write_tokenizer(folder, ids, draft))
        save_file(_trim_weights(folder, ids), draft / "model.safetensors", {"format": "pt"})
        document = {"schema_version": SCHEMA_VERSION, "original_size": original_size, "kept_ids": list(ids)}
        (draft / VOCABULARY_FILE).write_text(json.dumps(document))
        try:
            atomic_write.publish_folder(draft, out)
        except OSError:
            if not out.is_dir():
                raise
            shutil.rmtree(draft)  # another process has made the same folder meanwhile
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return out


def read_trimmed(folder: Path) -> TrimmedVocabulary | None:
    """Read vocabulary.json of a trimmed folder; None for an untrimmed one."""
    if not (folder / VOCABULARY_FILE).is_file():
        return None
    document = _read_json(folder / VOCABULARY_FILE)
    if (version := document.get("schema_version")) != SCHEMA_VERSION:
        raise UserError(
            f"{folder / VOCABULARY_FILE} has schema version {version}, and this rtrain reads {SCHEMA_VERSION}; "
            "delete the folder, and trim the model again",
            code="other_version",
        )
    return TrimmedVocabulary(document["original_size"], tuple(document["kept_ids"]))


def cache_key(folder: Path, *parts: object) -> str:
    """16 hex digits of a SHA-256 over a model folder and the other inputs of its trimmed copy."""
    digest = hashlib.sha256(json.dumps([SCHEMA_VERSION, *parts]).encode())
    for path in [folder / CONFIG_FILE, folder / TOKENIZER_FILE, *_weight_files(folder)]:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def write_tokenizer(folder: Path, ids: Sequence[int], out: Path) -> dict[int, str]:
    """Write the tokenizer files, config.json and the small files of a model folder for the tokens `ids`; return the
    original vocabulary."""
    document, settings = _read_json(folder / TOKENIZER_FILE), _read_json(folder / CONFIG_FILE)
    token_texts = vocabulary.tokens_by_id(document)
    new_ids = {old: place for place, old in enumerate(ids)}
    # Compact JSON, since the file is served.
    _write_json(out / TOKENIZER_FILE, vocabulary.renumber(document, ids))
    if (folder / VOCAB_FILE).is_file():
        (out / VOCAB_FILE).write_text("".join(f"{token_texts[number]}\n" for number in ids), encoding="utf-8")
    if (folder / "tokenizer_config.json").is_file():
        tokenizer_config = _read_json(folder / "tokenizer_config.json")
        if added_tokens := tokenizer_config.get("added_tokens_decoder"):
            tokenizer_config["added_tokens_decoder"] = {
                str(new_ids[int(number)]): token for number, token in added_tokens.items() if int(number) in new_ids
            }
        _write_json(out / "tokenizer_config.json", tokenizer_config)
    special_ids = {name: new_ids.get(number) for name, number in settings.items() if _is_id(name, number)}
    (out / CONFIG_FILE).write_text(json.dumps({**settings, **special_ids, "vocab_size": len(ids)}, indent=1))
    for name in COPIED_FILES:
        if (folder / name).is_file():
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(folder / name, out / name)
    return token_texts


def _trim_weights(folder: Path, ids: Sequence[int]) -> dict[str, "torch.Tensor"]:
    """The weights, with only the rows `ids` of every tensor with a row for each token."""
    import torch
    from safetensors.torch import load_file

    weights = {name: value for path in _weight_files(folder) for name, value in load_file(path).items()}
    embedding_names = find_embedding_names(folder)
    tables = {
        name for name in weights if any(name == suffix or name.endswith(f".{suffix}") for suffix in embedding_names)
    }
    if not tables:
        raise UserError(
            f"{folder}: its weights have no word embedding, so compress.vocabulary=trim cannot cut it",
            code="unsupported",
        )
    short_table = next((name for name in sorted(tables) if len(weights[name]) <= max(ids)), None)
    if short_table is not None:
        raise UserError(
            f"{folder}: {short_table} has {len(weights[short_table])} lines and the tokenizer a piece {max(ids)}; "
            "copy it whole",
            code="damaged",
        )
    index = torch.tensor(ids)
    return {name: value[index].contiguous() if name in tables else value for name, value in weights.items()}


def find_embedding_names(folder: Path) -> set[str]:
    """Names of the weights with a row for each token, without the encoder prefix of a class."""
    import torch
    import transformers

    settings = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    names: set[str] = set()
    for auto in AUTO_CLASSES:
        try:
            with torch.device("meta"):
                network = auto_class(auto).from_config(settings, trust_remote_code=False)
        except ValueError:  # the architecture has no such class
            continue
        modules = [network.get_input_embeddings(), network.get_output_embeddings()]
        tables = [value for module in modules if module is not None for value in module.parameters()]
        prefix = f"{network.base_model_prefix}."
        for name, value in network.named_parameters(remove_duplicate=False):
            # Compare by identity: a shared weight has several names and is saved under one of them.
            if any(value is table for table in tables):
                names.add(name.removeprefix(prefix))
    return names


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("model*.safetensors"))


def _special_ids(settings: dict[str, Any]) -> Collection[int]:
    return [number for name, number in settings.items() if _is_id(name, number)]


def _is_id(name: str, value: Any) -> bool:
    return name.endswith("_token_id") and isinstance(value, int)


def original_ids(kept_ids: Sequence[int]) -> Ints:
    """[tokens]: the original id of each kept token, to decode tokens of the trimmed vocabulary."""
    return np.array(kept_ids, dtype=np.int64)


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
