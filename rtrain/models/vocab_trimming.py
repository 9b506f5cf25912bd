"""Trim a Transformers folder to the vocabulary that its rows need.

The tokenizer, the word embedding, the output embedding with its bias and the ids in the settings are renumbered
together. A text whose tokens are all kept has the same output, bit for bit.

Each of the three tokenizer models splits a text as before if all its tokens are kept:

- WordPiece takes the longest token that fits. Trimming adds no longer one.
- BPE applies the first merge of its list that fits, repeatedly. Every ancestor of a kept token is kept, so each merge
of the old derivation is still present, and no new merge precedes it.
- Unigram takes the split with the highest score. The old split keeps its score, with fewer alternatives.
"""

import hashlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rtrain.core.errors import UserError
from rtrain.core.ragged import Ints
from rtrain.models import model_files
from rtrain.models.model_files import auto_class
from rtrain.models.pooling import MODULES_FILE, POOLING_FOLDER

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
Document = Mapping[str, Any]
"""The content of a tokenizer.json."""
SUPPORTED_MODELS = ("WordPiece", "BPE", "Unigram")
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""A token for one byte of a character outside the vocabulary (`byte_fallback`)."""
RESERVED = re.compile(r"\[.+\]|<.+>|madeupword\d+")
"""Tokens that no text contains, such as BERT's 994 `[unused]`; they never fill up a vocabulary."""
SPACE = "▁"
"""The replacement for a blank in the tokens of Unigram models."""


class TrimmedVocabulary(NamedTuple):
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


def sort_by_frequency(counts: Mapping[int, int]) -> list[int]:
    """Ids by descending frequency; ties in the order of the vocabulary."""
    return sorted(counts, key=lambda number: (-counts[number], number))


def select_folder_ids(
    folder: Path, used_ids: Iterable[int], min_size: int = 0, max_size: int | None = None
) -> list[int]:
    """The ids that a trimmed vocabulary of a model folder keeps for `used_ids` (`select_ids`)."""
    document, settings = _read_json(folder / TOKENIZER_FILE), _read_json(folder / CONFIG_FILE)
    pad = settings.get("pad_token_id")
    special_ids = [number for name, number in settings.items() if _is_id(name, number)]
    return select_ids(document, used_ids, min_size, special_ids, 0 if pad is None else pad, max_size)


def vocabulary_size(folder: Path) -> int:
    return len(tokens_by_id(_read_json(folder / TOKENIZER_FILE)))


def embedding_rows(folder: Path) -> int:
    """Rows of the word embedding. Some models pad them to a round number."""
    return int(_read_json(folder / CONFIG_FILE)["vocab_size"])


def trim(folder: Path, ids: Sequence[int], out: Path) -> Path:
    """Write the Transformers folder with only the tokens `ids` to `out`, atomically.

    Raises `UserError` if the weights do not fit the tokenizer.
    """
    from safetensors.torch import save_file

    with model_files.draft_model_folder(out) as draft:
        original_size = len(write_tokenizer(folder, ids, draft))
        save_file(_trim_weights(folder, ids), draft / "model.safetensors", {"format": "pt"})
        document = {"schema_version": SCHEMA_VERSION, "original_size": original_size, "kept_ids": list(ids)}
        (draft / VOCABULARY_FILE).write_text(json.dumps(document))
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
    token_texts = tokens_by_id(document)
    new_ids = {old: place for place, old in enumerate(ids)}
    # Compact JSON, since the file is served.
    model_files.write_compact_json(out / TOKENIZER_FILE, renumber(document, ids))
    if (folder / VOCAB_FILE).is_file():
        (out / VOCAB_FILE).write_text("".join(f"{token_texts[number]}\n" for number in ids), encoding="utf-8")
    if (folder / "tokenizer_config.json").is_file():
        tokenizer_config = _read_json(folder / "tokenizer_config.json")
        if added_tokens := tokenizer_config.get("added_tokens_decoder"):
            tokenizer_config["added_tokens_decoder"] = {
                str(new_ids[int(number)]): token for number, token in added_tokens.items() if int(number) in new_ids
            }
        model_files.write_compact_json(out / "tokenizer_config.json", tokenizer_config)
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


def _is_id(name: str, value: Any) -> bool:
    return name.endswith("_token_id") and isinstance(value, int)


def original_ids(kept_ids: Sequence[int]) -> Ints:
    """[tokens]: the original id of each kept token, to decode tokens of the trimmed vocabulary."""
    return np.array(kept_ids, dtype=np.int64)


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def tokens_by_id(document: Document) -> dict[int, str]:
    """All tokens by id, including added tokens."""
    vocabulary = document["model"]["vocab"]
    if isinstance(vocabulary, list):
        tokens = dict(enumerate(piece for piece, _ in vocabulary))
    else:
        tokens = {number: piece for piece, number in vocabulary.items()}
    return tokens | {token["id"]: token["content"] for token in document.get("added_tokens") or ()}


def select_ids(
    document: Document,
    used_ids: Iterable[int],
    min_size: int = 0,
    extra_ids: Collection[int] = (),
    pad_id: int | None = None,
    max_size: int | None = None,
) -> list[int]:
    """Select the ids to keep, in the order of their new numbers.

    These are single characters and bytes, which spell unknown words; special and added tokens; the `extra_ids` that
    exist; the `used_ids`, cut to `max_size` tokens in all; and the first other tokens up to `min_size`: vocabularies
    are ordered by frequency or by merges. The token `pad_id` keeps its number, since RoBERTa and relatives count
    positions from it. Raises `UserError` for an unsupported tokenizer, or for one with more than `max_size` characters
    and special tokens.
    """
    _check_supported(document)
    tokens, parents = tokens_by_id(document), _merge_parents(document)
    selected = _with_ancestors((set(extra_ids) & tokens.keys()) | _required_ids(document, tokens), parents)
    if max_size is not None and len(selected) > max_size:
        raise UserError(
            f"compress.max_vocab_size={max_size}: single characters and special tokens alone are {len(selected)} "
            "pieces; write more, or null",
            code="out_of_range",
        )
    limit = len(tokens) if max_size is None else max_size
    _add_until(selected, (number for number in used_ids if number in tokens), parents, limit, limit)
    spare_ids = (number for number in sorted(tokens) if not RESERVED.fullmatch(tokens[number]))
    _add_until(selected, spare_ids, parents, min(min_size, limit), limit)
    return _order_ids(selected, _model_ids(document), pad_id)


def _add_until(
    selected: set[int],
    candidates: Iterable[int],
    parents: Mapping[int, list[tuple[int, int]]],
    target_size: int,
    max_size: int,
) -> None:
    """Add the first of `candidates`, each with its ancestors, until `selected` has `target_size`, but never more than
    `max_size`."""
    for number in candidates:
        added = _with_ancestors({number}, parents) - selected
        if len(selected) >= target_size or len(selected) + len(added) > max_size:
            return
        selected |= added


def renumber(document: Document, ids: Sequence[int]) -> dict[str, Any]:
    """The document of a tokenizer with only the tokens `ids`, renumbered by their order."""
    new_ids, padding = {old: place for place, old in enumerate(ids)}, document.get("padding")
    return {
        **document,
        "added_tokens": [{**token, "id": new_ids[token["id"]]} for token in document.get("added_tokens") or ()],
        "padding": padding and {**padding, "pad_id": new_ids[padding["pad_id"]]},
        "post_processor": _renumber_processor(document.get("post_processor"), new_ids),
        "model": _renumber_model(document["model"], ids, new_ids),
    }


# ------------------------------------------------------------------------------------------------------- selection


def _check_supported(document: Document) -> None:
    model = document["model"]
    model_type = model.get("type")
    if model_type not in SUPPORTED_MODELS:
        raise UserError(
            f"compress.vocabulary=trim: a tokenizer of model {model_type} is not cut (only "
            f"{', '.join(SUPPORTED_MODELS)}); write keep",
            code="unsupported",
        )
    if model_type == "Unigram" and model.get("unk_id") is None and not model.get("byte_fallback"):
        raise UserError(
            "compress.vocabulary=trim: the Unigram tokenizer has no unknown token (unk_id), so a character "
            "without a piece would be an error; write keep",
            code="unsupported",
        )


def _model_ids(document: Document) -> set[int]:
    vocabulary = document["model"]["vocab"]
    return set(range(len(vocabulary))) if isinstance(vocabulary, list) else set(vocabulary.values())


def _required_ids(document: Document, tokens: Mapping[int, str]) -> set[int]:
    model = document["model"]
    required = {token["id"] for token in document.get("added_tokens") or ()}
    required |= {number for number, piece in tokens.items() if _is_character(piece, model) or BYTE.fullmatch(piece)}
    required |= {number for number, piece in tokens.items() if piece == model.get("unk_token")}
    required |= set(_post_processor_ids(document.get("post_processor")))
    if padding := document.get("padding"):
        required.add(padding["pad_id"])
    if model["type"] == "Unigram":
        if model["unk_id"] is not None:
            required.add(model["unk_id"])
        # An unknown character costs 10 more than the lowest score, so removing that token could change splits.
        scores = [score for _, score in model["vocab"]]
        required.add(scores.index(min(scores)))
    return required


def _is_character(piece: str, model: Mapping[str, Any]) -> bool:
    """Whether a token is one character at the beginning, inside or at the end of a word."""
    bare = piece.removeprefix(model.get("continuing_subword_prefix") or "")
    bare = bare.removesuffix(model.get("end_of_word_suffix") or "") or bare
    return len(bare) == 1 or (model["type"] == "Unigram" and len(bare.removeprefix(SPACE)) == 1)


def _post_processor_ids(processor: Mapping[str, Any] | None) -> Iterable[int]:
    if processor is None:
        return
    yield from (number for token in processor.get("special_tokens", {}).values() for number in token["ids"])
    yield from (processor[side][1] for side in ("sep", "cls") if side in processor)
    for inner in processor.get("processors", ()):
        yield from _post_processor_ids(inner)


def _merge_parents(document: Document) -> dict[int, list[tuple[int, int]]]:
    """BPE: the pairs of tokens that merge into each token."""
    model = document["model"]
    parents: dict[int, list[tuple[int, int]]] = {}
    for merge in model.get("merges") or ():
        left, right = _split_merge(merge)
        vocabulary = model["vocab"]
        parents.setdefault(vocabulary[_merge_tokens(left, right, model)], []).append(
            (vocabulary[left], vocabulary[right])
        )
    return parents


def _split_merge(merge: str | Sequence[str]) -> tuple[str, str]:
    """The two sides of a merge; older files write them as one string."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _merge_tokens(left: str, right: str, model: Mapping[str, Any]) -> str:
    return left + right.removeprefix(model.get("continuing_subword_prefix") or "")


def _with_ancestors(ids: Collection[int], parents: Mapping[int, list[tuple[int, int]]]) -> set[int]:
    """The tokens with everything that they are merged from, recursively."""
    ancestors, pending = set(ids), list(ids)
    while pending:
        for pair in parents.get(pending.pop(), ()):
            pending += [number for number in pair if number not in ancestors]
            ancestors.update(pair)
    return ancestors


def _order_ids(selected: set[int], model_ids: set[int], pad_id: int | None) -> list[int]:
    model_tokens, added_tokens = sorted(selected & model_ids), sorted(selected - model_ids)
    if pad_id in model_tokens and pad_id < len(model_tokens):
        model_tokens.remove(pad_id)
        model_tokens.insert(pad_id, pad_id)
    return model_tokens + added_tokens


# ------------------------------------------------------------------------------------------------------ new numbers


def _renumber_model(model: Mapping[str, Any], ids: Sequence[int], new_ids: Mapping[int, int]) -> dict[str, Any]:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        entries = [vocabulary[number] for number in ids if number < len(vocabulary)]
        return {**model, "vocab": entries, "unk_id": None if model["unk_id"] is None else new_ids[model["unk_id"]]}
    token_ids = {piece: new_ids[number] for piece, number in vocabulary.items() if number in new_ids}
    renumbered = {**model, "vocab": dict(sorted(token_ids.items(), key=lambda entry: entry[1]))}
    if "merges" in model:
        merges = ((merge, *_split_merge(merge)) for merge in model["merges"])
        renumbered["merges"] = [
            merge
            for merge, left, other in merges
            if left in token_ids and other in token_ids and _merge_tokens(left, other, model) in token_ids
        ]
    return renumbered


def _renumber_processor(processor: Mapping[str, Any] | None, new_ids: Mapping[int, int]) -> dict[str, Any] | None:
    if processor is None:
        return None
    renumbered = dict(processor)
    if "special_tokens" in renumbered:
        renumbered["special_tokens"] = {
            name: {**token, "ids": [new_ids[number] for number in token["ids"]]}
            for name, token in renumbered["special_tokens"].items()
        }
    for side in ("sep", "cls"):
        if side in renumbered:
            text, number = renumbered[side]
            renumbered[side] = [text, new_ids[number]]
    if "processors" in renumbered:
        renumbered["processors"] = [_renumber_processor(inner, new_ids) for inner in renumbered["processors"]]
    return renumbered
