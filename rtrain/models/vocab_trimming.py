"""A Transformers folder with the pieces that its rows need, in place of its whole vocabulary.

Tokenizer, word embedding, output embedding with its bias, and the ids in the settings are renumbered alike: a text
whose pieces are all kept has the same answer, bit for bit.
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
from rtrain.models.sentence_transformers_format import MODULES, POOLING

if TYPE_CHECKING:
    import torch

NAME = "vocabulary.json"
"""In a trimmed folder: which pieces of the whole vocabulary it has, so that a teacher of that one reads its rows."""
TOKENIZER, PIECES, SETTINGS = "tokenizer.json", "vocab.txt", "config.json"
COPIED = (
    "special_tokens_map.json",  # names pieces by their text
    MODULES,
    f"{POOLING}/config.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)
HEADS = ("AutoModel", "AutoModelForMaskedLM")
"""The classes whose weights may have a line for each piece."""


class Trimmed(NamedTuple):
    """The contents of vocabulary.json."""

    of: int
    """Pieces of the whole vocabulary."""
    kept: tuple[int, ...]
    """The old id of each piece that is left."""


def counted_by(tokenizer: Any, texts: Iterable[str]) -> Counter[int]:
    """How often each id occurs in texts. `tokenizer` is a `tokenizers.Tokenizer`; it should not cut them."""
    found: Counter[int] = Counter()
    for text in texts:
        found.update(tokenizer.encode(text).ids)
    return found


def used_by(tokenizer: Any, texts: Iterable[str]) -> list[int]:
    """The ids that occur in texts; the most frequent first."""
    return by_frequency(counted_by(tokenizer, texts))


def by_frequency(counts: Mapping[int, int]) -> list[int]:
    """The most frequent first; of equally frequent ones, the one that comes first in the vocabulary."""
    return sorted(counts, key=lambda number: (-counts[number], number))


def kept(folder: Path, numbers: Iterable[int], at_least: int = 0, most: int | None = None) -> list[int]:
    """The ids of a model folder's vocabulary that stay where the ids `numbers` are used (`vocabulary.kept`)."""
    document, settings = _json(folder / TOKENIZER), _json(folder / SETTINGS)
    pad = settings.get("pad_token_id")
    return vocabulary.kept(document, numbers, at_least, _ids(settings), 0 if pad is None else pad, most)


def size(folder: Path) -> int:
    """Pieces of a model folder's vocabulary."""
    return len(vocabulary.pieces(_json(folder / TOKENIZER)))


def lines(folder: Path) -> int:
    """Lines of its word embedding, which may be more: some are padded to a round number."""
    return int(_json(folder / SETTINGS)["vocab_size"])


def trim(folder: Path, ids: Sequence[int], out: Path) -> Path:
    """Write the Transformers folder with the pieces `ids` alone as `out`, which appears whole or not at all.

    Raises `UserError` where its weights do not fit its tokenizer.
    """
    from safetensors.torch import save_file

    draft = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}")
    draft.mkdir(parents=True)
    try:
        of = len(write_tokenizer(folder, ids, draft))
        save_file(_cut(folder, ids), draft / "model.safetensors", {"format": "pt"})
        (draft / NAME).write_text(json.dumps({"of": of, "kept": list(ids)}))
        try:
            atomic_write.publish_folder(draft, out)
        except OSError:
            if not out.is_dir():
                raise
            shutil.rmtree(draft)  # another process has made it meanwhile, from the same
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return out


def read(folder: Path) -> Trimmed | None:
    """What a trimmed folder says of its vocabulary; None of one that was not trimmed."""
    if not (folder / NAME).is_file():
        return None
    document = _json(folder / NAME)
    return Trimmed(document["of"], tuple(document["kept"]))


def address(folder: Path, *parts: object) -> str:
    """16 hex digits of a SHA-256 over a model folder and what else makes its trimmed copy."""
    total = hashlib.sha256(json.dumps(parts).encode())
    for path in [folder / SETTINGS, folder / TOKENIZER, *_weight_files(folder)]:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()[:16]


def write_tokenizer(folder: Path, ids: Sequence[int], out: Path) -> dict[int, str]:
    """Write the tokenizer's files and config.json for the pieces `ids`, with what else a model folder says in small
    files; returns the whole vocabulary."""
    document, settings = _json(folder / TOKENIZER), _json(folder / SETTINGS)
    found = vocabulary.pieces(document)
    new = {old: place for place, old in enumerate(ids)}
    # Without blanks: it is a part of what is served.
    _write(out / TOKENIZER, vocabulary.renumbered(document, ids))
    if (folder / PIECES).is_file():
        (out / PIECES).write_text("".join(f"{found[number]}\n" for number in ids), encoding="utf-8")
    if (folder / "tokenizer_config.json").is_file():
        about = _json(folder / "tokenizer_config.json")
        if tokens := about.get("added_tokens_decoder"):
            about["added_tokens_decoder"] = {
                str(new[int(number)]): token for number, token in tokens.items() if int(number) in new
            }
        _write(out / "tokenizer_config.json", about)
    ends = {name: new.get(number) for name, number in settings.items() if _is_id(name, number)}
    (out / SETTINGS).write_text(json.dumps({**settings, **ends, "vocab_size": len(ids)}, indent=1))
    for name in COPIED:
        if (folder / name).is_file():
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(folder / name, out / name)
    return found


def _cut(folder: Path, ids: Sequence[int]) -> dict[str, "torch.Tensor"]:
    """The weights, with the lines `ids` of every tensor that has one for each piece."""
    import torch
    from safetensors.torch import load_file

    weights = {name: value for path in _weight_files(folder) for name, value in load_file(path).items()}
    known = tables_of(folder)
    tables = {name for name in weights if any(name == one or name.endswith(f".{one}") for one in known)}
    if not tables:
        raise UserError(
            f"{folder}: its weights have no word embedding, so compress.vocabulary=trim cannot cut it",
            code="unsupported",
        )
    short = next((name for name in sorted(tables) if len(weights[name]) <= max(ids)), None)
    if short is not None:
        raise UserError(
            f"{folder}: {short} has {len(weights[short])} lines and the tokenizer a piece {max(ids)}; copy it whole",
            code="damaged",
        )
    chosen = torch.tensor(ids)
    return {name: value[chosen].contiguous() if name in tables else value for name, value in weights.items()}


def tables_of(folder: Path) -> set[str]:
    """Names of the weights with a line for each piece, without the prefix that a class puts before its encoder's."""
    import torch
    import transformers

    settings = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    found: set[str] = set()
    for auto in HEADS:
        try:
            with torch.device("meta"):
                network = auto_class(auto).from_config(settings, trust_remote_code=False)
        except ValueError:  # the architecture has no such class
            continue
        modules = [network.get_input_embeddings(), network.get_output_embeddings()]
        tables = [value for module in modules if module is not None for value in module.parameters()]
        prefix = f"{network.base_model_prefix}."
        for name, value in network.named_parameters(remove_duplicate=False):
            # By identity: a weight of several modules has several names, and is saved by one of them.
            if any(value is table for table in tables):
                found.add(name.removeprefix(prefix))
    return found


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("model*.safetensors"))


def _ids(settings: dict[str, Any]) -> Collection[int]:
    return [number for name, number in settings.items() if _is_id(name, number)]


def _is_id(name: str, value: Any) -> bool:
    return name.endswith("_token_id") and isinstance(value, int)


def old_ids(kept: Sequence[int]) -> Ints:
    """[pieces]: the id of each piece in the whole vocabulary, to read tokens of the trimmed one by."""
    return np.array(kept, dtype=np.int64)


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
