"""Where a GPU's memory begins to be measured for the size of passes: at what a trace foretells, not at a fixed size."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from rtrain.config import Recipe
from rtrain.doctor.forecast import trace
from rtrain.tasks.base import Task
from rtrain.training import pass_size

if TYPE_CHECKING:
    import torch

FORETOLD: Final = (512, 2048)
"""Fewest tokens of the two passes that are traced: what a pass takes is a line in its tokens."""


def tried(
    network: "torch.nn.Module", folder: Path, task: Task, recipe: Recipe, longest: int, precision: str
) -> tuple[int, int]:
    """Fewest tokens of the two passes to measure on the network's GPU. `longest`: tokens of the longest row.

    What cannot be traced is measured at fixed sizes.
    """
    room = pass_size.room(network)
    try:
        small, large = (_peak(folder, task, recipe, longest, tokens, precision) for tokens in FORETOLD)
    except trace.Untraceable:
        return pass_size.TRIED
    return pass_size.guessed(small, large, room)


def _peak(folder: Path, task: Task, recipe: Recipe, longest: int, tokens: int, precision: str) -> pass_size.Peak:
    """What is there in a pass: weights and gradients included, as when it is measured."""
    window = min(longest, recipe.data.window_tokens)
    lengths = [window] * -(-tokens // window)
    again = recipe.train.gradient_checkpointing
    found = trace.of_pass(folder, task, recipe.model, lengths, device="gpu", precision=precision, recomputed=again)
    return pass_size.Peak(found.tokens, found.weights + found.gradients + found.activations)
