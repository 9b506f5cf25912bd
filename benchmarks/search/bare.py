"""Seconds from `fit` of a Ray trainer to the begin of what its two workers do: `python -m benchmarks.search.bare
DIR`."""

import sys
import time
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def main() -> None:
    place = Path(sys.argv[1])
    begun = place / "begun"

    def work() -> None:
        begun.write_text(str(time.time()))

    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    trainer = TorchTrainer(
        work, scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(name="bare", storage_path=str(place))
    )
    start = time.time()
    trainer.fit()
    seconds = float(begun.read_text()) - start
    ray.shutdown()
    print(seconds)


if __name__ == "__main__":
    main()
