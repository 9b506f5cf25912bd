"""`Recipe` and its sections: the settings that identify a run.

The sections `data` and `augment`, which select the rows, are in `config.data`.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from rtrain.config.data import (
    AugmentConfig,
    ConfigSection,
    DataConfig,
    Fraction,
    NonNegative,
    OneOf,
    PositiveInt,
    conflict_problem,
    find_augment_problems,
    find_data_problems,
    missing_problem,
    out_of_range_problem,
)
from rtrain.config.selection import MetricsConfig, find_selection_problems
from rtrain.core import engines, plugins
from rtrain.core.errors import Problem

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

DEFAULT_AGGREGATION_FREQUENCY = 4
ADAM_BETAS = (0.9, 0.999)
"""Decay rates of the averages of gradients and of their squares in AdamW and RAdam. `optim.beta2_scaling` changes the
second."""


class ModelConfig(ConfigSection):
    name: str = "minilm"
    """`minilm` (the packaged all-MiniLM-L6-v2), a Transformers folder, or a model hub name (also with @revision). It is
    an encoder: decoders and encoder-decoders are refused."""
    attention_dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Dropout of attention weights; null takes the model's own, which is 0.1 for most. With 0, long texts train faster
    on a CPU (1.7 times at 512 tokens), since a mask has the square of the text's tokens as its size."""
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Dropout of hidden values: of embeddings, of each layer's output and, for BERT and related models, before the
    head. null takes the model's own, which is 0.1 for most."""
    pooling: Literal["auto", "own", "mean"] = "auto"
    """How a text's tokens become one vector: `own` is the pooling of the model's own head (the first token, for most),
    `mean` is the mean of the tokens. `auto` takes the mean for sentence encoders, which are trained for it: the
    packaged one, or a folder whose sentence-transformers files (`1_Pooling`, `modules.json`) say so. The choice is made
    once and kept in the run. rtrain answers with an artifact that reads the mean, transformers refuses it, and
    sentence-transformers loads its encoder."""
    max_position_embeddings: PositiveInt | None = None
    """Number of position embeddings of the model: a shorter table gets its rows repeated, so that BERT or RoBERTa read
    texts of more than 512 tokens whole after training on some. null, or no more than the model has: unchanged.
    ModernBERT has no such table and needs none."""
    attention_window: PositiveInt | None = None
    """Tokens that a token attends to on either side, in a model with full attention (BERT, RoBERTa and related models);
    every token also attends to the text's first token, which attends to all. The cost of a text then grows with its
    length, and not with its square. null: the model's own attention. Other programs would attend to all tokens: rtrain
    answers with the artifact, and transformers refuses its head."""
    freeze: Literal["none", "encoder"] = "none"
    """Frozen weights: `encoder` trains the head alone, which is several times as fast. The output embedding of a masked
    language model is its encoder's word embedding, so it is frozen too."""


class OptimConfig(ConfigSection):
    name: Literal["adamw", "radam"] = "adamw"
    """`radam` (Liu et al. 2020) corrects AdamW's first steps. Both cost the same and decouple weight decay."""
    lr: Annotated[float, Field(gt=0, lt=1)] = 2e-4
    """Peak learning rate."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the peak follows global_batch_size: `linear` is lr x (global_batch_size / lr_reference_batch_size) (Goyal et
    al. 2017), `sqrt` is lr x the square root of that ratio, the rule for Adam (Malladi et al. 2022)."""
    lr_reference_batch_size: PositiveInt | None = None
    """The global_batch_size for which `lr` was chosen; lr_scaling and beta2_scaling start from it."""
    beta2_scaling: Literal["none", "rows"] = "none"
    """How beta2, the decay rate of the average of squared gradients, follows global_batch_size: `none` keeps 0.999,
    `rows` takes 0.999^(global_batch_size / lr_reference_batch_size), but no less than beta1 = 0.9, so that a row's
    weight in the average halves after as many rows at any global_batch_size (Marek et al. 2025, arXiv:2507.07101)."""
    layerwise_lr_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Ratio of the learning rates of an encoder layer and the layer above it: the head learns at `lr`, the last of L
    layers at lr x layerwise_lr_decay, the embeddings at lr x layerwise_lr_decay^(L + 1), as in the fine-tuning of
    BEiT."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay (Loshchilov and Hutter 2019)."""
    warmup: Fraction = 0.1
    """Share of all steps during which the learning rate rises from 0."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """Learning rate after warm-up: `linear` and `cosine` fall to 0 at the last step, `constant` stays."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest norm of a step's gradient; a larger gradient is scaled down to it (gradient clipping). null: no limit."""


LOSSES = ("cross_entropy", "focal", "asymmetric")
"""Losses of labels (`train.loss`); `rtrain.tasks.label_losses` has them."""
CLASS_WEIGHT_RULES = ("none", "balanced", "effective")
"""Values of `train.class_weights` besides weights by label."""


class TrainConfig(ConfigSection):
    epochs: PositiveInt = 3
    """Number of passes over the training rows."""
    workers: PositiveInt = 2
    """DDP workers, each one process of one CPU (or one GPU)."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """`gpu` gives each worker one GPU. `auto` takes GPUs where the cluster has any or its autoscaler may start any
    (with fewer workers where there are fewer GPUs), and CPUs elsewhere; it is decided once and kept in the run."""
    gpus_per_worker: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a GPU that a worker takes. Below 1, with `workers` 1 alone, several runs or trials share a GPU and its
    memory: NCCL takes no two workers of one run on one GPU."""
    min_workers: PositiveInt | None = None
    """Fewest workers of a run while nodes are missing; it takes more again when they return."""
    micro_batch_size: PositiveInt = 8
    """Most rows of a micro-batch: one forward and backward computation of a worker."""
    max_tokens_per_micro_batch: PositiveInt | None = None
    """Most tokens of a micro-batch; a longer row is a micro-batch of its own. Default: 2,048 on a CPU; on a GPU as many
    as its memory holds, up to 65,536, measured before the first step and kept in the run. An attempt that ran out of
    memory halves it. Models that are trained without padding (BERT and related models) pack a worker's rows between two
    all-reduces into as few micro-batches as this allows; micro_batch_size then only sets global_batch_size."""
    load_balancing: Literal["off", "auto"] = "off"
    """How many of a step's tokens each worker gets: `off`, as many as the others; `auto`, in proportion to its speed,
    which is measured with three micro-batches of each worker before the first step, once for a run with so many
    workers. For nodes of several types, or cores that other programs share: with equal shares the fast workers wait for
    the slowest."""
    gradient_checkpointing: bool = False
    """Save memory: keep only each layer's input, and compute the layer again in the backward pass. With MiniLM and 16
    texts of 512 tokens, a micro-batch took 1.1 GB instead of 2.6, and 1.0 to 1.25 times as long."""
    embedding_rows: Literal["auto", "used", "all"] = "auto"
    """Rows of the word embedding in memory: `all`, or those of tokens that the run's texts `used`. The others have no
    gradient and only decay, so the artifact gets the same table. `auto` takes `used` where this saves a million weights
    or more. The choice is made once and kept in the run."""
    gradient_compression: Literal["none", "bf16"] = "none"
    """`bf16` sends gradients in half the bytes. It changes the weights; the log says how far the gradient is off. For
    two workers over 100 Mbit/s a step of MiniLM took 3.5 s instead of 5.3."""
    strategy: Literal["manual", "auto"] = "manual"
    """Which settings place the model on the workers: `manual`, those below; `auto`, the memory forecast, which takes
    the first layout that fits: the whole model on each worker, zero_stage 1, 2 and 3, the same with
    gradient_checkpointing, then with tensor_parallel_size. The choice is made once and kept in the run in place of
    these settings."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """Stage of ZeRO, the state that is sharded over the workers: 0 none; 1 the optimizer's state; 2 gradients too; 3
    weights too, which are gathered layer by layer. Each stage takes less memory than the one before, and more
    communication from 2 on. 1 gives the same weights as 0, bit for bit; 2 and 3 add in another order."""
    tensor_parallel_size: PositiveInt = 1
    """Workers that share one replica of the model: each has an equal part of the attention heads and of the inner
    feed-forward layers (tensor parallelism). It must divide both, and the workers."""
    sequence_parallel: bool = False
    """Sequence parallelism, for tensor_parallel_size > 1 without a pipeline: one worker of the replica alone computes
    normalization and dropout of a token."""
    pipeline_parallel_size: PositiveInt = 1
    """Workers that share one replica of the model, each with some of its layers: the stages of a pipeline for the
    micro-batches of a step, which have fewer tokens then, unless max_tokens_per_micro_batch is set. It must divide the
    workers. A stage has tensor_parallel_size workers; with zero_stage 2 or 3, replicas share each stage's weights."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """Order of forward and backward passes in a stage, for pipeline_parallel_size > 1: `gpipe` makes all forward passes
    before the first backward pass; `1f1b` makes backward passes as soon as it can, and so keeps only as many
    micro-batches as there are stages; `interleaved` is 1f1b with two parts of the layers on each worker, which then
    wait less and send more."""
    context_parallel_size: PositiveInt = 1
    """Workers that share one replica of the model, each with some of the tokens of every micro-batch: for texts that
    one worker cannot hold (context parallelism; the workers exchange tokens for attention heads within every layer). It
    must divide the workers and the heads, and needs a model that is trained without padding."""
    aggregation_frequency: PositiveInt | None = None
    """Micro-batches of micro_batch_size rows per worker between two all-reduces of gradients (gradient accumulation
    steps); sets global_batch_size. Default: 4."""
    global_batch_size: PositiveInt | None = None
    """Rows of one optimizer step. Default: workers x micro_batch_size x aggregation_frequency."""
    precision: Literal["fp32", "bf16", "fp16", "fp64", "auto"] = "auto"
    """Number format of forward and backward passes; weights and moments are fp32. `auto` takes bf16 where the device
    computes it natively, and a CPU no slower than fp32; else fp16 on a GPU and fp32 on a CPU. The choice is made once
    and kept in the run. fp16 scales the loss (Micikevicius et al. 2018): a step with a non-finite gradient is repeated
    with half the scale. `fp64`, on CPUs alone, has weights and moments in fp64 too, and takes twice the memory; the
    artifact is fp32. It is for comparisons: another number of workers adds in another order, a difference of 1e-12 in
    fp64, and of far more in fp32."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each true label's weight that is spread evenly over all labels; for classes, heads and tags."""
    class_weights: Literal["none", "balanced", "effective"] | dict[str, NonNegative] = "none"
    """Weight of each label's targets in the loss, for classes, heads, several labels and tags. `balanced`: rows /
    (labels x rows of the label), as in scikit-learn. `effective`: in inverse proportion to the label's effective number
    of rows, (1 - b^rows) / (1 - b) with b = 0.999 (Cui et al. 2019, arXiv:1901.05555). Or weights by label, `{urgent:
    5}`: other labels weigh 1; a head's label is written `head=label`. For several labels per text they are the weights
    of a label's positives, against 1 of its negatives: `balanced` is negatives / positives. A student learns its
    teacher's answers unweighted."""
    loss: Annotated[str, OneOf(lambda: (*LOSSES, *plugins.list_names("loss")))] = "cross_entropy"
    """Loss of a label: `cross_entropy`; `focal`, which lowers the loss of easy targets (Lin et al. 2017,
    arXiv:1708.02002); `asymmetric`, which lowers it most for absent labels (Ridnik et al. 2021, arXiv:2009.14119), for
    multi_label; or the name of a plug-in's. A student learns by cross-entropy."""
    focal_gamma: NonNegative = 2.0
    """Exponent of the focal loss; 0 is cross-entropy."""
    focal_alpha: Fraction | None = 0.25
    """Factor of present labels in the focal loss of multi_label, absent ones have 1 - focal_alpha; null: no factors."""
    asymmetric_gamma_positive: NonNegative = 0.0
    """Exponent of the asymmetric loss for present labels."""
    asymmetric_gamma_negative: NonNegative = 4.0
    """Exponent of the asymmetric loss for absent labels."""
    asymmetric_margin: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Probability below which an absent label has no asymmetric loss."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the order of the rows, of dropout and of a new head's weights."""
    evaluate_every: PositiveInt | None = None
    """Steps between two evaluations on the validation rows. Default: the steps of one epoch."""
    save_every: PositiveInt | None = None
    """Steps between two checkpoints; each evaluation saves a checkpoint too."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints that stay on the disk, in addition to the best one."""
    best_by: str | None = None
    """Validation score whose best evaluation gives the artifact's weights: `loss`, one of the task's scores
    (`macro_f1`), `recall:LABEL` or `precision:LABEL` of one label, or `recall@precision:LABEL=0.9` (the recall of the
    label where its precision is 0.9, and the reverse). A label of one head of several is `HEAD/LABEL`. null: the task's
    headline."""
    patience: PositiveInt | None = None
    """Evaluations in a row without a better `best_by` after which the training ends. The learning rate is that of all
    `epochs`, so it has not fallen to 0 by then. null: no early end."""
    keep_best: PositiveInt = 1
    """Best checkpoints by `best_by` that stay on the disk."""
    average_best: bool = False
    """Give the artifact the mean of the weights of the `keep_best` best checkpoints (Izmailov et al. 2018,
    arXiv:1803.05407), in place of the best ones."""
    log_every: PositiveInt = 10
    """Steps between two progress events."""

    @field_validator("class_weights", mode="before")
    @classmethod
    def _name_labels(cls, value: Any) -> Any:
        """Names of labels as texts: YAML reads 1 and yes as a number and as true. Refuses other values by one problem,
        not one for each type of the setting."""
        if not isinstance(value, Mapping):
            return OneOf(lambda: CLASS_WEIGHT_RULES).validate_name(value)
        for label, weight in value.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
                message = "the weight of {label} is not a number of 0 or more"
                raise PydanticCustomError("greater_than_equal", message, {"label": repr(label)})
        return {str(label).lower() if isinstance(label, bool) else str(label): value[label] for label in value}

    @property
    def workers_per_replica(self) -> int:
        """Workers that share one replica of the model, and have its rows."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def num_replicas(self) -> int:
        return -(-self.workers // self.workers_per_replica)


LAYOUT_SETTINGS = (
    "zero_stage",
    "tensor_parallel_size",
    "sequence_parallel",
    "pipeline_parallel_size",
    "pipeline_schedule",
    "context_parallel_size",
)
"""Settings of `train` that place the model on the workers."""
SPEED_SETTINGS = (
    *("workers", "device", "gpus_per_worker", "min_workers", "micro_batch_size", "max_tokens_per_micro_batch"),
    *("aggregation_frequency", "load_balancing", "gradient_checkpointing"),
    "embedding_rows",
    *("strategy", *LAYOUT_SETTINGS),
    *("save_every", "keep_checkpoints", "keep_best", "log_every"),
)
"""Settings of `train` that change speed or the files kept, never the weights, once global_batch_size is resolved. The
one exception is dropout: the activations it drops depend on the workers and their micro-batches. `evaluate_every` is
not among them: the artifact has the best weights of all evaluations. `keep_best` changes the weights with
`average_best` alone, and is part of the recipe digest then."""
STUDENTS_FOLDER = ".students"
"""Folder beside the runs with the initial weights of students, by digest of the teacher's version and the layers
kept."""
LOCATION_SETTINGS = ("name", "data.path", "data.query", "data.valid", "data.test", "data.max_bad_rows")
"""Settings for the name of the recipe, the location of its rows and the share of bad rows allowed. The rows themselves
are compared by the digest of their content."""

NEUTRAL_ROW_SETTINGS: dict[str, Any] = {
    **{"query": None, "where": None, "text_separator": "\n", "features": [], "strip_html": False, "labels": {}},
    **{"stratify": None, "split_time": None},
}
"""Settings of `data` that are left out of every address and of an artifact at these values."""
NEUTRAL_DATA_SETTINGS: dict[str, Any] = {
    "id": None,
    "out_of_scope_label": None,
    "validation_fold": 0,
    "delimiter": None,
    "escape": None,
    "weight_column": None,
    "sampling": None,
    **NEUTRAL_ROW_SETTINGS,
}
"""Settings of `data` that are left out of a recipe digest and of a token store's address at these values. The order of
rows is seeded by that address: another table here is another order of the same rows."""
NEUTRAL_AUGMENT_SETTINGS: dict[str, Any] = {"functions": []}
NEUTRAL_SETTINGS: dict[str, dict[str, Any]] = {
    "data": NEUTRAL_DATA_SETTINGS,
    "model": {
        **{"attention_dropout": None, "dropout": None, "pooling": "own", "freeze": "none"},
        **{"max_position_embeddings": None, "attention_window": None},
    },
    "optim": {
        "lr_scaling": "none",
        "lr_reference_batch_size": None,
        "beta2_scaling": "none",
        "layerwise_lr_decay": 1.0,
    },
    "train": {
        **{"gradient_compression": "none", "class_weights": "none", "loss": "cross_entropy"},
        **{"best_by": None, "patience": None, "average_best": False},
    },
    "augment": NEUTRAL_AUGMENT_SETTINGS,
    "distill": {
        **{"student": None, "width": None, "unlabeled_rows_path": None, "confidence": 0.0},
        **{"relation_loss_weight": 0.0, "relation_heads": 12, "relation_layer": None, "hidden_loss_weight": 0.0},
        **{"co_teachers": [], "augmented_copies": 0, "teacher_layers": "all"},
    },
    "compress": {"max_vocab_size": None},
}
"""Values at which settings change no weight, by section; at these values they are left out of the recipe digest.
`model.pooling` is resolved before the configuration is frozen."""


def drop_neutral(settings: dict[str, Any], neutral_values: dict[str, Any]) -> dict[str, Any]:
    absent = object()
    return {name: value for name, value in settings.items() if value != neutral_values.get(name, absent)}


STUDENT_SETTINGS = (
    *("model.name", "train.epochs", "optim.lr"),
    *("distill.teacher", "distill.co_teachers", "distill.augmented_rows_path"),
)
"""Settings of a student that follow from its teacher and from its other settings."""
SETTINGS_RESET_FOR_STUDENTS: dict[str, Any] = {
    **{"distill.augmented_rows_path": None, "distill.teacher_layers": "auto"},
    **{"train.class_weights": "none", "train.loss": "cross_entropy"},
}
"""Settings that a student does not inherit from its teacher's run: they were chosen for other rows, for other layers,
or for a loss without a teacher, whose answers have learned from them."""


class DistillConfig(ConfigSection):
    student: str | None = None
    """Model that the student starts from, named as model.name is. null: layers of the teacher."""
    layers: PositiveInt | None = 3
    """Encoder layers of the student, copied from evenly spaced layers of the teacher; null: all of them. `student` has
    its own."""
    teacher_layers: PositiveInt | Literal["auto", "all"] = "auto"
    """How many of the teacher's first layers the student's layers are taken from. The teacher's last layers have
    learned from the output of all layers below, which a student lacks. `auto`: two thirds, or as many as the student
    has, and all where layers differ in their attention window, as ModernBERT's; the choice is made once and kept in the
    run."""
    width: PositiveInt | None = None
    """Hidden size of the student; heads and feed-forward layers are narrower in proportion, and all take evenly spaced
    parts of the teacher's weights. null: the teacher's."""
    epochs: PositiveInt = 3
    """Number of passes of the student's training over the rows."""
    lr: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    """Peak learning rate of the student."""
    temperature: Annotated[float, Field(gt=0)] = 2.0
    """Temperature that softens both distributions before they are compared (Hinton et al. 2015, arXiv:1503.02531)."""
    alpha: Fraction = 0.7
    """Weight of the teacher's distribution in the loss; the true label has the rest."""
    unlabeled_rows_path: str | None = None
    """File, folder or glob of further rows, with the columns of the training rows but for their labels. The student
    learns the teacher's answers to them."""
    augmented_copies: Annotated[int, Field(ge=0)] = 0
    """Copies of each training row in which some words come from other rows; the student learns the teacher's answers to
    them too. 3 copies closed two thirds of the gap between a student of three layers for entities and its teacher."""
    augmented_rows_path: str | None = None
    """File with these copies. `rtrain distill` sets it."""
    confidence: Fraction = 0.0
    """Rows of `unlabeled_rows_path`, and copies, with less confidence of the teacher than this are left out."""
    relation_loss_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the distance between the relations of tokens inside student and teacher, of queries with queries, keys
    with keys and values with values (MiniLMv2, Wang et al. 2020, arXiv:2012.15828). 0: off."""
    relation_heads: PositiveInt = 12
    """Parts into which queries, keys and values are split for these relations, independent of the attention heads; a
    divisor of both widths."""
    relation_layer: PositiveInt | None = None
    """Layer of the teacher, from 1, whose relations the student's last layer learns. null: the last."""
    hidden_loss_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the squared distance between the layers' hidden states, the student's through a learned linear map
    (TinyBERT, Jiao et al. 2020, arXiv:1909.10351). 0: off."""
    teacher: str | None = None
    """Version of the teacher's artifact. `rtrain distill` sets it; it is null in any other run."""
    teachers: tuple[str, ...] = ()
    """Further teachers: runs with the same rows and labels. The student learns the mean of all outputs. Models of
    several seeds err on different rows, and their mean errs less."""
    co_teachers: tuple[str, ...] = ()
    """Versions of the artifacts of `teachers`. `rtrain distill` sets them."""

    @property
    def teacher_logits_key(self) -> str | None:
        """The name of the teacher's logits in a token store: the teacher's version or, with several teachers, a digest
        of all versions."""
        if self.teacher is None or not self.co_teachers:
            return self.teacher
        return "mean-" + hashlib.sha256(" ".join(sorted([self.teacher, *self.co_teachers])).encode()).hexdigest()[:12]


class CompressConfig(ConfigSection):
    vocabulary: Literal["keep", "trim"] = "keep"
    """`trim` reduces the vocabulary before training to the pieces that the training rows use, all single characters and
    special tokens; other words are split into these. With `rtrain distill` the student is trimmed and its teacher is
    not."""
    unlabeled_rows_path: str | None = None
    """File, folder or glob of further rows whose pieces are kept, with the columns of the training rows but for their
    labels, for example real requests."""
    min_vocab_size: Annotated[int, Field(ge=0)] = 5500
    """Least number of pieces: where the rows need fewer, the first others of the vocabulary are kept too, its most
    frequent. A piece costs as many bytes of an int8 model as the word embedding is wide, 384 for MiniLM; with the
    default, an int8 student of 3 of its layers is served from 8.2 MB."""
    max_vocab_size: PositiveInt | None = None
    """Largest number of pieces: where the rows need more, the rarest are dropped, and their words are split before
    training. null: all pieces that the rows need."""


class QuantizeConfig(ConfigSection):
    engine: Annotated[str, OneOf(engines.list_quantized_engines)] = engines.list_quantized_engines()[0]
    """Engine of the int8 artifact: one of `rtrain.core.engines` with a quantizer. `onnxruntime` needs the
    extra `onnx`."""
    kind: Literal["static", "weights"] = "static"
    """`static` computes in int8, with scales of the activations that are measured in advance. `weights` has the
    weights alone in int8: as small, no calibration, nearer to the float model, and half as fast in batches."""
    embedding_dtype: Literal["int8", "int4"] = "int8"
    """Number format of the word embedding. `int4` halves it and changes a few answers in a thousand; only for
    `openvino`.
    """
    compressed: bool = False
    """Keep the graph's files compressed, a seventh smaller. The first load unpacks them into the user's cache, or into
    memory where there is no cache."""
    max_changed_predictions: Fraction | None = None
    """Largest share of the calibration rows' answers that may differ from the float model's. Where more do, the
    operations that change them most are computed in float, as few as needed. null: no operation."""
    calibration_rows: PositiveInt = 256
    """Training rows from which the scales of activations are measured."""
    overflow_fix: bool = False
    """Use half of the range of int8 for weights. On x86 processors without VNNI or AMX, sums of two products saturate
    with the whole range, and answers are further from the float model's."""


EMPTY_LIMITS: Final[dict[str, float]] = {}


class GateConfig(ConfigSection):
    max_score_drop: Fraction = 0.01
    """Largest relative drop of a candidate's score below its baseline's. The interval must rule out three times as
    much."""
    max_slice_drop: Fraction = 0.05
    """The same in any slice of 20 rows or more."""
    max_negative_flips: Fraction = 0.02
    """Largest share of the baseline's right answers that a candidate answers wrongly, whatever it answers right
    instead."""
    student_max_score_drop: Fraction = 0.05
    """In place of `max_score_drop` where the baseline is the candidate's teacher, since a student has fewer layers."""
    student_max_slice_drop: Fraction = 0.15
    """In place of `max_slice_drop`, for a student."""
    student_max_negative_flips: Fraction = 0.15
    """In place of `max_negative_flips`, for a student."""
    min_speedup: Annotated[float, Field(ge=0)] = 0.95
    """Least ratio of the baseline's median latency to the candidate's, in each bucket of lengths. 0.95: 5 % slower."""
    max_megabytes: Annotated[float, Field(gt=0)] | None = None
    """Most megabytes of a candidate's files together."""
    max_memory_mb: Annotated[float, Field(gt=0)] | None = None
    """Most megabytes of memory that a loaded candidate takes. It is measured where a limit is set, and by the verb
    `rtrain gate`."""
    latency_seconds: Annotated[float, Field(gt=0)] = 5.0
    """Seconds for which latency is measured, roughly."""
    min_recall: dict[str, Fraction] = EMPTY_LIMITS
    """Least recall of a candidate on the test rows by label, e.g. {P1: 0.8}, whatever its baseline has. A label of one
    head of several is `HEAD/LABEL`."""
    min_precision: dict[str, Fraction] = EMPTY_LIMITS
    """The same for precision."""


class Recipe(ConfigSection):
    name: Annotated[str, Field(pattern=r"^\w[^/\\\x00-\x1f]*$")]
    """Name of the recipe; without --out a run folder begins with it."""
    task: Annotated[str, OneOf(lambda: (*TASKS, *plugins.list_names("task")))]
    """Task that the model is trained for."""
    plugins: tuple[str, ...] = ()
    """Python modules or files with tasks, losses, metrics, sources, trackers and augmentations of your own, e.g.
    [my_company.rtrain_ext] or [my_ext.py]; see docs/adding.md. A run keeps their module names and digests."""
    data: DataConfig = DataConfig()
    augment: AugmentConfig = AugmentConfig()
    model: ModelConfig = ModelConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    distill: DistillConfig = DistillConfig()
    compress: CompressConfig = CompressConfig()
    quantize: QuantizeConfig = QuantizeConfig()
    metrics: MetricsConfig = MetricsConfig()
    gate: GateConfig = GateConfig()

    def __getstate__(self) -> dict[Any, Any]:
        return {**super().__getstate__(), "plugins": plugins.describe_plugins(self.plugins)}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Load the plug-ins in a worker: the recipe's names are registered there."""
        plugins.receive_plugins(state.pop("plugins"))
        super().__setstate__(state)

    @property
    def teacher_logits_key(self) -> str | None:
        """`distill.teacher_logits_key` where a student learns a teacher's logits; a student of a masked language model
        learns hidden states instead."""
        return None if self.task == "masked_lm" else self.distill.teacher_logits_key

    @property
    def global_batch_size(self) -> int:
        """Rows of one optimizer step; the default is four micro-batches of every worker."""
        train = self.train
        aggregation_frequency = train.aggregation_frequency or DEFAULT_AGGREGATION_FREQUENCY
        return train.global_batch_size or train.workers * train.micro_batch_size * aggregation_frequency

    @property
    def peak_lr(self) -> float:
        """The highest learning rate: `optim.lr`, scaled to global_batch_size."""
        optim = self.optim
        if optim.lr_scaling == "none" or optim.lr_reference_batch_size is None:
            return optim.lr
        ratio = self.global_batch_size / optim.lr_reference_batch_size
        return optim.lr * (ratio if optim.lr_scaling == "linear" else math.sqrt(ratio))

    @property
    def beta2(self) -> float:
        """Decay rate of the average of squared gradients; see `optim.beta2_scaling`."""
        optim, (beta1, beta2) = self.optim, ADAM_BETAS
        if optim.beta2_scaling == "none" or optim.lr_reference_batch_size is None:
            return beta2
        return max(beta1, math.pow(beta2, self.global_batch_size / optim.lr_reference_batch_size))

    @property
    def has_weighted_loss(self) -> bool:
        """Whether the loss is another than the plain mean over the targets."""
        train = self.train
        has_weights = train.class_weights != "none" or self.data.weight_column is not None
        return has_weights or train.loss != "cross_entropy"

    def weight_settings(self) -> dict[str, Any]:
        """The settings that change the weights, by section. global_batch_size and evaluate_every are among them;
        workers, micro_batch_size, the name and the location of the rows are not."""
        excluded_sections = {"quantize", "gate", "metrics", *(() if self.distill.teacher else ("distill",))}
        document = self.model_dump(mode="json", exclude=excluded_sections)
        for name in LOCATION_SETTINGS:
            section, _, leaf = name.rpartition(".")
            del (document[section] if section else document)[leaf]
        student_start = PurePath(self.model.name)
        if student_start.parent.name == STUDENTS_FOLDER:  # the folder's name is a digest of its content
            document["model"]["name"] = f"{STUDENTS_FOLDER}/{student_start.name}"
        for name in SPEED_SETTINGS:
            if not (name == "keep_best" and self.train.average_best):
                del document["train"][name]
        del document["plugins"]
        if digests := plugins.weight_digests(self.plugins):
            document["plugins"] = digests
        document["data"]["id"] = None  # names rows, changes none
        for name in TrainConfig.model_fields:  # parameters of other losses
            if name.startswith(tuple(f"{loss}_" for loss in LOSSES if loss != self.train.loss)):
                del document["train"][name]
        # Locations: co_teachers and augmented_copies identify the content.
        for name in ("teachers", "augmented_rows_path"):
            document.get("distill", {}).pop(name, None)
        if self.compress.vocabulary == "keep":  # then the section has no effect
            del document["compress"]
        if not self.augment.is_active:  # then it changes no row
            del document["augment"]
        if self.optim.lr_scaling == self.optim.beta2_scaling == "none":
            document["optim"]["lr_reference_batch_size"] = None
        for section, neutral_values in NEUTRAL_SETTINGS.items():
            if section in document:
                document[section] = drop_neutral(document[section], neutral_values)
        document["train"]["global_batch_size"] = self.global_batch_size
        return document

    def recipe_digest(self) -> str:
        """Digest of the settings that change the weights."""
        return hashlib.sha256(json.dumps(self.weight_settings(), sort_keys=True).encode()).hexdigest()[:16]


def find_recipe_problems(recipe: Recipe) -> Iterator[Problem]:
    """Settings of a recipe that are valid alone and impossible together."""
    yield from _find_training_problems(recipe)
    if recipe.distill.teacher and recipe.model.freeze != "none":
        reason = "a student learns in its encoder layers"
        yield conflict_problem("model.freeze", recipe.model.freeze, reason, "add --set model.freeze=none")
    if recipe.distill.student is not None and recipe.distill.width is not None:
        reason = f"distill.student={recipe.distill.student} has its own width"
        yield conflict_problem("distill.width", recipe.distill.width, reason, "name one of the two")
    if recipe.quantize.kind == "weights" and recipe.quantize.max_changed_predictions is not None:
        setting, value = "quantize.max_changed_predictions", recipe.quantize.max_changed_predictions
        reason = "with quantize.kind=weights every operation computes in float already"
        yield conflict_problem(setting, value, reason, "write null, or leave it out")
    yield from _find_weighting_problems(recipe)
    yield from _find_scaling_problems(recipe)
    yield from find_selection_problems(recipe.metrics, recipe.train, recipe.data)
    yield from find_data_problems(recipe.data)
    yield from find_augment_problems(recipe.augment)


def _find_training_problems(recipe: Recipe) -> Iterator[Problem]:
    train, setting = recipe.train, "train.global_batch_size"
    if train.global_batch_size and train.aggregation_frequency:
        reason = f"train.aggregation_frequency={train.aggregation_frequency} sets it too"
        fix = "write one of the two and set the other to null"
        yield conflict_problem(setting, train.global_batch_size, reason, fix)
    if train.strategy == "auto":
        reason, fix = "train.strategy=auto chooses it", "leave it out, or write train.strategy=manual"
        for name in LAYOUT_SETTINGS:
            if (value := getattr(train, name)) != TrainConfig.model_fields[name].default:
                yield conflict_problem(f"train.{name}", value, reason, fix)
    if train.min_workers is not None and train.min_workers > train.workers:
        reason, fix = f"above train.workers={train.workers}", f"write {train.workers} or less, or leave it out"
        yield conflict_problem("train.min_workers", train.min_workers, reason, fix)
    if train.gpus_per_worker < 1 and train.workers > 1:
        reason = f"NCCL takes no two of the {train.workers} workers on one GPU"
        fix = "write train.workers=1, or train.gpus_per_worker=1"
        yield conflict_problem("train.gpus_per_worker", train.gpus_per_worker, reason, fix)
    if recipe.global_batch_size < train.num_replicas:
        unit = "workers" if train.workers_per_replica == 1 else f"replicas of {train.workers_per_replica} workers each"
        reason = f"fewer rows than the {train.num_replicas} {unit} that share them"
        fix = f"write {train.num_replicas} or more, or fewer train.workers"
        yield out_of_range_problem(setting, recipe.global_batch_size, reason, fix)


def _find_weighting_problems(recipe: Recipe) -> Iterator[Problem]:
    train, data, distill = recipe.train, recipe.data, recipe.distill
    if distill.teacher is not None:
        reason = "a student learns its teacher's answers, which have learned from it"
        for name, neutral in NEUTRAL_SETTINGS["train"].items():
            if name in ("class_weights", "loss") and getattr(train, name) != neutral:
                yield conflict_problem(f"train.{name}", getattr(train, name), reason, f"write {neutral}")
    if data.sampling is not None and (distill.unlabeled_rows_path or distill.augmented_copies):
        reason = "unlabeled rows and augmented copies of a student have no values of its column"
        fix = "write null, or leave out distill.unlabeled_rows_path and distill.augmented_copies"
        yield conflict_problem("data.sampling", data.sampling.column, reason, fix)


def _find_scaling_problems(recipe: Recipe) -> Iterator[Problem]:
    optim, rows = recipe.optim, recipe.global_batch_size
    settings = (
        ("lr_scaling", optim.lr_scaling, f"optim.lr={optim.lr:g} holds"),
        ("beta2_scaling", optim.beta2_scaling, f"beta2={ADAM_BETAS[1]:g} holds"),
    )
    requirements = [
        f"optim.{name}={value} needs the global_batch_size at which {condition}"
        for name, value, condition in settings
        if value != "none"
    ]
    if requirements and optim.lr_reference_batch_size is None:
        fix = f"write that number of rows ({rows} for this recipe)"
        yield missing_problem("optim.lr_reference_batch_size", None, " and ".join(requirements), fix)
    elif recipe.peak_lr >= 1:
        scaled = f"scaled from {optim.lr_reference_batch_size} to {rows} rows per step it is {recipe.peak_lr:g}"
        fix = "write a lower one, or fewer rows per step"
        yield out_of_range_problem("optim.lr", optim.lr, f"{scaled}, not less than 1", fix)
