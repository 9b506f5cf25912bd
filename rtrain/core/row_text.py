"""The text of a row, from its cells: HTML stripped, columns joined, features before it. Serving uses the same functions
on requests.

A feature is a value beside the text, such as a channel or a product, that the model reads as marked words:

    channel: mail
    product: card
    The amount was charged twice.
"""

import html
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rtrain.core.errors import quote_value

INLINE_TAGS = {
    *("a", "abbr", "b", "bdi", "bdo", "big", "cite", "code", "data", "del", "dfn", "em", "font", "i", "img", "ins"),
    *("kbd", "label", "mark", "q", "s", "samp", "small", "span", "strike", "strong", "sub", "sup", "time", "tt", "u"),
    *("var", "wbr"),
}
"""Tags that do not end a word; all others end a line."""
# The module html.parser takes the square of the length for hostile texts. A tag here has no `<` outside quotes, and its
# parts are possessive, so the time is linear.
_TAG = re.compile(r"""<!--|<[!?][^<>]*+>|<(/?)([a-zA-Z][\w:-]*+)(?=[\s/>])(?:"[^"]*+"|'[^']*+'|[^'"<>])*+>""")
_HIDDEN_END = {tag: re.compile(rf"</{tag}\s*+>", re.IGNORECASE) for tag in ("script", "style")}
"""Elements whose content is no text, each with its end."""
_BLANKS, _NEWLINES = re.compile(r"[^\S\n]+"), re.compile(r"\s*\n\s*")


def strip_html(text: str) -> str:
    """The text without tags, comments, scripts and styles, and with characters in place of entities. A text without
    `<` and `&` is unchanged. An address in angle brackets, as in mails, is no tag."""
    if "<" not in text and "&" not in text:
        return text
    parts, end = list[str](), 0
    while match := _TAG.search(text, end):
        parts.append(_decode(text[end : match.start()]))
        end, tag = match.end(), (match[2] or "").lower()
        if match[0] == "<!--":
            end = text.find("-->", end) + 3
            if end == 2:  # browsers hide the rest
                break
        elif tag in _HIDDEN_END and not match[1]:
            if (closing_tag := _HIDDEN_END[tag].search(text, end)) is None:
                break
            end = closing_tag.end()
        elif tag and tag not in INLINE_TAGS:
            parts.append("\n")
    else:
        parts.append(_decode(text[end:]))
    return _NEWLINES.sub("\n", _BLANKS.sub(" ", "".join(parts))).strip()


def _decode(text: str) -> str:
    """A text between tags: newlines of the source are blanks, since a line ends at a tag."""
    text = text.replace("\n", " ")
    try:
        return html.unescape(text)
    except ValueError:  # a number of thousands of digits
        return text


def build_text(parts: Sequence[str], data: Any, features: Mapping[str, str]) -> str:
    """The text of a row that is read by the settings `data` (`DataConfig`): its columns joined, after its features."""
    if data.strip_html:
        parts = [strip_html(part) for part in parts]
    text = parts[0] if len(parts) == 1 else data.text_separator.join(part for part in parts if part.strip())
    return add_features(text, features)


def add_features(text: str, features: Mapping[str, str]) -> str:
    """The text after one line for each feature with a value. A text without letters stays, so that it counts as
    empty."""
    if not text.strip():
        return text
    lines = [f"{name}: {' '.join(value.split())}\n" for name, value in features.items() if value.strip()]
    return "".join(lines) + text


def clean_input(
    value: Any, field: str, settings: Mapping[str, Any], normalize: Callable[[str], str] = str.strip
) -> Any:
    """An input of a request as a model's rows are: HTML stripped, the request's `features` before the text.

    `field` is the name of the first text, `settings` are an artifact's settings of rows; `normalize` gives a feature
    the form that cells have. Raises `ValueError` with the end of a sentence if the features are not the model's.
    """
    columns = settings.get("features") or ()
    features: Any = value.get("features") if isinstance(value, Mapping) else None
    if features is not None:
        is_valid = isinstance(features, Mapping) and all(isinstance(cell, str) for cell in features.values())
        if not is_valid or not features.keys() <= set(columns):
            fix = f"send texts by the names {', '.join(map(quote_value, columns))}" if columns else "leave them out"
            raise ValueError(f"has features that the model does not read; {fix}")
        value = {name: text for name, text in value.items() if name != "features"}
    if settings.get("strip_html"):
        is_text = isinstance(value, str)
        value = (
            strip_html(value)
            if is_text
            else {name: strip_html(text) if isinstance(text, str) else text for name, text in value.items()}
        )
    if not features or isinstance(value, str) or not isinstance(value.get(field), str):
        return value
    return {**value, field: add_features(value[field], {name: normalize(features.get(name, "")) for name in columns})}
