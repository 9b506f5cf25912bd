"""Wire format: requests, replies and the error form. Shared by the parser and the OpenAPI document."""

import re
from typing import Annotated, Any, NamedTuple, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from rtrain.tasks.base import Input

MAX_FIELD_CHARACTERS = 100
MAX_DEPTH = 32
"""Maximum nesting of a document's lists and objects; no valid request has more than 6 levels."""
DEFAULT_MAX_LABELS = 100
"""Most labels that are answered to a text by default. 256 texts with 1,800 labels each were a reply of 23.6 MB."""
# An unterminated string ends with the document: its content must not count. Possessive, so a hostile string is scanned
# once.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NON_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_PROTOCOL_PATH = re.compile(r"(/models/[^/]+)?/v2(/|$)")
"""Paths of the Open Inference Protocol: of an address, and of one model."""
_BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
ERROR_TYPES = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "too_large",
    415: "unsupported",
    421: "misdirected",
    422: "invalid",
    429: "rate_limited",
    431: "too_large",
    500: "internal",
    503: "overloaded",
    504: "deadline_exceeded",
}


class RequestError(Exception):
    """An answer other than 200. Every route tells it in the same form, but those of the Open Inference Protocol, whose
    clients expect a line of text."""

    def __init__(self, status: int, message: str, field: str | None = None, retry_after: int | None = None):
        super().__init__(message)
        self.status, self.message, self.field = status, message, field
        self.headers = {} if retry_after is None else {"retry-after": str(retry_after)}

    @property
    def single_line(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message

    def to_document(self, path: str) -> dict[str, Any]:
        """The JSON that answers a request of this path."""
        if _PROTOCOL_PATH.match(path):
            return {"error": self.single_line}
        return {"error": {"type": ERROR_TYPES[self.status], "message": self.message, "field": self.field}}


class StrictModel(BaseModel):
    """A misspelt name is refused, not ignored; "3" is not 3."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class TextPair(StrictModel):
    text: str
    text_pair: str | None = None
    features: dict[str, str] | None = None
    """Values that the model reads before the text, by the name of their column (`data.features` of its training)."""


class QuestionContext(StrictModel):
    question: str
    context: str


class PredictParameters(StrictModel):
    top_k: Annotated[int, Field(ge=1)] | None = None
    """Most labels per text, best first; by default all, and 100 of more."""
    max_words: Annotated[int, Field(ge=1)] | None = None
    """Maximum words of a summary; default: the mean length in the training rows."""
    abstain: bool = False
    """Answer with the label "none", before all others, where the model is less sure than the threshold that was chosen
    on its validation rows."""
    explain: bool = False
    """Say which words each answer rests on, by integrated gradients; float artifacts only."""
    label: str | None = None
    """With `explain`: the label to explain, instead of the answer's own."""

    @pydantic.model_validator(mode="after")
    def _check_label(self) -> "PredictParameters":
        if self.label is not None and not self.explain:
            raise ValueError("label says what to explain; send explain: true with it")
        return self


def _input_tag(value: object) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if isinstance(value, list):
        return "<list>"
    if isinstance(value, QuestionContext) or (isinstance(value, dict) and "question" in value):
        return "<question>"
    return "<pair>" if isinstance(value, dict | TextPair) else None


# Tagged by JSON type, so an error names one place and one reason instead of every form that did not match.
_SingleInput = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[TextPair, Tag("<pair>")] | Annotated[QuestionContext, Tag("<question>")],
    Discriminator(_input_tag, custom_error_type="not_a_text", custom_error_message="Input should be a text"),
]
_INPUTS_MESSAGE = "Input should be a text or a list of texts"
_PredictInputs = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[TextPair, Tag("<pair>")]
    | Annotated[QuestionContext, Tag("<question>")]
    | Annotated[list[_SingleInput], Field(min_length=1), Tag("<list>")],
    Discriminator(_input_tag, custom_error_type="not_texts", custom_error_message=_INPUTS_MESSAGE),
]


class PredictRequest(StrictModel):
    inputs: _PredictInputs
    """One text, or several."""
    parameters: PredictParameters | None = None

    def texts(self) -> list[Input]:
        values = self.inputs if isinstance(self.inputs, list) else [self.inputs]
        return [value if isinstance(value, str) else _to_pair(value) for value in values]


def _to_pair(value: TextPair | QuestionContext) -> Input:
    if isinstance(value, QuestionContext):
        return {"question": value.question, "context": value.context}
    return value.model_dump(exclude_none=True)


class LabelScore(StrictModel):
    """Filled by `rtrain.tasks.classification.rank_labels`, written by `serve.replies.labels_to_json`."""

    label: str
    score: Annotated[float, Field(ge=0, le=1)]
    abstained: bool = False
    """True for the label "none" that `abstain` has put before all others; missing otherwise."""


class TaggedEntity(StrictModel):
    entity_group: str
    score: Annotated[float, Field(ge=0, le=1)]
    word: str
    start: int
    """Characters of the text, `end` not included."""
    end: int


class SpanAnswer(StrictModel):
    answer: str
    """Empty where the context holds none."""
    score: Annotated[float, Field(ge=0, le=1)]
    start: int
    end: int


class SummarySentence(StrictModel):
    text: str
    score: Annotated[float, Field(ge=0, le=1)]
    start: int
    """Characters of the document, `end` not included."""
    end: int


class Summary(StrictModel):
    summary_text: str
    """The sentences, joined by blanks."""
    sentences: list[SummarySentence]
    """In the document's order."""


class TokenScore(StrictModel):
    score: Annotated[float, Field(ge=0, le=1)]
    token: int
    """The token's number in the model's vocabulary."""
    token_str: str
    """Its text."""
    sequence: str
    """The input with this token in place of the mask."""


class PredictReply(
    pydantic.RootModel[
        list[list[LabelScore]]
        | list[list[TaggedEntity]]
        | list[TaggedEntity]
        | list[float]
        | list[dict[str, list[LabelScore]]]
        | list[SpanAnswer]
        | SpanAnswer
        | list[Summary]
        | list[list[list[TokenScore]]]
        | list[list[TokenScore]]
        | list[TokenScore]
    ]
):
    """Answers in the order of the texts: labels, best first; entities; a number; labels by head; the answer to a
    question; a summary; or the likeliest tokens of each mask. A single text is answered by a list of one, with three
    exceptions: a question by its answer, a tagged text by its entities, and a text with masks by the tokens of its
    mask, or of each mask."""


class _AttributedPart(StrictModel):
    field: str
    """Which of the input's texts, e.g. `text`."""
    start: int
    end: int
    """Characters of that text, `end` not included."""
    attribution: float
    """Attribution of the word."""


class WordAttribution(_AttributedPart):
    word: str


class SentenceAttribution(_AttributedPart):
    sentence: str


class ExplainedValue(StrictModel):
    """A value of the model and the attribution of each word: value = baseline + sum of attributions."""

    label: str
    start: int | None = None
    end: int | None = None
    """Characters of the entity, where it is an entity that is explained."""
    value: float
    """The label's logit; of a regression the number."""
    baseline: float
    """The value where every word is padding."""
    steps: int
    """Steps of the integral."""
    completeness_error: float | None
    """|sum of attributions - (value - baseline)| / |value - baseline|; null where the words change nothing."""
    words: list[WordAttribution]
    sentences: list[SentenceAttribution]


class AnswerExplanation(StrictModel):
    truncated: bool
    """The text continues after the last word; the model did not read the rest."""
    answers: list[ExplainedValue]
    """The answer's label, or each of several; none where no entity was found."""


class ExplainedAnswer(StrictModel):
    answer: Any
    """As in `PredictReply`."""
    explanation: AnswerExplanation


class ExplainedReply(pydantic.RootModel[list[ExplainedAnswer]]):
    """With `parameters.explain`: answer and explanation of each text, in order."""


class ErrorDetail(StrictModel):
    type: Annotated[str, Field(json_schema_extra={"enum": list(dict.fromkeys(ERROR_TYPES.values()))})]
    message: str
    field: str | None
    """Where in the request, e.g. `inputs.3.text`."""


class ErrorReply(StrictModel):
    error: ErrorDetail


# ---------------------------------------------------------------------------------------------------------- parsing


class JsonSize(NamedTuple):
    depth: int
    """Maximum nesting of lists and objects; 0 for a single text or number."""
    num_values: int
    """1 + commas + opening brackets: the number of values, or a few more if lists are empty."""


def measure_json(body: bytes, max_values: int) -> JsonSize:
    """Number of values and nesting depth of `body`. Above `max_values` counting stops, and the depth is 0, so the cost
    is bounded by the length and by `max_values`."""
    # At most two strings per value: its name in an object, and the value itself.
    without_strings, num_strings = _STRING.subn(b"", body, 2 * max_values + 1)
    if num_strings > 2 * max_values:
        return JsonSize(0, num_strings)
    brackets = without_strings.translate(None, _NON_BRACKETS)
    num_values = 1 + without_strings.count(b",") + brackets.count(b"[") + brackets.count(b"{")
    if max(num_values, len(brackets) // 2) > max_values:
        return JsonSize(0, max(num_values, len(brackets) // 2))
    depth = max_depth = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        max_depth = max(max_depth, depth)
    return JsonSize(max_depth, num_values)


RequestModel = TypeVar("RequestModel", bound=BaseModel)


def max_num_values(max_texts: int) -> int:
    """Maximum number of JSON values in a request of so many texts: a few per text, and a few for the request."""
    return 8 * max_texts + 64


def parse_request(model: type[RequestModel], body: bytes, max_texts: int = 256) -> RequestModel:
    """Parse and check `body`. Raises `RequestError`: 400 if it is not JSON or nested too deep, 413 if it has more
    values than `max_texts` texts can need, 422 if it does not match `model`."""
    json_size = measure_json(body, max_num_values(max_texts))
    if json_size.num_values > max_num_values(max_texts):
        raise RequestError(
            413, f"the body has more than {max_num_values(max_texts)} values; send at most {max_texts} texts"
        )
    if json_size.depth > MAX_DEPTH:
        raise RequestError(400, f"the body is nested deeper than {MAX_DEPTH}")
    try:
        return model.model_validate_json(body)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    reason = first["msg"].removeprefix("Value error, ")  # pydantic's word for an error of ours
    if first["type"] == "json_invalid":
        if body.startswith(_BYTE_ORDER_MARKS) or b"\x00" in body[:2]:
            reason = "UTF-16 or a byte order mark; send plain UTF-8"
        raise RequestError(400, f"the body is not JSON: {reason.removeprefix('Invalid JSON: ')}")
    # Tags and union members are pydantic's names for a place, not the client's.
    field = ".".join(part for part in map(str, first["loc"]) if not part.startswith(("<", "list[")))
    raise RequestError(422, reason, field[:MAX_FIELD_CHARACTERS] or None)
