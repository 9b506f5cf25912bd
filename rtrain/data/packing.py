"""Documents of any length -> blocks of text that fill the model's input: long documents are cut between words, short
ones are joined.

Only documents of one split are joined, so that no block straddles two splits. Each word is in one block.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rtrain.data.row_reader import SourceRow

SPECIAL_TOKENS = 2
"""Tokens that the tokenizer adds at the beginning and the end of a block."""
SEPARATOR = "\n\n"


def pack_documents(
    rows: Iterable[SourceRow], tokenizer: Any, max_tokens: int, split_of: Callable[[SourceRow], str]
) -> Iterator[SourceRow]:
    """Blocks of at most `max_tokens` tokens, in order; bad rows are passed through.

    A block takes its line and its `group` from its first document, so it has that document's split.
    """
    open_blocks: dict[str, tuple[SourceRow, int]] = {}  # by split: the block being filled, and its tokens
    block_capacity = max_tokens - SPECIAL_TOKENS
    for row in rows:
        if row.reason is not None:
            yield row
            continue
        split = split_of(row)
        group = row.text if row.group is None else row.group
        parts = split_document(row.text, tokenizer, block_capacity)
        if not parts:
            yield row._replace(reason="the model reads no token of it; write a text or remove the row")
        for text, tokens in parts:
            if split in open_blocks:
                block, filled = open_blocks[split]
                if filled + tokens <= block_capacity:
                    open_blocks[split] = block._replace(text=block.text + SEPARATOR + text), filled + tokens
                    continue
                yield block
            open_blocks[split] = row._replace(text=text, pair=None, group=group), tokens
    for block, _ in open_blocks.values():
        yield block


def split_document(text: str, tokenizer: Any, max_tokens: int) -> list[tuple[str, int]]:
    """Consecutive parts of a text of at most `max_tokens` tokens, cut where a word begins: (text, number of tokens) of
    each."""
    encoding = tokenizer.encode(text, add_special_tokens=False)
    # The tokenizer cuts into windows that overlap by `stride`, which is 0 here.
    spans = [span for window in [encoding, *encoding.overflowing] for span in window.offsets]
    parts, first = [], 0
    while first < len(spans):
        last = min(first + max_tokens, len(spans))
        if last < len(spans):
            # Cut at the beginning of a word. A word longer than half a block is cut inside.
            last = next(
                (cut for cut in range(last, first + max_tokens // 2, -1) if _is_word_start(text, spans[cut][0])), last
            )
        end = spans[last][0] if last < len(spans) else len(text)
        part = text[spans[first][0] if first else 0 : end].strip()
        if part:
            parts.append((part, last - first))
        first = last
    return parts


def _is_word_start(text: str, position: int) -> bool:
    return position == 0 or text[position - 1].isspace() or text[position].isspace()
