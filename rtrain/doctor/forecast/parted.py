"""What it costs that a model lies on several workers in parts: what they send beside the sum of an update's gradient,
and for how long the stages of a pipeline stand still. Pure.

Shares of gradients and weights are those of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054), cut layers Megatron's
(Shoeybi et al. 2019, arXiv:1909.08053), the stages that wait GPipe's (Huang et al. 2019, arXiv:1811.06965).
"""

import math
from typing import Final

from rtrain.config import Train
from rtrain.doctor.forecast import stages
from rtrain.doctor.forecast.facts import Shape
from rtrain.doctor.forecast.links import Fabric
from rtrain.doctor.forecast.scaling import Parted
from rtrain.strategies.schedules import SCHEDULES
from rtrain.training import pass_size

FP32: Final = 4
"""Bytes of a number."""
HALF: Final = 2
SUMS: Final = 4
"""Sums over a replica's workers for each cut layer and pass, each of a vector for each token: after attention and after
the feed-forward layer, and the gradients of what both read."""


def tokens_of_pass(train: Train, device: str) -> int:
    """Tokens of a pass, at most."""
    return train.tokens_per_pass or (pass_size.ON_CPU if device == "cpu" else 4 * pass_size.ON_CPU)


def of(train: Train, shape: Shape, tokens: float, fabric: Fabric, workers: int, *, gpu: bool, tied: bool) -> Parted:
    """What a layout costs on so many workers. `tokens`: of a replica's update; `tied`: the table of words is the head's
    too. The first of a pipeline's stages stands for all: it has that table, and with it most."""
    most, half = tokens_of_pass(train, "gpu" if gpu else "cpu"), train.precision != "fp32"
    staged, cut = train.pipeline, train.tensor
    parts, layers = staged * cut, shape.layers / staged
    replicas, layer, rest = workers // parts, shape.layer / cut, shape.table / cut
    passes = max(1, math.ceil(tokens / (stages.tokens(train, most, tokens) if staged > 1 else most)))
    still, bubble = 0.0, 0.0
    if cut > 1:
        vectors = tokens / passes * shape.hidden * (HALF if half else FP32)
        still += passes * (SUMS * layers + 1) * fabric.seconds(vectors, cut)
    if staged > 1:
        each = SCHEDULES[train.schedule].parts
        # Each pass goes on to the next stage, and its gradient comes back, from every part of the network but the last.
        still += 2 * each * passes * fabric.sent(tokens / passes * shape.hidden * FP32, parts)
        # Both ends have a tied table, and add its gradients up.
        still += fabric.seconds(rest, 2) if tied else 0.0
        # Idle passes that are added, where an update has too few, hardly take time.
        bubble = (staged - 1) / each / passes
    if train.shard < 2 or replicas == 1:
        shares = replicas if train.shard == 1 else 1
        still += gather(shape.weights, shares, 1, fabric)
        summed = rest + layers * layer if parts > 1 else None
        return Parted(parts, parts * shares, summed, still_s=still, bubble=bubble)
    shared = layers * scatter(layer, replicas, parts, fabric, gpu) + scatter(rest, replicas, parts, fabric, gpu)
    gathered, ends = layers * gather(layer, replicas, parts, fabric), gather(rest, replicas, parts, fabric)
    # The third way gathers a layer before its forward pass and before its backward pass, the rest once.
    beside = passes * (2 * gathered + ends + shared) if train.shard == 3 else gathered + ends + passes * shared
    return Parted(parts, parts * replicas, 0.0, beside, still, bubble)


def gather(size: float, workers: int, groups: int, fabric: Fabric) -> float:
    """Seconds until each worker has all of so many bytes, of which each has a share: the second half of a sum."""
    return fabric.seconds(size, workers, groups) / 2


def scatter(size: float, workers: int, groups: int, fabric: Fabric, gpu: bool) -> float:
    """Seconds until each worker has the sum of its share of so many bytes: the first half of a sum. Gloo sums all of
    them."""
    return fabric.seconds(size, workers, groups) / (2 if gpu else 1)
