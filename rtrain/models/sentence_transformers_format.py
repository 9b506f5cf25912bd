"""The folder layout of sentence-transformers, read and written: how an encoder's tokens become a text's vector."""

import json
from pathlib import Path
from typing import Any

from rtrain.core import json_files
from rtrain.models.pooling import FACT

MODULES, POOLING, SETTINGS = "modules.json", "1_Pooling", "config_sentence_transformers.json"
NORMALIZE = "Normalize"
FLAGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
"""The keys that older files have in place of `pooling_mode`."""
OTHER_FLAG = "pooling_mode_"


def pooling_of(folder: Path) -> str | None:
    """How the encoder of a model folder was trained to pool: by the `mean` of the tokens, or by the first, `cls`.

    None where the folder is no sentence encoder's, or pools otherwise. An artefact says what it was trained with.
    """
    if _json(folder / json_files.ARTIFACT_JSON).get("facts", {}).get(FACT) == "mean":
        return "mean"
    listed = (folder / MODULES).is_file()
    modules = _json(folder / MODULES) if listed else [{"type": ".Pooling", "path": POOLING}]
    place = next((one["path"] for one in modules if one["type"].endswith(".Pooling")), None)
    if place is None or not (listed or (folder / place / "config.json").is_file()):
        return None
    modes = _modes(_json(folder / place / "config.json"))
    return next((mode for mode in ("mean", "cls") if mode in modes), None)


def unsupported(folder: Path) -> list[str]:
    """What else makes the vectors of the sentence encoder in a model folder, beside an encoder and one way of pooling:
    none of it is computed here. Normalized vectors are written on (`write`), since their direction is the same."""
    found = [f"the module {kind}" for kind in _kinds(folder) if kind not in ("Transformer", "Pooling", NORMALIZE)]
    modes = _modes(_json(folder / POOLING / "config.json")) if (folder / POOLING / "config.json").is_file() else []
    if len(modes) > 1:
        found.append(f"the pooling {' with '.join(modes)}")
    settings = _json(folder / SETTINGS)
    if prompt := (settings.get("prompts") or {}).get(settings.get("default_prompt_name")):
        found.append(f"the default prompt {prompt!r}")
    return found


def _kinds(folder: Path) -> list[str]:
    """Names of the classes of the modules, in their order."""
    return [module["type"].rpartition(".")[2] for module in _json(folder / MODULES) or []]


def _modes(settings: dict[str, Any]) -> list[str]:
    """The ways of pooling that are joined into the vector; the mean where the file names none."""
    wanted = settings.get("pooling_mode")
    if wanted is not None:
        return [wanted] if isinstance(wanted, str) else list(wanted)
    return [FLAGS.get(name, name) for name, on in settings.items() if name.startswith(OTHER_FLAG) and on] or ["mean"]


def write(folder: Path, pooling: str, width: int, max_tokens: int, source: Path | None = None) -> None:
    """Make the model folder one that `SentenceTransformer(folder)` loads, with vectors of `width` numbers. They are
    normalized, and may be asked for with prompts, where those of `source` are."""
    kinds = [("", "Transformer"), (POOLING, "Pooling")]
    before: dict[str, Any] = {}
    if source is not None:
        before = _json(source / SETTINGS)
        kinds += [(f"2_{NORMALIZE}", NORMALIZE)] if NORMALIZE in _kinds(source) else []
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (path, kind) in enumerate(kinds)
    ]
    # The older names, which every version reads.
    modes = {name: mode == pooling for name, mode in FLAGS.items()}
    documents: dict[str, Any] = {
        f"{POOLING}/config.json": {"word_embedding_dimension": width, **modes},
        "sentence_bert_config.json": {"max_seq_length": max_tokens, "do_lower_case": False},
        SETTINGS: {
            "prompts": before.get("prompts") or {},
            "similarity_fn_name": before.get("similarity_fn_name") or "cosine",
        },
        MODULES: modules,
    }
    (folder / POOLING).mkdir(parents=True)
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _json(path: Path) -> Any:
    return json_files.value(path) if path.is_file() else {}
