"""Worker group of `rtrain verify`: train the same slice in several layouts and measure the differences.

There is no dropout, and nearly all cases are in float64: in fp32 correct code differs too, since Adam amplifies
rounding if the true gradient is zero. The cases use the run's own stream, loop and step.
"""

import copy
import hashlib
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rtrain.checkpoint import format as checkpoint_format
from rtrain.config import Recipe
from rtrain.core import env
from rtrain.core.run_folder import Run
from rtrain.data import stream
from rtrain.data.order import RowOrder, chain_digest
from rtrain.data.store.store import open_store
from rtrain.models import builder
from rtrain.parallel import collectives, dtensor_utils, factory as strategies
from rtrain.parallel.base import Strategy
from rtrain.tasks import base
from rtrain.trainer import losses, optimizers, step, trainer
from rtrain.verification import planted_bugs
from rtrain.verification.verify_plan import EXACT_PRECISION, SINGLE_WORKER, VerificationCase, case_train_config

if TYPE_CHECKING:
    import torch

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


def reference_name(case: VerificationCase) -> str:
    """Folder of the reference of a case."""
    return REFERENCE if case.precision == EXACT_PRECISION else f"{REFERENCE}-{case.precision}"


@dataclass(frozen=True)
class TrainingSlice:
    """Common inputs of the cases: rows of a store, a recipe, and a model's weights."""

    recipe: Recipe
    scratch: Path
    store: Path
    model: Path
    rows: int
    steps: int


def run_group(training_slice: TrainingSlice, cases: Sequence[VerificationCase]) -> None:
    """The train function of one worker group. Rank 0 appends each case's figures to the scratch folder's log."""
    import ray.train
    import torch

    torch.set_num_threads(max(1, env.available_cores() // ray.train.get_context().get_local_world_size()))
    runner = _CaseRunner(training_slice)
    for case in cases:
        runner.run(case)


@dataclass
class _CaseRunner:
    training_slice: TrainingSlice
    context: trainer.TrainingContext = field(init=False)
    initial_network: "torch.nn.Module" = field(init=False)

    def __post_init__(self) -> None:
        recipe, folder, store = (
            self.training_slice.recipe,
            self.training_slice.model,
            open_store(self.training_slice.store),
        )
        task = base.get_task(recipe.task)
        network = builder.build_network(folder, task, store.manifest.labels, recipe.train.seed, recipe.model)
        # Evaluation mode disables dropout for every architecture; encoders have no other layer with two modes.
        self.initial_network = cast("torch.nn.Module", network).double().eval()
        order = RowOrder(
            store.manifest.digest, self.training_slice.rows, recipe.global_batch_size, 1, recipe.train.seed
        )
        self.context = trainer.TrainingContext(
            recipe=recipe,
            run=Run(self.training_slice.scratch),
            store=store,
            task=task,
            loss=losses.make_loss(task, recipe.distill, store.manifest.head, recipe.train.label_smoothing),
            order=order,
            pad_id=builder.pad_id(folder),
            precision=EXACT_PRECISION,
            end_step=order.num_steps,
        )

    def run(self, case: VerificationCase) -> None:
        clock = trainer.Clock()
        with clock.section("case"):
            train = case_train_config(self.context.recipe.train, case.layout, case.workers)
            network = copy.deepcopy(self.initial_network)
            strategy = strategies.build_strategy(
                network if case.precision == EXACT_PRECISION else network.float(), train
            )
            reference = _ReferenceFiles(case, self.training_slice, is_active=collectives.is_rank_zero())
            measurement = self._train(case, strategy, reference)
            measurement.differing_workers = _count_differing_workers(strategy.module)
        measurement.seconds = round(clock.seconds["case"], 2)
        if collectives.is_rank_zero():  # with sharded layers several workers belong to replica 0
            self.context.run.append_event("case", **asdict(case), name=case.name, measurement=asdict(measurement))

    def _train(self, case: VerificationCase, strategy: Strategy, reference: "_ReferenceFiles") -> CaseMeasurement:
        context, measurement = replace(self.context, precision=case.precision), CaseMeasurement()
        optimizer = optimizers.build_run_optimizer(strategy, context.recipe)
        first_step, link = 0, trainer.INITIAL_LEDGER
        if case.resumed_from:
            state = checkpoint_format.load_checkpoint(
                reference.checkpoint_path(case.resumed_from), strategy.module, optimizer
            )
            first_step, link = state.step, bytes.fromhex(state.ledger)
        step.warm_up(strategy, context.loss, context.pad_id, context.precision)
        teacher = context.recipe.teacher_logits_key
        stream_spec = stream.StreamSpec(
            context.store.folder,
            context.order,
            strategy.num_replicas,
            strategy.replica_rank,
            case.micro_batch_size,
            teacher_version=teacher,
        )
        for batch in stream.stream_batches(stream_spec, first_step, context.order.num_steps):
            step_result = trainer.train_step(
                context,
                strategy,
                optimizer,
                batch,
                run_step=planted_bugs.BUGS[case.bug] if case.bug else None,
                observer=_GradientObserver(reference, batch.step, measurement),
            )
            link = chain_digest(link, batch.digest)
            measurement.rows += step_result.rows
            measurement.max_micro_batches = max(measurement.max_micro_batches, step_result.micro_batches)
            should_checkpoint = case.checkpoint_name or (
                not reference.is_complete and case.precision == EXACT_PRECISION
            )
            if should_checkpoint and batch.step + 1 == context.order.num_steps // 2:
                reference.save_checkpoint(
                    case.checkpoint_name or SINGLE_WORKER, strategy, optimizer, batch.step + 1, link
                )
        measurement.rows, measurement.order_digest = _sum_over_replicas(strategy, measurement.rows), link.hex()
        reference.compare_weights(self.initial_network, strategy, measurement)
        return measurement


@dataclass
class _GradientObserver(step.Observer):
    """Compares each gradient with the reference's."""

    reference: "_ReferenceFiles"
    step_number: int
    measurement: CaseMeasurement

    def on_gradient(self, strategy: Strategy) -> None:
        self.reference.compare_gradient(strategy, self.step_number, self.measurement)


class _ReferenceFiles:
    """Gradients and weights of the first case of a precision, on disk; every later case of that precision is compared
    with them."""

    def __init__(self, case: VerificationCase, training_slice: TrainingSlice, is_active: bool):
        self._folder = folder = training_slice.scratch / reference_name(case)
        self._is_active, self._middle_step = is_active, training_slice.steps // 2
        self._floor = GRADIENT_FLOOR if case.precision == EXACT_PRECISION else FP32_GRADIENT_FLOOR
        self.is_complete = (folder / "weights.safetensors").is_file()
        self.is_writer = is_active and not self.is_complete
        if is_active:
            folder.mkdir(exist_ok=True)

    def checkpoint_path(self, name: str) -> Path:
        return checkpoint_format.checkpoint_path(self._folder / name, self._middle_step)

    def save_checkpoint(self, name: str, strategy: Strategy, optimizer: Any, step_number: int, link: bytes) -> None:
        """Called on every rank. A rank that reads the checkpoint has synchronized with rank 0 since."""
        state = checkpoint_format.CheckpointState(step_number, link.hex(), None, None)
        snapshot = checkpoint_format.Snapshot.capture(
            strategy.module, optimizer, state, gather=strategy.gather_full_tensors
        )
        if self._is_active:
            checkpoint_format.write_checkpoint(self._folder / name, snapshot)

    def compare_gradient(self, strategy: Strategy, step_number: int, measurement: CaseMeasurement) -> None:
        """Called on every rank. Rank 0's gradient stands for all, as the final comparison of weights shows."""
        local_gradients = {
            name: value.grad for name, value in strategy.module.named_parameters() if value.grad is not None
        }
        gradients = dict(strategy.gather_full_tensors(local_gradients))
        if not self._is_active:
            return
        path = self._folder / f"gradient-{step_number}.safetensors"
        if self.is_writer:
            _write_tensors(
                path,
                {key: part for name, grad in gradients.items() for key, part in _compact_gradient(name, grad).items()},
            )
            return
        reference_tensors = _read_tensors(path)
        norms = {
            name: float(value.norm()) for name, value in reference_tensors.items() if not name.endswith(ROWS_SUFFIX)
        }
        total = sum(norm**2 for norm in norms.values()) ** 0.5
        for name, grad in gradients.items():
            ratio = _gradient_distance(grad, reference_tensors, name) / max(norms.get(name, 0.0), self._floor * total)
            if not ratio <= measurement.gradient_ratio:  # NaN counts as the largest
                measurement.gradient_ratio, measurement.worst_tensor, measurement.worst_step = ratio, name, step_number
        if missing := norms.keys() - gradients.keys():  # as wrong as a gradient of zeros
            measurement.gradient_ratio = math.inf
            measurement.worst_tensor, measurement.worst_step = min(missing), step_number

    def compare_weights(
        self, initial_network: "torch.nn.Module", strategy: Strategy, measurement: CaseMeasurement
    ) -> None:
        weights = dict(
            strategy.gather_full_tensors({name: value.detach() for name, value in strategy.module.named_parameters()})
        )
        if not self._is_active:
            return
        path = self._folder / "weights.safetensors"
        if self.is_writer:
            _write_tensors(path, weights)
            return
        difference = reference_distance = 0.0
        initial_weights, reference_weights = dict(initial_network.named_parameters()), _read_tensors(path)
        if missing := reference_weights.keys() - weights.keys():
            raise AssertionError(f"weights that one worker trains are not there: {', '.join(sorted(missing))}")
        for name, value in weights.items():
            difference += float((value - reference_weights[name]).norm()) ** 2
            reference_distance += float((reference_weights[name] - initial_weights[name].detach()).norm()) ** 2
        measurement.weights_ratio = (difference / reference_distance) ** 0.5


# ---------------------------------------------------------------------------------------------------------- tensors

ROWS_SUFFIX = ":rows"


def _compact_gradient(name: str, grad: "torch.Tensor") -> dict[str, "torch.Tensor"]:
    """A gradient, or only its nonzero rows: a step touches few rows of an embedding table."""
    if grad.dim() == 2:
        rows = grad.ne(0).any(dim=1).nonzero().squeeze(1)
        if 2 * len(rows) < len(grad):
            return {name: grad[rows], name + ROWS_SUFFIX: rows}
    return {name: grad}


def _gradient_distance(grad: "torch.Tensor", reference_tensors: dict[str, "torch.Tensor"], name: str) -> float:
    if name not in reference_tensors:
        return float(grad.norm())
    rows = reference_tensors.get(name + ROWS_SUFFIX)
    if rows is None:
        return float((grad - reference_tensors[name]).norm())
    residual = grad.clone()
    residual[rows] -= reference_tensors[name]
    return float(residual.norm())


def _write_tensors(path: Path, tensors: dict[str, "torch.Tensor"]) -> None:
    from safetensors.torch import save_file

    draft = path.with_suffix(".draft")
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, draft)
    shutil.move(draft, path)


def _read_tensors(path: Path) -> dict[str, "torch.Tensor"]:
    from safetensors.torch import load_file

    return load_file(path)


def _sum_over_replicas(strategy: Strategy, value: int) -> int:
    import torch

    return int(strategy.sum_over_replicas(torch.tensor([value])).item())


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
