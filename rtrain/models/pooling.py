"""Pooling of a text's token vectors into the classified vector, and its files in sentence-transformers folders."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtrain.core import json_files
from rtrain.core.errors import UserError
from rtrain.models.network_parts import LAYOUT

if TYPE_CHECKING:
    import torch
    import transformers

FACT = "token_pooling"
"""Artifact fact of a model with `mean` pooling."""
MODULES_FILE, POOLING_FOLDER, SETTINGS_FILE = "modules.json", "1_Pooling", "config_sentence_transformers.json"
NORMALIZE = "Normalize"
POOLING_FLAGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
"""Keys of older files instead of `pooling_mode`."""
POOLING_FLAG_PREFIX = "pooling_mode_"


def pool_by_mean(network: "transformers.PreTrainedModel") -> None:
    """Feed the head the mean of the text's tokens instead of its first token's vector.

    Sentence encoders are trained this way (Reimers and Gurevych 2019, arXiv:1908.10084): their mean separates texts
    before any fine-tuning, their first token does not. A pooler (BERT and relatives) is removed; a head with its own
    mean (ModernBERT) reads the first position instead. Raises `UserError` for a network without a separate encoder.
    """
    encoder: Any = network.base_model
    if encoder is network:
        class_name = type(network).__name__
        raise UserError(
            f"model.pooling=mean: {class_name} does not tell its encoder from its head; write model.pooling=own",
            code="unsupported",
        )
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None
    if pools_by_mean(network):
        network.config.classifier_pooling = "cls"
    encoder.register_forward_hook(_pool_mean, with_kwargs=True)


def pools_by_mean(network: "transformers.PreTrainedModel") -> bool:
    """Whether the network's own head reads the mean of the tokens."""
    return getattr(network.config, "classifier_pooling", None) == "mean"


def _pool_mean(module: "torch.nn.Module", inputs: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
    """Write the mean where heads read it: into the pooled output (BERT) and the first position of the last layer
    (RoBERTa, DistilBERT)."""
    import torch

    if LAYOUT in kwargs:  # windows of a pack are pooled already
        return output
    hidden = output.last_hidden_state
    mask = kwargs["attention_mask"].to(torch.promote_types(hidden.dtype, torch.float32))[..., None]
    mean = ((hidden * mask).sum(1) / mask.sum(1).clamp(min=1.0)).to(hidden.dtype)
    output.last_hidden_state = torch.cat([mean[:, None], hidden[:, 1:]], dim=1)
    if "pooler_output" in type(output).__dataclass_fields__:
        output.pooler_output = mean
    return output


def read_pooling(folder: Path) -> str | None:
    """The pooling that the encoder of a model folder was trained with: `mean` or `cls` (first token); None if the
    folder holds no sentence encoder or another pooling. An artifact states its own pooling."""
    if _read_json(folder / json_files.ARTIFACT_JSON).get("facts", {}).get(FACT) == "mean":
        return "mean"
    has_modules = (folder / MODULES_FILE).is_file()
    modules = _read_json(folder / MODULES_FILE) if has_modules else [{"type": ".Pooling", "path": POOLING_FOLDER}]
    path = next((module["path"] for module in modules if module["type"].endswith(".Pooling")), None)
    if path is None or not (has_modules or (folder / path / "config.json").is_file()):
        return None
    modes = _pooling_modes(_read_json(folder / path / "config.json"))
    return next((mode for mode in ("mean", "cls") if mode in modes), None)


def find_unsupported(folder: Path) -> list[str]:
    """Unsupported parts of the sentence encoder in a model folder, beyond an encoder and one pooling. Normalization is
    supported: `write_sentence_files` writes it on, and the direction of the vectors is the same."""
    unsupported = [
        f"the module {kind}" for kind in _module_types(folder) if kind not in ("Transformer", "Pooling", NORMALIZE)
    ]
    modes = (
        _pooling_modes(_read_json(folder / POOLING_FOLDER / "config.json"))
        if (folder / POOLING_FOLDER / "config.json").is_file()
        else []
    )
    if len(modes) > 1:
        unsupported.append(f"the pooling {' with '.join(modes)}")
    settings = _read_json(folder / SETTINGS_FILE)
    if prompt := (settings.get("prompts") or {}).get(settings.get("default_prompt_name")):
        unsupported.append(f"the default prompt {prompt!r}")
    return unsupported


def _module_types(folder: Path) -> list[str]:
    return [module["type"].rpartition(".")[2] for module in _read_json(folder / MODULES_FILE) or []]


def _pooling_modes(settings: dict[str, Any]) -> list[str]:
    """The poolings that are concatenated into the vector; the mean if the file names none."""
    modes = settings.get("pooling_mode")
    if modes is not None:
        return [modes] if isinstance(modes, str) else list(modes)
    return [
        POOLING_FLAGS.get(name, name) for name, on in settings.items() if name.startswith(POOLING_FLAG_PREFIX) and on
    ] or ["mean"]


def write_sentence_files(folder: Path, pooling: str, width: int, max_tokens: int, source: Path | None = None) -> None:
    """Make the model folder loadable by `SentenceTransformer(folder)`, with vectors of `width` numbers. Normalization
    and prompts are copied from `source`."""
    module_types = [("", "Transformer"), (POOLING_FOLDER, "Pooling")]
    source_settings: dict[str, Any] = {}
    if source is not None:
        source_settings = _read_json(source / SETTINGS_FILE)
        module_types += [(f"2_{NORMALIZE}", NORMALIZE)] if NORMALIZE in _module_types(source) else []
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (path, kind) in enumerate(module_types)
    ]
    # The older keys, which every version reads.
    modes = {name: mode == pooling for name, mode in POOLING_FLAGS.items()}
    files: dict[str, Any] = {
        f"{POOLING_FOLDER}/config.json": {"word_embedding_dimension": width, **modes},
        "sentence_bert_config.json": {"max_seq_length": max_tokens, "do_lower_case": False},
        SETTINGS_FILE: {
            "prompts": source_settings.get("prompts") or {},
            "similarity_fn_name": source_settings.get("similarity_fn_name") or "cosine",
        },
        MODULES_FILE: modules,
    }
    (folder / POOLING_FOLDER).mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _read_json(path: Path) -> Any:
    return json_files.load_json(path) if path.is_file() else {}
