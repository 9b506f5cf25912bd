"""A plain loop with Accelerate, batches padded to their longest row:
`torchrun --nproc-per-node 2 -m benchmarks.peers.accelerate_loop --model FOLDER --rows FILE --out FILE`.
"""

from typing import Any

from benchmarks.peers import common


def main() -> None:
    chosen = common.parser("accelerate_loop", __doc__).parse_args()

    import accelerate
    import torch
    import transformers

    accelerate.utils.set_seed(chosen.seed)
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision="bf16", gradient_accumulation_steps=chosen.passes, step_scheduler_with_optimizer=False
    )
    texts, names = common.read(chosen.rows)
    labels = {name: number for number, name in enumerate(sorted(set(names)))}
    tokenizer = transformers.AutoTokenizer.from_pretrained(chosen.model, local_files_only=True, trust_remote_code=False)
    encoded = tokenizer(texts, truncation=True, max_length=common.MAX_TOKENS)["input_ids"]
    rows = [{"input_ids": ids, "labels": labels[name]} for ids, name in zip(encoded, names, strict=True)]
    loader: Any = torch.utils.data.DataLoader(
        rows,  # type: ignore[arg-type]
        batch_size=common.ROWS_PER_PASS,
        shuffle=True,
        collate_fn=transformers.DataCollatorWithPadding(tokenizer),
        num_workers=chosen.loader_workers,
    )
    model = common.network(chosen.model, len(labels), chosen.attention)
    per_update = common.ROWS_PER_PASS * common.PROCESSES * chosen.passes
    optimizer, schedule = common.optimizer(model, -(-len(texts) // per_update))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    watch, losses, sum_of_losses, passes = common.Watch(), [], torch.zeros(()), 0
    for batch in loader:
        watch.begin()
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            sum_of_losses, passes = sum_of_losses + loss.detach(), passes + 1
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), common.CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            schedule.step()
            losses.append(sum_of_losses / passes)
            sum_of_losses, passes = torch.zeros(()), 0
        watch.end()
    means = accelerator.reduce(torch.stack(losses), reduction="mean").tolist()
    if accelerator.is_main_process:
        loss = common.last_quarter(means)
        common.write(chosen.out, rows=len(texts), seconds=watch.seconds, updates=len(means), loss=loss)


if __name__ == "__main__":
    main()
