"""A tiny encoder and a tiny artefact, made in a second from nothing: no download, no committed weights."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rtrain.inference.artifact
import rtrain.inference.predictor
from rtrain.config import Recipe
from rtrain.inference.artifact import Artifact

if TYPE_CHECKING:
    import transformers

    from rtrain.core.ragged import Head
    from rtrain.data.store.store import Store

VOCABULARY = 300
MAX_TOKENS = 64
POSITIONS = 128
NAME = "tiny"

CORPUS = (
    "where is my parcel, it was due on monday and nobody came to the door",
    "please cancel my subscription at the end of the month and confirm by mail",
    "the card was declined twice in the shop although there is money on the account",
    "how do i change the address of an order that was already sent",
    "i want my money back, the box was open and two articles were missing",
    "can you tell me the exchange rate for dollars and euros today",
    "the app says wrong password, but i have not changed it in years",
    "my invoice shows a fee that i do not understand, who can explain it",
    "thank you for the quick answer, everything works again now",
    "which documents do you need to open an account for my daughter",
    "der brief kam gestern, vielen dank für die schnelle hilfe",
    "le colis est arrivé ouvert et il manque deux articles sur trois",
    "pueden devolverme el dinero de la factura, por favor?",
)
"""Own sentences, enough for a vocabulary of word pieces."""


def make_encoder(folder: Path, seed: int = 0, layers: int = 2) -> Path:
    """A bare encoder with random weights: config.json, tokenizer.json, model.safetensors. Usable as `model.name`."""
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformers.BertModel(_config(layers=layers)).save_pretrained(folder)
    return folder


def make_modern(folder: Path, seed: int = 0, **settings: Any) -> Path:
    """The same of ModernBERT, for texts of up to 8,192 tokens: in the second layer of two, tokens read 16 on either
    side."""
    import torch
    import transformers

    make_tokenizer(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformers.ModernBertModel(modern(**settings)).save_pretrained(folder)
    return folder


def modern(**settings: Any) -> "transformers.ModernBertConfig":
    import transformers

    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    # The numbers that `make_tokenizer` gives them.
    special = {"pad_token_id": 0, "cls_token_id": 2, "bos_token_id": 2, "sep_token_id": 3, "eos_token_id": 3}
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 8192, "local_attention": 32, "initializer_range": 0.2}
    return transformers.ModernBertConfig(**{**small, **special, **sizes, **settings})


def make_artifact(folder: Path, labels: Sequence[str] = ("a", "b", "c"), seed: int = 0, layers: int = 2) -> Path:
    """A complete float artefact with random weights, golden answers and manifest included."""
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.BertForSequenceClassification(_config(num_labels=len(labels), layers=layers))
        # The usual 0.02 gives every text nearly the same scores; an answer that swapped two rows would pass unseen.
        torch.nn.init.normal_(model.classifier.weight, std=1.0)
        model.save_pretrained(folder)
    artifact = Artifact(name=NAME, task="classification", labels=tuple(labels), max_tokens=MAX_TOKENS, engine="torch")
    rtrain.inference.artifact.write_artifact(folder, artifact, rtrain.inference.predictor.compute_golden_logits)
    return folder


def refused(folder: Path) -> Path:
    """An artefact with the gate's verdict that it is worse than its base."""
    made = rtrain.inference.artifact.read_artifact(folder)
    gate = {"version": made.version, "verdict": "refuse", "reasons": ["it is worse"]}
    rtrain.inference.artifact.write_artifact(
        folder, replace(made, gate=gate), lambda *_: [row["logits"] for row in made.golden]
    )
    return folder


def make_task_artifact(
    folder: Path,
    task: str,
    head: "Head",
    seed: int = 0,
    max_tokens: int = MAX_TOKENS,
    data: Mapping[str, Any] | None = None,
) -> Path:
    """A complete artefact of any task, for texts of `max_tokens`; `data` says how its training rows were read."""
    import torch
    import transformers

    from rtrain.tasks import base

    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder)
    found = base.get_task(task)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto = getattr(transformers, found.auto_model)
        config = _config(num_labels=max(1, len(head.labels)), positions=max(POSITIONS, max_tokens))
        auto.from_config(config).save_pretrained(folder)
    made = Artifact(NAME, task, head.labels, max_tokens, "torch", facts=head.facts, data=data or {})
    rtrain.inference.artifact.write_artifact(
        folder,
        made,
        rtrain.inference.predictor.compute_golden_logits,
        rtrain.inference.predictor.make_golden_inputs(found, head),
    )
    return folder


def make_store(recipe: Recipe, encoder: Path, root: Path, head: "Head | None" = None) -> "Store":
    """The token store that `builder.build_or_open` makes, by the same functions one after another, without Ray. `head`:
    of the labelled rows, where these have no labels."""
    from rtrain.data import row_reader
    from rtrain.data.splits import Splits
    from rtrain.data.store import builder, commit, shards, store

    source = row_reader.inspect_source(recipe.data)
    writer = store.StoreWriter(root / ".tokens" / builder.compute_digest(recipe, source, encoder))
    splits = Splits.from_config(recipe.data, source) if head is None else Splits(has_test=True, valid_share=0.0)
    job = shards.TokenizeJob(recipe, encoder, writer.folder, splits, head)
    written = [
        row
        for piece in shards.plan_tasks(source)
        for part in shards.split_task(piece, recipe)
        for row in shards.write_shards(part, job)
    ]
    return commit.commit_store(job, source, writer, written)


def _config(num_labels: int = 2, layers: int = 2, positions: int = POSITIONS) -> "transformers.BertConfig":
    import transformers

    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=positions,
        # Wider than usual, so that different texts get visibly different vectors from untrained weights.
        initializer_range=0.2,
    )
    config.num_labels = num_labels
    return config


def make_masked(folder: Path, kind: str, layers: int = 2) -> None:
    """A masked language model of a family (bert, distilbert, electra, modernbert or roberta) with its head and without
    dropout."""
    import torch
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 2, "intermediate_size": 64}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if kind == "distilbert":
        sizes = {"dim": 32, "n_layers": layers, "n_heads": 2, "hidden_dim": 64}
        still = {"dropout": 0.0, "attention_dropout": 0.0}
    if kind == "modernbert":
        still = {"local_attention": 8}
    # RoBERTa counts positions from pad_token_id + 1.
    settings = {"vocab_size": VOCABULARY, "max_position_embeddings": 130, "pad_token_id": 0, **sizes, **still}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = transformers.AutoConfig.for_model(kind, **settings)
        transformers.AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    make_tokenizer(folder)


def make_tokenizer(folder: Path) -> Path:
    """tokenizer.json alone: what a token store needs of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    # Not tokenizers' own trainer: it breaks ties by hash order, so that each process would get another vocabulary.
    words = Counter(re.findall(r"\w+", " ".join(CORPUS)))
    letters = sorted(set("".join(CORPUS)) - {" "}) + list("0123456789!?")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + letter for letter in letters)]
    pieces += sorted(words, key=lambda word: (-words[word], word))
    vocabulary = {piece: number for number, piece in enumerate(list(dict.fromkeys(pieces))[:VOCABULARY])}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.add_special_tokens(pieces[:5])
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    sep, cls = (("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    tokenizer.post_processor = processors.BertProcessing(sep, cls)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
