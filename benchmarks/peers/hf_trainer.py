"""HF Trainer: `torchrun --nproc-per-node 2 -m benchmarks.peers.hf_trainer --model FOLDER --rows FILE --out FILE`.

It trains with its defaults, or with `--sampling group_by_length`, its own way to pad less. `--pooling mean` gives it a
handwritten classifier that reads the mean of the tokens.
"""

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peers import common


def main() -> None:
    parser = common.parser("hf_trainer", __doc__)
    parser.add_argument("--sampling", default="random", help="the Trainer's train_sampling_strategy")
    parser.add_argument("--pooling", choices=("own", "mean"), default="own", help="what its head reads")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--test", type=Path, help="csv; evaluate on it, and stop at --until")
    parser.add_argument("--evaluate-every", type=int, default=100, help="updates between two evaluations")
    parser.add_argument("--until", type=float, default=1.0, help="accuracy at which it stops")
    chosen = parser.parse_args()

    import datasets
    import numpy as np
    import torch
    import transformers

    texts, names = common.read(chosen.rows)
    labels = {name: number for number, name in enumerate(sorted(set(names)))}
    tokenizer = transformers.AutoTokenizer.from_pretrained(chosen.model, local_files_only=True, trust_remote_code=False)

    def encode(batch: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = tokenizer(batch["text"], truncation=True, max_length=common.MAX_TOKENS)
        return found

    def dataset(texts: list[str], names: list[str]) -> Any:
        rows = datasets.Dataset.from_dict({"text": texts, "label": [labels[name] for name in names]})
        return rows.map(encode, batched=True, remove_columns=["text"])

    def accuracy(answers: Any) -> dict[str, float]:
        return {"accuracy": float(np.mean(answers.predictions.argmax(-1) == answers.label_ids))}

    watch = common.Watch()
    seen: list[tuple[float, float]] = []

    class Clock(transformers.TrainerCallback):
        paused = 0.0
        """Seconds that evaluations took."""

        def on_step_begin(self, *of: Any, **more: Any) -> None:
            watch.begin()

        def on_step_end(self, *of: Any, **more: Any) -> None:
            watch.end()

        def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            score = more["metrics"]["eval_accuracy"]
            seen.append((watch.seconds - self.paused, score))
            control.should_training_stop = score >= chosen.until
            before = watch.ended
            watch.end()
            self.paused += watch.ended - before

    clock, train = Clock(), dataset(texts, names)
    losses = list[torch.Tensor]()
    if chosen.pooling == "mean":
        from benchmarks.peers.mean_pooling import MeanPooled

        transformers.set_seed(chosen.seed)  # all processes draw the same, as when the Trainer makes the model
        model: Any = MeanPooled(chosen.model, len(labels), chosen.attention)
    else:
        model = common.network(chosen.model, len(labels), chosen.attention)

    # For a classifier the Trainer logs the sum of the means of all processes and passes.
    def keep_loss(module: Any, inputs: Any, output: Any) -> None:
        if module.training:
            losses.append(output.loss.detach())

    model.register_forward_hook(keep_loss)
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=common.ROWS_PER_PASS,
                per_device_eval_batch_size=2 * common.ROWS_PER_PASS,
                gradient_accumulation_steps=chosen.passes,
                num_train_epochs=chosen.epochs,
                learning_rate=common.LEARNING_RATE,
                weight_decay=common.WEIGHT_DECAY,
                max_grad_norm=common.CLIP_NORM,
                warmup_steps=common.WARMUP,
                lr_scheduler_type="linear",
                bf16=True,
                use_cpu=True,
                ddp_backend="gloo",
                train_sampling_strategy=chosen.sampling,
                dataloader_num_workers=chosen.loader_workers,
                eval_strategy="steps" if chosen.test else "no",
                eval_steps=chosen.evaluate_every,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
                seed=chosen.seed,
            ),
            train_dataset=train,
            eval_dataset=dataset(*common.read(chosen.test)) if chosen.test else None,
            data_collator=transformers.DataCollatorWithPadding(tokenizer),
            compute_metrics=accuracy,
            callbacks=[clock],
        )
        trainer.train()
    means = trainer.accelerator.reduce(torch.stack(losses), reduction="mean").tolist()
    if common.rank() == 0:
        updates = trainer.state.global_step
        rows = min(updates * common.ROWS_PER_PASS * common.PROCESSES * chosen.passes, chosen.epochs * len(texts))
        seconds, loss = watch.seconds - clock.paused, common.last_quarter(means)
        common.write(chosen.out, rows=rows, seconds=seconds, updates=updates, loss=loss, seen=seen)


if __name__ == "__main__":
    main()
