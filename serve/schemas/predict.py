"""What goes over the wire: requests, replies and the one error form. Shared by the parser and the OpenAPI document.

Requests are parsed straight from the body's bytes: pydantic's own JSON reader bounds the nesting and refuses text that
is not UTF-8, lone surrogates included, so nothing hostile reaches Python objects. The texts become tokens in
`rtrain.inference.predictor.Predictor.encode`, by the task's `encode`.

Replies are described here and built as plain dicts: validating our own answers would cost more than a small model does.
The answers of /predict are built by `decode` of the model's task (`rtrain.tasks`), explanations beside them by
`serve.explanations`, the messages of /v2 by `serve.schemas.open_inference`, errors by `serve.app_base`, and all else
where its route is.
"""

import re
from typing import Annotated, Any, NamedTuple, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from rtrain.tasks.base import Input

MAX_FIELD_CHARACTERS = 100
MAX_DEPTH = 32
"""How deep a document's lists and objects may be nested; a request of ours has 6 at most."""
DEFAULT_LABELS = 100
"""Most labels that are answered to a text by default. 256 texts with 1,800 labels each were a reply of 23.6 MB."""
# The end of the document ends a string that has no other: what is inside it must not count. Possessive, so that a
# hostile string is read once.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_PROTOCOL_PATH = re.compile(r"(/models/[^/]+)?/v2(/|$)")
"""Paths of the Open Inference Protocol: of an address, and of one model."""
_BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")


ERROR_TYPES = {
    400: "malformed",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "too_slow",
    413: "too_large",
    415: "unsupported",
    421: "misdirected",
    422: "invalid",
    429: "rate_limited",
    431: "too_large",
    500: "internal",
    503: "overloaded",
    504: "expired",
}


class RequestError(Exception):
    """An answer other than 200. Every route tells it in the same form, but those of the Open Inference Protocol, whose
    clients expect a line of text."""

    def __init__(self, status: int, message: str, field: str | None = None, retry_after: int | None = None):
        super().__init__(message)
        self.status, self.message, self.field = status, message, field
        self.headers = {} if retry_after is None else {"retry-after": str(retry_after)}

    @property
    def line(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message

    def document(self, path: str) -> dict[str, Any]:
        """The JSON that answers a request of this path."""
        if _PROTOCOL_PATH.match(path):
            return {"error": self.line}
        return {"error": {"type": ERROR_TYPES[self.status], "message": self.message, "field": self.field}}


class Closed(BaseModel):
    """A misspelt name is refused, not ignored; "3" is not 3."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class TextPair(Closed):
    text: str
    text_pair: str | None = None


class QuestionContext(Closed):
    question: str
    context: str


class Parameters(Closed):
    top_k: Annotated[int, Field(ge=1)] | None = None
    """Most labels per text, best first; by default all, and 100 of more."""
    max_words: Annotated[int, Field(ge=1)] | None = None
    """Most words of a summary; by default the mean length of those that the model was trained with."""
    abstain: bool = False
    """Answer with the label "none", before all others, where the model is less sure than the threshold that was chosen
    on its validation rows."""
    explain: bool = False
    """Say which words each answer rests on, by integrated gradients; float artefacts only."""
    label: str | None = None
    """With `explain`: the label to explain, instead of the answer's own."""

    @pydantic.model_validator(mode="after")
    def _label_explains(self) -> "Parameters":
        if self.label is not None and not self.explain:
            raise ValueError("label says what to explain; send explain: true with it")
        return self


def _kind(value: object) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if isinstance(value, list):
        return "<list>"
    if isinstance(value, QuestionContext) or (isinstance(value, dict) and "question" in value):
        return "<question>"
    return "<pair>" if isinstance(value, dict | TextPair) else None


# Tagged by what arrived, so that an error names one place and one reason instead of every form that did not match.
_One = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[TextPair, Tag("<pair>")] | Annotated[QuestionContext, Tag("<question>")],
    Discriminator(_kind, custom_error_type="not_a_text", custom_error_message="Input should be a text"),
]
_SEVERAL = "Input should be a text or a list of texts"
_Inputs = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[TextPair, Tag("<pair>")]
    | Annotated[QuestionContext, Tag("<question>")]
    | Annotated[list[_One], Field(min_length=1), Tag("<list>")],
    Discriminator(_kind, custom_error_type="not_texts", custom_error_message=_SEVERAL),
]


class PredictRequest(Closed):
    inputs: _Inputs
    """One text, or several."""
    parameters: Parameters | None = None

    def texts(self) -> list[Input]:
        values = self.inputs if isinstance(self.inputs, list) else [self.inputs]
        return [value if isinstance(value, str) else _pair(value) for value in values]


def _pair(value: TextPair | QuestionContext) -> Input:
    if isinstance(value, QuestionContext):
        return {"question": value.question, "context": value.context}
    return {"text": value.text} if value.text_pair is None else {"text": value.text, "text_pair": value.text_pair}


class LabelScore(Closed):
    label: str
    score: Annotated[float, Field(ge=0, le=1)]
    abstained: bool = False
    """True for the label "none" that `abstain` has put before all others; missing otherwise."""


class Entity(Closed):
    entity_group: str
    score: Annotated[float, Field(ge=0, le=1)]
    word: str
    start: int
    """Characters of the text, `end` not included."""
    end: int


class SpanAnswer(Closed):
    answer: str
    """Empty where the context holds none."""
    score: Annotated[float, Field(ge=0, le=1)]
    start: int
    end: int


class SummarySentence(Closed):
    text: str
    score: Annotated[float, Field(ge=0, le=1)]
    start: int
    """Characters of the document, `end` not included."""
    end: int


class Summary(Closed):
    summary_text: str
    """The sentences, joined by blanks."""
    sentences: list[SummarySentence]
    """In the document's order."""


class TokenScore(Closed):
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
        | list[list[Entity]]
        | list[Entity]
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
    """For each text in order, what the model is for: its labels, best first; entities; a number; labels by head; the
    answer to a question; a summary; the likeliest tokens of each mask. A single text too is answered by a list of one;
    but a single question by its answer, a single text whose words are tagged by the list of its entities, and one with
    masks by the tokens of its mask, or of each of its masks."""


class _Part(Closed):
    field: str
    """Which of the input's texts, e.g. `text`."""
    start: int
    end: int
    """Characters of that text, `end` not included."""
    attribution: float
    """What it adds to the value."""


class WordAttribution(_Part):
    word: str


class SentenceAttribution(_Part):
    sentence: str


class ExplainedValue(Closed):
    """A value of the model and what each word adds to it: value = baseline + sum of the words' attributions."""

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


class Explanation(Closed):
    truncated: bool
    """The text goes on behind the last word here; the model did not read it."""
    answers: list[ExplainedValue]
    """The answer's label, or each of several; none where no entity was found."""


class ExplainedAnswer(Closed):
    answer: Any
    """As in `PredictReply`."""
    explanation: Explanation


class ExplainedReply(pydantic.RootModel[list[ExplainedAnswer]]):
    """With `parameters.explain`: for each text in order its answer and what it rests on."""


class ErrorDetail(Closed):
    type: Annotated[str, Field(json_schema_extra={"enum": list(dict.fromkeys(ERROR_TYPES.values()))})]
    message: str
    field: str | None
    """Where in the request, e.g. `inputs.3.text`."""


class ErrorReply(Closed):
    error: ErrorDetail


# ---------------------------------------------------------------------------------------------------------- parsing


class Shape(NamedTuple):
    depth: int
    """Lists and objects within each other; none in a document that is a text or a number."""
    values: int
    """Commas and opening brackets, and one: as many values, a few more where lists are empty."""


def shape(body: bytes, most_values: int) -> Shape:
    """The shape of `body`. Nothing is counted further in one that has more than `most_values`, and its depth is 0: what
    this costs is bounded by the length and by `most_values`."""
    # A value has a name at most, so that it is two texts.
    bare, texts = _STRING.subn(b"", body, 2 * most_values + 1)
    if texts > 2 * most_values:
        return Shape(0, texts)
    brackets = bare.translate(None, _NOT_BRACKETS)
    values = 1 + bare.count(b",") + brackets.count(b"[") + brackets.count(b"{")
    if max(values, len(brackets) // 2) > most_values:
        return Shape(0, max(values, len(brackets) // 2))
    depth = deepest = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return Shape(deepest, values)


Request = TypeVar("Request", bound=BaseModel)


def most_values(texts: int) -> int:
    """Most values of a document with so many texts: a few for each, and for what is said of the request."""
    return 8 * texts + 64


def parse(model: type[Request], body: bytes, most_texts: int = 256) -> Request:
    """The request in `body`, or the `RequestError` to answer: 400 where it is no JSON, 413 where it has more values
    than `most_texts` can need, 422 where it is another's."""
    found = shape(body, most_values(most_texts))
    if found.values > most_values(most_texts):
        raise RequestError(
            413, f"the body has more than {most_values(most_texts)} values; send at most {most_texts} texts"
        )
    if found.depth > MAX_DEPTH:
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
    place = ".".join(part for part in map(str, first["loc"]) if not part.startswith(("<", "list[")))
    raise RequestError(422, reason, place[:MAX_FIELD_CHARACTERS] or None)
