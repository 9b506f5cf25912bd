"""What is trained: `Recipe` with its sections, which are a run's identity.

The sections `data` and `augment`, which say which rows there are, are in `config.data`.
"""

import hashlib
import json
import math
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import Field

from rtrain.config.data import (
    Augment,
    Data,
    OneOf,
    Positive,
    Section,
    Share,
)
from rtrain.core import engines

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
BETAS = (0.9, 0.999)
"""By which AdamW and RAdam average gradients and their squares, unless `optim.beta2_scaling` changes the second."""


class Model(Section):
    name: str = "minilm"
    """`minilm` (the packaged all-MiniLM-L6-v2), a Transformers folder, or a model hub name (also with @revision). It is
    an encoder: decoders and encoder-decoders are refused."""
    attention_dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Dropout of attention weights; null takes the model's own, which is 0.1 for most. With 0, long texts train faster
    on a CPU (1.7 times at 512 tokens), since a mask has the square of the text's tokens as its size."""
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Dropout of hidden values: of embeddings, of what each layer adds to them and, for BERT and its kin, before the
    head. null takes the model's own, which is 0.1 for most."""
    pooling: Literal["auto", "own", "mean"] = "auto"
    """How a text's tokens become one vector: `own` is the way of the model's own head (the first token, for most),
    `mean` is the mean of the tokens. `auto` takes the mean for sentence encoders, which are trained for it: the
    packaged one, or a folder whose sentence-transformers files (`1_Pooling`, `modules.json`) say so. It is decided once
    and kept in the run. An artefact that reads the mean is answered by rtrain and refused by transformers;
    sentence-transformers loads its encoder."""
    positions: Positive | None = None
    """Tokens that the model's table of positions is to hold: a shorter one gets its rows repeated, so that BERT or
    RoBERTa read texts of more than 512 tokens whole once they are trained on some. null, or no more than it has: as it
    is. ModernBERT has no table and needs none."""
    local_attention: Positive | None = None
    """Tokens that a token reads on either side, in a model that was made to read all of them (BERT, RoBERTa and their
    kin); beside these it reads the text's first token, which reads all. What a long text costs grows with its length
    then, and not with its square. null: as the model was made. Others' code would read all tokens: an artefact is
    answered by rtrain, and its head refused by transformers."""
    freeze: Literal["none", "encoder"] = "none"
    """Which weights stay as they are: `encoder` trains the head alone, which is several times as fast. A masked
    language model's output embedding is its encoder's word embedding, so it stays too."""


class Optim(Section):
    name: Literal["adamw", "radam"] = "adamw"
    """`radam` (Liu et al. 2020) corrects AdamW's first updates. Both cost the same and decouple weight decay."""
    lr: Annotated[float, Field(gt=0, lt=1)] = 2e-4
    """Peak learning rate."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the peak follows rows_per_update: `linear` is lr x (rows_per_update / lr_rows) (Goyal et al. 2017), `sqrt` is
    lr x the square root of that ratio, the rule for Adam (Malladi et al. 2022)."""
    lr_rows: Positive | None = None
    """The rows_per_update for which `lr` is meant; lr_scaling and beta2_scaling start from it."""
    beta2_scaling: Literal["none", "rows"] = "none"
    """How beta2, by which squared gradients are averaged, follows rows_per_update: `none` leaves 0.999, `rows` takes
    0.999^(rows_per_update / lr_rows), but no less than beta1 = 0.9, so that a row's weight in the average halves after
    as many rows at any rows_per_update (Marek et al. 2025, arXiv:2507.07101)."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor by which each encoder layer learns slower than the one above it: the head learns at `lr`, the last of L
    layers at lr x layer_decay, the embeddings at lr x layer_decay^(L + 1), as in the fine-tuning of BEiT."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay (Loshchilov and Hutter 2019)."""
    warmup: Share = 0.1
    """Share of all updates during which the learning rate rises from 0."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """Learning rate after warm-up: `linear` and `cosine` fall to 0 at the last update, `constant` stays."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest norm of an update's gradient; a larger one is scaled down to it. null: no limit."""


class Train(Section):
    epochs: Positive = 3
    """Times that each training row is trained on."""
    workers: Positive = 2
    """DDP workers, each one process of one CPU (or one GPU)."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """`gpu` gives each worker one GPU. `auto` takes GPUs where the cluster has any or its autoscaler may start any
    (with fewer workers where there are fewer GPUs), and CPUs elsewhere; it is decided once and kept in the run."""
    gpus_per_worker: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a GPU that a worker takes. Below 1, with `workers` 1 alone, several runs or trials share a GPU and its
    memory: NCCL takes no two workers of one run on one GPU."""
    min_workers: Positive | None = None
    """Fewest workers that a run goes on with while nodes are missing; it takes more again when they come back."""
    micro_batch: Positive = 8
    """Most rows of a pass: one forward and backward pass of a worker."""
    tokens_per_pass: Positive | None = None
    """Most tokens of a pass; a longer row goes alone. Default: 2,048 on a CPU; on a GPU what its memory holds, up to
    65,536, measured before the first update and kept in the run. A start that ran out of memory halves it. Models that
    are trained without padding (BERT and its kin) put a worker's rows between two exchanges into as few passes as this
    allows; micro_batch then only sets rows_per_update."""
    balance: Literal["off", "auto"] = "off"
    """How many of an update's tokens each worker gets: `off`, as many as the others; `auto`, by its speed, which three
    passes of each worker tell before the first update, once for a run with so many workers. For nodes of several types,
    or cores that other work shares: with equal shares the fast workers wait for the slowest."""
    gradient_checkpointing: bool = False
    """Save memory: keep only each layer's input, and compute the layer again in the backward pass. With MiniLM and 16
    texts of 512 tokens, a pass took 1.1 GB in place of 2.6, and 1.0 to 1.25 times as long."""
    gradient_compression: Literal["none", "bf16"] = "none"
    """`bf16` sends gradients in half the bytes. It changes the weights; the log says how far the gradient is off. For
    two workers over 100 Mbit/s an update of MiniLM took 3.5 s in place of 5.3."""
    strategy: Literal["manual", "auto"] = "manual"
    """Who says how the model lies on the workers: `manual`, the settings that follow; `auto`, the forecast of memory,
    which takes the first that fits of the whole model on each worker, shard 1, 2 and 3, the same with
    gradient_checkpointing, and with tensor. It is decided once, and kept in the run in their place."""
    shard: Literal[0, 1, 2, 3] = 0
    """What each worker keeps a share of, in place of the whole: 0 nothing; 1 the optimizer's state; 2 gradients too; 3
    weights too, which are gathered layer by layer (the stages of ZeRO). Each takes less memory than the one before, and
    more exchanges from 2 on. 1 gives the same weights as 0, bit for bit; the others add in another order."""
    tensor: Positive = 1
    """Workers that share one replica of the model: each has as many attention heads, and of the inner feed-forward
    layers as much, as the others (tensor parallelism). It must divide both, and the workers."""
    sequence: bool = False
    """With tensor > 1, and no pipeline: normalisations and dropout of a token are computed by one worker of the replica
    alone."""
    pipeline: Positive = 1
    """Workers that share one replica of the model, each with some of its layers: the stages of a pipeline, through
    which the passes of an update go; they have fewer tokens then, unless tokens_per_pass says how many. It must divide
    the workers. With tensor, a stage is so many workers; with shard 2 or 3, replicas share each stage's weights."""
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """With pipeline > 1, the order of passes in a stage: `gpipe` makes all forward passes before the first backward
    pass; `1f1b` makes backward passes as soon as it can, and so keeps as many passes at a time as there are stages;
    `interleaved` is 1f1b with two parts of the layers on each worker, which then wait less and send more."""
    context: Positive = 1
    """Workers that share one replica of the model, each with some of the tokens of every pass: for texts that one
    worker cannot hold (context parallelism; each exchanges tokens for attention heads within every layer). It must
    divide the workers and the heads, and goes with models that are trained without padding."""
    aggregation_frequency: Positive | None = None
    """Passes of micro_batch rows that a worker makes between two exchanges of gradients; sets rows_per_update.
    Default: 4."""
    rows_per_update: Positive | None = None
    """Rows of one optimizer step. Default: workers x micro_batch x aggregation_frequency."""
    precision: Literal["fp32", "bf16", "fp16", "fp64", "auto"] = "auto"
    """Number format of passes; weights and moments are fp32. `auto` takes bf16 where the device computes it natively,
    and a processor no slower than fp32; else fp16 on a GPU and fp32 on a CPU. It is decided once and kept in the run.
    fp16 scales the loss (Micikevicius et al. 2018): an update whose gradient is infinite is done again with half the
    scale. `fp64`, on CPUs alone, has weights and moments in it too, and takes twice the memory; the artefact is fp32.
    It is for comparisons: other workers add in another order, which differs by 1e-12 then, and by far more in fp32."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each true label's weight that is spread evenly over all labels; for classes, heads and tags."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the order of the rows, of dropout and of a new head's weights."""
    evaluate_every: Positive | None = None
    """Updates between two evaluations on the validation rows. Default: those of one epoch."""
    save_every: Positive | None = None
    """Updates between two checkpoints; each evaluation saves a checkpoint too."""
    keep: Positive = 2
    """Newest checkpoints that stay on the disk, beside the best one."""
    log_every: Positive = 10
    """Updates between two progress events."""

    @property
    def within(self) -> int:
        """Workers that share one replica of the model, and have its rows."""
        return self.tensor * self.pipeline * self.context

    @property
    def replicas(self) -> int:
        return -(-self.workers // self.within)


LAID_OUT = ("shard", "tensor", "sequence", "pipeline", "schedule", "context")
"""Settings of `train` that say how the model lies on the workers."""
SPEED = (
    *("workers", "device", "gpus_per_worker", "min_workers", "micro_batch", "tokens_per_pass"),
    *("aggregation_frequency", "balance", "gradient_checkpointing"),
    *("strategy", *LAID_OUT),
    *("save_every", "keep", "log_every"),
)
"""Settings of `train` that change speed or what is kept, never the weights, once rows_per_update is resolved. The one
exception is dropout: which activations it drops depends on the workers and their passes. `evaluate_every` is none of
them: the artefact has the best weights of those that were evaluated."""
STUDENTS = ".students"
"""Folder beside the runs with what students start from, each by its address: a teacher's version and what is left."""
LOCATION = ("name", "data.path", "data.valid", "data.test", "data.max_bad_rows")
"""Settings that say what the recipe is called, where its rows lie and how many of them may be bad. The rows themselves
are compared by the digest of their content."""

NEUTRAL_DATA: dict[str, Any] = {"id": None, "outside": None, "valid_part": 0, "delimiter": None, "escape": None}
"""Settings of `data` that are left out of a run's identity and of a token store's address at these values. An order of
rows begins with that address: another table is another order of the same rows."""
NEUTRAL: dict[str, dict[str, Any]] = {
    "data": NEUTRAL_DATA,
    "model": {
        **{"attention_dropout": None, "dropout": None, "pooling": "own", "freeze": "none"},
        **{"positions": None, "local_attention": None},
    },
    "optim": {"lr_scaling": "none", "lr_rows": None, "beta2_scaling": "none", "layer_decay": 1.0},
    "train": {"gradient_compression": "none"},
    "distill": {
        **{"student": None, "width": None, "unlabelled": None, "confidence": 0.0},
        **{"relations": 0.0, "relation_heads": 12, "relation_layer": None, "hidden": 0.0},
        **{"co_teachers": [], "copies": 0, "teacher_layers": "all"},
    },
    "compress": {"vocabulary_most": None},
}
"""Values at which settings change no weight, by section; there they are no part of a run's identity. `model.pooling` is
decided before a run is frozen."""


def without_neutral(settings: dict[str, Any], neutral: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in neutral or value != neutral[name]}


OF_STUDENTS = (*("model.name", "train.epochs", "optim.lr", "distill.teacher", "distill.co_teachers", "distill.copied"),)
"""Settings of a student that follow from its teacher and from its other settings."""
FRESH: dict[str, Any] = {"distill.copied": None, "distill.teacher_layers": "auto"}
"""Settings that a student does not take over from its teacher's run, where that is a student's too: they were decided
for other rows, or for other layers."""


class Distill(Section):
    student: str | None = None
    """Model that the student starts from, named as model.name is. null: layers of the teacher."""
    layers: Positive | None = 3
    """Encoder layers of the student, copied from evenly spaced layers of the teacher; null: all of them. `student` has
    its own."""
    teacher_layers: Positive | Literal["auto", "all"] = "auto"
    """How many of the teacher's first layers these are taken from. Its last ones have learned to answer from what all
    others made of a text, which is not what they are given in a student. `auto`: two thirds, or as many as the student
    has, and all where layers differ in how far they read, as ModernBERT's; it is decided once and kept in the run."""
    width: Positive | None = None
    """Hidden size of the student; heads and feed-forward layers get narrower in proportion, and all keep evenly spaced
    parts of the teacher's weights. null: the teacher's."""
    epochs: Positive = 3
    """Times that the student is trained on each row."""
    lr: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    """Peak learning rate of the student."""
    temperature: Annotated[float, Field(gt=0)] = 2.0
    """Temperature that softens both distributions before they are compared (Hinton et al. 2015, arXiv:1503.02531)."""
    alpha: Share = 0.7
    """Weight of the teacher's distribution in the loss; the true label has the rest."""
    unlabelled: str | None = None
    """File, folder or glob of further rows, with the columns of the training rows but for their labels. The student
    learns the teacher's answers to them."""
    copies: Annotated[int, Field(ge=0)] = 0
    """Copies of each training row whose words are in part other rows', and to which the student learns the teacher's
    answers too. 3 took a student of three layers, which finds entities, two thirds of the way to its teacher."""
    copied: str | None = None
    """File with these copies. `rtrain distill` sets it."""
    confidence: Share = 0.0
    """Rows of `unlabelled`, and copies, of which the teacher is less sure than this are left out."""
    relations: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the distance between the relations of tokens inside student and teacher, of queries with queries, keys
    with keys and values with values (MiniLMv2, Wang et al. 2020, arXiv:2012.15828). 0: off."""
    relation_heads: Positive = 12
    """Parts into which queries, keys and values are cut for that, whatever the attention heads; a divisor of both
    widths."""
    relation_layer: Positive | None = None
    """Layer of the teacher, from 1, whose relations the student's last layer learns. null: the last."""
    hidden: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the squared distance between the layers' hidden states, the student's through a learned linear map
    (TinyBERT, Jiao et al. 2020, arXiv:1909.10351). 0: off."""
    teacher: str | None = None
    """Version of the artefact whose answers are learned. `rtrain distill` sets it; it is null in any other run."""
    teachers: tuple[str, ...] = ()
    """Further runs, of the same rows and labels, whose models teach too: the student learns the mean of all outputs.
    Trained with other seeds, they err in other places, and their mean errs less."""
    co_teachers: tuple[str, ...] = ()
    """Versions of the artefacts of `teachers`. `rtrain distill` sets them."""

    @property
    def answers(self) -> str | None:
        """The name under which a token store keeps the answers that are learned: the teacher's version or, where there
        are several, a digest of all versions."""
        if self.teacher is None or not self.co_teachers:
            return self.teacher
        return "mean-" + hashlib.sha256(" ".join(sorted([self.teacher, *self.co_teachers])).encode()).hexdigest()[:12]


class Compress(Section):
    vocabulary: Literal["keep", "trim"] = "keep"
    """`trim` cuts the model, before it is trained, to the pieces that its training rows use, with every single
    character and special token, into which other words fall apart. With `rtrain distill` the student is cut and its
    teacher is not."""
    unlabelled: str | None = None
    """File, folder or glob of further rows whose pieces are kept, with the columns of the training rows but for their
    labels: requests as they really come, say."""
    vocabulary_pieces: Annotated[int, Field(ge=0)] = 5500
    """Pieces to keep at least: where the rows need fewer, the vocabulary's first others are kept too, which are its
    most frequent. A piece costs as many bytes of an int8 model as the word embedding is wide, 384 of MiniLM's; with
    the default, an int8 student of 3 of its layers is served from 8.2 MB."""
    vocabulary_most: Positive | None = None
    """Most pieces to keep: where the rows need more, those that are rarest in them are not kept, and their words fall
    apart before the model is trained. null: all that the rows need."""


class Quantize(Section):
    engine: Annotated[str, OneOf(engines.quantized)] = engines.quantized()[0]
    """What computes the int8 answers: an engine of `rtrain.core.engines` that has a quantizer. `onnxruntime` needs the
    extra `onnx`."""
    kind: Literal["static", "weights"] = "static"
    """`static` computes in int8, by scales of the activations that are measured beforehand. `weights` keeps weights
    alone in int8: as small, nothing to calibrate, nearer to the float model, and half as fast in batches."""
    table: Literal["int8", "int4"] = "int8"
    """Numbers of the word table. `int4` halves it and changes a few answers in a thousand; the engine `openvino` alone.
    """
    compressed: bool = False
    """Keep the graph's files compressed, a seventh smaller. Where it is first loaded they are unpacked into the user's
    cache, or into memory where there is none."""
    flips: Share | None = None
    """Largest share of the calibration rows' answers that may differ from the float model's. Where more do, the
    operations that change them most are computed in float, as few as needed. null: none is."""
    calibration_rows: Positive = 256
    """Training rows from which the scales of activations are measured."""
    overflow_fix: bool = False
    """Use half of the range of int8 for weights. On x86 processors without VNNI or AMX, sums of two products saturate
    with the whole range, and answers are further from the float model's."""


class Gate(Section):
    loss: Share = 0.01
    """Share of its base's score that a candidate may lose. The interval must rule out three times as much."""
    slice_loss: Share = 0.05
    """The same in any slice of 20 rows or more."""
    lost: Share = 0.02
    """Share of the base's right answers that a candidate may answer wrongly, whatever it has right instead."""
    student_loss: Share = 0.05
    """In place of `loss` where the base is the candidate's teacher, since a student has fewer layers."""
    student_slice_loss: Share = 0.15
    """In place of `slice_loss`, for a student."""
    student_lost: Share = 0.15
    """In place of `lost`, for a student."""
    speedup: Annotated[float, Field(ge=0)] = 0.95
    """Least median latency of the base divided by the candidate's, in each bucket of lengths. 0.95: 5 % slower."""
    megabytes: Annotated[float, Field(gt=0)] | None = None
    """Most megabytes of all of a candidate's files."""
    memory_mb: Annotated[float, Field(gt=0)] | None = None
    """Most megabytes of memory that a loaded candidate takes. It is measured where a limit is set, and by the verb
    `rtrain gate`."""
    seconds: Annotated[float, Field(gt=0)] = 5.0
    """About how long latency is measured."""


class Recipe(Section):
    name: Annotated[str, Field(pattern=r"^\w[^/\\\x00-\x1f]*$")]
    """Name of the recipe; without --out a run folder begins with it."""
    task: Annotated[str, OneOf(lambda: TASKS)]
    """What the model is trained to answer."""
    data: Data = Data()
    augment: Augment = Augment()
    model: Model = Model()
    optim: Optim = Optim()
    train: Train = Train()
    distill: Distill = Distill()
    compress: Compress = Compress()
    quantize: Quantize = Quantize()
    gate: Gate = Gate()

    @property
    def answers(self) -> str | None:
        """`distill.answers` where a teacher's are learned: of a masked language model, what is inside is."""
        return None if self.task == "masked_lm" else self.distill.answers

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

    @property
    def beta2(self) -> float:
        """By which squared gradients are averaged; see `optim.beta2_scaling`."""
        optim, (beta1, beta2) = self.optim, BETAS
        if optim.beta2_scaling == "none" or optim.lr_rows is None:
            return beta2
        return max(beta1, math.pow(beta2, self.rows_per_update / optim.lr_rows))

    def weights(self) -> dict[str, Any]:
        """The settings that change the weights, by section. rows_per_update and evaluate_every are among them; workers,
        micro-batch, the name and the places of the rows are not."""
        others = {"quantize", "gate"} if self.distill.teacher else {"quantize", "gate", "distill"}
        document = self.model_dump(mode="json", exclude=others)
        for name in LOCATION:
            section, _, leaf = name.rpartition(".")
            del (document[section] if section else document)[leaf]
        if (start := PurePath(self.model.name)).parent.name == STUDENTS:  # its own name says what it is made of
            document["model"]["name"] = f"{STUDENTS}/{start.name}"
        for name in SPEED:
            del document["train"][name]
        document["data"]["id"] = None  # it names rows, and changes none
        for name in ("teachers", "copied"):  # where they lie; what they are is in co_teachers, and follows from copies
            document.get("distill", {}).pop(name, None)
        if self.compress.vocabulary == "keep":  # then nothing of the section counts
            del document["compress"]
        if not self.augment.active:  # then it changes no row
            del document["augment"]
        if self.optim.lr_scaling == self.optim.beta2_scaling == "none":
            document["optim"]["lr_rows"] = None
        for section, neutral in NEUTRAL.items():
            if section in document:
                document[section] = without_neutral(document[section], neutral)
        document["train"]["rows_per_update"] = self.rows_per_update
        return document

    def identity(self) -> str:
        """Digest of what changes the weights."""
        return hashlib.sha256(json.dumps(self.weights(), sort_keys=True).encode()).hexdigest()[:16]
