"""Documents of any length -> blocks of text that fill the model's input: long documents are cut between words, short
ones are joined.

Only documents of one split are joined, so that no block straddles two splits. Each word is in one block.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rtrain.data.row_reader import Record

SPECIAL_TOKENS = 2
"""Tokens that the tokenizer adds at the beginning and the end of a block."""
BETWEEN = "\n\n"


def packed(
    records: Iterable[Record], tokenizer: Any, max_tokens: int, split_of: Callable[[Record], str]
) -> Iterator[Record]:
    """Blocks of at most `max_tokens` tokens as records, in order; bad records come as they are.

    A block takes its line and its `group` from its first document, and so goes to that document's split.
    """
    open_blocks: dict[str, tuple[Record, int]] = {}  # by split: the block being filled, and its tokens
    room = max_tokens - SPECIAL_TOKENS
    for record in records:
        if record.reason is not None:
            yield record
            continue
        split = split_of(record)
        group = record.text if record.group is None else record.group
        parts = pieces(record.text, tokenizer, room)
        if not parts:
            yield record._replace(reason="the model reads no token of it; write a text or remove the row")
        for text, tokens in parts:
            if split in open_blocks:
                block, filled = open_blocks[split]
                if filled + tokens <= room:
                    open_blocks[split] = block._replace(text=block.text + BETWEEN + text), filled + tokens
                    continue
                yield block
            open_blocks[split] = record._replace(text=text, pair=None, group=group), tokens
    for block, _ in open_blocks.values():
        yield block


def pieces(text: str, tokenizer: Any, room: int) -> list[tuple[str, int]]:
    """Consecutive parts of a text of at most `room` tokens, cut where a word begins: (text, number of tokens) of
    each."""
    row = tokenizer.encode(text, add_special_tokens=False)
    # The tokenizer cuts into windows that overlap by `stride`, which is 0 here.
    spans = [span for window in [row, *row.overflowing] for span in window.offsets]
    found, first = [], 0
    while first < len(spans):
        last = min(first + room, len(spans))
        if last < len(spans):
            # Go back to where a word begins. A word longer than half the room is cut inside.
            last = next((cut for cut in range(last, first + room // 2, -1) if _begins(text, spans[cut][0])), last)
        end = spans[last][0] if last < len(spans) else len(text)
        part = text[spans[first][0] if first else 0 : end].strip()
        if part:
            found.append((part, last - first))
        first = last
    return found


def _begins(text: str, place: int) -> bool:
    return place == 0 or text[place - 1].isspace() or text[place].isspace()
