"""The Task protocol and its registry. No torch or transformers at module level: serving needs neither."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rtrain.errors import ConfigError, Problem, UserError

if TYPE_CHECKING:
    import tokenizers
    import torch

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class Encoded(NamedTuple):
    """Tokens of one row. Positions from `second` on belong to the second text (`len(ids)` where there is none)."""

    ids: list[int]
    second: int
    truncated: bool


class Task(Protocol):
    """What the loop, the compressors and the endpoint need to know of a task, and all that they know."""

    name: str
    output: str
    """Kind of output: chooses the metric (`rtrain.tasks.metrics`)."""
    auto_model: str
    """Name of the transformers class that loads the float artefact."""

    def labels(self, counts: Mapping[str, int]) -> tuple[str, ...]:
        """Label names in the order of the model's outputs, from the training rows' labels and their counts."""
        ...

    def targets(self, labels: Sequence[str], names: tuple[str, ...]) -> Ints:
        """One target per row; -1 where the label is not among `names`."""
        ...

    def encode(
        self, tokenizer: "tokenizers.Tokenizer", texts: Sequence[str], pairs: Sequence[str] | None = None
    ) -> list[Encoded]:
        """Rows to tokens, the same in training and in serving."""
        ...

    def loss(self, logits: "torch.Tensor", targets: "torch.Tensor") -> dict[str, tuple["torch.Tensor", int]]:
        """Named (sum over targets, number of targets): never a mean, so that passes and workers add up exactly."""
        ...

    def decode(self, logits: Floats, names: tuple[str, ...], parameters: Mapping[str, Any]) -> list[Any]:
        """The HTTP answer of each row of `logits`."""
        ...


def get(name: str) -> Task:
    """The task of that name, from `rtrain.tasks.<name>`."""
    found: Task = importlib.import_module(f"rtrain.tasks.{name}").TASK
    return found


def load_tokenizer(folder: Path, max_tokens: int) -> "tokenizers.Tokenizer":
    """The folder's fast tokenizer, cutting at `max_tokens`, never padding. A private object: its settings are state."""
    import tokenizers

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            [
                Problem(
                    "model.name",
                    str(folder),
                    "no tokenizer.json in the folder",
                    "save the fast tokenizer into it: AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)",
                )
            ]
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises plain Exception
        raise UserError(f"{path} cannot be read as a tokenizer: {error}") from None
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    return tokenizer
