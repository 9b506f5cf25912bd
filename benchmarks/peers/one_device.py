"""Train Transformers' padded model on one device, in this process, for `benchmarks.gpu`.

HF Trainer trains it. The other peers are programs.
"""

import contextlib
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.peers import common

if TYPE_CHECKING:
    import torch

Row = Mapping[str, Any]
"""A row: its `input_ids`, and its `labels`, which is one number."""


@dataclass(frozen=True)
class Plan:
    updates: int
    micro_batch_size: int
    passes: int = 1
    """Rows of an update."""
    grouped: bool = True
    """Whether rows are grouped by length, the Trainer's own way to pad less."""
    precision: str = "bf16"
    seed: int = 0
    warm: int = 0
    """Updates that are made before the clock runs."""
    loader_workers: int = 0


@dataclass(frozen=True)
class Measured:
    real_tokens: int
    padded_tokens: int
    seconds: float


def train(model: "torch.nn.Module", rows: Sequence[Row], pad_id: int, plan: Plan) -> Measured:
    """Train the model, which must be on its device already. The loss is not kept."""
    clock = Clock(model, plan)
    with clock.counting():
        _by_trainer(model, rows, pad_id, plan, clock)
    return clock.measured()


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
        self._padded = 0
        self._started_at = 0.0
        self.updates, self.seconds = 0, 0.0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        def count(module: Any, inputs: Any, keywords: Mapping[str, Any]) -> None:
            if self.updates >= self._plan.warm and module.training:
                mask = keywords["attention_mask"]
                self._real += mask.sum()
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
            self._started_at = time.perf_counter()

    def end(self) -> None:
        """To be called after each update."""
        self.updates += 1
        if self.updates == self._plan.updates:
            self._synchronize()
            self.seconds = time.perf_counter() - self._started_at

    def measured(self) -> Measured:
        return Measured(int(self._real), self._padded, self.seconds)


def collate(rows: Sequence[Row], pad_id: int) -> dict[str, "torch.Tensor"]:
    """A padded batch."""
    import torch

    texts = [torch.as_tensor(row["input_ids"], dtype=torch.int64) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=pad_id)
    lengths = torch.tensor([len(text) for text in texts])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([int(row["labels"]) for row in rows])}


def _by_trainer(model: Any, rows: Sequence[Row], pad_id: int, plan: Plan, clock: Clock) -> None:
    import transformers

    class StepTimer(transformers.TrainerCallback):
        def on_step_begin(self, *arguments: Any, **more: Any) -> None:
            clock.begin()

        def on_step_end(self, *arguments: Any, **more: Any) -> None:
            clock.end()

    device = next(model.parameters()).device.type
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=plan.updates,
            per_device_train_batch_size=plan.micro_batch_size,
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
            train_sampling_strategy="group_by_length" if plan.grouped else "random",
        )
        transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=list(rows),
            data_collator=lambda batch: collate(batch, pad_id),
            callbacks=[StepTimer()],
        ).train()
