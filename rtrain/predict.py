"""Artefact + texts -> typed answers, with the engine that artifact.json names. No torch for an int8 artefact."""

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rtrain import artifact
from rtrain.artifact import GOLDEN_INPUTS, Artifact, ArtifactError
from rtrain.data.store import Tokens, pack, padded
from rtrain.errors import UserError
from rtrain.tasks import base
from rtrain.tasks.base import Encoded, Floats

BATCH_ROWS = 32
# Logits of another processor's kernels differ in the last bits; of int8 kernels, by a rounding step of a few scales.
GOLDEN_TOLERANCE = {"torch": 1e-3, "openvino": 0.1}

Input = str | Mapping[str, str]
"""A text, or `{"text": ..., "text_pair": ...}`."""


class InputError(UserError):
    """An input that no model can read; `position` is its place in the request."""

    def __init__(self, message: str, position: int):
        super().__init__(message)
        self.position = position


class Engine(Protocol):
    def logits(self, inputs: Mapping[str, Any]) -> Floats:
        """[rows, outputs] of padded inputs [rows, tokens]: input_ids, attention_mask, token_type_ids."""
        ...


class Predictor:
    """A loaded artefact. Thread-safe as far as its engine is; serving calls `run` from one thread."""

    def __init__(self, folder: Path, artifact: Artifact, threads: int | None = None):
        self.artifact = artifact
        self.task = base.get(artifact.task)
        self.tokenizer = base.load_tokenizer(folder, artifact.max_tokens)
        self._engine: Engine = _ENGINES[artifact.engine](folder, artifact, threads)
        self._pad_id = _pad_id(folder)

    @classmethod
    def load(cls, folder: Path, threads: int | None = None) -> "Predictor":
        """Verify the folder, load its engine and check that it reproduces its golden answers (I8)."""
        predictor = cls(folder, artifact.read(folder), threads)
        predictor.check_golden()
        return predictor

    def encode(self, inputs: Sequence[Input]) -> list[Encoded]:
        """Tokens of each input, by the same `task.encode` as in training."""
        read = [_texts(value, position) for position, value in enumerate(inputs)]
        found: dict[int, Encoded] = {}
        # Pairs apart: beside them, a single text would get an empty second one, and another answer than alone (I8).
        for paired in (False, True):
            rows = [row for row, (_, pair) in enumerate(read) if (pair is not None) == paired]
            pairs = [read[row][1] or "" for row in rows] if paired else None
            encoded = self.task.encode(self.tokenizer, [read[row][0] for row in rows], pairs)
            found.update(zip(rows, encoded, strict=True))
        return [found[row] for row in range(len(read))]

    def run(self, encoded: Sequence[Encoded]) -> Floats:
        """Logits [rows, outputs], one engine call for all rows."""
        ids, lengths, second = pack([(row.ids, row.second) for row in encoded])
        nothing = np.zeros(len(encoded), dtype=np.int64)
        no_teacher = np.empty((len(encoded), 0), dtype=np.float32)
        return self.run_tokens(Tokens(ids, lengths, second, nothing, nothing.astype(np.uint64), no_teacher))

    def run_tokens(self, tokens: Tokens) -> Floats:
        """Logits [rows, outputs] of rows that are tokens already, as a token store gives them."""
        return self._engine.logits(padded(tokens, self._pad_id))

    def logits(self, inputs: Sequence[Input], batch_rows: int = BATCH_ROWS) -> Floats:
        """Logits of any number of inputs, in batches of neighbours in length."""
        encoded = self.encode(inputs)
        order = sorted(range(len(encoded)), key=lambda row: len(encoded[row].ids))
        result = np.empty((len(encoded), len(self.artifact.labels)), dtype=np.float32)
        for start in range(0, len(order), batch_rows):
            rows = order[start : start + batch_rows]
            result[rows] = self.run([encoded[row] for row in rows])
        return result

    def __call__(
        self, inputs: Sequence[Input], parameters: Mapping[str, Any] | None = None, batch_rows: int = BATCH_ROWS
    ) -> list[Any]:
        """One answer per input, in the task's HTTP form."""
        if not inputs:
            return []
        return self.task.decode(self.logits(inputs, batch_rows), self.artifact.labels, parameters or {})

    def check_golden(self) -> None:
        """Refuse to answer where the answers are not those that the artefact's maker recorded."""
        if not self.artifact.golden:
            raise ArtifactError("the artefact has no golden answers; make it again")
        expected = np.array([row["logits"] for row in self.artifact.golden], dtype=np.float32)
        found = self.logits([row["inputs"] for row in self.artifact.golden], batch_rows=1)
        worst = float(np.abs(found - expected).max())
        tolerance = GOLDEN_TOLERANCE[self.artifact.engine]
        if not worst <= tolerance:  # also where it is not a number
            raise ArtifactError(
                f"artefact {self.artifact.name} {self.artifact.version} does not reproduce its golden answers: logits "
                f"differ by {worst:.3g} (at most {tolerance:g}). Its tokenizer, weights or engine are not its maker's."
            )


def golden_logits(folder: Path, artifact: Artifact) -> list[list[float]]:
    """The golden answers of a folder that has its model files but no artifact.json yet."""
    predictor = Predictor(folder, artifact)
    rows = predictor.logits(GOLDEN_INPUTS, batch_rows=1)
    return [[float(value) for value in row] for row in rows]


def _texts(value: Input, position: int) -> tuple[str, str | None]:
    if isinstance(value, str):
        text, pair = value, None
    else:
        text, pair = value["text"], value.get("text_pair")
    for part in (text, pair or ""):
        try:
            part.encode("utf-8")
        except UnicodeEncodeError:
            raise InputError(
                f"input {position} is not valid Unicode (a lone surrogate); send UTF-8 text", position
            ) from None
    if not text.strip():
        raise InputError(f"input {position} is empty; send a text", position)
    return text, pair


def _pad_id(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text()).get("pad_token_id") or 0)


class _Torch:
    """The float model, in fp32 with torch."""

    def __init__(self, folder: Path, artifact: Artifact, threads: int | None):
        import torch
        import transformers

        if threads is not None:
            torch.set_num_threads(threads)
        auto = getattr(transformers, base.get(artifact.task).auto_model)
        transformers.utils.logging.disable_progress_bar()
        self._torch = torch
        self._model = auto.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, dtype=torch.float32
        ).eval()
        # DistilBERT, for one, has no token types.
        self._accepted = frozenset(inspect.signature(self._model.forward).parameters)

    def logits(self, inputs: Mapping[str, Any]) -> Floats:
        with self._torch.inference_mode():
            tensors = {name: self._torch.from_numpy(value) for name, value in inputs.items() if name in self._accepted}
            found: Floats = self._model(**tensors).logits.numpy()
        return found


class _OpenVino:
    """The int8 graph, on OpenVINO's CPU plugin."""

    def __init__(self, folder: Path, artifact: Artifact, threads: int | None):
        import openvino

        options = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": "1",
            # What is not int8 stays fp32: the plugin would take bf16 on some processors, and answer differently there.
            "INFERENCE_PRECISION_HINT": "f32",
        }
        if threads is not None:
            options["INFERENCE_NUM_THREADS"] = str(threads)
        self._request = openvino.Core().compile_model(folder / "model.int8.xml", "CPU", options).create_infer_request()

    def logits(self, inputs: Mapping[str, Any]) -> Floats:
        found: Floats = next(iter(self._request.infer(dict(inputs), share_inputs=True).values())).copy()
        return found


_ENGINES: Mapping[str, type[_Torch] | type[_OpenVino]] = {"torch": _Torch, "openvino": _OpenVino}
