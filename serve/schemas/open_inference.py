"""The Open Inference Protocol (KServe, Triton), version 2: its messages, and texts and answers as its tensors."""

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from rtrain.tasks.base import Input
from serve.schemas.predict import DEFAULT_LABELS, Closed, RequestError


class Open(BaseModel):
    """Messages of a public protocol, whose clients may send more than we read."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, use_attribute_docstrings=True)


# --------------------------------------------------------------------------------------------------- about the server


class Live(Closed):
    live: bool


class Ready(Closed):
    ready: bool


class ModelReady(Closed):
    name: str
    ready: bool


class ServerMetadata(Closed):
    name: str
    version: str
    extensions: list[str]


class TensorMetadata(Closed):
    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(Closed):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class IndexRequest(Open):
    ready: bool = False
    """Name only models that can answer now."""


class IndexedModel(Closed):
    name: str
    version: str
    state: Literal["READY", "UNAVAILABLE"]
    reason: str


class RepositoryIndex(pydantic.RootModel[list[IndexedModel]]):
    """The models that can be asked at this address."""


# --------------------------------------------------------------------------------------------------- texts and answers


class InferError(Closed):
    error: str
    """Where in the request, if anywhere, and what is wrong."""


class InputParameters(Open):
    binary_data_size: Annotated[int, Field(ge=0)] | None = None
    """Triton's binary extension: bytes of the texts, which follow the JSON instead of standing in `data`."""


class InputTensor(Open):
    name: str
    shape: list[Annotated[int, Field(ge=0)]]
    """[n] or [n, 1]."""
    datatype: Literal["BYTES"]
    data: list[str] | list[list[str]] | None = None
    parameters: InputParameters | None = None


class RequestedOutput(Open):
    name: Literal["label", "score", "labels", "scores", "answer"]


class InferParameters(Open):
    top_k: Annotated[int, Field(ge=1)] | None = None
    """Most labels of a text in `labels` and `scores`, best first; by default all, and 100 of more."""
    abstain: bool = False
    """As /predict has it."""


class InferRequest(Open):
    id: str | None = None
    inputs: Annotated[list[InputTensor], Field(min_length=1, max_length=2)]
    """One tensor of texts; or two, where a question is about two texts, named as the model's metadata names them."""
    outputs: list[RequestedOutput] | None = None
    parameters: InferParameters | None = None

    def wanted(self, output: str) -> Collection[str]:
        """The names of the tensors to answer with: those that are asked for, or those with a value for each text;
        `output` is the task's kind of output. Raises `RequestError` where the model has no tensor of a name."""
        had = output_tensors(output)
        asked = [one.name for one in self.outputs or ()]
        for place, name in enumerate(asked):
            if name not in had:
                raise RequestError(422, f"no output {name}; this model has {', '.join(had)}", f"outputs.{place}.name")
        return asked or [name for name in had if name not in RANKED]

    def asks(self, wanted: Collection[str], labels: int) -> dict[str, Any]:
        """The parameters of `Task.decode`, of a model of so many labels: of ranked labels as many of each text as are
        wanted, and no fewer for one than for another, since they are a row of a tensor; of answers in the Hugging Face
        form what that has where nobody says how many."""
        given = self.parameters or InferParameters()
        if not RANKED.keys().isdisjoint(wanted):
            most: int | None = min(given.top_k or DEFAULT_LABELS, labels)
        else:
            most = given.top_k if "answer" in wanted else 1
        return {"top_k": most, "abstain": given.abstain}

    def texts(self, fields: tuple[str, str], binary: bytes = b"", most: int = 256) -> list[Input]:
        """What is asked. `fields` are the names of the task's two texts, `binary` is what followed the JSON; it is
        unpacked no further than to the first text past `most`."""
        columns = []
        for place, tensor in enumerate(self.inputs):
            size = None if tensor.parameters is None else tensor.parameters.binary_data_size
            columns.append(_column(tensor, place, None if size is None else binary[:size], most))
            binary = binary[size or 0 :]
        if binary:
            raise RequestError(422, "the binary data goes on behind the last tensor", "inputs")
        if len(columns) == 1:
            return list(columns[0])
        names = [tensor.name for tensor in self.inputs]
        if sorted(names) != sorted(fields):
            raise RequestError(422, f"two tensors of texts are named {fields[0]} and {fields[1]}", "inputs.0.name")
        if len(columns[0]) != len(columns[1]):
            raise RequestError(422, "one tensor has more texts than the other", "inputs.1.shape")
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _column(tensor: InputTensor, place: int, binary: bytes | None, most: int) -> list[str]:
    """The texts of one tensor."""
    if (tensor.data is None) == (binary is None):
        raise RequestError(422, "give the texts either as data or as binary data", f"inputs.{place}.data")
    rows = unpacked(binary or b"", place, most) if tensor.data is None else tensor.data
    texts = [text for row in rows for text in ([row] if isinstance(row, str) else row)]
    if tensor.shape not in ([len(texts)], [len(texts), 1]):
        shape = f"shape {tensor.shape} does not fit {len(texts)} texts"
        raise RequestError(422, shape, f"inputs.{place}.shape")
    if not texts:
        raise RequestError(422, "no text; send at least one", f"inputs.{place}.data")
    return texts


def packed(texts: Iterable[bytes]) -> bytes:
    """Triton's binary form of texts: for each its length (4 bytes, little-endian), then its UTF-8."""
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


def unpacked(data: bytes, tensor: int, most: int) -> list[str]:
    """The texts of which `packed` made `data`; errors name the place of their tensor."""
    texts: list[str] = []
    place = 0
    while place < len(data):
        if len(texts) == most:
            raise RequestError(413, f"more than {most} texts; send at most {most}", f"inputs.{tensor}.data")
        start = place + 4
        place = start + int.from_bytes(data[place:start], "little")
        if place > len(data):
            raise RequestError(422, "the binary data ends inside a text", f"inputs.{tensor}.data")
        try:
            texts.append(data[start:place].decode())
        except UnicodeDecodeError:
            raise RequestError(422, "a text is not UTF-8", f"inputs.{tensor}.data.{len(texts)}") from None
    return texts


def split(body: bytes, json_length: str | None) -> tuple[bytes, bytes]:
    """JSON and binary part of a body; `json_length` is the header in which Triton's clients say where one ends."""
    if json_length is None:
        return body, b""
    if not json_length.isdecimal() or len(json_length) > 9 or int(json_length) > len(body):
        raise RequestError(400, "inference-header-content-length does not fit the body")
    return body[: int(json_length)], body[int(json_length) :]


def input_tensors(fields: Sequence[str], needs_pair: bool) -> list[dict[str, Any]]:
    """The tensors that ask: one, or two where the task reads two texts."""
    names = fields if needs_pair else fields[:1]
    return [{"name": name, "datatype": "BYTES", "shape": [-1]} for name in names]


RANKED = {"labels": "label", "scores": "score"}
"""Tensors of as many columns as labels, best first, and what each of them has of a label."""


def output_tensors(output: str) -> dict[str, str]:
    """Name and datatype of the tensors that answer, by the kind of output. Where the protocol has no form for an
    answer, it is the JSON of the Hugging Face form, a text for each input."""
    classes = {"label": "BYTES", "score": "FP32", "labels": "BYTES", "scores": "FP32"}
    return {"classes": classes, "number": {"score": "FP32"}}.get(output, {"answer": "BYTES"})


def tensors(answers: list[Any], output: str, wanted: Collection[str]) -> list[dict[str, Any]]:
    """The answers of the Hugging Face form as those of /v2's output tensors that are wanted; `output` is the task's
    kind of output."""
    found = []
    for name, datatype in output_tensors(output).items():
        if name not in wanted:
            continue
        shape = [len(answers)]
        if name in RANKED:
            shape.append(len(answers[0]))
            data = [one[RANKED[name]] for row in answers for one in row]
        elif output == "classes":
            data = [row[0][name] for row in answers]
        elif output == "number":
            data = answers
        else:
            data = [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in answers]
        found.append({"name": name, "datatype": datatype, "shape": shape, "data": data})
    return found


class OutputTensor(Closed):
    name: str
    datatype: Literal["BYTES", "FP32"]
    shape: list[int]
    data: list[str] | list[float]


class InferReply(Closed):
    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[OutputTensor]
