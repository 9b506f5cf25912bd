"""The condition `data.where`: which rows it selects, its columns, and the place of an error."""

import pytest

from rtrain.core.row_filter import InvalidFilter, parse_filter

ROW = {"status": "closed", "lang": "de", "amount": "20", "zip": "01234", "order id": "7", "reply": "", "paid": "true"}


def selects(condition: str) -> bool:
    return parse_filter(condition).matches(lambda column: ROW.get(column, ""))


@pytest.mark.parametrize(
    "condition",
    [
        "status = 'closed' and lang in ('de', 'en')",
        "STATUS is null or status == 'closed'",
        "status <> 'open' and lang != 'fr'",
        "amount > 3 and amount <= 2e1 and amount = 20.0",  # a text comparison would say 20 < 3
        "zip like '01%' and zip = '01234' and zip like '_1234'",
        '"order id" = 7 and `order id` between 7 and 8',
        "reply is null and not reply is not null",
        "paid = true and paid = 'true'",
        "not (lang = 'fr' or lang not in ('de', 'en'))",
        "lang = 'fr' or status = 'closed' and amount >= -1",
        "lang not like 'f%' and lang not between 'a' and 'c'",
    ],
)
def test_a_condition_selects_a_row(condition: str) -> None:
    assert selects(condition)


@pytest.mark.parametrize(
    "condition",
    [
        "lang = 'fr' or status = 'closed' and amount > 20",
        "reply = 'x'",
        "not reply = 'x'",  # unknown, as in SQL
        "reply != 'x' or reply not in ('x', 'y') or not reply like 'x'",
        "status > 3",
        "status not in ('closed') and lang = 'de'",
        "zip = '1234'",
    ],
)
def test_a_condition_leaves_out_a_row(condition: str) -> None:
    assert not selects(condition)


def test_columns_have_their_positions() -> None:
    parsed = parse_filter("status = 'lang' and (lang = 'de' or \"a \"\"b\" is null or lang = 'en')")
    assert dict(parsed.columns) == {"status": 1, "lang": 22, 'a "b': 37}


@pytest.mark.parametrize(
    ("condition", "position"),
    [
        ("", 1),
        ("status", 7),
        ("status = ", 10),
        ("status = closed", 10),
        ('status = "closed"', 10),
        ("status = 'closed", 10),
        ("status = 'a'; drop table x", 13),
        ("lower(status) = 'a'", 6),
        ("(status = 'a'", 14),
        ("status = 'a' lang = 'b'", 14),
        ("status in ()", 12),
        ("status like 5 and", 18),
        ("status is 5", 11),
        ("'a' = status", 1),
    ],
)
def test_an_error_names_the_character(condition: str, position: int) -> None:
    with pytest.raises(InvalidFilter, match=rf"^character {position}: "):
        parse_filter(condition)
