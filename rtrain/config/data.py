"""The sections `data` and `augment`: which rows there are. And which of their settings contradict each other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from rtrain.core.errors import Problem

conflict = partial(Problem, code="conflicting_settings")
missing = partial(Problem, code="missing")
out_of_range = partial(Problem, code="out_of_range")
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


@dataclass(frozen=True)
class OneOf:
    """The type of a setting that names an entry of a table. Another name is a problem with the nearest ones."""

    names: Callable[[], Sequence[str]]
    """Asked at each check: the table may have grown since the settings' classes were made."""

    def check(self, name: str) -> str:
        if name not in self.names():
            raise PydanticCustomError("unknown_name", "unknown", {"known": tuple(self.names())})
        return name

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "enum": list(self.names())}


class Section(BaseModel):
    # Infinity and NaN pass most comparisons, and end a run in its midst.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _refuse_yes_for_a_number(cls, value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        """YAML reads `yes` and `on` as true, and Python takes true for 1."""
        found = check(value)
        if isinstance(value, bool) and isinstance(found, int | float) and not isinstance(found, bool):
            raise PydanticCustomError("not_a_number", "Input should be a number")
        return found


class Data(Section):
    path: str | None = None
    """File, folder, glob or URL of the training rows: csv, tsv, jsonl, parquet, a `datasets` folder, or a hub name
    (owner/name, owner/name:subset, either with @revision)."""
    test: str | None = None
    """The same for the test rows. Without it, 10 % of the rows, chosen by a hash of their content, are the test."""
    valid: str | None = None
    """The same for the validation rows. Without it, `valid_share` of the training rows."""
    split: str | None = None
    """Column that names each row's split: train, valid (or validation, val, dev) or test."""
    valid_share: Annotated[float, Field(ge=0.0, le=0.5)] | None = None
    """Share of the rows that choose the best weights and are not trained on. Default: 0.1, or 0 where `valid` or
    `split` names validation rows. Without any validation rows the last weights are kept: that trains chosen settings
    on all rows."""
    valid_part: Annotated[int, Field(ge=0)] = 0
    """Which part of the rows, of the size of `valid_share`, validates, from 0: another one has no row in common with
    it. Its rows are trained on where another part validates."""
    folds: Annotated[int, Field(ge=2, le=100)] | None = None
    """Cut the rows into so many equal parts, by a hash of their content; part `fold` is the test."""
    fold: Annotated[int, Field(ge=0)] = 0
    """Which of the `folds`, from 0."""
    format: Literal["csv", "tsv", "jsonl", "parquet", "datasets", "conll", "squad"] | None = None
    """Format of all files; by default the ending of a file's name says it."""
    delimiter: Annotated[str, Field(pattern=r'^[^"\\\r\n]$')] | None = None
    """Sign between the columns of csv files. By default, and for files whose header line does not have it, the header
    line says which of `,`, `;`, tab and `|` it is."""
    escape: Literal["\\"] | None = None
    """`\\` where csv files have a backslash before a quote that is text, as Spark, MySQL and Postgres may write
    them. By default such quotes are doubled."""
    text: str = "text"
    """Column with the text."""
    text_pair: str | None = None
    """Column with a second text, or none."""
    label: str | tuple[str, ...] | None = "label"
    """Column with the label; for a task of several heads a list, one column each; null where nothing is labelled."""
    separator: Annotated[str, Field(min_length=1)] | None = None
    """Sign between several labels in one text, e.g. "|"; a column of lists needs none."""
    outside: Annotated[str, Field(min_length=1)] | None = None
    """Label of the rows that belong to no class. They are not trained on; a threshold, chosen on the validation rows,
    tells them from the others."""
    slices: tuple[str, ...] = ()
    """Columns, e.g. a language: each of their values gets scores of its own, beside those of the whole."""
    id: str | None = None
    """Column that names each row for people, e.g. the number of a ticket: predictions and reports have its values
    beside file and line."""
    split_by: str | None = None
    """Column, e.g. an essay or a contract: rows of one value stay in one split. By default rows of one text do."""
    max_tokens: Annotated[int, Field(ge=8, le=8192)] = 64
    """Tokens at which longer texts are cut, in training and in serving alike."""
    window: Annotated[int, Field(ge=8, le=8192)] | None = None
    """Tokens of a window: longer texts are read in several windows, and are not cut at max_tokens."""
    stride: Annotated[int, Field(ge=0)] = 0
    """Tokens that two neighbouring windows share."""
    max_windows: Positive = 64
    """Most windows of a row; the text beyond them is cut, and counted as truncated."""
    pooling: Literal["mean", "max", "first"] = "mean"
    """How the outputs of a text's windows become one."""
    max_row_bytes: Positive = 200_000
    """A row with more text than this (bytes of UTF-8) is set aside as bad."""
    max_bad_rows: Share = 0.02
    """Share of bad rows that are set aside; a file with more of them is refused."""

    @property
    def window_tokens(self) -> int:
        """Most tokens that the model reads at once."""
        return self.window or self.max_tokens

    @property
    def labels(self) -> tuple[str, ...]:
        """Columns with labels."""
        return (self.label,) if isinstance(self.label, str) else self.label or ()


class Augment(Section):
    """Further training rows, made from the given ones. Validation and test rows stay as they are. No copy has a text
    that a hash would make one of them; it may have one that stands in a `valid` or `test` file, or that `split` names,
    and that row is counted among those that are training rows too."""

    copies: Annotated[int, Field(ge=0, le=100)] = 0
    """Noisy copies of each training row; a text with few words to change gets fewer."""
    typo: Share = 0.0
    """Share of a copy's words that get a typo."""
    swap: Share = 0.0
    """Share of the words that change places with the next."""
    drop: Share = 0.0
    """Share of the words that are left out."""
    mask: Share = 0.0
    """Share of the words that become the model's mask token."""
    paraphrase: str | None = None
    """Encoder-decoder model (a Transformers folder or a hub name) that writes each training text (data.text) anew, as a
    further copy."""
    pivot: str | None = None
    """Model that first translates the texts into another language; `paraphrase` then translates them back."""
    prefix: str = ""
    """Words put before each text, for models that expect an instruction."""
    variants: Annotated[int, Field(ge=1, le=16)] = 1
    """Texts that `paraphrase` writes for each text, with as many beams."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the noise. It is not train.seed, so that runs of several seeds share their rows."""

    @property
    def noise(self) -> dict[str, float]:
        """Share of the words by kind of noise."""
        return {"typo": self.typo, "swap": self.swap, "drop": self.drop, "mask": self.mask}

    @property
    def active(self) -> bool:
        return self.copies > 0 or self.paraphrase is not None


def _split_contradictions(data: Data) -> list[Problem]:
    problems = []
    if data.split is not None and (data.valid or data.test):
        fix = "give a column or files of their own, and set the others to null"
        problems.append(conflict("data.split", data.split, "data.valid or data.test names splits too", fix))
    if data.folds is not None and (data.valid or data.test or data.split):
        fix = "leave out data.valid, data.test and data.split, or set data.folds=null"
        problems.append(conflict("data.folds", data.folds, "the splits are given already", fix))
    if data.valid and data.valid_share:
        fix = "leave out one of the two"
        problems.append(conflict("data.valid_share", data.valid_share, "data.valid has the validation rows", fix))
    if data.valid_part and (data.valid or data.valid_share == 0 or (data.split and not data.valid_share)):
        reason = "no part of the training rows validates"
        fix = "leave it out, or give data.valid_share in place of validation rows of their own"
        problems.append(conflict("data.valid_part", data.valid_part, reason, fix))
    if data.fold and data.fold >= (data.folds or 1):
        problems.append(out_of_range("data.fold", data.fold, f"there are {data.folds} folds", "folds count from 0"))
    if data.valid_share == 0 and not (data.valid or data.split) and data.outside is not None:
        reason = "the threshold of data.outside is chosen on validation rows, and there are none"
        problems.append(conflict("data.valid_share", 0, reason, "give a share, or set data.outside=null"))
    return problems


def data_contradictions(data: Data) -> list[Problem]:
    problems = _split_contradictions(data)
    if data.text_pair == data.text:
        problems.append(
            Problem("data.text_pair", data.text_pair, "the same column as data.text", "remove it", code="same_column")
        )
    if {data.text, data.text_pair} & set(data.labels):
        problems.append(
            Problem(
                "data.label",
                data.label,
                "the same column as the text",
                "name the column of the labels",
                code="same_column",
            )
        )
    if 2 * data.stride >= data.window_tokens:
        fix = "write less than half of data.window (or of data.max_tokens where it is not set)"
        problems.append(
            out_of_range("data.stride", data.stride, "windows would share half of their tokens or more", fix)
        )
    return problems


def augment_contradictions(augment: Augment) -> list[Problem]:
    problems, total = [], sum(augment.noise.values())
    if total > 1:
        reason = "the shares of typo, swap, drop and mask are more than all words"
        problems.append(out_of_range("augment", round(total, 6), reason, "lower one: their sum is at most 1"))
    if augment.copies and not total:
        fix = "give a share of words, e.g. augment.typo=0.1, or copies=0"
        problems.append(conflict("augment.copies", augment.copies, "copies without noise repeat their rows", fix))
    if total and not augment.copies:
        problems.append(conflict("augment.copies", 0, "noise is for copies, and there are none", "write 1 or more"))
    if augment.pivot and not augment.paraphrase:
        fix = "name the model that translates back as augment.paraphrase"
        problems.append(missing("augment.pivot", augment.pivot, "the way back is missing", fix))
    return problems
