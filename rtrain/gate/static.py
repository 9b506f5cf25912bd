"""A static student: a vector for each token, made once by the encoder from the token alone; a text is their mean.

After Model2Vec (Tulkens and van Dongen 2024): each token is read alone, the vectors are reduced to their principal
components and weighted by their tokens' rank, which stands in for their frequency. The package's own distillation needs
an older transformers, so that its model is filled here; what answers is its `StaticModel`.
"""

import importlib.util
from typing import Any

import numpy as np
import numpy.typing as npt

from rtrain.batch import Encoded, Window, pack, padded
from rtrain.predict import Predictor

PACKAGE = "model2vec"
DIMENSIONS = 256
SIF = 1e-4
"""Smooth inverse frequency (Arora et al. 2017)."""
TOKENS_AT_ONCE = 512


def is_installed() -> bool:
    return importlib.util.find_spec(PACKAGE) is not None


def distil(teacher: Predictor) -> Any:
    """A `StaticModel` of a float artefact's encoder, over its whole vocabulary."""
    from model2vec import StaticModel

    return StaticModel(_weighted(_reduced(_vectors(teacher))), teacher.tokenizer, normalize=True)


def _vectors(teacher: Predictor) -> npt.NDArray[np.float64]:
    """The mean of the encoder's outputs for [start] token [end], for each token; [vocabulary, width]."""
    import torch

    network, accepted = teacher.network
    size = teacher.tokenizer.get_vocab_size()
    # What the tokenizer puts round a text: of an empty one nothing else is left.
    around = teacher.tokenizer.encode("").ids
    first, last = around[: (len(around) + 1) // 2], around[(len(around) + 1) // 2 :]
    found = []
    for start in range(0, size, TOKENS_AT_ONCE):
        rows = [[*first, token, *last] for token in range(start, min(start + TOKENS_AT_ONCE, size))]
        tokens = pack([Encoded(row, [Window(len(row), len(row))], False, []) for row in rows])
        inputs = padded(tokens, teacher.pad_id)
        with torch.inference_mode():
            tensors = {name: torch.from_numpy(value) for name, value in inputs.items() if name in accepted}
            hidden = network.base_model(**tensors).last_hidden_state
        found.append(hidden.mean(dim=1).double().numpy())
    return np.concatenate(found)


def _reduced(vectors: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The first principal components."""
    centred = vectors - vectors.mean(axis=0)
    _, axes = np.linalg.eigh(centred.T @ centred)
    return np.asarray(centred @ axes[:, ::-1][:, :DIMENSIONS])


def _weighted(vectors: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """By Zipf's law, the rank of a token in the vocabulary being that of its frequency."""
    share = 1 / np.arange(2, len(vectors) + 2)
    share /= share.sum()
    return np.asarray(vectors * (SIF / (SIF + share))[:, None], dtype=np.float32)
