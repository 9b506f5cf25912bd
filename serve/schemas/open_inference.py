"""The Open Inference Protocol (KServe, Triton), version 2: its messages, and texts and answers as its tensors."""

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from rtrain.tasks.base import Input
from serve.schemas.predict import DEFAULT_MAX_LABELS, RequestError, StrictModel


class LenientModel(BaseModel):
    """Messages of a public protocol, whose clients may send more than we read."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, use_attribute_docstrings=True)


# --------------------------------------------------------------------------------------------------- about the server


class ServerLive(StrictModel):
    live: bool


class ServerReady(StrictModel):
    ready: bool


class ModelReady(StrictModel):
    name: str
    ready: bool


class ServerMetadata(StrictModel):
    name: str
    version: str
    extensions: list[str]


class TensorMetadata(StrictModel):
    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(StrictModel):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class IndexRequest(LenientModel):
    ready: bool = False
    """Name only models that can answer now."""


class IndexedModel(StrictModel):
    name: str
    version: str
    state: Literal["READY", "UNAVAILABLE"]
    reason: str


class RepositoryIndex(pydantic.RootModel[list[IndexedModel]]):
    """The models that can be asked at this address."""


# --------------------------------------------------------------------------------------------------- texts and answers


class InferError(StrictModel):
    error: str
    """Location in the request, if any, and the error."""


class InputParameters(LenientModel):
    binary_data_size: Annotated[int, Field(ge=0)] | None = None
    """Triton's binary extension: bytes of the texts, which follow the JSON instead of standing in `data`."""


class InputTensor(LenientModel):
    name: str
    shape: list[Annotated[int, Field(ge=0)]]
    """[n] or [n, 1]."""
    datatype: Literal["BYTES"]
    data: list[str] | list[list[str]] | None = None
    parameters: InputParameters | None = None


class RequestedOutput(LenientModel):
    name: Literal["label", "score", "labels", "scores", "answer"]


class InferParameters(LenientModel):
    top_k: Annotated[int, Field(ge=1)] | None = None
    """Most labels of a text in `num_labels` and `scores`, best first; by default all, and 100 of more."""
    abstain: bool = False
    """See /predict."""


class InferRequest(LenientModel):
    id: str | None = None
    inputs: Annotated[list[InputTensor], Field(min_length=1, max_length=2)]
    """One tensor of texts; or two, where a question is about two texts, named as the model's metadata names them."""
    outputs: list[RequestedOutput] | None = None
    parameters: InferParameters | None = None

    def requested_outputs(self, output: str) -> Collection[str]:
        """Names of the output tensors: the requested ones, or those with one value per text; raises `RequestError` for
        unknown names."""
        available_outputs = output_datatypes(output)
        names = [tensor.name for tensor in self.outputs or ()]
        for index, name in enumerate(names):
            if name not in available_outputs:
                raise RequestError(
                    422, f"no output {name}; this model has {', '.join(available_outputs)}", f"outputs.{index}.name"
                )
        return names or [name for name in available_outputs if name not in RANKED_TENSORS]

    def decode_parameters(self, output_names: Collection[str], num_labels: int) -> dict[str, Any]:
        """The parameters of `Task.decode`, of a model of so many labels: of ranked labels as many of each text as
        are wanted, and no fewer for one than for another, since they are a row of a tensor; of answers in the Hugging
        Face form what that has where nobody says how many."""
        parameters = self.parameters or InferParameters()
        if not RANKED_TENSORS.keys().isdisjoint(output_names):
            top_k: int | None = min(parameters.top_k or DEFAULT_MAX_LABELS, num_labels)
        else:
            top_k = parameters.top_k if "answer" in output_names else 1
        return {"top_k": top_k, "abstain": parameters.abstain}

    def texts(self, fields: tuple[str, str], binary_data: bytes = b"", max_texts: int = 256) -> list[Input]:
        """Texts of the request. `fields`: names of the task's two texts. `binary_data`: bytes after the JSON, empty
        without the binary extension. Raises `RequestError`."""
        columns = []
        for index, tensor in enumerate(self.inputs):
            size = None if tensor.parameters is None else tensor.parameters.binary_data_size
            columns.append(_tensor_texts(tensor, index, None if size is None else binary_data[:size], max_texts))
            binary_data = binary_data[size or 0 :]
        if binary_data:
            raise RequestError(422, "the binary data is longer than its tensors", "inputs")
        if len(columns) == 1:
            return list(columns[0])
        names = [tensor.name for tensor in self.inputs]
        if sorted(names) != sorted(fields):
            raise RequestError(422, f"two tensors of texts are named {fields[0]} and {fields[1]}", "inputs.0.name")
        if len(columns[0]) != len(columns[1]):
            raise RequestError(422, "one tensor has more texts than the other", "inputs.1.shape")
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _tensor_texts(tensor: InputTensor, tensor_index: int, binary: bytes | None, max_texts: int) -> list[str]:
    """The texts of one tensor."""
    if (tensor.data is None) == (binary is None):
        raise RequestError(422, "give the texts either as data or as binary data", f"inputs.{tensor_index}.data")
    rows = unpack_texts(binary or b"", tensor_index, max_texts) if tensor.data is None else tensor.data
    texts = [text for row in rows for text in ([row] if isinstance(row, str) else row)]
    if tensor.shape not in ([len(texts)], [len(texts), 1]):
        shape = f"shape {tensor.shape} does not fit {len(texts)} texts"
        raise RequestError(422, shape, f"inputs.{tensor_index}.shape")
    if not texts:
        raise RequestError(422, "no text; send at least one", f"inputs.{tensor_index}.data")
    return texts


def pack_texts(texts: Iterable[bytes]) -> bytes:
    """Triton's binary form of texts: for each its length (4 bytes, little-endian), then its UTF-8."""
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


def unpack_texts(data: bytes, tensor_index: int, max_texts: int) -> list[str]:
    """Texts that `pack_texts` packed into `data`; errors name the index of the tensor."""
    texts: list[str] = []
    offset = 0
    while offset < len(data):
        if len(texts) == max_texts:
            raise RequestError(
                413, f"more than {max_texts} texts; send at most {max_texts}", f"inputs.{tensor_index}.data"
            )
        start = offset + 4
        offset = start + int.from_bytes(data[offset:start], "little")
        if offset > len(data):
            raise RequestError(422, "the binary data ends inside a text", f"inputs.{tensor_index}.data")
        try:
            texts.append(data[start:offset].decode())
        except UnicodeDecodeError:
            raise RequestError(422, "a text is not UTF-8", f"inputs.{tensor_index}.data.{len(texts)}") from None
    return texts


def split_body(body: bytes, json_length: str | None) -> tuple[bytes, bytes]:
    """JSON and binary part of a body; `json_length` is the header in which Triton's clients say where one ends."""
    if json_length is None:
        return body, b""
    if not json_length.isdecimal() or len(json_length) > 9 or int(json_length) > len(body):
        raise RequestError(400, "inference-header-content-length does not fit the body")
    return body[: int(json_length)], body[int(json_length) :]


def describe_input_tensors(fields: Sequence[str], needs_pair: bool) -> list[dict[str, Any]]:
    """The tensors that ask: one, or two where the task reads two texts."""
    names = fields if needs_pair else fields[:1]
    return [{"name": name, "datatype": "BYTES", "shape": [-1]} for name in names]


RANKED_TENSORS = {"labels": "label", "scores": "score"}
"""Tensors with one column per label, best first."""


def output_datatypes(output: str) -> dict[str, str]:
    """Name and datatype of the tensors that answer, by the kind of output. Where the protocol has no form for an
    answer, it is the JSON of the Hugging Face form, a text for each input."""
    classes = {"label": "BYTES", "score": "FP32", "labels": "BYTES", "scores": "FP32"}
    return {"classes": classes, "number": {"score": "FP32"}}.get(output, {"answer": "BYTES"})


def build_output_tensors(answers: list[Any], output: str, output_names: Collection[str]) -> list[dict[str, Any]]:
    """The answers of the Hugging Face form as those of /v2's output tensors that are wanted; `output` is the task's
    kind of output."""
    output_tensors = []
    for name, datatype in output_datatypes(output).items():
        if name not in output_names:
            continue
        shape = [len(answers)]
        if name in RANKED_TENSORS:
            shape.append(len(answers[0]))
            data = [entry[RANKED_TENSORS[name]] for row in answers for entry in row]
        elif output == "classes":
            data = [row[0][name] for row in answers]
        elif output == "number":
            data = answers
        else:
            data = [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in answers]
        output_tensors.append({"name": name, "datatype": datatype, "shape": shape, "data": data})
    return output_tensors


class OutputTensor(StrictModel):
    name: str
    datatype: Literal["BYTES", "FP32"]
    shape: list[int]
    data: list[str] | list[float]


class InferReply(StrictModel):
    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[OutputTensor]
