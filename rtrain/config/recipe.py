"""What is trained: the sections of a recipe, which are a run's identity, and what of them is impossible together.

Those that say which rows there are, `data` and `augment`, are in `config.data`.
"""

import hashlib
import json
import math
from typing import Annotated, Any, Literal

from pydantic import Field

from rtrain import engines
from rtrain.config.data import (
    Augment,
    Data,
    OneOf,
    Positive,
    Section,
    Share,
    augment_contradictions,
    data_contradictions,
)
from rtrain.errors import Problem

TASKS = (
    "classification",
    "multi_label",
    "multi_head",
    "regression",
    "token_tags",
    "span_qa",
    "extractive_summary",
    "masked_lm",
)
"""Every task. The module `rtrain.tasks.<name>` holds it, as `TASK`; nothing else is listed by a task's name."""

DEFAULT_FREQUENCY = 4


class Model(Section):
    name: str = "minilm"
    """`minilm` (the packaged all-MiniLM-L6-v2), a Transformers folder, or a model hub name (also with @revision)."""
    attention_dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Dropout of attention weights; null is what the model's own configuration says, 0.1 for most. With 0, texts of
    some hundred tokens train faster on a CPU (512: 1.7 times): the masks of attention are as large as its square."""
    pooling: Literal["auto", "own", "mean"] = "auto"
    """How a text's tokens become one vector: as the model's own head has it (its first token, for most), or their
    `mean`. `auto` is the mean for sentence encoders, which are trained for it: the packaged one, or a folder that has
    sentence-transformers' `1_Pooling` or `modules.json` and says so; decided once and kept in the run. rtrain answers
    with such an artefact, transformers alone refuses to; sentence-transformers loads its encoder."""
    freeze: Literal["none", "encoder"] = "none"
    """What stays as it is: `encoder` trains the head alone, some times faster. A masked language model's output
    embedding is its encoder's word embedding, and stays too."""


class Optim(Section):
    name: Literal["adamw", "radam"] = "adamw"
    """`radam` (Liu et al. 2020) rectifies AdamW's first updates; both cost the same, and decay is decoupled in both."""
    lr: Annotated[float, Field(gt=0, lt=1)] = 2e-4
    """Peak learning rate."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the peak follows rows_per_update: lr x (rows_per_update / lr_rows) with `linear` (Goyal et al. 2017), lr x
    its root with `sqrt`, the rule for Adam and its kin (Malladi et al. 2022)."""
    lr_rows: Positive | None = None
    """The rows_per_update at which `lr` holds as it stands, for lr_scaling."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor of the learning rate from each encoder layer to the one below it: the head learns at `lr`, the last of L
    layers at lr x layer_decay, the embeddings at lr x layer_decay^(L + 1), as in the fine-tuning of BEiT."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    warmup: Share = 0.1
    """Share of all updates over which the learning rate rises from 0."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """After warm-up: `linear` and `cosine` fall to 0 at the last update, `constant` stays."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """The gradient is scaled down to this norm."""


class Train(Section):
    epochs: Positive = 3
    workers: Positive = 2
    """DDP workers, each one process of one CPU (or one GPU)."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """`gpu` gives each worker one. `auto` takes GPUs where the cluster has any or its autoscaler may start any, with
    fewer workers where there are fewer, and CPUs else; it is decided once and kept in the run."""
    min_workers: Positive | None = None
    """Go on with fewer workers, down to this many, while nodes are missing, and with more when they come back."""
    micro_batch: Positive = 8
    """Most rows of one forward and backward pass of a worker."""
    tokens_per_pass: Positive | None = None
    """Most tokens of a pass; a longer row is alone. Default 2,048 on a CPU; on a GPU what its memory holds, up to
    65,536, measured before the first update and kept in the run. Halved after a start that ran out of memory. BERT and
    its kin are trained without padding: a worker's rows between two exchanges are regrouped into as few passes as this
    allows, and micro_batch sets rows_per_update alone."""
    gradient_checkpointing: bool = False
    """Keep each layer's input alone, and compute the layer again in the backward pass. Of MiniLM and 16 texts of 512
    tokens a pass took 1.1 GB in place of 2.6, and 1.0 to 1.25 times as long."""
    transport: Literal["auto", "stock", "shared_memory"] = "auto"
    """How gradients go from worker to worker: `stock` is Gloo's sockets (NCCL on GPUs); `shared_memory` is for the
    workers of one host, and the stock one, with a word of it, where they are on several or on GPUs. `auto` takes memory
    where two workers share it, of whom gradients are the same by either, bit for bit; of more they differ in the last
    bit, and a run's would with the hosts that its starts were given."""
    gradient_compression: Literal["none", "bf16"] = "none"
    """`bf16` sends gradients in half of the bytes; it changes the weights, and the log says by how much a gradient. Of
    two workers over 100 Mbit/s an update of MiniLM took 3.5 s in place of 5.3."""
    sharded_optimizer: bool = False
    """Each worker keeps the optimizer's state of a share of the weights (ZeRO stage 1), for less memory and the same
    weights, bit for bit; updated weights are then sent to the others, which takes time."""
    aggregation_frequency: Positive | None = None
    """Passes of micro_batch rows of a worker between two gradient exchanges; sets rows_per_update. Default 4."""
    rows_per_update: Positive | None = None
    """Rows of one optimizer step. Default: workers x micro_batch x aggregation_frequency."""
    precision: Literal["fp32", "bf16", "fp16", "auto"] = "auto"
    """Of passes; weights and moments are fp32. `auto` takes bf16 where the device computes it natively, else fp16 on a
    GPU and fp32 on a CPU; it is decided once and kept in the run. fp16 scales the loss (Micikevicius et al. 2018): an
    update whose gradient is infinite is done again with half the scale."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each label's weight that is spread evenly over all labels: for classes, heads and tags."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    evaluate_every: Positive | None = None
    """Updates between two evaluations on the validation rows. Default: one epoch."""
    save_every: Positive | None = None
    """Updates between two checkpoints; each evaluation saves one too."""
    keep: Positive = 2
    """Newest checkpoints that stay on the disk, beside the best one."""
    log_every: Positive = 10
    """Updates between two progress events."""


SPEED = (
    *("workers", "device", "min_workers", "micro_batch", "tokens_per_pass"),
    *("aggregation_frequency", "gradient_checkpointing", "transport", "sharded_optimizer"),
    *("evaluate_every", "save_every", "keep", "log_every"),
)
"""Settings of `train` that change speed or what is kept, never the weights, once rows_per_update is resolved; but for
which activations dropout takes, where there is dropout."""


ADDED = {"lr_scaling": "none", "lr_rows": None, "layer_decay": 1.0}
"""Settings of `optim` that came later, with the values by which all is as it was before them."""
ADDED_TO_MODEL = {"attention_dropout": None, "pooling": "own", "freeze": "none"}
"""The same of `model`; what `auto` stands for is decided before a run is frozen."""


class Distill(Section):
    layers: Positive = 3
    """Encoder layers of the student, copied from evenly spaced layers of the teacher."""
    epochs: Positive = 3
    lr: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    temperature: Annotated[float, Field(gt=0)] = 2.0
    """Softens both distributions before they are compared (Hinton et al. 2015, arXiv:1503.02531)."""
    alpha: Share = 0.7
    """Weight of the teacher's distribution; the rest is the weight of the true label."""
    teacher: str | None = None
    """Version of the artefact whose answers are learned; set by `rtrain distill`, null in any other run."""


class Quantize(Section):
    engine: Annotated[str, OneOf(engines.quantized)] = engines.quantized()[0]
    """What computes the int8 answers: an engine of `rtrain.engines` that has a quantizer."""
    calibration_rows: Positive = 256
    """Training rows that set the activation scales."""


class Recipe(Section):
    name: str
    task: Annotated[str, OneOf(lambda: TASKS)]
    """What the model is trained to answer."""
    data: Data = Data()
    augment: Augment = Augment()
    model: Model = Model()
    optim: Optim = Optim()
    train: Train = Train()
    distill: Distill = Distill()
    quantize: Quantize = Quantize()

    @property
    def rows_per_update(self) -> int:
        """Rows of one optimizer step; the default is four passes of every worker."""
        train = self.train
        return train.rows_per_update or train.workers * train.micro_batch * (
            train.aggregation_frequency or DEFAULT_FREQUENCY
        )

    @property
    def peak_lr(self) -> float:
        """The highest learning rate: `optim.lr`, scaled to rows_per_update."""
        optim = self.optim
        if optim.lr_scaling == "none" or optim.lr_rows is None:
            return optim.lr
        ratio = self.rows_per_update / optim.lr_rows
        return optim.lr * (ratio if optim.lr_scaling == "linear" else math.sqrt(ratio))

    def weights(self) -> dict[str, Any]:
        """The settings that change the weights, by section: rows_per_update is one of them; workers, micro-batch and
        cadences are not."""
        document = self.model_dump(
            mode="json", exclude={"quantize"} if self.distill.teacher else {"quantize", "distill"}
        )
        for name in SPEED:
            del document["train"][name]
        if self.data.outside is None:
            del document["data"]["outside"]
        if not self.augment.active:  # then it changes no row
            del document["augment"]
        # What is as it was before there were settings for it has the identity of then.
        for name, neutral in ADDED_TO_MODEL.items():
            if document["model"][name] == neutral:
                del document["model"][name]
        if self.optim.lr_scaling == "none":
            document["optim"]["lr_rows"] = None
        for name, value in ADDED.items():
            if document["optim"][name] == value:
                del document["optim"][name]
        if self.train.gradient_compression == "none":
            del document["train"]["gradient_compression"]
        document["train"]["rows_per_update"] = self.rows_per_update
        return document

    def identity(self) -> str:
        """Digest of what changes the weights."""
        return hashlib.sha256(json.dumps(self.weights(), sort_keys=True).encode()).hexdigest()[:16]


def recipe_contradictions(recipe: Recipe) -> list[Problem]:
    """Settings that are valid alone and impossible together."""
    train = recipe.train
    problems = []
    if train.rows_per_update and train.aggregation_frequency:
        problems.append(
            Problem(
                "train.rows_per_update",
                train.rows_per_update,
                f"train.aggregation_frequency={train.aggregation_frequency} sets it too",
                "give one of the two and set the other to null",
            )
        )
    if train.min_workers is not None and train.min_workers > train.workers:
        fix = f"write {train.workers} or less, or leave it out"
        problems.append(Problem("train.min_workers", train.min_workers, f"above train.workers={train.workers}", fix))
    if recipe.rows_per_update < train.workers:
        problems.append(
            Problem(
                "train.rows_per_update",
                recipe.rows_per_update,
                f"fewer rows than the {train.workers} workers that share them",
                f"write {train.workers} or more, or fewer train.workers",
            )
        )
    if recipe.distill.teacher and recipe.model.freeze != "none":
        reason = "a student of fewer layers learns its teacher's answers in those layers"
        problems.append(Problem("model.freeze", recipe.model.freeze, reason, "add --set model.freeze=none"))
    return (
        problems
        + _rate_contradictions(recipe)
        + data_contradictions(recipe.data)
        + augment_contradictions(recipe.augment)
    )


def _rate_contradictions(recipe: Recipe) -> list[Problem]:
    optim, rows = recipe.optim, recipe.rows_per_update
    if optim.lr_scaling != "none" and optim.lr_rows is None:
        reason = f"optim.lr_scaling={optim.lr_scaling} asks at which rows_per_update optim.lr={optim.lr:g} holds"
        return [Problem("optim.lr_rows", None, reason, f"write that number of rows ({rows} for this recipe as it is)")]
    if recipe.peak_lr >= 1:
        reason = f"scaled from {optim.lr_rows} to {rows} rows per update it is {recipe.peak_lr:g}, not less than 1"
        return [Problem("optim.lr", optim.lr, reason, "write a lower one, or fewer rows per update")]
    return []
