"""A float model that int8 harms: some of a layer's queries are large and their keys small, which changes no answer."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors.numpy

from tests.support import gating


def plant(original: Path, target: Path, layer: int, factor: float, channels: Sequence[int] = (0,)) -> Path:
    """A copy of a float artefact in which these channels of a layer's queries are `factor` times as large, and those of
    its keys as many times smaller: their products stay. The queries share one scale in int8, which the large ones set.
    """

    def scale(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = {name: np.array(value) for name, value in safetensors.numpy.load_file(path).items()}
        for name in tensors:
            for part, by in (("query", factor), ("key", 1 / factor)):
                if f"encoder.layer.{layer}.attention.self.{part}." in name:
                    tensors[name][list(channels)] *= by
        safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})

    return gating.copy(original, target, gating.by_files(scale))
