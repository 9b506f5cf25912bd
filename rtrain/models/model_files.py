"""Files of a model folder: weights and tokenizer, loaded, and saved so that other programs read them rightly.

Transformers knows neither mean pooling nor local attention and would compute other outputs without an error. So weights
are saved in a shape that it refuses.

rtrain reads only tokenizer.json. `AutoTokenizer` loads a class that may change the normalizer, e.g. by `do_lower_case`
of tokenizer_config.json, and reads length limits and the truncation side from there.
"""

import contextlib
import json
import shutil
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtrain.core import atomic_write, json_files
from rtrain.core.errors import UserError
from rtrain.models import long_texts
from rtrain.tasks.encode import load_tokenizer

if TYPE_CHECKING:
    import torch
    import transformers

GUARD_SHAPE = (1, 1, 1)
"""Leading dimensions of the head's matrices in a guarded artifact (mean pooling or local attention). `AutoModelFor...`
raises an error of mismatched sizes; `AutoModel` and sentence-transformers load the encoder without the head."""

STANDARDIZED_SUFFIX = ".standardized"
"""Suffix of a regression head's weights as trained. The weights without the suffix answer in the unit of the training
scores, for other programs."""

CREATION_LOCK = threading.Lock()
"""Held while transformers creates a network. It patches its own functions and torch's for the whole process meanwhile;
two threads would restore each other's patches, and no weights would be tied or initialized afterwards."""
ENCODERS = frozenset(
    {
        *("albert", "bert", "camembert", "deberta-v2", "distilbert", "electra", "ernie", "longformer", "modernbert"),
        *("mpnet", "nomic_bert", "roberta", "xlm-roberta"),
    }
)
"""Common encoders. Other architectures need transformers' import tables, which takes seconds."""
BIDIRECTIONAL = frozenset({"xlnet"})
"""Architectures that predict the next token although each token reads the tokens after it."""
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


def save_weights(
    network: "transformers.PreTrainedModel",
    folder: Path,
    *,
    guard_head: bool,
    weights: "Mapping[str, torch.Tensor] | None" = None,
    scale: tuple[float, float] | None = None,
) -> None:
    """Write config.json and model.safetensors.

    Args:
        guard_head: Save the head's matrices in a shape that other programs refuse.
        weights: Full weights by name, if the network's own are shards or include more than the artifact needs.
        scale: Mean and standard deviation of the training scores, for a network that answers in standard deviations.
            Its last layer is written to answer in their unit, and as trained (`STANDARDIZED_SUFFIX`).
    """
    encoder_prefix = f"{network.base_model_prefix}."
    weights = dict(network.state_dict() if weights is None else weights)
    if scale is not None and not guard_head:
        output_name = next(
            name for name, weight in weights.items() if not name.startswith(encoder_prefix) and _is_output(weight)
        )
        weights |= _rescale_output(weights, output_name.removesuffix(".weight"), *scale)
    if guard_head:
        head_weights = {
            name: weight for name, weight in weights.items() if weight.ndim == 2 and not name.startswith(encoder_prefix)
        }
        weights |= {name: weight.reshape(*GUARD_SHAPE, *weight.shape) for name, weight in head_weights.items()}
    network.save_pretrained(folder, state_dict=weights)


def _is_output(weight: "torch.Tensor") -> bool:
    return weight.ndim == 2 and len(weight) == 1


def _rescale_output(
    weights: "Mapping[str, torch.Tensor]", layer: str, mean: float, std: float
) -> "dict[str, torch.Tensor]":
    weight, bias = weights[f"{layer}.weight"], weights[f"{layer}.bias"]
    return {
        f"{layer}.weight": (weight.double() * std).to(weight.dtype),
        f"{layer}.bias": (bias.double() * std + mean).to(bias.dtype),
        f"{layer}.weight{STANDARDIZED_SUFFIX}": weight,
        f"{layer}.bias{STANDARDIZED_SUFFIX}": bias,
    }


def restore_standardized(weights: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Undo the rescaling of a regression head by `save_weights`."""
    other_weights = {name: weight for name, weight in weights.items() if not name.endswith(STANDARDIZED_SUFFIX)}
    return other_weights | {
        name.removesuffix(STANDARDIZED_SUFFIX): weight
        for name, weight in weights.items()
        if name.endswith(STANDARDIZED_SUFFIX)
    }


def load_network(
    auto: Any, folder: Path, *, new_head: bool = False, **settings: Any
) -> "tuple[transformers.PreTrainedModel, dict[str, Any]]":
    """Load a folder in fp32 by `auto.from_pretrained`, guarded or not, with its loading report. The caller sets the
    pooling.

    Args:
        new_head: Initialize weights of mismatched shape like missing ones, instead of raising an error.
    """
    import torch
    import transformers
    from safetensors import safe_open

    transformers.utils.logging.disable_progress_bar()
    network: transformers.PreTrainedModel
    with CREATION_LOCK:
        network, report = auto.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **settings,
        )
    for name in report["unexpected_keys"]:
        if name.endswith(STANDARDIZED_SUFFIX):
            with safe_open(folder / "model.safetensors", framework="pt") as file, torch.no_grad():
                network.get_parameter(name.removesuffix(STANDARDIZED_SUFFIX)).copy_(file.get_tensor(name))
    mismatches = []
    for name, saved_shape, expected_shape in sorted(report["mismatched_keys"]):
        if tuple(saved_shape) == (*GUARD_SHAPE, *expected_shape):
            with safe_open(folder / "model.safetensors", framework="pt") as file, torch.no_grad():
                network.get_parameter(name).copy_(file.get_tensor(name).reshape(*expected_shape))
        else:
            mismatches.append(f"{name} is {list(saved_shape)} in place of {list(expected_shape)}")
    if mismatches and not new_head:
        message = f"{folder}: model.safetensors does not fit config.json: {', '.join(mismatches)}; copy it whole"
        raise UserError(message, code="damaged")
    long_texts.enable_local_attention(network)
    return network, report


def describe_generator(config: Mapping[str, Any]) -> str | None:
    """Describe a model that generates text by its config.json: `a decoder` or `an encoder-decoder`; None for an
    encoder."""
    model_type = config.get("model_type")
    if config.get("is_encoder_decoder"):
        return "an encoder-decoder"
    if config.get("is_decoder"):
        return "a decoder"
    if model_type in ENCODERS or model_type in BIDIRECTIONAL:
        return None
    auto_class("AutoConfig")  # a lazy import of transformers
    from transformers.models.auto import modeling_auto as tables

    if model_type in tables.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return "an encoder-decoder"
    is_causal = model_type in tables.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return "a decoder" if is_causal and model_type not in tables.MODEL_FOR_MASKED_LM_MAPPING_NAMES else None


def auto_class(name: str) -> Any:
    """One of transformers' auto classes, such as `AutoModelForSequenceClassification`.

    Each of them imports the losses of object detection, which import scipy's optimizers if scipy is installed: 0.25 s
    of a core and 30 MB at the start of every worker. So scipy is hidden during the import.
    """
    import transformers

    if "transformers.loss.loss_utils" not in sys.modules:
        utils: Any = transformers.utils
        is_scipy_available, utils.is_scipy_available = utils.is_scipy_available, lambda: False
        try:
            import transformers.loss.loss_utils
        finally:
            utils.is_scipy_available = is_scipy_available
    return getattr(transformers, name)


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
    write_compact_json(folder / "tokenizer.json", {**document, "truncation": truncation, "padding": None})
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
    write_compact_json(folder / CONFIG_FILE, settings)


@contextlib.contextmanager
def draft_model_folder(final: Path) -> Iterator[Path]:
    """Yield a draft of a model folder, which gets the name `final` when the block ends. If another process has made the
    same folder meanwhile, that one stays."""
    draft = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}")
    draft.mkdir(parents=True)
    try:
        yield draft
        try:
            atomic_write.publish_folder(draft, final)
        except OSError:
            if not (final / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _load_tokenizer(folder: Path, **options: Any) -> Any:
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **options
        )
    except Exception:  # of any type, for a missing library or a file that rtrain does not need
        return transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **options)


def write_compact_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
