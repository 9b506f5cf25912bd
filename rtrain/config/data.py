"""The sections `data` and `augment`, which select the rows, and the conflicts among their settings."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
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

from rtrain.core import plugins, row_filter
from rtrain.core.errors import Problem

conflict_problem = partial(Problem, code="conflicting_settings")
missing_problem = partial(Problem, code="missing")
out_of_range_problem = partial(Problem, code="out_of_range")
PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]


@dataclass(frozen=True)
class OneOf:
    """The type of a setting that names an entry of a table. An unknown name is a problem with the nearest names."""

    names: Callable[[], Sequence[str]]
    """Called at each check: entries may be added after the class of the settings was created."""

    def validate_name(self, name: str) -> str:
        if name not in self.names():
            raise PydanticCustomError("unknown_name", "unknown", {"known": tuple(self.names())})
        return name

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.validate_name, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        names = list(self.names())
        return {**handler(schema), **({"enum": names} if names else {})}


class ConfigSection(BaseModel):
    # Infinity and NaN pass most comparisons, and would end a run midway.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _refuse_boolean_as_number(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        """YAML reads `yes` and `on` as true, and Python takes true for 1."""
        checked_value = validate(value)
        if isinstance(value, bool) and isinstance(checked_value, int | float) and not isinstance(checked_value, bool):
            raise PydanticCustomError("not_a_number", "Input should be a number")
        return checked_value


class Sampling(ConfigSection):
    """How often the rows of each value of a column are drawn; see `data.sampling`."""

    column: Annotated[str, Field(min_length=1)]
    temperature: Fraction = 0.5


def _name_number(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, int | float) else value


class SplitTime(ConfigSection):
    """`data.split_time`: the newest rows are the test."""

    column: str
    """Column with the time of each row: a date or time in ISO 8601, without a zone in UTC, or seconds or milliseconds
    since 1970. Rows of one time are in one split."""
    valid: Fraction | str = 0.1
    """Share of the rows that validate, the newest before the test rows; or the first date of them."""
    test: Fraction | str = 0.1
    """Share of the test rows, the newest; or the first date of them."""


class DataConfig(ConfigSection):
    path: str | None = None
    """File, folder, glob or URL of the training rows: csv, tsv, jsonl, parquet, a `datasets` folder, or a hub name
    (owner/name, owner/name:subset, either with @revision)."""
    test: str | None = None
    """The same for the test rows. Without it, 10 % of the rows, chosen by a hash of their content, are test rows."""
    valid: str | None = None
    """The same for the validation rows. Without it, `valid_share` of the training rows."""
    split_column: str | None = None
    """Column that names each row's split: train, valid (or validation, val, dev) or test."""
    valid_share: Annotated[float, Field(ge=0.0, le=0.5)] | None = None
    """Share of validation rows, which choose the best weights and are not trained on. Default: 0.1, or 0 where `valid`
    or `split_column` names validation rows. With 0 the last weights are kept, to train with final settings on all
    rows."""
    validation_fold: Annotated[int, Field(ge=0)] = 0
    """Number of the part of the rows, of the size of `valid_share`, that validates, from 0. Parts have no rows in
    common; the rows of the other parts are trained on."""
    folds: Annotated[int, Field(ge=2, le=100)] | None = None
    """Split the rows into this many equal parts, by a hash of their content; part `fold` is the test split."""
    fold: Annotated[int, Field(ge=0)] = 0
    """Number of the fold, from 0."""
    format: (
        Literal["csv", "tsv", "jsonl", "parquet", "datasets", "conll", "squad"]
        | Literal["xlsx", "label_studio", "doccano", "prodigy"]
        | None
    ) = None
    """Format of all files; by default from the suffix of a file's name."""
    delimiter: Annotated[str, Field(pattern=r'^[^"\\\r\n]$')] | None = None
    """Separator of the columns of csv files. By default, and for files without it in the header line, it is detected
    from the header line: `,`, `;`, tab or `|`."""
    escape: Literal["\\"] | None = None
    """`\\` where csv files escape a quote by a backslash, as Spark, MySQL and Postgres may write them. By default
    quotes are doubled."""
    query: str | None = None
    """SELECT statement that gives the rows, with a database as `path`. A new run executes it; a resumed run keeps the
    rows."""
    where: str | None = None
    """Condition on the columns of a row, in the words of SQL: status = 'closed' and lang in ('de', 'en'). Other rows
    are left out and counted."""
    text: str | tuple[str, ...] = "text"
    """Column with the text; or a list of columns, which are joined to one text."""
    text_separator: str = "\n"
    """Text between the columns of `text`; empty columns are left out."""
    features: tuple[str, ...] = ()
    """Columns whose values the model reads before the text, one line each, e.g. `channel: mail`."""
    strip_html: bool = False
    """Strip the tags of HTML from texts, and scripts and styles, and decode entities; the artifact does so in requests
    too."""
    text_pair: str | None = None
    """Column with a second text, or none."""
    label: str | tuple[str, ...] | None = "label"
    """Column with the label; for a task of several heads a list, one column each; null where no row is labeled."""
    labels: dict[str, str] = {}
    """Name of the label by each other spelling in the column, e.g. {p3: P3, Prio 3: P3}. Other labels stay."""
    separator: Annotated[str, Field(min_length=1)] | None = None
    """Separator of several labels in one text, e.g. "|"; a column of lists needs none."""
    out_of_scope_label: Annotated[str, Field(min_length=1)] | None = None
    """Label of the out-of-scope rows, which belong to no class. They are not trained on; a threshold, chosen on the
    validation rows, separates them from the others."""
    weight_column: str | None = None
    """Column with the weight of each training row in the loss, a number of 0 or more. The weights of a step are divided
    by their sum. Scores count every row once. A student learns every row alike. null: all rows weigh 1."""
    sampling: Sampling | None = None
    """Draw the training rows of each value of a column (a language, a source, the label) in other shares than theirs:
    `{column: lang, temperature: 0.5}` draws a value of n rows in proportion to n^temperature. 1: the shares of the
    rows; 0: equally many of each value. An epoch has as many rows as without it. null: each row once per epoch."""
    slices: tuple[str, ...] = ()
    """Columns, e.g. a language: each of their values gets scores of its own, in addition to the overall scores."""
    id: str | None = None
    """Column that identifies each row to people, e.g. the number of a ticket: predictions and reports show its value
    next to file and line."""
    group_column: str | None = None
    """Column, e.g. an essay or a contract: rows of one value stay in one split. By default rows of one text stay
    together."""
    stratify: str | None = None
    """`label`, or a column: each of its values has the same share of rows in each split and in each fold."""
    split_time: SplitTime | None = None
    """Split by time: {column: created_at, valid: 0.1, test: 0.1}, by shares of the rows; or by first dates,
    {column: created_at, valid: 2024-05-01, test: 2024-06-01}."""
    max_tokens: Annotated[int, Field(ge=8, le=8192)] = 64
    """Tokens at which longer texts are truncated, in training and in serving alike."""
    window: Annotated[int, Field(ge=8, le=8192)] | None = None
    """Tokens of a window: longer texts are read in several windows, and are not truncated at max_tokens."""
    stride: Annotated[int, Field(ge=0)] = 0
    """Tokens that two neighbouring windows share."""
    max_windows: PositiveInt = 64
    """Most windows of a row; text beyond them is truncated."""
    pooling: Literal["mean", "max", "first"] = "mean"
    """Pooling of the outputs of a text's windows."""
    max_row_bytes: PositiveInt = 200_000
    """A row with more text than this (bytes of UTF-8) is quarantined as bad."""
    max_bad_rows: Fraction = 0.02
    """Largest share of bad rows, which are quarantined; a file with more is refused."""

    @field_validator("labels", mode="before")
    @classmethod
    def _name_numbers(cls, value: Any) -> Any:
        """YAML reads 1 as a number, and labels are texts."""
        if not isinstance(value, dict):
            return value
        return {_name_number(spelling): _name_number(label) for spelling, label in value.items()}

    @property
    def window_tokens(self) -> int:
        """Most tokens of one window."""
        return self.window or self.max_tokens

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Columns with the text."""
        return (self.text,) if isinstance(self.text, str) else self.text

    @property
    def label_columns(self) -> tuple[str, ...]:
        """Columns with labels."""
        return (self.label,) if isinstance(self.label, str) else self.label or ()


class AugmentConfig(ConfigSection):
    """Further training rows, made from the training rows. Validation and test rows are unchanged. A copy never has a
    text that the hash would assign to another split. It may have the text of a row in a `valid` or `test` file or of
    `split_column`; that row is counted as contaminated."""

    copies: Annotated[int, Field(ge=0, le=100)] = 0
    """Noisy copies of each training row; a text with few changeable words gets fewer."""
    typo: Fraction = 0.0
    """Share of a copy's words that get a typo."""
    swap: Fraction = 0.0
    """Share of the words that are swapped with the next."""
    drop: Fraction = 0.0
    """Share of the words that are left out."""
    mask: Fraction = 0.0
    """Share of the words that become the model's mask token."""
    paraphrase: str | None = None
    """Encoder-decoder model (a Transformers folder or a hub name) that paraphrases each training text (data.text) as a
    further copy."""
    back_translation_model: str | None = None
    """Model that first translates the texts into another language; `paraphrase` then translates them back."""
    prefix: str = ""
    """Prefix of each text, for models that expect an instruction."""
    variants: Annotated[int, Field(ge=1, le=16)] = 1
    """Paraphrases of each text, with as many beams."""
    functions: tuple[Annotated[str, OneOf(lambda: plugins.list_names("augmentation"))], ...] = ()
    """Functions of plug-ins. Each makes one more copy of each training row, with another text (data.text)."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the noise. It is not train.seed, so that runs of several seeds share their rows."""

    @property
    def noise_shares(self) -> dict[str, float]:
        """Share of the words by kind of noise."""
        return {"typo": self.typo, "swap": self.swap, "drop": self.drop, "mask": self.mask}

    @property
    def is_active(self) -> bool:
        return self.copies > 0 or self.paraphrase is not None or bool(self.functions)


def find_data_problems(data: DataConfig) -> Iterator[Problem]:
    yield from _find_split_problems(data)
    yield from _find_column_problems(data)
    if data.text_pair in data.text_columns:
        yield Problem("data.text_pair", data.text_pair, "the same column as data.text", "remove it", code="same_column")
    if {*data.text_columns, data.text_pair} & set(data.label_columns):
        fix = "name the column of the labels"
        yield Problem("data.label", data.label, "the same column as the text", fix, code="same_column")
    if 2 * data.stride >= data.window_tokens:
        fix = "write less than half of data.window (or of data.max_tokens where it is not set)"
        yield out_of_range_problem("data.stride", data.stride, "windows would share half of their tokens or more", fix)


def _find_column_problems(data: DataConfig) -> Iterator[Problem]:
    if not data.text_columns or len({*data.text_columns}) < len(data.text_columns):
        reason, fix = "no column, or one column twice", "write a column, or a list such as [subject, body]"
        yield Problem("data.text", list(data.text_columns), reason, fix, code="same_column")
    if shared_columns := {*data.text_columns, data.text_pair, *data.label_columns} & set(data.features):
        reason, fix = "the column of a text or a label", "name columns beside the text"
        yield Problem("data.features", min(map(str, shared_columns)), reason, fix, code="same_column")
    if data.where is not None:
        try:
            row_filter.parse_filter(data.where)
        except row_filter.InvalidFilter as error:
            fix = f"write a condition such as {row_filter.EXAMPLE}"
            yield Problem("data.where", data.where, str(error), fix, code="invalid_filter")
    if data.path is not None and (data.query is None) == is_database(data.path):
        # The address is not printed: it may have a password.
        if data.query is None:
            fix = "write the statement, e.g. SELECT text, label FROM tickets"
            yield missing_problem("data.query", None, "data.path names a database, whose rows a query gives", fix)
        else:
            fix = "write an address such as sqlite:///FILE in data.path, or leave the query out"
            yield conflict_problem("data.query", data.query, "data.path names no database", fix)
    for name in ("valid", "test"):
        if is_database(getattr(data, name)):
            fix = "select all rows, and write data.split_column, data.split_time or data.stratify"
            yield Problem(f"data.{name}", None, "a database has the rows of one query", fix, code="unsupported")
    if data.format is not None and is_table(data.path):
        yield conflict_problem("data.format", data.format, "a table has columns, and no format", "leave it out")
    if data.labels and not data.label_columns:
        yield conflict_problem("data.labels", data.labels, "no column has labels", "name it in data.label")


def _find_split_problems(data: DataConfig) -> Iterator[Problem]:
    rules = {
        "data.stratify": (data.stratify, (*("valid", "test", "split_column", "split_time"),)),
        "data.split_time": (
            data.split_time and data.split_time.column,
            ("valid", "test", "split_column", "folds", "group_column", "valid_share", "validation_fold"),
        ),
    }
    for setting, (value, other_settings) in rules.items():
        conflicts = [f"data.{name}" for name in other_settings if value and getattr(data, name)]
        if conflicts:
            reason, fix = f"{' and '.join(conflicts)} sets the splits too", "leave out one of the two"
            yield conflict_problem(setting, value, reason, fix)
    if data.stratify == "label" and not data.label_columns:
        yield conflict_problem("data.stratify", "label", "no column has labels", "name another column, or data.label")
    if (times := data.split_time) is not None:
        shares = [value for value in (times.valid, times.test) if isinstance(value, float)]
        if len(shares) == 1 or sum(shares) >= 1 or 0 in shares:
            value, reason = (
                f"{times.valid}, {times.test}",
                "two shares above 0 with a sum below 1, or two dates, are needed",
            )
            fix = "write both as shares or both as dates"
            yield out_of_range_problem("data.split_time", value, reason, fix)
        for name, date in (("valid", times.valid), ("test", times.test)):
            if isinstance(date, str) and parse_time(date) is None:
                fix = "write a date such as 2024-06-01"
                yield Problem(f"data.split_time.{name}", date, "no date", fix, code="invalid_date")
        if not shares and (parse_time(times.valid) or 0.0) > (parse_time(times.test) or math.inf):
            reason, fix = "validation rows would be newer than the test rows", "write an earlier date"
            yield out_of_range_problem("data.split_time.valid", times.valid, reason, fix)
    if data.split_column is not None and (data.valid or data.test):
        reason, fix = "data.valid or data.test names splits too", "write a column or files, and set the others to null"
        yield conflict_problem("data.split_column", data.split_column, reason, fix)
    if data.folds is not None and (data.valid or data.test or data.split_column):
        fix = "leave out data.valid, data.test and data.split_column, or set data.folds=null"
        yield conflict_problem("data.folds", data.folds, "the splits are set already", fix)
    if data.valid and data.valid_share:
        reason, fix = "data.valid has the validation rows", "leave out one of the two"
        yield conflict_problem("data.valid_share", data.valid_share, reason, fix)
    if data.validation_fold and (data.valid or data.valid_share == 0 or (data.split_column and not data.valid_share)):
        fix = "leave it out, or write data.valid_share in place of data.valid"
        reason = "no part of the training rows validates"
        yield conflict_problem("data.validation_fold", data.validation_fold, reason, fix)
    if data.fold and data.fold >= (data.folds or 1):
        yield out_of_range_problem("data.fold", data.fold, f"there are {data.folds} folds", "folds count from 0")
    if data.valid_share == 0 and not (data.valid or data.split_column) and data.out_of_scope_label is not None:
        reason = "the threshold of data.out_of_scope_label needs validation rows"
        yield conflict_problem("data.valid_share", 0, reason, "write a share, or set data.out_of_scope_label=null")


DATABASE_SCHEMES = (
    *("sqlite", "postgresql", "postgres", "mysql", "mariadb", "mssql", "oracle", "duckdb", "redshift", "clickhouse"),
    *("snowflake", "bigquery", "databricks"),
)
"""Schemes of the addresses of databases, each also with a driver: mysql+pymysql."""
LAKE_SCHEMES = ("delta", "iceberg")


def is_database(address: str | None) -> bool:
    """Whether an address is that of a database, which `data.query` reads."""
    scheme, separator, _ = (address or "").partition("://")
    return bool(separator) and scheme.partition("+")[0] in DATABASE_SCHEMES


def is_table(address: str | None) -> bool:
    """Whether an address is that of a database, or of a Delta or Iceberg table."""
    return is_database(address) or (address or "").partition("://")[0] in LAKE_SCHEMES


MIN_MILLISECONDS = 1e11
"""A number of this size or more is a time in milliseconds; in seconds it would be in the year 5138."""


def parse_time(value: object) -> float | None:
    """Seconds since 1970 of a date or time in ISO 8601, or of seconds or milliseconds; None for other values."""
    text = str(value).strip()
    try:
        number = float(text)
        return None if not math.isfinite(number) else number / 1000 if abs(number) >= MIN_MILLISECONDS else number
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def find_augment_problems(augment: AugmentConfig) -> Iterator[Problem]:
    total = sum(augment.noise_shares.values())
    if total > 1:
        reason = "the shares of typo, swap, drop and mask are more than all words"
        yield out_of_range_problem("augment", round(total, 6), reason, "lower one: their sum is at most 1")
    if augment.copies and not total:
        fix = "write a share of words, e.g. augment.typo=0.1, or augment.copies=0"
        yield conflict_problem("augment.copies", augment.copies, "copies without noise repeat their rows", fix)
    if total and not augment.copies:
        yield conflict_problem("augment.copies", 0, "noise needs copies", "write 1 or more")
    if (pivot := augment.back_translation_model) and not augment.paraphrase:
        reason, fix = (
            "the model that translates back is missing",
            "name the model that translates back as augment.paraphrase",
        )
        yield missing_problem("augment.back_translation_model", pivot, reason, fix)
