"""The condition `data.where`, in the words of SQL, as a function of a row's cells.

    status = 'closed' and lang in ('de', 'en') and (score >= 3 or reply is not null) and not subject like 'Re:%'

A cell is compared as text with a text, and as a number with a number. An empty cell is null: a comparison with it is
unknown, as in SQL, and a row is selected only where the condition is true. Nothing of the text is executed.
"""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

Cells = Callable[[str], str]
"""Returns the cell of a column as text, empty where the row has none."""
Predicate = Callable[[Cells], bool | None]
"""None: unknown, since a cell is empty, or is text where a number is compared."""

_TOKEN = re.compile(
    r"""\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|(?P<word>[^\W\d]\w*)|(?P<text>'(?:[^']|'')*')
    |(?P<name>"(?:[^"]|"")+"|`[^`]+`)|(?P<sign><>|<=|>=|!=|==|[=<>(),])|(?P<end>$))""",
    re.VERBOSE,
)
_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    **{"=": operator.eq, "==": operator.eq, "!=": operator.ne, "<>": operator.ne},
    **{"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
}
_KEYWORDS = ("and", "or", "not", "in", "like", "is", "null", "between")
EXAMPLE = "status = 'closed' and lang in ('de', 'en')"


class InvalidFilter(ValueError):
    """The text is no condition; `position` is that of the character, from 1."""

    def __init__(self, reason: str, position: int):
        super().__init__(f"character {position}: {reason}")


@dataclass(frozen=True)
class RowFilter:
    columns: Mapping[str, int]
    """The columns of the condition, each with the position where it occurs first, from 1."""
    predicate: Predicate

    def matches(self, cells: Cells) -> bool:
        return self.predicate(cells) is True


@lru_cache(32)
def parse_filter(text: str, normalize: Callable[[str], str] = str.strip) -> RowFilter:
    """Parse a condition. `normalize` gives a text of the condition the form that cells have. Raises
    `InvalidFilter`."""
    parser = _Parser(text, normalize)
    predicate = parser.parse_or()
    if parser.token.kind != "end":
        parser.fail("and, or, or the end")
    return RowFilter(parser.columns, predicate)


class _Token(NamedTuple):
    kind: str
    text: str
    """A keyword is in lower case."""
    position: int


class _Parser:
    """Recursive descent. `token` is the next one."""

    def __init__(self, text: str, normalize: Callable[[str], str]):
        self._text, self._normalize, self._end = text, normalize, 0
        self.columns: dict[str, int] = {}
        self.token = self._read_token()

    def _read_token(self) -> _Token:
        match = _TOKEN.match(self._text, self._end)
        if match is None:
            start = len(self._text) - len(self._text[self._end :].lstrip())
            is_open = self._text[start] in "'\"`"
            reason = "the quote is never closed" if is_open else f"unexpected {self._text[start]!r}"
            raise InvalidFilter(reason, start + 1)
        kind, self._end = str(match.lastgroup), match.end()
        token = _Token(kind, match[kind], match.start(kind) + 1)
        is_keyword = kind == "word" and token.text.lower() in _KEYWORDS
        return token._replace(kind="keyword", text=token.text.lower()) if is_keyword else token

    def _take(self, *texts: str) -> str | None:
        """Take the next token if it is one of these keywords or signs."""
        if self.token.kind not in ("keyword", "sign") or self.token.text not in texts:
            return None
        text, self.token = self.token.text, self._read_token()
        return text

    def _require(self, text: str) -> None:
        if self._take(text) is None:
            self.fail(text)

    def fail(self, expected: str) -> NoReturn:
        actual = "the text ends" if self.token.kind == "end" else f"{self.token.text!r} stands"
        raise InvalidFilter(f"{actual} where {expected} is expected", self.token.position)

    def parse_or(self) -> Predicate:
        parts = [self._parse_and()]
        while self._take("or"):
            parts.append(self._parse_and())
        return _combine(parts, True)

    def _parse_and(self) -> Predicate:
        parts = [self._parse_not()]
        while self._take("and"):
            parts.append(self._parse_not())
        return _combine(parts, False)

    def _parse_not(self) -> Predicate:
        if self._take("not"):
            return _negate(self._parse_not())
        if self._take("("):
            predicate = self.parse_or()
            self._require(")")
            return predicate
        return self._parse_comparison()

    def _parse_comparison(self) -> Predicate:
        column = self._parse_column()
        if self._take("is"):
            is_negated = self._take("not") is not None
            self._require("null")
            return lambda cells: (not cells(column)) != is_negated
        if sign := self._take(*_COMPARISONS):
            return _compare(column, sign, self._parse_value())
        is_negated = self._take("not") is not None
        if self._take("in"):
            self._require("(")
            equals = [_compare(column, "=", self._parse_value())]
            while self._take(","):
                equals.append(_compare(column, "=", self._parse_value()))
            self._require(")")
            predicate = _combine(equals, True)
        elif self._take("between"):
            low = _compare(column, ">=", self._parse_value())
            self._require("and")
            predicate = _combine([low, _compare(column, "<=", self._parse_value())], False)
        elif self._take("like"):
            predicate = _match_pattern(column, str(self._parse_value("a text such as 'Re:%'")))
        else:
            self.fail("=, <, in, like, between or is null")
        return _negate(predicate) if is_negated else predicate

    def _parse_column(self) -> str:
        kind, name, position = self.token
        if kind not in ("word", "name"):
            self.fail("the name of a column")
        if kind == "name":
            name = name[1:-1].replace('""', '"') if name[0] == '"' else name[1:-1]
        self.columns.setdefault(name, position)
        self.token = self._read_token()
        return name

    def _parse_value(self, expected: str = "a number, or a text in single quotes,") -> str | float:
        kind, text, _ = self.token
        is_boolean = kind == "word" and text.lower() in ("true", "false")
        if kind not in ("text", "number") and not is_boolean:
            self.fail(expected)
        self.token = self._read_token()
        if kind == "number":
            return float(text)
        return text.lower() if is_boolean else self._normalize(text[1:-1].replace("''", "'"))


def _combine(parts: list[Predicate], decisive: bool) -> Predicate:
    """The `or` (`decisive` is True) or the `and` (False) of parts, by the three values of SQL."""

    def evaluate(cells: Cells) -> bool | None:
        values = {part(cells) for part in parts}
        return decisive if decisive in values else None if None in values else not decisive

    return evaluate if len(parts) > 1 else parts[0]


def _negate(predicate: Predicate) -> Predicate:
    return lambda cells: None if (value := predicate(cells)) is None else not value


def _compare(column: str, sign: str, value: str | float) -> Predicate:
    compare = _COMPARISONS[sign]

    def evaluate(cells: Cells) -> bool | None:
        cell: str | float = cells(column)
        if not cell:
            return None
        if isinstance(value, float):
            try:
                cell = float(cell)
            except ValueError:
                return None
        return compare(cell, value)

    return evaluate


def _match_pattern(column: str, pattern: str) -> Predicate:
    parts = (".*" if sign == "%" else "." if sign == "_" else re.escape(sign) for sign in pattern)
    expression = re.compile("".join(parts), re.DOTALL)
    return lambda cells: bool(expression.fullmatch(cell)) if (cell := cells(column)) else None
