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

from rtrain.core.errors import UserError, quote_value
from rtrain.core.ragged import IGNORE_INDEX, EncodedRow, Floats, Head, Ints, Outputs, RaggedArray, TokenBatch
from rtrain.core.text_segmentation import find_word_spans, get_word_cuts
from rtrain.metrics.classification import predict_classes, softmax
from rtrain.metrics.entities import (
    MISSING_WORD,
    WordResults,
    decode_true_tags,
    encode_missing_words,
    extract_entities,
    select_token_targets,
    to_tag_names,
)
from rtrain.tasks import base
from rtrain.tasks.base import AnswerColumn, Input, Inputs, Losses, Parameters, RowReport, Targets
from rtrain.tasks.classification import distillation_kl
from rtrain.tasks.defaults import TokenTask, upcast_logits
from rtrain.tasks.encode import parse_label_list, validate_label

if TYPE_CHECKING:
    import tokenizers
    import torch

OUTSIDE_TAG = "O"
EXAMPLE_TEXTS = (
    "Maria Lund met the directors of Nordhaven Shipping in Rotterdam on Friday.",
    "Aspirin lowered the fever, but two patients with diabetes developed a rash after ibuprofen.",
    "The tenant, Harbour Foods Ltd, shall pay 1,200 euros to the landlord by 3 March 2026.",
)
_TAG = re.compile(r"O|[BI]-.+")


class TokenTags(TokenTask):
    name = "token_tags"
    output = "tags"
    supports_label_smoothing = True
    weighting: base.Weighting = "classes"
    reads_pair = False
    augmentable: base.Variation = "words"
    target_rule_version = 2

    def validate_row(self, text: str, pair: str | None, label: str) -> str | None:
        """Words are separated by single blanks, since the row reader joins a list of tokens so."""
        if bad_label := validate_label(parse_tags, label):
            return bad_label
        if label.startswith("[") and _is_json_list(text):
            return "its words are a list written as text; write jsonl or parquet, or words with blanks between them"
        tags, words = parse_tags(label), len(text.split(" "))
        if bad := [tag for tag in tags if not _TAG.fullmatch(tag)]:
            return f"tag {quote_value(bad[0])} is not O, B-TYPE or I-TYPE; convert the tags to BIO"
        if len(tags) != words:
            return f"{len(tags)} tags for {words} words; give each word one"
        return None

    def build_head(self, counts: Mapping[str, int], tokenizer: "tokenizers.Tokenizer | None" = None) -> Head:
        tags = {tag for label in counts for tag in parse_tags(label)} - {OUTSIDE_TAG}
        if not tags:
            raise UserError(
                "data.label: no training row has an entity, all tags are O; "
                "add rows with entities, or name the column of the tags with --set data.label=COLUMN",
                code="no_labels",
            )
        return Head((OUTSIDE_TAG, *sorted(tags)))

    def target_positions(self, text: str, pair: str | None, label: str, encoded: EncodedRow) -> list[int]:
        """For each token the number of the word that is answered there, or -1."""
        lengths = np.array([len(word) for word in text.split(" ")])
        word_numbers: list[int] = _map_tokens_to_words(encoded, np.cumsum(lengths + 1) - lengths - 1).tolist()
        return word_numbers

    def build_targets(self, labels: Sequence[str], target_positions: RaggedArray, head: Head) -> Targets:
        """The tag of each word at the token that answers it, then the words without a token."""
        index = {tag: position for position, tag in enumerate(head.labels)}
        rows, has_unknown_label = [], np.zeros(len(labels), dtype=np.bool_)
        for row, (label, words) in enumerate(zip(labels, target_positions, strict=True)):
            tag_ids = np.array([index.get(tag, -1) for tag in parse_tags(label)], dtype=np.int64)
            has_unknown_label[row] = (tag_ids < 0).any()
            word_tokens, values = np.flatnonzero(words >= 0), np.full(len(words), IGNORE_INDEX, dtype=np.float64)
            values[word_tokens] = tag_ids[words[word_tokens]]
            missing_positions = np.setdiff1d(np.arange(len(tag_ids)), words[word_tokens])
            rows.append(np.concatenate([values, encode_missing_words(missing_positions, tag_ids[missing_positions])]))
        return Targets(RaggedArray.from_rows(rows, np.float32), has_unknown_label)

    def placeholder_label(self, text: str, head: Head) -> str:
        return " ".join([OUTSIDE_TAG] * len(text.split(" ")))

    def count_targets(self, tokens: TokenBatch, head: Head) -> dict[str, int]:
        return {"loss": int((select_token_targets(tokens.row_targets).values != IGNORE_INDEX).sum())}

    def loss(self, logits: "torch.Tensor", tokens: TokenBatch, head: Head) -> Losses:
        import torch

        targets = torch.from_numpy(select_token_targets(tokens.row_targets).values.astype(np.int64)).to(logits.device)
        options: Any = {"reduction": "sum", "ignore_index": IGNORE_INDEX}
        return {"loss": torch.nn.functional.cross_entropy(upcast_logits(logits), targets, **options)}

    def target_classes(self, tokens: TokenBatch, head: Head) -> dict[str, base.TargetClasses]:
        targets = select_token_targets(tokens.row_targets)
        is_target = targets.values != IGNORE_INDEX
        rows = np.repeat(np.arange(len(tokens)), targets.counts)
        return {"loss": base.TargetClasses(rows[is_target], targets.values[is_target].astype(np.int64))}

    def target_losses(self, logits: "torch.Tensor", tokens: TokenBatch, head: Head, loss: base.LabelLoss) -> Losses:
        targets = select_token_targets(tokens.row_targets).values
        target_tokens = np.flatnonzero(targets != IGNORE_INDEX)
        return {"loss": loss.choose_one(upcast_logits(logits)[target_tokens.tolist()], targets[target_tokens])}

    def distillation_loss(self, logits: "torch.Tensor", tokens: TokenBatch, head: Head, temperature: float) -> Losses:
        """T^2 x KL at each word's first token, as in classification."""
        import torch

        target_tokens = np.flatnonzero(select_token_targets(tokens.row_targets).values != IGNORE_INDEX)
        student = upcast_logits(logits)[torch.from_numpy(target_tokens).to(logits.device)]
        return {"loss": distillation_kl(student, tokens.teacher_logits[target_tokens], temperature)}

    def row_results(self, outputs: Outputs, tokens: TokenBatch, head: Head) -> RaggedArray:
        """`WordResults` of each row; the tag is `NO_CLASS` if a logit is NaN. A word without a token is answered O; its
        probability is NaN and its loss 0: it is not trained on."""
        rows, outside_index = [], head.labels.index(OUTSIDE_TAG)
        for output, targets in zip(outputs, tokens.row_targets, strict=True):
            token_targets = targets[targets > MISSING_WORD]
            is_target, (word_tags, missing_positions) = token_targets != IGNORE_INDEX, decode_true_tags(targets)
            probabilities, true = softmax(output[is_target]), token_targets[is_target].astype(np.int64)
            indices = np.arange(len(true))
            with np.errstate(divide="ignore"):  # a tag that training lacks has probability 0 and an infinite loss
                loss = -np.log(np.where(true >= 0, probabilities[indices, true], 0.0))
            words = np.full((len(word_tags), 3), WordResults(outside_index, np.nan, 0.0))
            answered = WordResults(predict_classes(probabilities), probabilities.max(axis=1), loss)
            words[np.setdiff1d(np.arange(len(word_tags)), missing_positions)] = np.stack(answered, axis=1)
            rows.append(words)
        return RaggedArray.from_rows(rows, np.float64)

    def explain_rows(self, row_results: RaggedArray, targets: RaggedArray, head: Head) -> RowReport:
        rows = [WordResults.from_row(row) for row in row_results]
        true_tags, missing = zip(*map(decode_true_tags, targets), strict=True) if len(targets) else ((), ())
        return RowReport(
            target=[to_tag_names(tags, head) for tags in true_tags],
            prediction=[to_tag_names(row.tag, head) for row in rows],
            score=np.array([_mean_over_words(row.probability, gap) for row, gap in zip(rows, missing, strict=True)]),
            loss=np.array([_mean_over_words(row.loss, gap) for row, gap in zip(rows, missing, strict=True)]),
        )

    def decode(
        self, outputs: Outputs, inputs: Inputs, encoded: Sequence[EncodedRow], head: Head, parameters: Parameters
    ) -> list[Any]:
        """`[{"entity_group", "score", "word", "start", "end"}, ...]` for each text: the Hugging Face form of whole
        entities; start and end are characters, the score is the mean over the entity's words."""
        return [
            [group for group, _, _ in locate_entities(text, output, row, head)]
            for text, output, row in zip(inputs, outputs, encoded, strict=True)
        ]

    def example_inputs(self, head: Head) -> list[Input]:
        return list(EXAMPLE_TEXTS)

    def unwrap_single(self, answer: Any) -> Any:
        return answer

    def answer_columns(self, head: Head) -> list[AnswerColumn]:
        entity = {"entity_group": str, "score": float, "word": str, "start": int, "end": int}
        return [AnswerColumn("entities", [entity], lambda answer: answer)]


def locate_entities(
    input_item: Input, output: Floats, encoded: EncodedRow, head: Head
) -> list[tuple[dict[str, Any], list[int], list[int]]]:
    """Each entity as in the HTTP answer, the token that answers each of its words, and the predicted tag there."""
    text = input_item if isinstance(input_item, str) else input_item["text"]
    words = find_word_spans(text, **get_word_cuts(head.facts))
    word_at_token = _map_tokens_to_words(encoded, np.array([start for start, _ in words], dtype=np.int64))
    tokens = np.flatnonzero(word_at_token >= 0)
    spans, probabilities = [words[word] for word in word_at_token[tokens]], softmax(output[tokens])
    tags = probabilities.argmax(axis=1)
    located_entities = []
    for entity in extract_entities(to_tag_names(tags, head)):
        start, end = spans[entity.start][0], spans[entity.end - 1][1]
        word_slice = slice(entity.start, entity.end)
        group = {"entity_group": entity.type, "score": float(probabilities[word_slice].max(axis=1).mean())}
        group |= {"word": text[start:end], "start": start, "end": end}
        located_entities.append((group, tokens[word_slice].tolist(), tags[word_slice].tolist()))
    return located_entities


def _map_tokens_to_words(encoded: EncodedRow, starts: Ints) -> Ints:
    """For each token the number of the word that is answered there, or -1; `starts`: the first character of each word.

    A word is answered once, at its first token in the window in which it is farthest from an edge; the beginning and
    end of the text are not edges. So words are answered in order.
    """
    word_at_token = np.full(len(encoded.ids), -1, dtype=np.int64)
    if not len(starts):
        return word_at_token
    best: dict[int, tuple[int, int]] = {}  # word -> (distance from the edge, token)
    begin, last = 0, len(encoded.windows) - 1
    for number, window in enumerate(encoded.windows):
        seen = -1
        for token_index in range(window.num_tokens):
            start, end = encoded.spans[begin + token_index]
            if start == end:  # a special token; others may begin at the blank before their word, none ends after it
                continue
            word = int(np.searchsorted(starts, end - 1, side="right")) - 1
            if word == seen:
                continue
            seen = word
            tokens_before = token_index if number else len(encoded.ids)
            tokens_after = window.num_tokens - token_index if number < last else len(encoded.ids)
            if word >= 0 and (word not in best or min(tokens_before, tokens_after) > best[word][0]):
                best[word] = (min(tokens_before, tokens_after), begin + token_index)
        begin += window.num_tokens
    for word, (_, token) in best.items():
        word_at_token[token] = word
    return word_at_token


def _mean_over_words(values: Floats, missing_positions: Ints) -> float:
    """Mean over the words that have a token; NaN if no word has one."""
    read_values = np.delete(values, missing_positions)
    return float(read_values.mean()) if len(read_values) else np.nan


def parse_tags(label: str) -> list[str]:
    """A JSON list, or tags separated by blanks. Raises `InvalidLabel`."""
    if label.startswith("["):
        return parse_label_list(label, '["O", "B-PER"]')
    return label.split()


def _is_json_list(text: str) -> bool:
    """Whether a text is a JSON list of texts."""
    try:
        value = json.loads(text) if text.startswith("[") else None
    except (ValueError, RecursionError):
        return False
    return isinstance(value, list) and all(isinstance(tag, str) for tag in value)


TASK = TokenTags()
