"""A tag for each word: names, diseases, clauses in running text. Tags are O, B-TYPE and I-TYPE (BIO, IOB1 or IO).

A word's tag is learned and answered at its first token. A long text is read in windows (`data.max_windows`), and each
word is answered in the window in which it has the most text on both sides. A word without a token, or beyond the last
window, is answered O.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rtrain.core.errors import UserError, quoted
from rtrain.core.ragged import IGNORED, Encoded, Floats, Head, Ints, Outputs, Ragged, Tokens
from rtrain.core.text_segmentation import read_cuts, word_spans
from rtrain.metrics.calibration import softmax
from rtrain.metrics.classification import best
from rtrain.metrics.entities import MISSING, entities, missing_words, of_tokens, true_tags
from rtrain.tasks import base
from rtrain.tasks.base import Column, Described, Input, Targets
from rtrain.tasks.classification import divergence
from rtrain.tasks.defaults import TokenTask, widened
from rtrain.tasks.labels import flaw_of, listed

if TYPE_CHECKING:
    import tokenizers
    import torch

OUTSIDE = "O"
EXAMPLES = (
    "Maria Lund met the directors of Nordhaven Shipping in Rotterdam on Friday.",
    "Aspirin lowered the fever, but two patients with diabetes developed a rash after ibuprofen.",
    "The tenant, Harbour Foods Ltd, shall pay 1,200 euros to the landlord by 3 March 2026.",
)
_TAG = re.compile(r"O|[BI]-.+")


class TokenTags(TokenTask):
    name = "token_tags"
    output = "tags"
    smooths = True
    reads_pair = False
    varies: base.Variation = "words"
    rule_of_marks = 2

    def flaw(self, text: str, pair: str | None, label: str) -> str | None:
        """The text's words are separated by single blanks, as `records` joins a list of tokens."""
        if bad_label := flaw_of(tags_of, label):
            return bad_label
        if label.startswith("[") and _is_list(text):
            return "its words are a list written as text; write jsonl or parquet, or words with blanks between them"
        tags, words = tags_of(label), len(text.split(" "))
        if bad := [tag for tag in tags if not _TAG.fullmatch(tag)]:
            return f"tag {quoted(bad[0])} is not O, B-TYPE or I-TYPE; convert the tags to BIO"
        if len(tags) != words:
            return f"{len(tags)} tags for {words} words; give each word one"
        return None

    def head(self, counts: Mapping[str, int], tokenizer: "tokenizers.Tokenizer | None" = None) -> Head:
        found = {tag for label in counts for tag in tags_of(label)} - {OUTSIDE}
        if not found:
            raise UserError(
                "data.label: no training row has an entity, all tags are O; "
                "add rows with entities, or name the column of the tags with --set data.label=COLUMN",
                code="no_labels",
            )
        return Head((OUTSIDE, *sorted(found)))

    def marks(self, text: str, pair: str | None, label: str, encoded: Encoded) -> list[int]:
        """For each token the number of the word that is answered there, or -1."""
        lengths = np.array([len(word) for word in text.split(" ")])
        found: list[int] = _answered(encoded, np.cumsum(lengths + 1) - lengths - 1).tolist()
        return found

    def targets(self, labels: Sequence[str], marks: Ragged, head: Head) -> Targets:
        """The tag of each word at the token that is answered for it, then the words without a token."""
        index = {tag: place for place, tag in enumerate(head.labels)}
        rows, unknown = [], np.zeros(len(labels), dtype=np.bool_)
        for row, (label, words) in enumerate(zip(labels, marks, strict=True)):
            places = np.array([index.get(tag, -1) for tag in tags_of(label)], dtype=np.int64)
            unknown[row] = (places < 0).any()
            answered, values = np.flatnonzero(words >= 0), np.full(len(words), IGNORED, dtype=np.float64)
            values[answered] = places[words[answered]]
            without = np.setdiff1d(np.arange(len(places)), words[answered])
            rows.append(np.concatenate([values, missing_words(without, places[without])]))
        return Targets(Ragged.of(rows, np.float32), unknown)

    def stand_in(self, text: str, head: Head) -> str:
        return " ".join([OUTSIDE] * len(text.split(" ")))

    def counts(self, tokens: Tokens, head: Head) -> dict[str, int]:
        return {"loss": int((of_tokens(tokens.labelled).values != IGNORED).sum())}

    def loss(self, logits: "torch.Tensor", tokens: Tokens, head: Head) -> dict[str, "torch.Tensor"]:
        import torch

        targets = torch.from_numpy(of_tokens(tokens.labelled).values.astype(np.int64)).to(logits.device)
        return {
            "loss": torch.nn.functional.cross_entropy(widened(logits), targets, reduction="sum", ignore_index=IGNORED)
        }

    def imitation(
        self, logits: "torch.Tensor", tokens: Tokens, head: Head, temperature: float
    ) -> dict[str, "torch.Tensor"]:
        """T^2 x KL at each word's first token, as in classification."""
        import torch

        answered = np.flatnonzero(of_tokens(tokens.labelled).values != IGNORED)
        student = widened(logits)[torch.from_numpy(answered).to(logits.device)]
        return {"loss": divergence(student, tokens.teacher[answered], temperature)}

    def outcomes(self, outputs: Outputs, tokens: Tokens, head: Head) -> Ragged:
        """For each word: the tag (no tag's number where a logit is no number), its chance, and the word's loss. A word
        without a token is answered O; it has no chance (NaN), and no loss: nothing is learned of it."""
        rows, outside = [], head.labels.index(OUTSIDE)
        for output, targets in zip(outputs, tokens.labelled, strict=True):
            of_token = targets[targets > MISSING]
            answered, (every, without) = of_token != IGNORED, true_tags(targets)
            chances, true = softmax(output[answered]), of_token[answered].astype(np.int64)
            place = np.arange(len(true))
            with np.errstate(divide="ignore"):  # a tag that training lacks has probability 0 and an endless loss
                loss = -np.log(np.where(true >= 0, chances[place, true], 0.0))
            words = np.full((len(every), 3), [outside, np.nan, 0.0])
            words[np.setdiff1d(np.arange(len(every)), without)] = np.stack(
                [best(chances), chances.max(axis=1), loss], axis=1
            )
            rows.append(words)
        return Ragged.of(rows, np.float64)

    def describe(self, outcomes: Ragged, targets: Ragged, head: Head) -> Described:
        words = [row.reshape(-1, 3) for row in outcomes]
        known = [true_tags(row) for row in targets]
        return Described(
            target=[names(tags, head) for tags, _ in known],
            prediction=[names(row[:, 0], head) for row in words],
            score=np.array([_mean(row[:, 1], without) for row, (_, without) in zip(words, known, strict=True)]),
            loss=np.array([_mean(row[:, 2], without) for row, (_, without) in zip(words, known, strict=True)]),
        )

    def decode(
        self,
        outputs: Outputs,
        asked: Sequence[Input],
        encoded: Sequence[Encoded],
        head: Head,
        parameters: Mapping[str, Any],
    ) -> list[Any]:
        """`[{"entity_group", "score", "word", "start", "end"}, ...]` for each text: the Hugging Face form of whole
        entities; start and end are characters, the score is the mean over the entity's words."""
        return [
            [group for group, _, _ in located(text, output, row, head)]
            for text, output, row in zip(asked, outputs, encoded, strict=True)
        ]

    def examples(self, head: Head) -> list[Input]:
        return list(EXAMPLES)

    def alone(self, answer: Any) -> Any:
        return answer

    def columns(self, head: Head) -> list[Column]:
        entity = {"entity_group": str, "score": float, "word": str, "start": int, "end": int}
        return [Column("entities", [entity], lambda answer: answer)]


def names(places: Any, head: Head) -> list[str]:
    """Tags by their numbers. A tag that the head lacks (-1) is shown as outside: no answer to it can be right."""
    return [head.labels[int(place)] if place >= 0 else OUTSIDE for place in places]


def located(
    asked: Input, output: Floats, encoded: Encoded, head: Head
) -> list[tuple[dict[str, Any], list[int], list[int]]]:
    """Each entity as in the HTTP answer, the token at which each of its words is answered, and the tag found there."""
    text = asked if isinstance(asked, str) else asked["text"]
    words = word_spans(text, **read_cuts(head.facts))
    answered = _answered(encoded, np.array([start for start, _ in words], dtype=np.int64))
    tokens = np.flatnonzero(answered >= 0)
    spans, chances = [words[word] for word in answered[tokens]], softmax(output[tokens])
    tags = chances.argmax(axis=1)
    found = []
    for entity in entities(names(tags, head)):
        start, end = spans[entity.start][0], spans[entity.end - 1][1]
        of = slice(entity.start, entity.end)
        group = {"entity_group": entity.type, "score": float(chances[of].max(axis=1).mean())}
        group |= {"word": text[start:end], "start": start, "end": end}
        found.append((group, tokens[of].tolist(), tags[of].tolist()))
    return found


def _answered(encoded: Encoded, starts: Ints) -> Ints:
    """For each token the number of the word that is answered there, or -1; `starts`: where each word begins.

    A word is answered once, at its first token in the window in which it is farthest from an edge; the text's own
    beginning and end are no edges. So words are answered in their order.
    """
    result = np.full(len(encoded.ids), -1, dtype=np.int64)
    if not len(starts):
        return result
    best: dict[int, tuple[int, int]] = {}  # word -> (distance from the edge, token)
    begin, last = 0, len(encoded.windows) - 1
    for number, window in enumerate(encoded.windows):
        seen = -1
        for place in range(window.tokens):
            start, end = encoded.spans[begin + place]
            if start == end:  # a special token; others may begin at the blank before their word, none ends behind it
                continue
            word = int(np.searchsorted(starts, end - 1, side="right")) - 1
            if word == seen:
                continue
            seen = word
            before = place if number else len(encoded.ids)
            after = window.tokens - place if number < last else len(encoded.ids)
            if word >= 0 and (word not in best or min(before, after) > best[word][0]):
                best[word] = (min(before, after), begin + place)
        begin += window.tokens
    for word, (_, token) in best.items():
        result[token] = word
    return result


def _mean(values: Floats, without: Ints) -> float:
    """Over the words that have a token; NaN where none has."""
    read = np.delete(values, without)
    return float(read.mean()) if len(read) else np.nan


def tags_of(label: str) -> list[str]:
    """A JSON list, or tags separated by blanks. Raises `BadLabel`."""
    if label.startswith("["):
        return listed(label, '["O", "B-PER"]')
    return label.split()


def _is_list(text: str) -> bool:
    """Whether a text is a JSON list of texts."""
    try:
        found = json.loads(text) if text.startswith("[") else None
    except (ValueError, RecursionError):
        return False
    return isinstance(found, list) and all(isinstance(one, str) for one in found)


TASK = TokenTags()
