"""`rtrain.load`: an artifact that answers texts in this process. An int8 artifact needs the core installation alone."""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rtrain.core.run_folder import resolve_artifact

if TYPE_CHECKING:
    from rtrain.inference.predictor import Predictor

DEFAULT_BATCH_SIZE = 32
PathOrUrl = str | os.PathLike[str]
PrintLine = Callable[[str], None]


def find_artifact(address: PathOrUrl, print_line: PrintLine = lambda line: None) -> Path:
    """Return the folder of the artifact at a path (of an artifact, a run or a search) or a URL, which is fetched.

    Raises `UserError` if there is no artifact.
    """
    name = os.fspath(address)
    if "://" in name:
        from rtrain.inference import artifact

        return artifact.fetch_artifact(name, print_line=print_line)
    return resolve_artifact(Path(name).expanduser().absolute())


def load(artifact: PathOrUrl, *, threads: int | None = None) -> "Model":
    """Load an artifact, and check that it reproduces its golden answers.

    Args:
        artifact: folder of an artifact, a run or a search; the result of a verb; or a URL such as s3://bucket/folder.
        threads: threads of the engine; default: its own choice.

    Raises:
        UserError: there is no artifact, it is damaged, or it answers otherwise on this machine.
    """
    from rtrain.inference.predictor import Predictor

    return Model(Predictor.load(find_artifact(artifact), threads))


class Model:
    """A loaded artifact."""

    def __init__(self, predictor: "Predictor") -> None:
        self.predictor = predictor

    def __repr__(self) -> str:
        metadata = self.predictor.artifact
        return f"Model({metadata.name!r}, task={metadata.task!r}, engine={metadata.engine!r})"

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the answers; empty for a task without labels."""
        return self.predictor.head.labels

    def predict(
        self,
        inputs: Iterable[str | Mapping[str, str]],
        top: int | None = None,
        batch_size: int = DEFAULT_BATCH_SIZE,
    ) -> list[Any]:
        """Return one answer per input.

        Args:
            inputs: texts; for a task of two texts, dictionaries such as {"question": ..., "context": ...}.
            top: number of labels of each answer, best first; default: the best label, or all labels past the threshold.
            batch_size: most texts of one engine call.

        Returns:
            With one label per text {"label", "score"} each, with `top` a list of them; for several labels a list of
            them each; for other tasks the answers of the endpoint (docs/endpoint.md).

        Raises:
            InputError: an input is no text, or empty; `position` is its index.
        """
        texts = [inputs] if isinstance(inputs, str) else list(inputs)
        thresholds = self.predictor.task.label_thresholds(self.predictor.head)
        answers = self.predictor(texts, make_parameters(self.predictor, top), batch_size=batch_size)
        if top is None and self.predictor.task.output == "classes":
            return [answer[0] for answer in answers]
        return [select_entries(answer, thresholds, top) for answer in answers]

    def logits(
        self, inputs: Iterable[str | Mapping[str, str]], batch_size: int = DEFAULT_BATCH_SIZE
    ) -> list[npt.NDArray[np.float32]]:
        """Return the outputs of the network for each input, before probabilities and thresholds."""
        return self.predictor.logits([inputs] if isinstance(inputs, str) else list(inputs), batch_size)


def make_parameters(predictor: "Predictor", top: int | None) -> dict[str, Any]:
    """Return the parameters of a request for `top` labels; all labels where any number of them may pass a threshold."""
    has_thresholds = predictor.task.label_thresholds(predictor.head) is not None
    return {} if top is None and has_thresholds else {"top_k": top or 1}


def select_entries(answer: Any, thresholds: Mapping[str, float] | None, top: int | None) -> Any:
    """Select the shown entries of an answer: those above their threshold (`Task.label_thresholds`), or all with
    `is_selected` when `top` is set."""
    if thresholds is None or not isinstance(answer, list):
        return answer
    if top is None:
        return [entry for entry in answer if entry["score"] >= thresholds[entry["label"]]]
    return [{**entry, "is_selected": entry["score"] >= thresholds[entry["label"]]} for entry in answer]
