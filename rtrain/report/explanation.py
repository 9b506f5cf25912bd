"""An explanation on a terminal: the attribution of each word or sentence as a bar."""

from typing import Any, TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

MAX_BAR_WIDTH = 20
"""Characters of the longest bar."""
MAX_TEXT_WIDTH = 44
"""Shown characters of a sentence."""
POSITIVE_STYLE, NEGATIVE_STYLE = "green", "red"


def print_explanation(document: dict[str, Any], stream: TextIO) -> None:
    """Print the document of `inference.explain.explainer.Explanation.to_document()`; with colors on a terminal."""
    # Wider than any line: wrapped bars cannot be read.
    console = Console(file=stream, highlight=False, soft_wrap=True)
    if not document["answers"]:
        console.print(Text("the model found no entity in the text"))
    for answer in document["answers"]:
        console.print(Text(_format_headline(answer)))
        fields = {part["field"] for part in answer["words"]}
        # Sentences come first: they are the most useful for long texts.
        for name in ("sentence", "word"):
            parts = answer[f"{name}s"]
            if name == "word" or len(parts) > len(fields):
                for line in format_lines(parts, name, len(fields) > 1):
                    console.print(line)
                console.print()
    if document["truncated"]:
        console.print(Text("the text is truncated after the last word"))


def _format_headline(answer: dict[str, Any]) -> str:
    error = answer["completeness_error"]
    accuracy = "the words change nothing" if error is None else f"completeness error {error:.2%}"
    place = f" at {answer['start']}-{answer['end']}" if "start" in answer else ""
    return (
        f"{answer['label']}{place}: {answer['value']:.4f} = {answer['baseline']:.4f} without words "
        f"{answer['value'] - answer['baseline']:+.4f} from these ({accuracy}, {answer['steps']} steps)"
    )


def format_lines(parts: list[dict[str, Any]], name: str, several_fields: bool) -> list[Text]:
    """Format `part  +0.123      |#####`; the largest attribution has the longest bar."""
    names = [_make_printable(part[name], part["field"] if several_fields else "") for part in parts]
    width = min(MAX_TEXT_WIDTH, max(map(cell_len, names), default=0))
    largest = max((abs(part["attribution"]) for part in parts), default=0.0) or 1.0
    bar_lines = []
    for display_name, part in zip(names, parts, strict=True):
        value = part["attribution"]
        bar = "█" * round(MAX_BAR_WIDTH * abs(value) / largest)
        left, right = (bar.rjust(MAX_BAR_WIDTH), "") if value < 0 else (" " * MAX_BAR_WIDTH, bar)
        line = Text(f"  {set_cell_size(display_name, width)}  {value:+9.4f}  ")
        line.append(left, NEGATIVE_STYLE).append("│").append(right, POSITIVE_STYLE)
        bar_lines.append(line)
    return bar_lines


def _make_printable(text: str, field: str) -> str:
    """Return the text on one line without control characters."""
    clean = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in " ".join(text.split())
    )
    return f"{field}: {clean}" if field else clean
