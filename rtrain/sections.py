"""The sections of a configuration, as frozen pydantic models, and the settings that are impossible together."""

import hashlib
import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from rtrain.errors import Problem

Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


DEFAULT_FREQUENCY = 4


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Data(Section):
    path: str | None = None
    """File, folder, glob or URL of the training rows: csv, tsv, jsonl, parquet, a `datasets` folder or name."""
    test: str | None = None
    """The same for the test rows. Without it, 10 % of the rows, chosen by a hash of their content, are the test."""
    valid: str | None = None
    """The same for the validation rows. Without it, `valid_share` of the training rows."""
    split: str | None = None
    """Column that names each row's split: train, valid (or validation, val, dev) or test."""
    valid_share: Annotated[float, Field(ge=0.0, le=0.5)] | None = None
    """Share of the rows that choose the best weights and are not trained on; by default 0.1, and 0 where `valid` or
    `split` names them. With 0 and no other validation rows the last weights are kept: to train the chosen settings on
    all rows."""
    folds: Annotated[int, Field(ge=2, le=100)] | None = None
    """Cut the rows into so many equal parts, by a hash of their content; part `fold` is the test."""
    fold: Annotated[int, Field(ge=0)] = 0
    """Which of the `folds`, from 0."""
    format: Literal["csv", "tsv", "jsonl", "parquet", "datasets", "conll", "squad"] | None = None
    """Format of both; by default read from the file name."""
    text: str = "text"
    """Column with the text."""
    text_pair: str | None = None
    """Column with a second text, or none."""
    label: str | tuple[str, ...] | None = "label"
    """Column with the label; for a task of several heads a list, one column each; null where nothing is labelled."""
    separator: Annotated[str, Field(min_length=1)] | None = None
    """Between the labels of a row that has several, e.g. "|", where they are one text; lists need none."""
    outside: Annotated[str, Field(min_length=1)] | None = None
    """Label of rows that belong to none of the classes: not trained on, and told from the others by a threshold that is
    chosen on the validation rows."""
    slices: tuple[str, ...] = ()
    """Columns, e.g. a language, by whose values the scores are given apart as well."""
    split_by: str | None = None
    """Column, e.g. an essay or a contract, whose equal values are all in one of the splits; by default equal texts."""
    max_tokens: Annotated[int, Field(ge=8, le=8192)] = 64
    """Longer texts are cut here, in training and in serving alike. Tokens."""
    window: Annotated[int, Field(ge=8, le=8192)] | None = None
    """Longer texts are read in windows of this many tokens, instead of being cut at max_tokens."""
    stride: Annotated[int, Field(ge=0)] = 0
    """Tokens that two neighbouring windows share."""
    max_windows: Positive = 64
    """Windows of a row; what is beyond them is cut, and counted as truncated."""
    pooling: Literal["mean", "max", "first"] = "mean"
    """How the outputs of a text's windows become one."""
    max_row_bytes: Positive = 200_000
    """A row with more text than this (bytes of UTF-8) is set aside as bad."""
    max_bad_rows: Share = 0.02
    """Share of bad rows above which the file is refused rather than its bad rows set aside."""

    @property
    def window_tokens(self) -> int:
        """Most tokens that the model reads at once."""
        return self.window or self.max_tokens

    @property
    def labels(self) -> tuple[str, ...]:
        """Columns with labels."""
        return (self.label,) if isinstance(self.label, str) else self.label or ()


class Augment(Section):
    """More training rows, made from those that there are. Validation and test rows stay as they are, and no copy of a
    training row has a text that would be in one of them."""

    copies: Annotated[int, Field(ge=0, le=100)] = 0
    """Noisy copies of each training row; fewer of a text with little to change."""
    typo: Share = 0.0
    """Share of a copy's words that get a typo."""
    swap: Share = 0.0
    """Share of the words that change places with the next."""
    drop: Share = 0.0
    """Share of the words that are left out."""
    mask: Share = 0.0
    """Share of the words that the model's mask token takes the place of."""
    paraphrase: str | None = None
    """Encoder-decoder model (a Transformers folder or a hub name) that writes each training text (data.text) anew; what
    it writes is a copy more."""
    pivot: str | None = None
    """Model that translates the texts into another language first; `paraphrase` is then the one that translates them
    back."""
    prefix: str = ""
    """Written before each text, for models that are told their job."""
    variants: Annotated[int, Field(ge=1, le=16)] = 1
    """Texts that `paraphrase` writes for each text, by as many beams."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of the noise; apart from train.seed, so that runs of several seeds share their rows."""

    @property
    def noise(self) -> dict[str, float]:
        """Share of the words by what is done to them."""
        return {"typo": self.typo, "swap": self.swap, "drop": self.drop, "mask": self.mask}

    @property
    def active(self) -> bool:
        return self.copies > 0 or self.paraphrase is not None


class Model(Section):
    name: str = "minilm"
    """`minilm` (the packaged all-MiniLM-L6-v2), a Transformers folder, or a model hub name."""
    attention_dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Dropout of attention weights; null is what the model's own configuration says, 0.1 for most. With 0, texts of
    some hundred tokens train faster on a CPU (512: 1.7 times): the masks of attention are as large as its square."""
    pooling: Literal["own", "mean"] = "own"
    """How a text's tokens become one vector: as the model's own head has it (its first token, for most), or their
    `mean`, for which sentence encoders are trained. rtrain answers with such an artefact, transformers alone cannot."""
    freeze: Literal["none", "encoder"] = "none"
    """What stays as it is: `encoder` trains the head alone, some times faster. A masked language model's output
    embedding is its encoder's word embedding, and stays too."""


class Optim(Section):
    name: Literal["adamw"] = "adamw"
    lr: Annotated[float, Field(gt=0, lt=1)] = 2e-4
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    warmup: Share = 0.1
    """Share of all updates over which the learning rate rises from 0."""
    schedule: Literal["linear", "constant"] = "linear"
    """After warm-up: `linear` falls to 0 at the last update, `constant` stays."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """The gradient is scaled down to this norm."""


class Train(Section):
    epochs: Positive = 3
    workers: Positive = 2
    """DDP workers, each one process of one CPU (or one GPU)."""
    min_workers: Positive | None = None
    """Go on with fewer workers, down to this many, while nodes are missing, and with more when they come back."""
    micro_batch: Positive = 8
    """Most rows of one forward and backward pass of a worker."""
    tokens_per_pass: Positive = 2048
    """Most tokens of a pass; a longer row is alone. For BERT and its kin, which are trained without padding, a worker's
    rows between two exchanges are regrouped into as few passes as this allows, and micro_batch sets rows_per_update."""
    packed: bool = True
    """Train BERT and its kin without padding; false pads each pass, as Transformers does, to compare the two."""
    aggregation_frequency: Positive | None = None
    """Passes of micro_batch rows of a worker between two gradient exchanges; sets rows_per_update. Default 4."""
    rows_per_update: Positive | None = None
    """Rows of one optimizer step. Default: workers x micro_batch x aggregation_frequency."""
    precision: Literal["fp32", "bf16", "auto"] = "fp32"
    """`auto` takes bf16 where the processor computes it natively; it is decided once and kept in the run."""
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
    *("workers", "min_workers", "micro_batch", "tokens_per_pass", "packed", "aggregation_frequency"),
    *("evaluate_every", "save_every", "keep", "log_every"),
)
"""Settings of `train` that change speed or what is kept, never the weights, once rows_per_update is resolved."""


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
    engine: Literal["openvino"] = "openvino"
    calibration_rows: Positive = 256
    """Training rows that set the activation scales."""


class Recipe(Section):
    name: str
    task: Literal[
        "classification",
        "multi_label",
        "multi_head",
        "regression",
        "token_tags",
        "span_qa",
        "extractive_summary",
        "masked_lm",
    ]
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

    def identity(self) -> str:
        """Digest of what changes the weights: rows_per_update is inside it; workers, micro-batch, cadences are not."""
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
        document["model"] = {"name": self.model.name, **self.model.model_dump(mode="json", exclude_defaults=True)}
        document["train"]["rows_per_update"] = self.rows_per_update
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


class Cluster(Section):
    address: str | None = None
    """Address of a Ray cluster; by default RAY_ADDRESS (set inside a job), else a private local one."""
    max_crashes: Annotated[int, Field(ge=0)] = 3
    """Crashes without progress after which a run is given up. A start that came further than the last counts anew;
    nodes that are taken away are not counted."""
    stall_s: Annotated[float, Field(gt=0)] = 300.0
    """A worker that makes no pass for this long (seconds) is ended, with its traceback in the run folder, and the run
    started again from its newest checkpoint."""
    storage: str | None = None
    """URL (s3://, gs://, file:// or another that fsspec knows) under which each run's checkpoints, log and artefact are
    copied as `<storage>/<run>`: `--resume` brings back from there a run whose folder is lost."""


class Tune(Section):
    trials: Annotated[int, Field(ge=1)] = 4
    """Trials in all; trial 0 is the recipe as it stands."""
    points: tuple[dict[str, float], ...] = ()
    """Settings to try right after trial 0, e.g. [{optim.lr: 1.0e-4}]; the rest is drawn from the lists below."""
    lr: tuple[float, ...] = (1e-4, 3e-4, 5e-4)
    """Learning rates to choose from."""
    aggregation_frequency: tuple[Positive, ...] = (2, 4, 8)
    """Aggregation frequencies to choose from."""
    budget: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the updates that a trial other than trial 0 may use; the winner is then continued to the end."""
    first_rung: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of the updates at which a trial is first compared, and stopped if it is behind."""
    concurrent: Positive = 1
    """Trials at a time; each takes all of train.workers."""


class Serve(Section):
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """0 takes a free port."""
    replicas: Positive = 1
    threads: Positive = 1
    """Processor threads of one replica's engine."""
    max_batch_rows: Positive = 32
    """Most texts that one engine call answers."""
    max_queue_rows: Positive = 1024
    """Texts that may wait; beyond it a request is answered 503 with Retry-After."""
    max_inputs: Positive = 256
    """Most texts in one request."""
    max_body_bytes: Positive = 1_000_000
    deadline_s: Annotated[float, Field(gt=0)] = 10.0
    """A request that has not been answered by then is answered 504."""


class Report(Section):
    attributions: Annotated[int, Field(ge=0, le=20)] = 20
    """Hardest rows whose answers are explained in the report, once, when the run has finished; 0 for none."""
    trackers: tuple[Literal["tensorboard", "mlflow"], ...] = ()
    """Trackers that are told what the run logs, e.g. [tensorboard, mlflow]; each needs the extra of its name."""
    tensorboard_dir: str | None = None
    """Folder under which each run gets one of its own. Default: `tensorboard` beside the run."""
    mlflow_uri: str | None = None
    """Tracking server or store. Default: MLFLOW_TRACKING_URI, else the file `mlflow.db` beside the run."""
    mlflow_experiment: str | None = None
    """Default: the name of the recipe."""


class Deploy(Section):
    cluster: Cluster = Cluster()
    tune: Tune = Tune()
    serve: Serve = Serve()
    report: Report = Report()


def contradictions(recipe: Recipe, deploy: Deploy) -> list[Problem]:
    """Settings that are valid alone and impossible together."""
    train, tune = recipe.train, deploy.tune
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
    if tune.first_rung > tune.budget:
        problems.append(
            Problem("tune.first_rung", tune.first_rung, f"above tune.budget={tune.budget}", "write a smaller share")
        )
    if recipe.distill.teacher and recipe.model.freeze != "none":
        reason = "a student of fewer layers learns its teacher's answers in those layers"
        problems.append(Problem("model.freeze", recipe.model.freeze, reason, "add --set model.freeze=none"))
    return problems + _data_contradictions(recipe.data) + _augment_contradictions(recipe.augment)


def _augment_contradictions(augment: Augment) -> list[Problem]:
    problems, total = [], sum(augment.noise.values())
    if total > 1:
        reason = "the shares of typo, swap, drop and mask are more than all words"
        problems.append(Problem("augment", round(total, 6), reason, "lower one: their sum is at most 1"))
    if augment.copies and not total:
        fix = "give a share of words, e.g. augment.typo=0.1, or copies=0"
        problems.append(Problem("augment.copies", augment.copies, "copies without noise repeat their rows", fix))
    if total and not augment.copies:
        problems.append(Problem("augment.copies", 0, "noise is for copies, and there are none", "write 1 or more"))
    if augment.pivot and not augment.paraphrase:
        fix = "name the model that translates back as augment.paraphrase"
        problems.append(Problem("augment.pivot", augment.pivot, "the way back is missing", fix))
    return problems


def _split_contradictions(data: Data) -> list[Problem]:
    problems = []
    if data.split is not None and (data.valid or data.test):
        fix = "give a column or files of their own, and set the others to null"
        problems.append(Problem("data.split", data.split, "data.valid or data.test names splits too", fix))
    if data.folds is not None and (data.valid or data.test or data.split):
        fix = "leave out data.valid, data.test and data.split, or set data.folds=null"
        problems.append(Problem("data.folds", data.folds, "the splits are given already", fix))
    if data.valid and data.valid_share:
        fix = "leave out one of the two"
        problems.append(Problem("data.valid_share", data.valid_share, "data.valid has the validation rows", fix))
    if data.fold and data.fold >= (data.folds or 1):
        problems.append(Problem("data.fold", data.fold, f"there are {data.folds} folds", "folds count from 0"))
    if data.valid_share == 0 and not (data.valid or data.split) and data.outside is not None:
        reason = "the threshold of data.outside is chosen on validation rows, and there are none"
        problems.append(Problem("data.valid_share", 0, reason, "give a share, or set data.outside=null"))
    return problems


def _data_contradictions(data: Data) -> list[Problem]:
    problems = _split_contradictions(data)
    if data.text_pair == data.text:
        problems.append(Problem("data.text_pair", data.text_pair, "the same column as data.text", "remove it"))
    if {data.text, data.text_pair} & set(data.labels):
        problems.append(
            Problem("data.label", data.label, "the same column as the text", "name the column of the labels")
        )
    if 2 * data.stride >= data.window_tokens:
        fix = "write less than half of data.window (or of data.max_tokens where it is not set)"
        problems.append(Problem("data.stride", data.stride, "windows would share half of their tokens or more", fix))
    return problems
