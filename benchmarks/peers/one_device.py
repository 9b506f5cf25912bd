"""Train Transformers' padded model on one device, in this process, for `benchmarks.gpu`.

HF Trainer trains it, or, if `accelerate` is missing, a plain loop that groups, pads, accumulates and steps as the
Trainer does. The other peers are programs.
"""

import contextlib
import importlib.util
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.peers import common

if TYPE_CHECKING:
    import torch

TRAINER, LOOP = "HF Trainer", "plain loop"
HALF = {"bf16": "bfloat16", "fp16": "float16"}
Row = Mapping[str, Any]
"""A row: its `input_ids`, and its `labels`, which is one number."""


@dataclass(frozen=True)
class Plan:
    updates: int
    rows_per_pass: int
    passes: int = 1
    """Rows of an update."""
    grouped: bool = True
    """Whether rows are grouped by length, the Trainer's own way to pad less."""
    precision: str = "bf16"
    seed: int = 0
    warm: int = 0
    """Updates that are made before the clock runs."""
    loader_workers: int = 0
    after: Callable[[float], bool] = lambda seconds: False
    """Called with the seconds until then, after every `every` updates and outside of the clock; True ends the
    training."""
    every: int = 0
    """Updates between two calls of the function above; 0 for never."""


@dataclass(frozen=True)
class Measured:
    by: str
    rows: int
    real_tokens: int
    padded_tokens: int
    seconds: float


def peer() -> str:
    return LOOP if importlib.util.find_spec("accelerate") is None else TRAINER


def train(
    model: "torch.nn.Module",
    rows: Sequence[Row],
    pad_id: int,
    plan: Plan,
    collator: Callable[[Any], Any] | None = None,
) -> Measured:
    """Train the model, which must be on its device already. The loss is not kept. `collator`: the Trainer's, in place
    of one that pads."""
    clock = Clock(model, plan)
    with clock.counting():
        if collator is not None or peer() == TRAINER:
            _by_trainer(model, rows, plan, clock, collator or (lambda batch: collate(batch, pad_id)))
        else:
            _by_loop(model, rows, pad_id, plan, clock)
    return clock.measured(peer())


class Clock:
    """Measures the seconds of the updates after the first `plan.warm`, and counts the tokens given to the model in
    them."""

    def __init__(self, model: "torch.nn.Module", plan: Plan):
        import torch

        self._model, self._plan = model, plan
        device = next(model.parameters()).device
        self._synchronize: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        # Real tokens are counted on the batch's device, since reading the count would make the GPU wait.
        self._real = torch.zeros((), dtype=torch.int64, device=device)
        self._rows = self._padded = 0
        self._begun = self._ended = self._paused = 0.0
        self.updates, self.seconds = 0, 0.0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        def count(module: Any, inputs: Any, named: Mapping[str, Any]) -> None:
            if self.updates >= self._plan.warm and module.training:
                mask = named.get("attention_mask")
                if mask is None:  # flattened rows: nothing is padded
                    self._real += named["input_ids"].numel()
                    self._rows += 1
                    self._padded += named["input_ids"].numel()
                    return
                self._real += mask.sum()
                self._rows += len(mask)
                self._padded += mask.numel()

        hook = self._model.register_forward_pre_hook(count, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def begin(self) -> None:
        """To be called before each update."""
        if self.updates == self._plan.warm:
            self._synchronize()
            self._begun = self._ended = time.perf_counter()

    def end(self) -> bool:
        """To be called after each update; returns whether the training should end."""
        self.updates += 1
        if self.updates <= self._plan.warm:
            return False
        asks = bool(self._plan.every) and self.updates % self._plan.every == 0
        if asks or self.updates == self._plan.updates:
            self._synchronize()
        self._ended = time.perf_counter()
        self.seconds = self._ended - self._begun - self._paused
        stop = asks and self._plan.after(self.seconds)
        self._paused += time.perf_counter() - self._ended
        return stop

    def measured(self, by: str) -> Measured:
        return Measured(by, self._rows, int(self._real), self._padded, self.seconds)


def collate(rows: Sequence[Row], pad_id: int) -> dict[str, "torch.Tensor"]:
    """A padded batch."""
    import torch

    texts = [torch.as_tensor(row["input_ids"], dtype=torch.int64) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=pad_id)
    lengths = torch.tensor([len(text) for text in texts])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([int(row["labels"]) for row in rows])}


def _by_trainer(model: Any, rows: Sequence[Row], plan: Plan, clock: Clock, collator: Callable[[Any], Any]) -> None:
    import transformers

    class Told(transformers.TrainerCallback):
        def on_step_begin(self, *of: Any, **more: Any) -> None:
            clock.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            control.should_training_stop = clock.end() or control.should_training_stop

    known = transformers.TrainingArguments.__dataclass_fields__
    grouping = (
        {"train_sampling_strategy": "group_by_length"}
        if "train_sampling_strategy" in known
        else {"group_by_length": True}
    )
    device = next(model.parameters()).device.type
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=plan.updates,
            per_device_train_batch_size=plan.rows_per_pass,
            gradient_accumulation_steps=plan.passes,
            learning_rate=common.LEARNING_RATE,
            weight_decay=common.WEIGHT_DECAY,
            max_grad_norm=common.CLIP_NORM,
            warmup_steps=math.ceil(common.WARMUP * plan.updates),
            lr_scheduler_type="linear",
            bf16=plan.precision == "bf16",
            fp16=plan.precision == "fp16",
            use_cpu=device == "cpu",
            dataloader_num_workers=plan.loader_workers,
            remove_unused_columns=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=plan.seed,
            **(grouping if plan.grouped else {}),
        )
        transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=list(rows),
            data_collator=collator,
            callbacks=[Told()],
        ).train()


def _by_loop(model: Any, rows: Sequence[Row], pad_id: int, plan: Plan, clock: Clock) -> None:
    import torch

    device = next(model.parameters()).device
    optimizer, schedule = common.optimizer(model, plan.updates)
    scaler = torch.amp.GradScaler(device.type, enabled=plan.precision == "fp16")
    half = getattr(torch, HALF[plan.precision]) if plan.precision in HALF else None
    batches = _batches(rows, plan)
    torch.manual_seed(plan.seed)
    model.train()
    for _ in range(plan.updates):
        update = [collate(next(batches), pad_id) for _ in range(plan.passes)]
        clock.begin()
        for batch in update:
            given = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
            with torch.autocast(device.type, dtype=half) if half else contextlib.nullcontext():
                loss = model(**given).loss
            scaler.scale(loss / plan.passes).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), common.CLIP_NORM)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        if clock.end():
            return


def _batches(rows: Sequence[Row], plan: Plan) -> Iterator[list[Row]]:
    """The passes of endless epochs without their short last ones, as the Trainer draws them."""
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    draw = torch.Generator().manual_seed(plan.seed)
    lengths = [len(row["input_ids"]) for row in rows]
    size = plan.rows_per_pass
    while True:
        if plan.grouped:
            order = list(LengthGroupedSampler(size, lengths=lengths, generator=draw))
        else:
            order = torch.randperm(len(rows), generator=draw).tolist()
        for begin in range(0, len(order) - size + 1, size):
            yield [rows[place] for place in order[begin : begin + size]]
