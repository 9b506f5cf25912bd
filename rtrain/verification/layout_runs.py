"""What a worker group of `rtrain verify` does: train the same slice in several layouts and measure how far they part.

All without dropout, and nearly all in float64: in fp32, correct code parts too, since Adam amplifies rounding where the
true gradient is zero. What is trained with is the run's own stream, loop and step.
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
from rtrain.data.order import Order, chain
from rtrain.data.store.store import open_store
from rtrain.models import builder
from rtrain.parallel import collectives, dtensor_utils, factory as strategies
from rtrain.parallel.base import Exchange
from rtrain.tasks import base
from rtrain.trainer import losses, optimizers, step, trainer
from rtrain.verification import planted_bugs
from rtrain.verification.verify_plan import EXACT, SINGLE, Case, train_of

if TYPE_CHECKING:
    import torch

REFERENCE = "reference"
FLOOR = 1e-6
"""A tensor's gradient below this share of the whole gradient's norm is compared with that share instead of itself."""
FP32_FLOOR = 1.0
"""The same in fp32: a tensor whose true gradient is zero, as a key's bias has, is nothing but rounding."""


@dataclass
class Measured:
    """How far a case parted from the reference."""

    weights_ratio: float = 0.0
    """|difference| / |distance moved|, over all tensors jointly, at the end."""
    gradient_ratio: float = 0.0
    """The largest |g - g_ref| / max(|g_ref|, FLOOR x |whole g_ref|) of any tensor and update, before clipping."""
    worst_tensor: str = ""
    worst_update: int = -1
    most_passes: int = 0
    """Most passes that rank 0 made in one update."""
    order_digest: str = ""
    rows: int = 0
    workers_differ: int = 0
    """Workers whose weights are not, bit for bit, those of the first worker that has the same."""
    seconds: float = 0.0


def reference_of(case: Case) -> str:
    """The folder of what a case is compared with."""
    return REFERENCE if case.precision == EXACT else f"{REFERENCE}-{case.precision}"


@dataclass(frozen=True)
class Slice:
    """What the cases train: rows of a store, by a recipe, from a model's weights."""

    recipe: Recipe
    scratch: Path
    store: Path
    model: Path
    rows: int
    updates: int


def run_group(trained: Slice, cases: Sequence[Case]) -> None:
    """The train function of one worker group. Rank 0 appends each case's figures to the scratch folder's log."""
    import ray.train
    import torch

    torch.set_num_threads(max(1, env.cores() // ray.train.get_context().get_local_world_size()))
    group = _Group(trained)
    for case in cases:
        group.run(case)


@dataclass
class _Group:
    slice: Slice
    job: trainer.Job = field(init=False)
    start: "torch.nn.Module" = field(init=False)

    def __post_init__(self) -> None:
        recipe, folder, store = self.slice.recipe, self.slice.model, open_store(self.slice.store)
        task = base.get(recipe.task)
        network = builder.build(folder, task, store.manifest.labels, recipe.train.seed, recipe.model)
        # Evaluation mode is dropout 0 for every architecture; encoders have no other layer that heeds it.
        self.start = cast("torch.nn.Module", network).double().eval()
        order = Order(store.manifest.digest, self.slice.rows, recipe.rows_per_update, 1, recipe.train.seed)
        self.job = trainer.Job(
            recipe=recipe,
            run=Run(self.slice.scratch),
            store=store,
            task=task,
            loss=losses.for_run(task, recipe.distill, store.manifest.head, recipe.train.label_smoothing),
            order=order,
            pad_id=builder.pad_id(folder),
            precision=EXACT,
            until=order.updates,
        )

    def run(self, case: Case) -> None:
        clock = trainer.Clock()
        with clock.section("case"):
            train = train_of(self.job.recipe.train, case.layout, case.workers)
            network = copy.deepcopy(self.start)
            exchange = strategies.build(network if case.precision == EXACT else network.float(), train)
            reference = _Reference(case, self.slice, active=collectives.first())
            measured = self._train(case, exchange, reference)
            measured.workers_differ = _differing(exchange.module)
        measured.seconds = round(clock.seconds["case"], 2)
        if collectives.first():  # with layers cut, several workers are of replica 0
            self.job.run.append("case", **asdict(case), name=case.name, measured=asdict(measured))

    def _train(self, case: Case, exchange: Exchange, reference: "_Reference") -> Measured:
        job, measured = replace(self.job, precision=case.precision), Measured()
        optimizer = optimizers.of_run(exchange, job.recipe)
        begin, link = 0, trainer.GENESIS
        if case.resumed:
            state = checkpoint_format.load(reference.checkpoint(case.resumed), exchange.module, optimizer)
            begin, link = state.update, bytes.fromhex(state.ledger)
        step.settle(exchange, job.loss, job.pad_id, job.precision)
        teacher = job.recipe.answers
        share = stream.Share(
            job.store.folder, job.order, exchange.world, exchange.rank, case.micro_batch, teacher=teacher
        )
        for update in stream.stream(share, begin, job.order.updates):
            done = trainer.one_update(
                job,
                exchange,
                optimizer,
                update,
                run_update=planted_bugs.BUGS[case.bug] if case.bug else None,
                observer=_Compared(reference, update.number, measured),
            )
            link = chain(link, update.digest)
            measured.rows += done.rows
            measured.most_passes = max(measured.most_passes, done.passes)
            keeps = case.keeps or (not reference.made and case.precision == EXACT)
            if keeps and update.number + 1 == job.order.updates // 2:
                reference.keep(case.keeps or SINGLE, exchange, optimizer, update.number + 1, link)
        measured.rows, measured.order_digest = _sum(exchange, measured.rows), link.hex()
        reference.weights(self.start, exchange, measured)
        return measured


@dataclass
class _Compared(step.Observer):
    """Compares each gradient with the reference's."""

    reference: "_Reference"
    update: int
    measured: Measured

    def gradient(self, exchange: Exchange) -> None:
        self.reference.gradient(exchange, self.update, self.measured)


class _Reference:
    """Gradients and weights of the first case of a precision, on disk; every later case of that is compared with them
    as it goes."""

    def __init__(self, case: Case, of: Slice, active: bool):
        self._folder = folder = of.scratch / reference_of(case)
        self._active, self._middle = active, of.updates // 2
        self._floor = FLOOR if case.precision == EXACT else FP32_FLOOR
        self.made = (folder / "weights.safetensors").is_file()
        self.is_made_here = active and not self.made
        if active:
            folder.mkdir(exist_ok=True)

    def checkpoint(self, name: str) -> Path:
        return checkpoint_format.path_of(self._folder / name, self._middle)

    def keep(self, name: str, exchange: Exchange, optimizer: Any, update: int, link: bytes) -> None:
        """Called on every rank. Whoever reads it has made an exchange with rank 0 since."""
        state = checkpoint_format.State(update, link.hex(), None, None)
        taken = checkpoint_format.Snapshot.take(exchange.module, optimizer, state, gathered=exchange.whole)
        if self._active:
            checkpoint_format.write(self._folder / name, taken)

    def gradient(self, exchange: Exchange, update: int, measured: Measured) -> None:
        """Called on every rank; rank 0's gradient is the others', which the end's comparison of weights shows."""
        own = {name: value.grad for name, value in exchange.module.named_parameters() if value.grad is not None}
        gradients = dict(exchange.whole(own))
        if not self._active:
            return
        path = self._folder / f"gradient-{update}.safetensors"
        if self.is_made_here:
            _write(path, {key: part for name, grad in gradients.items() for key, part in _compact(name, grad).items()})
            return
        known = _read(path)
        norms = {name: float(value.norm()) for name, value in known.items() if not name.endswith(ROWS)}
        total = sum(norm**2 for norm in norms.values()) ** 0.5
        for name, grad in gradients.items():
            ratio = _difference(grad, known, name) / max(norms.get(name, 0.0), self._floor * total)
            if not ratio <= measured.gradient_ratio:  # a NaN is the worst of all
                measured.gradient_ratio, measured.worst_tensor, measured.worst_update = ratio, name, update
        if missing := norms.keys() - gradients.keys():  # as wrong as a gradient of zeros
            measured.gradient_ratio = math.inf
            measured.worst_tensor, measured.worst_update = min(missing), update

    def weights(self, start: "torch.nn.Module", exchange: Exchange, measured: Measured) -> None:
        found = dict(exchange.whole({name: value.detach() for name, value in exchange.module.named_parameters()}))
        if not self._active:
            return
        path = self._folder / "weights.safetensors"
        if self.is_made_here:
            _write(path, found)
            return
        difference = moved = 0.0
        before, known = dict(start.named_parameters()), _read(path)
        if missing := known.keys() - found.keys():
            raise AssertionError(f"weights that one worker trains are not there: {', '.join(sorted(missing))}")
        for name, value in found.items():
            difference += float((value - known[name]).norm()) ** 2
            moved += float((known[name] - before[name].detach()).norm()) ** 2
        measured.weights_ratio = (difference / moved) ** 0.5


# ---------------------------------------------------------------------------------------------------------- tensors

ROWS = ":rows"


def _compact(name: str, grad: "torch.Tensor") -> dict[str, "torch.Tensor"]:
    """A gradient as it is, or only its rows that are not zero: an update touches few rows of an embedding table."""
    if grad.dim() == 2:
        rows = grad.ne(0).any(dim=1).nonzero().squeeze(1)
        if 2 * len(rows) < len(grad):
            return {name: grad[rows], name + ROWS: rows}
    return {name: grad}


def _difference(grad: "torch.Tensor", known: dict[str, "torch.Tensor"], name: str) -> float:
    if name not in known:
        return float(grad.norm())
    rows = known.get(name + ROWS)
    if rows is None:
        return float((grad - known[name]).norm())
    difference = grad.clone()
    difference[rows] -= known[name]
    return float(difference.norm())


def _write(path: Path, tensors: dict[str, "torch.Tensor"]) -> None:
    from safetensors.torch import save_file

    draft = path.with_suffix(".draft")
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, draft)
    shutil.move(draft, path)


def _read(path: Path) -> dict[str, "torch.Tensor"]:
    from safetensors.torch import load_file

    return load_file(path)


def _sum(exchange: Exchange, value: int) -> int:
    import torch

    return int(exchange.sum(torch.tensor([value])).item())


def _differing(module: "torch.nn.Module") -> int:
    """Workers that have other weights than the first worker that has these, by digest; shares are put together."""
    own = {
        name: hashlib.sha256(dtensor_utils.full(value.detach()).cpu().numpy().data).hexdigest()
        for name, value in module.named_parameters()
        if dtensor_utils.here(value)
    }
    every, first = collectives.every(own), dict[str, str]()
    for known in reversed(every):
        first |= known
    return sum(any(first[name] != digest for name, digest in known.items()) for known in every)
