"""Ray Train over Ray Data in the way that Ray's guides show: rows are tokenised by `map_batches`, each worker iterates
over its shard by `iter_torch_batches`, and the collate function pads. `python -m benchmarks.peers.ray_documented
--model FOLDER --rows FILE --out FILE`.
"""

import tempfile
from functools import partial
from typing import Any

from benchmarks.peers import common


def encode(batch: dict[str, Any], tokenizer: Any, labels: dict[str, int]) -> dict[str, Any]:
    import numpy as np

    ids = tokenizer(list(batch["text"]), truncation=True, max_length=common.MAX_TOKENS)["input_ids"]
    # numpy would make a matrix of rows of equal length.
    rows = np.empty(len(ids), dtype=object)
    rows[:] = [np.array(row) for row in ids]
    return {"input_ids": rows, "labels": np.array([labels[name] for name in batch["label"]])}


def collate(batch: dict[str, Any], pad_id: int) -> dict[str, Any]:
    import torch

    rows = [torch.as_tensor(row) for row in batch["input_ids"]]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id)
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.as_tensor(batch["labels"])}


def train(config: dict[str, Any]) -> None:
    """The training of each worker."""
    import ray.train
    import ray.train.torch
    import torch
    import torch.distributed as dist

    torch.manual_seed(config["seed"])
    model = ray.train.torch.prepare_model(common.network(config["model"], config["labels"]))
    optimizer, schedule = common.optimizer(model, config["updates"])
    model.train()
    shard = ray.train.get_dataset_shard("train")
    batches = shard.iter_torch_batches(
        batch_size=common.MICRO_BATCH_SIZE, collate_fn=partial(collate, pad_id=config["pad_id"])
    )
    watch, losses, rows = common.Watch(), [], 0
    for batch in batches:
        watch.begin()
        losses.append(common.train_step(model, batch, optimizer, schedule))
        rows += len(batch["labels"])
        watch.end()
    means, total = torch.stack(losses) / dist.get_world_size(), torch.tensor(rows)
    dist.all_reduce(means)
    dist.all_reduce(total)
    if ray.train.get_context().get_world_rank() == 0:
        loss = common.last_quarter(means.tolist())
        common.write(config["out"], rows=int(total), seconds=watch.seconds, updates=len(losses), loss=loss)


def main() -> None:
    options = common.parser("ray_documented", __doc__).parse_args()

    import ray
    import ray.data
    import ray.train
    import ray.train.torch
    import transformers

    # Ray gets more CPUs than exist: the workers would take both, and the data tasks would never start.
    ray.init(num_cpus=2 * common.PROCESSES, include_dashboard=False)
    texts, names = common.read(options.rows)
    labels = {name: number for number, name in enumerate(sorted(set(names)))}
    dataset = ray.data.read_csv(str(options.rows)).random_shuffle(seed=options.seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        options.model, local_files_only=True, trust_remote_code=False
    )
    dataset = dataset.map_batches(partial(encode, tokenizer=tokenizer, labels=labels))
    config = {
        "model": options.model,
        "labels": len(labels),
        "pad_id": tokenizer.pad_token_id,
        "updates": -(-len(texts) // (common.MICRO_BATCH_SIZE * common.PROCESSES)),
        "seed": options.seed,
        "out": options.out,
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = ray.train.torch.TorchTrainer(
            train,
            train_loop_config=config,
            scaling_config=ray.train.ScalingConfig(num_workers=common.PROCESSES),
            run_config=ray.train.RunConfig(storage_path=folder),
            datasets={"train": dataset},
        )
        trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
