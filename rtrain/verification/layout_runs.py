"""Layouts of `rtrain verify`: the plan of the cases, and the worker group that trains them and measures differences.

There is no dropout, and nearly all cases are in float64: in fp32 correct code differs too, since Adam amplifies
rounding if the true gradient is zero. The cases use the run's own stream, loop and step.
"""

import copy
import hashlib
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rtrain.checkpoint import format as checkpoint_format
from rtrain.config import Config, Recipe, TrainConfig
from rtrain.core import env, plugins
from rtrain.core.errors import Problem
from rtrain.core.ragged import TokenBatch
from rtrain.core.run_folder import Run
from rtrain.data import stream
from rtrain.data.order import RowOrder
from rtrain.data.sampling import SampledOrder
from rtrain.data.store.store import open_store
from rtrain.models import builder, network_parts, used_vocabulary
from rtrain.parallel import collectives, dtensor_utils
from rtrain.parallel.base import Strategy
from rtrain.parallel.layout import build_strategy, check_parallelism
from rtrain.tasks import base
from rtrain.tasks.label_losses import get_label_loss
from rtrain.trainer import imbalance, losses, optimizers, step
from rtrain.trainer.trainer import Clock, Trainer, TrainingContext
from rtrain.verification import planted_bugs

if TYPE_CHECKING:
    import torch

EXACT_PRECISION = "fp64"
SINGLE_WORKER = "1 worker"
"""The reference, as a layout to resume from."""
_PIPELINE = {"pipeline_parallel_size": 2, "pipeline_schedule": "1f1b"}
PAIR_LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 2": {"zero_stage": 2},
    "zero 3": {"zero_stage": 3},
    "tensor 2": {"tensor_parallel_size": 2},
    "sequence": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "gpipe": {"pipeline_parallel_size": 2, "pipeline_schedule": "gpipe"},
    "pipeline": _PIPELINE,
    "interleaved": {"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved"},
    "context": {"context_parallel_size": 2},
}
"""Settings of `train` by the name of a layout."""
GRID_LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 2, tensor 2": {"zero_stage": 2, "tensor_parallel_size": 2},
    "zero 3, sequence": {"zero_stage": 3, "tensor_parallel_size": 2, "sequence_parallel": True},
    "pipeline of 2": _PIPELINE,
    "context of 2": {"context_parallel_size": 2},
    "pipeline, zero 3": {**_PIPELINE, "zero_stage": 3},
    "pipeline, tensor 2": {**_PIPELINE, "tensor_parallel_size": 2},
}
"""Layouts of four workers: two replicas of two workers each, and one of all."""
CUBE_LAYOUTS: dict[str, dict[str, Any]] = {
    "2x2x2": {**_PIPELINE, "tensor_parallel_size": 2},
    "2x2x2, zero 3": {**_PIPELINE, "tensor_parallel_size": 2, "zero_stage": 3},
}
"""Layouts of eight workers: two replicas of two stages on two workers each."""
GRID_WORKERS, CUBE_WORKERS = 4, 8
FP32_LAYOUT = "zero 3"
"""The layout that is also trained in fp32, where its collectives differ from float64."""
PLAIN_SETTINGS = {
    **{"zero_stage": 0, "tensor_parallel_size": 1, "sequence_parallel": False},
    **{"pipeline_parallel_size": 1, "context_parallel_size": 1, "gradient_compression": "none"},
}
"""Settings of a case without a layout. Compression is off, since its error is intended and no error of the sums."""

MAX_BATCH_SIZE, FULL_MAX_BATCH_SIZE = 32, 97
UNEVEN_MULTIPLE = 48
"""Steps of the full matrix have a multiple of these rows, which two and three replicas split into full micro-batches of
8, 4 and 2; and one row more, so that one replica has one micro-batch more."""
MIN_FULL_ROWS = 1000
"""Smallest number of rows in the full matrix."""
TOKEN_BUDGET, FULL_TOKEN_BUDGET = 4_000, 40_000
"""Token budget: long texts get fewer rows, so that the time of a slice does not depend on them."""
FULL_STEPS = 4
"""Full steps of the default slice. One step of a single row follows in both, in which all workers but one are idle."""

# --------------------------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True)
class VerificationCase:
    """One layout of the slice."""

    workers: int
    micro_batch_size: int
    layout: str = ""
    """A key of `PAIR_LAYOUTS`, `GRID_LAYOUTS` or `CUBE_LAYOUTS`, or empty: the full model on every worker."""
    resumed_from: str = ""
    """The source of the mid-slice checkpoint from which the case starts, if any: `SINGLE_WORKER`, or a layout."""
    bug: str | None = None
    """A key of `planted_bugs.BUGS`, or None."""
    precision: str = EXACT_PRECISION
    is_weighted: bool = False
    """Labels and rows have weights, and rows are drawn by groups (`_weigh`)."""
    uses_rows: bool = False
    """Train the used rows of the word embedding alone (`train.embedding_rows=used`)."""

    @property
    def is_exact(self) -> bool:
        return self.precision == EXACT_PRECISION

    @property
    def name(self) -> str:
        resumed_text = "resized from 1" if self.resumed_from == SINGLE_WORKER else f"resumed from {self.resumed_from}"
        parts = [f"{self.workers} x {self.micro_batch_size}", self.layout, self.resumed_from and resumed_text]
        parts += ["used rows" if self.uses_rows else "", self.bug or ""]
        parts += ["" if self.is_exact else self.precision, "weighted" if self.is_weighted else ""]
        return ", ".join(part for part in parts if part)

    @property
    def checkpoint_name(self) -> str:
        """Name of the checkpoint that the case leaves in mid-slice, or empty."""
        is_source = self.is_exact and not self.resumed_from and not self.bug and not self.uses_rows
        return self.layout if is_source else ""


@dataclass(frozen=True)
class SkippedLayout:
    """A layout that is not trained with this number of workers, and the bugs that would have been planted in it."""

    workers: int
    layout: str
    reason: str
    bugs: tuple[str, ...] = ()


@dataclass(frozen=True)
class VerificationPlan:
    """The plan: `rows` rows of the store in steps of `global_batch_size`, in each group's cases."""

    rows: int
    global_batch_size: int
    groups: tuple[tuple[VerificationCase, ...], ...]
    """One worker group each: all its cases have the same number of workers. The first case is the reference."""
    skipped_layouts: tuple[SkippedLayout, ...] = ()

    @property
    def steps(self) -> int:
        return -(-self.rows // self.global_batch_size)

    @property
    def workers(self) -> int:
        return max(group[0].workers for group in self.groups)


LayoutCheck = Callable[[int, str], Sequence[Problem]]
"""Returns the problems of a layout, by its name, on a number of workers."""


def case_train_config(train: TrainConfig, layout: str, workers: int) -> TrainConfig:
    """The section `train` of a case. Workers with a part of the model compute equally many micro-batches."""
    settings = {**PLAIN_SETTINGS, "workers": workers, "min_workers": None}
    if layout:
        settings |= {"load_balancing": "off", **{**PAIR_LAYOUTS, **GRID_LAYOUTS, **CUBE_LAYOUTS}[layout]}
    return train.model_copy(update=settings)


def check_layout(recipe: Recipe, weights: Path, workers: int, layout: str) -> list[Problem]:
    """Conflicts of a layout with the recipe, or with the model in the folder `weights`."""
    train = case_train_config(recipe.train, layout, workers)
    return check_parallelism(recipe.model_copy(update={"train": train}), weights)


def make_plan(
    config: Config,
    row_size: tuple[int, float],
    *,
    full: bool = False,
    plant_bugs: bool = False,
    cores: int = 1,
    find_problems: LayoutCheck = lambda workers, layout: (),
) -> VerificationPlan:
    """Plan slice and cases for a recipe. `row_size`: number of training rows, and their mean tokens; `cores` are for
    workers."""
    train_rows, mean_tokens = row_size
    groups, skipped_layouts = list[tuple[VerificationCase, ...]](), list[SkippedLayout]()
    if not full and cores < GRID_WORKERS:
        reason = f"{GRID_WORKERS} workers have {cores} cores here; with --full they share them"
        skipped_layouts += [SkippedLayout(GRID_WORKERS, layout, reason) for layout in GRID_LAYOUTS]
    for workers, sizes, layouts in _case_groups(config.recipe.train, full, cores):
        bugs: dict[str, Iterable[str]] = {}
        if plant_bugs and len(groups) == 1:  # in the first group with several workers
            bugs = {"": planted_bugs.possible_bugs(config.recipe.model.freeze), **planted_bugs.LAYOUT_BUGS}
        valid_layouts = []
        for layout in layouts:
            if problems := find_problems(workers, layout):
                reason = "; ".join(f"{problem.field}={problem.value}: {problem.reason}" for problem in problems)
                skipped_layouts.append(SkippedLayout(workers, layout, reason, tuple(bugs.get(layout, ()))))
            else:
                valid_layouts.append(layout)
        cases = _make_cases(workers, sizes, valid_layouts)
        for layout in ("", *valid_layouts):
            cases += [VerificationCase(workers, 3, layout, bug=bug) for bug in bugs.get(layout, ())]
        if len(groups) < 2 and supports_weights(config.recipe):
            cases.append(VerificationCase(workers, sizes[min(1, len(groups))], is_weighted=True))
            if bugs:
                cases.append(VerificationCase(workers, 3, bug=planted_bugs.WEIGHTS_BUG, is_weighted=True))
        if planted_bugs.STALE_ROW_BUG in bugs.get("", ()):
            cases.append(VerificationCase(workers, 3, bug=planted_bugs.STALE_ROW_BUG, uses_rows=True))
        groups.append(tuple(cases))
    budget = int((FULL_TOKEN_BUDGET if full else TOKEN_BUDGET) / max(1.0, mean_tokens))
    batch_size = min(config.recipe.global_batch_size, FULL_MAX_BATCH_SIZE if full else MAX_BATCH_SIZE)
    batch_size = min(batch_size, budget // FULL_STEPS, train_rows // FULL_STEPS)
    # At least four rows for each worker: two micro-batches of three, the second of them short.
    batch_size = max(batch_size, 4 * max(group[0].workers for group in groups))
    if full and batch_size > UNEVEN_MULTIPLE:
        batch_size -= (batch_size - 1) % UNEVEN_MULTIPLE
    steps = min(math.ceil(MIN_FULL_ROWS / batch_size), max(FULL_STEPS, budget // batch_size)) if full else FULL_STEPS
    rows = min(steps * batch_size + 1, train_rows)
    if rows > batch_size:
        rows -= (rows - 1) % batch_size
    return VerificationPlan(rows, batch_size, tuple(groups), tuple(skipped_layouts))


def supports_weights(recipe: Recipe) -> bool:
    """Whether the weighted cases are trained: not with a teacher, whose answers have no weights."""
    return recipe.distill.teacher is None and base.get_task(recipe.task).weighting != "nothing"


def check_plan(config: Config, plan: VerificationPlan) -> list[Problem]:
    """Problems of a slice: cases resume between two of its steps."""
    if plan.steps > 1:
        return []
    reason = f"its {plan.rows} training rows are one step of {plan.global_batch_size}, and a case resumes between two"
    fix = f"give {plan.global_batch_size + 1} of them or more"
    return [Problem("data.path", config.recipe.data.path, reason, fix, code="too_few_rows")]


def _case_groups(train: TrainConfig, full: bool, cores: int) -> list[tuple[int, tuple[int, ...], Sequence[str]]]:
    """Worker groups: their workers, the micro-batch sizes of workers with the full model, and the layouts, which have
    the second of these sizes."""
    if full:
        pairs = [(workers, (8, 4, 2), tuple(PAIR_LAYOUTS)) for workers in (2, 3)]
        grids = [(GRID_WORKERS, (8, 4), tuple(GRID_LAYOUTS)), (CUBE_WORKERS, (8, 4), tuple(CUBE_LAYOUTS))]
        return [(1, (8, 4, 2), ()), *pairs, *grids]
    sizes = train.micro_batch_size, 3 if train.micro_batch_size != 3 else 2
    grid = [(GRID_WORKERS, sizes, tuple(GRID_LAYOUTS))] if cores >= GRID_WORKERS else []
    return [(1, sizes, ()), (max(2, train.workers), sizes, tuple(PAIR_LAYOUTS)), *grid]


def _make_cases(workers: int, sizes: Sequence[int], layouts: Sequence[str]) -> list[VerificationCase]:
    """Cases of a group: each layout is trained, and resumed by the next one; the last by workers with the full
    model."""
    cases = [VerificationCase(workers, size) for size in sizes]
    cases.append(VerificationCase(workers, sizes[1], uses_rows=True))
    if workers == 1:
        return [*cases, *(VerificationCase(1, size, precision="fp32") for size in sizes[:2])]
    if FP32_LAYOUT in layouts:
        cases.append(VerificationCase(workers, sizes[1], FP32_LAYOUT, precision="fp32"))
    cases.append(VerificationCase(workers, sizes[1], resumed_from=SINGLE_WORKER))
    cases += [VerificationCase(workers, sizes[1], name) for name in layouts]
    cases += [VerificationCase(workers, sizes[1], name, uses_rows=True) for name in layouts if name == FP32_LAYOUT]
    chain = pairwise([*layouts, ""])
    return [*cases, *(VerificationCase(workers, sizes[1], into, resumed_from=name) for name, into in chain)]


def max_group_workers(train: TrainConfig, full: bool, cores: int) -> int:
    """Workers of the largest group."""
    return max(workers for workers, _, _ in _case_groups(train, full, cores))


# ------------------------------------------------------------------------------------------------------ worker group

REFERENCE = "reference"
GRADIENT_FLOOR = 1e-6
"""Floor of a tensor's gradient norm in the comparison, as a fraction of the whole gradient's norm."""
FP32_GRADIENT_FLOOR = 1.0
"""The floor in fp32: a tensor with a true gradient of zero, such as a key's bias, has only rounding errors."""


@dataclass
class CaseMeasurement:
    """Difference of a case from the reference."""

    weights_ratio: float = 0.0
    """|difference| / |distance moved|, over all tensors jointly, at the end."""
    gradient_ratio: float = 0.0
    """The largest |g - g_ref| / max(|g_ref|, FLOOR x |whole g_ref|) of any tensor and step, before clipping."""
    worst_tensor: str = ""
    worst_step: int = -1
    max_micro_batches: int = 0
    """Largest number of micro-batches of rank 0 in a step."""
    order_digest: str = ""
    rows: int = 0
    differing_workers: int = 0
    """Workers whose weights differ in a bit from the first worker with the same tensors."""
    seconds: float = 0.0


@dataclass(frozen=True)
class TrainingSlice:
    """Common inputs of the cases: rows of a store, a recipe, and a model's weights."""

    recipe: Recipe
    scratch: Path
    store: Path
    model: Path
    rows: int
    steps: int


@plugins.attribute_errors()
def run_group(training_slice: TrainingSlice, cases: Sequence[VerificationCase]) -> None:
    """The train function of one worker group. Rank 0 appends each case's figures to the scratch folder's log."""
    import ray.train
    import torch

    torch.set_num_threads(max(1, env.available_cores() // ray.train.get_context().get_local_world_size()))
    recipe, folder, store = training_slice.recipe, training_slice.model, open_store(training_slice.store)
    task = base.get_task(recipe.task)
    built = builder.build_network(folder, task, store.manifest.labels, recipe.train.seed, recipe.model)
    imbalance.initialize_output_bias(built, recipe, task, store)
    # Evaluation mode disables dropout for every architecture; encoders have no other layer with two modes.
    initial_network = cast("torch.nn.Module", built).double().eval()
    used_ids = used_vocabulary.special_ids(folder).union(store.used_ids().tolist())
    vocabulary = used_vocabulary.select_vocabulary(built, used_ids, 1)
    order = RowOrder(store.manifest.digest, training_slice.rows, recipe.global_batch_size, 1, recipe.train.seed)
    context = TrainingContext(
        recipe=recipe,
        run=Run(training_slice.scratch),
        store=store,
        task=task,
        loss=losses.make_run_loss(recipe, task, store),
        order=order,
        pad_id=builder.pad_id(folder),
        precision=EXACT_PRECISION,
        end_step=order.num_steps,
    )
    for case in cases:
        start = time.perf_counter()
        network = copy.deepcopy(initial_network)
        train = case_train_config(recipe.train, case.layout, case.workers)
        if case.uses_rows and vocabulary is not None:
            used_vocabulary.restrict_embedding(network, vocabulary)
        strategy = build_strategy(network if case.is_exact else network.float(), train)
        case_vocabulary = vocabulary if case.uses_rows else None
        reference = _ReferenceFiles(case, training_slice, collectives.is_rank_zero(), case_vocabulary)
        case_context = replace(_weigh(context) if case.is_weighted else context, precision=case.precision)
        measurement = _train(case_context, case, strategy, reference)
        reference.compare_weights(initial_network, strategy, measurement)
        measurement.differing_workers = _count_differing_workers(strategy.module)
        measurement.seconds = round(time.perf_counter() - start, 2)
        if collectives.is_rank_zero():  # with sharded layers several workers belong to replica 0
            context.run.append_event("case", **asdict(case), name=case.name, measurement=asdict(measurement))


class _RowWeightedLoss(losses.RunLoss):
    """Weights of 0 to 2 for the rows, by their ids."""

    def count_targets(self, tokens: TokenBatch) -> list[float]:
        return super().count_targets(_weigh_rows(tokens))

    def __call__(self, logits: "torch.Tensor", tokens: TokenBatch) -> "torch.Tensor":
        return super().__call__(logits, _weigh_rows(tokens))


def _weigh_rows(tokens: TokenBatch) -> TokenBatch:
    return replace(tokens, row_weights=(tokens.row_ids % 5).astype(np.float64) / 2)


def _weigh(context: TrainingContext) -> TrainingContext:
    """The context of the weighted cases: balanced labels where the targets are labels, weights of rows, and a slice
    whose last half is drawn as often as its first sixth."""
    recipe, task, store, order = context.recipe, context.task, context.store, context.order
    if task.weighting == "classes" and recipe.train.class_weights == "none":
        train = recipe.train.model_copy(update={"class_weights": "balanced"})
        recipe = recipe.model_copy(update={"train": train})
    weighting = imbalance.TargetWeighting(
        *(task, store.manifest.head, get_label_loss(recipe.train)),
        imbalance.compute_class_weights(recipe.train, task, store),
    )
    settings = recipe.distill, store.manifest.head, recipe.train.label_smoothing
    sizes = order.rows // 6, order.rows // 3, order.rows - order.rows // 6 - order.rows // 3
    sampled_order = SampledOrder(**asdict(order), sizes=sizes, temperature=0.0, store=None)
    return replace(context, loss=_RowWeightedLoss(task, *settings, weighting=weighting), order=sampled_order)


def _train(
    context: TrainingContext, case: VerificationCase, strategy: Strategy, reference: "_ReferenceFiles"
) -> CaseMeasurement:
    import torch

    measurement = CaseMeasurement()
    bases = (planted_bugs.BUGS[case.bug], Trainer) if case.bug else (Trainer,)
    trainer: Trainer = type("CaseTrainer", bases, {})(context, strategy, _NoReporter(), Clock())
    trainer.observer = _GradientObserver(trainer, reference, measurement)
    if case.resumed_from:
        path = reference.checkpoint_path(case.resumed_from)
        trainer.state = checkpoint_format.load_checkpoint(path, strategy.module, trainer.optimizer)
    trainer.warm_up()
    stream_spec = stream.StreamSpec(
        context.store.folder,
        context.order,
        *(strategy.num_replicas, strategy.replica_rank, case.micro_batch_size),
        teacher_version=context.recipe.teacher_logits_key,
    )
    checkpoint_name = case.checkpoint_name or (SINGLE_WORKER if case.is_exact and not reference.is_complete else "")
    for batch in stream.stream_batches(stream_spec, trainer.state.step, context.order.num_steps):
        step_result = trainer.train_step(batch)
        measurement.rows += step_result.rows
        measurement.max_micro_batches = max(measurement.max_micro_batches, step_result.micro_batches)
        if checkpoint_name and trainer.state.step == context.order.num_steps // 2:
            reference.save_checkpoint(checkpoint_name, trainer)
    measurement.rows = int(strategy.sum_over_replicas(torch.tensor([measurement.rows])).item())
    measurement.order_digest = trainer.state.ledger
    return measurement


class _NoReporter(step.Observer):
    def event(self, kind: str, **fields: Any) -> None:
        pass

    def score(self, metrics: dict[str, Any]) -> None:
        pass


@dataclass
class _GradientObserver(step.Observer):
    """Compares each gradient with the reference's."""

    trainer: Trainer
    reference: "_ReferenceFiles"
    measurement: CaseMeasurement

    def on_gradient(self, strategy: Strategy) -> None:
        self.reference.compare_gradient(strategy, self.trainer.state.step, self.measurement)


class _ReferenceFiles:
    """Gradients and weights of the first case of a precision, on disk; every later case of that precision is compared
    with them."""

    def __init__(
        self,
        case: VerificationCase,
        training_slice: TrainingSlice,
        is_active: bool,
        vocabulary: used_vocabulary.UsedVocabulary | None = None,
    ):
        variant = f"-{case.precision}" * (not case.is_exact) + "-weighted" * case.is_weighted
        self._folder = training_slice.scratch / f"{REFERENCE}{variant}"
        self._is_active, self._vocabulary, self._slice = is_active, vocabulary, training_slice
        self._middle_step = training_slice.steps // 2
        self._floor = GRADIENT_FLOOR if case.is_exact else FP32_GRADIENT_FLOOR
        self.is_complete = (self._folder / "weights.safetensors").is_file()
        self.is_writer = is_active and not self.is_complete
        if is_active:
            self._folder.mkdir(exist_ok=True)

    def checkpoint_path(self, name: str) -> Path:
        return checkpoint_format.checkpoint_path(self._folder / name, self._middle_step)

    def save_checkpoint(self, name: str, trainer: Trainer) -> None:
        """Called on every rank. A rank that reads the checkpoint has synchronized with rank 0 since."""
        strategy = trainer.strategy
        snapshot = checkpoint_format.Snapshot.capture(
            strategy.module, trainer.optimizer, trainer.state, gather=strategy.gather_full_tensors
        )
        if self._is_active:
            checkpoint_format.write_checkpoint(self._folder / name, snapshot)

    def compare_gradient(self, strategy: Strategy, step_number: int, measurement: CaseMeasurement) -> None:
        """Called on every rank. Rank 0's gradient stands for all, as the final comparison of weights shows."""
        parameters = strategy.module.named_parameters()
        local_gradients = {name: value.grad for name, value in parameters if value.grad is not None}
        gradients = dict(strategy.gather_full_tensors(local_gradients))
        if not self._is_active:
            return
        if (vocabulary := self._vocabulary) is not None:
            gradients[vocabulary.name] = vocabulary.expand_gradient(gradients[vocabulary.name])
        path = self._folder / f"gradient-{step_number}.safetensors"
        if self.is_writer:
            _write_tensors(path, dict(_compact_gradients(gradients)))
            return
        reference = _read_tensors(path)
        norms = {name: float(value.norm()) for name, value in reference.items() if not name.endswith(ROWS_SUFFIX)}
        total = sum(norm**2 for norm in norms.values()) ** 0.5
        for name, grad in gradients.items():
            ratio = _gradient_distance(grad, reference, name) / max(norms.get(name, 0.0), self._floor * total)
            if not ratio <= measurement.gradient_ratio:  # NaN counts as the largest
                measurement.gradient_ratio, measurement.worst_tensor, measurement.worst_step = ratio, name, step_number
        if missing := norms.keys() - gradients.keys():  # as wrong as a gradient of zeros
            measurement.gradient_ratio = math.inf
            measurement.worst_tensor, measurement.worst_step = min(missing), step_number

    def compare_weights(
        self, initial_network: "torch.nn.Module", strategy: Strategy, measurement: CaseMeasurement
    ) -> None:
        """Called on every rank, at the end."""
        local_weights = {name: value.detach() for name, value in strategy.module.named_parameters()}
        weights = dict(strategy.gather_full_tensors(local_weights))
        if not self._is_active:
            return
        path = self._folder / "weights.safetensors"
        if self.is_writer:
            _write_tensors(path, weights)
            return
        difference = reference_distance = 0.0
        initial_weights, reference_weights = dict(initial_network.named_parameters()), _read_tensors(path)
        if (vocabulary := self._vocabulary) is not None:
            recipe, steps, name = self._slice.recipe, self._slice.steps, vocabulary.name
            factor = network_parts.lr_factors(initial_network, recipe.optim.layerwise_lr_decay)[initial_weights[name]]
            decay = optimizers.decay_product(recipe, steps, steps, factor)
            weights[name] = vocabulary.expand_rows(weights[name], initial_weights[name].detach(), decay)
        if missing := reference_weights.keys() - weights.keys():
            raise AssertionError(f"weights that one worker trains are not there: {', '.join(sorted(missing))}")
        for name, value in weights.items():
            difference += float((value - reference_weights[name]).norm()) ** 2
            reference_distance += float((reference_weights[name] - initial_weights[name].detach()).norm()) ** 2
        measurement.weights_ratio = (difference / reference_distance) ** 0.5


ROWS_SUFFIX = ":rows"


def _compact_gradients(gradients: "dict[str, torch.Tensor]") -> "Iterator[tuple[str, torch.Tensor]]":
    """Each gradient, or only its nonzero rows: a step touches few rows of an embedding table."""
    for name, grad in gradients.items():
        rows = grad.ne(0).any(dim=1).nonzero().squeeze(1) if grad.dim() == 2 else None
        if rows is not None and 2 * len(rows) < len(grad):
            yield name, grad[rows]
            yield name + ROWS_SUFFIX, rows
        else:
            yield name, grad


def _gradient_distance(grad: "torch.Tensor", reference: "dict[str, torch.Tensor]", name: str) -> float:
    if name not in reference:
        return float(grad.norm())
    residual = grad.clone()
    rows = reference.get(name + ROWS_SUFFIX)
    residual[... if rows is None else rows] -= reference[name]
    return float(residual.norm())


def _write_tensors(path: Path, tensors: "dict[str, torch.Tensor]") -> None:
    from safetensors.torch import save_file

    draft = path.with_suffix(".draft")
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, draft)
    shutil.move(draft, path)


def _read_tensors(path: Path) -> "dict[str, torch.Tensor]":
    from safetensors.torch import load_file

    return load_file(path)


def _count_differing_workers(module: "torch.nn.Module") -> int:
    """Number of workers whose weights differ from the first worker with the same tensors, by digest; shards are
    gathered."""
    digests = {
        name: hashlib.sha256(dtensor_utils.full_tensor(value.detach()).cpu().numpy().data).hexdigest()
        for name, value in module.named_parameters()
        if dtensor_utils.is_materialized(value)
    }
    digests_by_rank, first_digests = collectives.all_gather_object(digests), dict[str, str]()
    for rank_digests in reversed(digests_by_rank):
        first_digests |= rank_digests
    return sum(any(first_digests[name] != digest for name, digest in known.items()) for known in digests_by_rank)
