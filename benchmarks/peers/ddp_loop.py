"""A plain DistributedDataParallel loop over the very batches that rtrain trains on, made before its clock starts:
`torchrun --nproc-per-node 2 -m benchmarks.peers.ddp_loop --store STORE --model FOLDER --rows FILE --out FILE`.

It pads, exchanges gradients and steps as PyTorch and Transformers do. It waits for no input and uses no Ray, so that it
shows the least that a training loop can cost with these batches and these parts.
"""

from pathlib import Path
from typing import Any

from benchmarks.peers import common


def batches(folder: Path, world: int, rank: int, seed: int) -> list[dict[str, Any]]:
    """This process's batches of one epoch, as tensors, with the rows and the order of rtrain's worker of the same
    rank."""
    import torch

    from rtrain.core.ragged import pad_batch
    from rtrain.data import order, stream
    from rtrain.data.store import store

    opened = store.open_store(folder)
    global_batch_size = common.MICRO_BATCH_SIZE * world
    epoch = order.RowOrder(opened.manifest.digest, opened.num_rows("train"), global_batch_size, 1, seed)
    share = stream.StreamSpec(folder, epoch, world, rank, common.MICRO_BATCH_SIZE)
    rows = []
    for number in range(epoch.num_steps):
        # A worker has at most MICRO_BATCH_SIZE rows of short texts in an update, so there is one pass.
        (tokens,) = stream.plan_worker_batch(opened, share, number).micro_batches
        inputs = {name: torch.from_numpy(values) for name, values in pad_batch(tokens, 0).items()}
        rows.append({**inputs, "labels": torch.from_numpy(tokens.targets).long()})
    return rows


def main() -> None:
    parser = common.parser("ddp_loop", __doc__)
    parser.add_argument("--store", type=Path, required=True, help="token store of an rtrain run on these rows")
    options = parser.parse_args()

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    prepared = batches(options.store, dist.get_world_size(), dist.get_rank(), options.seed)
    texts, names = common.read(options.rows)
    model = DistributedDataParallel(common.network(options.model, len(set(names))))
    optimizer, schedule = common.optimizer(model, len(prepared))
    model.train()
    watch, losses = common.Watch(), []
    for batch in prepared:
        watch.begin()
        losses.append(common.train_step(model, batch, optimizer, schedule))
        watch.end()
    means = torch.stack(losses) / dist.get_world_size()
    dist.all_reduce(means)
    if dist.get_rank() == 0:
        loss = common.last_quarter(means.tolist())
        common.write(options.out, rows=len(texts), seconds=watch.seconds, updates=len(losses), loss=loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
