"""Texts of rows and of requests: HTML, joined columns, features."""

import time

import pytest

from rtrain.config import DataConfig
from rtrain.core.row_text import build_text, clean_input, strip_html


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("no markup: 1 > 0", "no markup: 1 > 0"),
        ("<p>Hello&nbsp;<b>Bo</b>b &amp; Al</p>", "Hello Bob & Al"),
        ("<div>one</div><div>two<br/>three</div>", "one\ntwo\nthree"),
        ("<style>p { color: red }</style>x<script>if (a < b) alert('<p>')</script>y<!-- z -->", "xy"),
        ("&lt;b&gt; &#228;&#x20AC;&hellip;", "<b> ä€…"),
        ("<p class='a>b' hidden>text", "text"),
        ("a < b, 5 <3 &nosuch; <ann@example.org>", "a < b, 5 <3 &nosuch; <ann@example.org>"),
        ("<p>one\n two</p>\n\n<p>three</p>", "one two\nthree"),
        ("<p></p><br>", ""),
        ("<script>never closed", ""),
    ],
)
def test_html_becomes_its_text(source: str, text: str) -> None:
    assert strip_html(source) == text


def test_a_hostile_text_takes_linear_time() -> None:
    started_at = time.process_time()
    for part in ("<", "<a ", "<a '\"", "&", "<!--", "<!-- -->", "<!", "<script>", "</", "<b", "&#9"):
        strip_html(part * (200_000 // len(part)))
    strip_html("&#" + "9" * 200_000)
    assert time.process_time() - started_at < 20  # the square of its length would take minutes


def test_columns_are_joined_without_the_empty_ones() -> None:
    data = DataConfig(text=("subject", "body"), text_separator=" | ")
    assert build_text(["Hello", "Bob"], data, {}) == "Hello | Bob"
    assert build_text(["", "Bob"], data, {}) == "Bob"
    assert build_text(["", " "], data, {}) == ""


def test_features_stand_before_a_text_and_make_none() -> None:
    data = DataConfig(features=("channel", "product"), strip_html=True)
    features = {"channel": "mail", "product": ""}
    assert build_text(["<i>Bob</i>"], data, features) == "channel: mail\nBob"
    assert build_text(["<p></p>"], data, features) == ""


def test_a_request_becomes_the_text_of_its_row() -> None:
    data = DataConfig(features=("channel", "product"), strip_html=True)
    row = build_text(["<p>Hello</p>"], data, {"channel": "mail", "product": "card & co"})
    request = {"text": "<p>Hello</p>", "features": {"product": "card & co", "channel": "mail"}}
    settings = data.model_dump(mode="json")
    assert clean_input(request, "text", settings) == {"text": row}
    assert clean_input("<p>Hello</p>", "text", settings) == "Hello"
    assert clean_input({"text": "<b>a", "text_pair": "<i>b"}, "text", settings) == {"text": "a", "text_pair": "b"}
    assert clean_input("<p>", "text", {}) == "<p>"


@pytest.mark.parametrize("features", [{"chanel": "mail"}, {"channel": 5}, "mail"])
def test_unknown_features_are_refused(features: object) -> None:
    for settings in ({"features": ["channel"]}, {}):
        with pytest.raises(ValueError, match="features"):
            clean_input({"text": "a", "features": features}, "text", settings)
