"""An explanation on a terminal: each word or sentence with what it adds to the value, as a bar to either side."""

from typing import Any, TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

SIDE = 20
"""Characters of the longest bar."""
WIDEST = 44
"""Characters of a sentence's beginning."""
FOR, AGAINST = "green", "red"


def show(document: dict[str, Any], to: TextIO) -> None:
    """Draw `explain.explainer.Explanation.to_document()`; in colours where `to` is a terminal."""
    # Wider than any line: wrapped bars cannot be read.
    console = Console(file=to, highlight=False, soft_wrap=True)
    if not document["answers"]:
        console.print(Text("no entity was found in the text: nothing to explain"))
    for answer in document["answers"]:
        console.print(Text(_headline(answer)))
        fields = {part["field"] for part in answer["words"]}
        # Sentences say something where they are several; of a long text they say the most, and so come first.
        for name in ("sentence", "word"):
            parts = answer[f"{name}s"]
            if name == "word" or len(parts) > len(fields):
                for line in lines(parts, name, len(fields) > 1):
                    console.print(line)
                console.print()
    if document["truncated"]:
        console.print(Text("the text goes on: the model reads no further than the last word here"))


def _headline(answer: dict[str, Any]) -> str:
    error = answer["completeness_error"]
    accuracy = "the words change nothing" if error is None else f"completeness error {error:.2%}"
    place = f" at {answer['start']}-{answer['end']}" if "start" in answer else ""
    return (
        f"{answer['label']}{place}: {answer['value']:.4f} = {answer['baseline']:.4f} without words "
        f"{answer['value'] - answer['baseline']:+.4f} from these ({accuracy}, {answer['steps']} steps)"
    )


def lines(parts: list[dict[str, Any]], name: str, several_fields: bool) -> list[Text]:
    """`part  +0.123      |#####`, the longest bar being the largest attribution."""
    names = [_printable(part[name], part["field"] if several_fields else "") for part in parts]
    width = min(WIDEST, max(map(cell_len, names), default=0))
    largest = max((abs(part["attribution"]) for part in parts), default=0.0) or 1.0
    found = []
    for shown, part in zip(names, parts, strict=True):
        value = part["attribution"]
        bar = "█" * round(SIDE * abs(value) / largest)
        left, right = (bar.rjust(SIDE), "") if value < 0 else (" " * SIDE, bar)
        line = Text(f"  {set_cell_size(shown, width)}  {value:+9.4f}  ")
        line.append(left, AGAINST).append("│").append(right, FOR)
        found.append(line)
    return found


def _printable(text: str, field: str) -> str:
    """The text on one line, with no character that would steer the terminal."""
    clean = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in " ".join(text.split())
    )
    return f"{field}: {clean}" if field else clean
