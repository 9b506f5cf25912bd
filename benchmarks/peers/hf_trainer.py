"""HF Trainer: `torchrun --nproc-per-node 2 -m benchmarks.peers.hf_trainer --model FOLDER --rows FILE --out FILE`.

It trains with its defaults, or with `--sampling group_by_length`, its own way to pad less.
"""

import tempfile
from typing import Any

from benchmarks.peers import common


def main() -> None:
    parser = common.parser("hf_trainer", __doc__)
    parser.add_argument("--sampling", default="random", help="the Trainer's train_sampling_strategy")
    options = parser.parse_args()

    import datasets
    import torch
    import transformers

    texts, names = common.read(options.rows)
    labels = {name: number for number, name in enumerate(sorted(set(names)))}
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        options.model, local_files_only=True, trust_remote_code=False
    )

    def encode(batch: dict[str, Any]) -> dict[str, Any]:
        encoded: dict[str, Any] = tokenizer(batch["text"], truncation=True, max_length=common.MAX_TOKENS)
        return encoded

    rows = datasets.Dataset.from_dict({"text": texts, "label": [labels[name] for name in names]})
    watch, losses = common.Watch(), list[torch.Tensor]()

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *arguments: Any, **more: Any) -> None:
            watch.begin()

        def on_step_end(self, *arguments: Any, **more: Any) -> None:
            watch.end()

    model = common.network(options.model, len(labels))

    # For a classifier the Trainer logs the sum of the means of all processes and passes.
    def keep_loss(module: Any, inputs: Any, output: Any) -> None:
        losses.append(output.loss.detach())

    model.register_forward_hook(keep_loss)
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=common.MICRO_BATCH_SIZE,
                gradient_accumulation_steps=options.passes,
                num_train_epochs=1,
                learning_rate=common.LEARNING_RATE,
                weight_decay=common.WEIGHT_DECAY,
                max_grad_norm=common.CLIP_NORM,
                warmup_steps=common.WARMUP,
                lr_scheduler_type="linear",
                bf16=True,
                use_cpu=True,
                ddp_backend="gloo",
                train_sampling_strategy=options.sampling,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
                seed=options.seed,
            ),
            train_dataset=rows.map(encode, batched=True, remove_columns=["text"]),
            data_collator=transformers.DataCollatorWithPadding(tokenizer),
            callbacks=[Clock()],
        )
        trainer.train()
    means = trainer.accelerator.reduce(torch.stack(losses), reduction="mean").tolist()
    if common.rank() == 0:
        updates = trainer.state.global_step
        trained = min(updates * common.MICRO_BATCH_SIZE * common.PROCESSES * options.passes, len(texts))
        loss = common.last_quarter(means)
        common.write(options.out, rows=trained, seconds=watch.seconds, updates=updates, loss=loss)


if __name__ == "__main__":
    main()
