"""Extractive summaries: the best sentences of a document under a word budget, in the document's order.

The model classifies each token: selected or not. A sentence's logits are the mean of its tokens' logits. The targets
are the oracle sentences of a greedy search by ROUGE-1 and ROUGE-2 for the reference (Nallapati, Zhai and Zhou 2017),
computed once, when the rows are read. Documents are read in windows (`data.max_windows`), and each sentence is scored
once, in the window that holds most of it; on ties, where it has the most text on both sides.

A summary's words are counted by blanks, and its length is by default the mean length of the training references. Its
first sentence may be longer: a summary is never empty.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rtrain.core.errors import UserError
from rtrain.core.ragged import EncodedRow, Floats, Head, Outputs, RaggedArray, TokenBatch
from rtrain.core.text_segmentation import find_sentence_spans
from rtrain.metrics import summaries
from rtrain.metrics.bootstrap import Floats as Wide, Ints
from rtrain.metrics.classes import sigmoid
from rtrain.metrics.summaries import SummaryBudget, select_oracle_sentences
from rtrain.tasks import base
from rtrain.tasks.base import AnswerColumn, Input, Inputs, Losses, Parameters, RowReport
from rtrain.tasks.classification import distillation_kl
from rtrain.tasks.defaults import TokenTask, upcast_logits

if TYPE_CHECKING:
    import tokenizers
    import torch


EXAMPLES = (
    "The town council voted on Tuesday to close the old bridge to cars. Engineers had found cracks in two of its "
    "pillars in spring. Buses may cross it until the end of the year, at walking pace. A new bridge would cost forty "
    "million, which the town does not have. The mayor hopes that the state will pay half of it. Shop owners on the "
    "east bank fear for their customers and have collected nine hundred signatures. The council will meet again in "
    "October.",
)


class ExtractiveSummary(TokenTask):
    name = "extractive_summary"
    output = "summary"
    has_standard_head = False  # a softmax over one output is 1 for each token
    reads_pair = False
    augmentable: base.Variation = "text"

    def validate_row(self, text: str, pair: str | None, label: str) -> str | None:
        if not any(character.isalnum() for character in text):
            return "the document has no sentence, not one letter or digit; write a text or remove the row"
        if not summaries.tokenize_for_rouge(label):
            return "the reference summary has no word that ROUGE counts (a to z, 0 to 9); write one or remove the row"
        return None

    def build_head(self, counts: Mapping[str, int], tokenizer: "tokenizers.Tokenizer | None" = None) -> Head:
        """The budget: the mean length of the training rows' references, in words."""
        if not counts:
            problem = "data.path: no row is left to train on; add rows with a document and its summary each"
            raise UserError(problem, code="no_rows")
        words = sum(len(label.split()) * count for label, count in counts.items())
        return Head(("left out", "taken"), {"max_words": max(1, round(words / sum(counts.values())))})

    def target_positions(self, text: str, pair: str | None, label: str, encoded: EncodedRow) -> list[int]:
        """The numbers that `rtrain.metrics.summaries` describes."""
        spans = find_sentence_spans(text)
        sentences = [text[start:end] for start, end in spans]
        oracle_positions = select_oracle_sentences(sentences, label, SummaryBudget(sentences=max(1, len(sentences))))
        return summaries.encode_summary_row(sentences, locate_sentences(encoded, spans), oracle_positions, label)

    def placeholder_label(self, text: str, head: Head) -> str:
        return "unknown"

    def count_targets(self, tokens: TokenBatch, head: Head) -> dict[str, int]:
        """Sentences that were read."""
        return {"loss": sum(int(summaries.decode_sentences(row).is_read.sum()) for row in tokens.row_targets)}

    def loss(self, logits: "torch.Tensor", tokens: TokenBatch, head: Head) -> Losses:
        import torch

        first, end, in_oracle = _collect_sentences(tokens)
        labels = torch.from_numpy(in_oracle).to(logits.device)
        return {"loss": torch.nn.functional.cross_entropy(_pool_sentences(logits, first, end), labels, reduction="sum")}

    def distillation_loss(self, logits: "torch.Tensor", tokens: TokenBatch, head: Head, temperature: float) -> Losses:
        """T^2 x KL of each sentence, as in classification."""
        first, end, _ = _collect_sentences(tokens)
        teacher_logits = _mean_outputs(tokens.teacher_logits, first, end).astype(np.float32)
        return {"loss": distillation_kl(_pool_sentences(logits, first, end), teacher_logits, temperature)}

    def row_results(self, outputs: Outputs, tokens: TokenBatch, head: Head) -> RaggedArray:
        """For each row its figures under the head's budget, then its sentences (`summaries.encode_result`)."""
        rows = []
        budget = SummaryBudget(words=int(head.facts["max_words"]))
        for output, values in zip(outputs, tokens.row_targets, strict=True):
            sentences, (rouge, bleu) = summaries.decode_sentences(values), summaries.decode_words(values)
            margins = _compute_margins(output, sentences.first, sentences.end)
            words = sentences.words.tolist()
            picked_positions = summaries.pick_sentences(_rank_sentences(margins), words, budget)
            lead = summaries.pick_sentences(range(len(words)), words, budget)
            wrong_margins = np.where(sentences.in_oracle, -margins, margins)[sentences.is_read]
            figures = summaries.SummaryFigures(
                *(rouge.compute_rouge(picked_positions), bleu.count_bleu(picked_positions)),
                *(rouge.compute_rouge(lead), bleu.count_bleu(lead)),
                rouge.compute_rouge(np.flatnonzero(sentences.in_oracle)),
                [np.logaddexp(0, wrong_margins).mean() if len(wrong_margins) else 0.0],
            )
            probabilities = np.where(sentences.is_read, sigmoid(margins), -1.0)
            is_picked = np.isin(np.arange(len(words)), picked_positions)
            rows.append(summaries.encode_result(figures, summaries.SentenceResults(probabilities, is_picked)))
        return RaggedArray.from_rows(rows, np.float64)

    def explain_rows(self, row_results: RaggedArray, targets: RaggedArray, head: Head) -> RowReport:
        """The oracle's and the summary's sentences, by their numbers from 1."""
        rows = [summaries.decode_result(row) for row in row_results]
        return RowReport(
            target=[_format_numbers(summaries.decode_sentences(row).in_oracle) for row in targets],
            prediction=[_format_numbers(row.is_picked) for row in rows],
            score=np.array([row.probability[row.is_picked].mean() if row.is_picked.any() else np.nan for row in rows]),
            loss=summaries.decode_figures(row_results).loss[:, 0],
        )

    def decode(
        self, outputs: Outputs, inputs: Inputs, encoded: Sequence[EncodedRow], head: Head, parameters: Parameters
    ) -> list[Any]:
        """`{"summary_text", "sentences": [{"text", "score", "start", "end"}, ...]}` for each text: at most
        `parameters["max_words"]` words, by default the head's; start and end are characters."""
        max_words = parameters.get("max_words")
        budget = SummaryBudget(words=int(head.facts["max_words"] if max_words is None else max_words))
        answers = []
        for input_item, output, row in zip(inputs, outputs, encoded, strict=True):
            text = input_item if isinstance(input_item, str) else input_item["text"]
            spans = find_sentence_spans(text)
            margins = _compute_margins(output, *np.array(locate_sentences(row, spans), dtype=np.int64).reshape(-1, 2).T)
            words = summaries.count_words([text[start:end] for start, end in spans])
            picked_positions = summaries.pick_sentences(_rank_sentences(margins), words, budget)
            sentences = []
            for position in picked_positions:
                start, end = spans[position]
                score = float(sigmoid(margins[position]))
                sentences.append({"text": text[start:end], "score": score, "start": start, "end": end})
            summary = " ".join(str(sentence["text"]) for sentence in sentences)
            answers.append({"summary_text": summary, "sentences": sentences})
        return answers

    def example_inputs(self, head: Head) -> list[Input]:
        return list(EXAMPLES)

    def answer_columns(self, head: Head) -> list[AnswerColumn]:
        sentence = {"text": str, "score": float, "start": int, "end": int}
        return [
            AnswerColumn("summary", str, operator.itemgetter("summary_text")),
            AnswerColumn("sentences", [sentence], operator.itemgetter("sentences")),
        ]


def locate_sentences(encoded: EncodedRow, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each sentence its first token and the token after its last, in one window; (0, 0) if it was not read.

    The window holds most of its tokens; on ties, the sentence is farthest from an edge in it. The beginning and end of
    the text are not edges.
    """
    starts = np.array([start for start, _ in spans], dtype=np.int64)
    best: dict[int, tuple[int, int, int]] = {}  # sentence -> (tokens, distance from the edge, first token)
    begin, last = 0, len(encoded.windows) - 1
    for number, window in enumerate(encoded.windows):
        characters = np.array(encoded.spans[begin : begin + window.num_tokens], dtype=np.int64).reshape(-1, 2)
        # Assigned by the last character: a token may begin at the blank before its word, none ends after it.
        owner = np.searchsorted(starts, characters[:, 1] - 1, side="right") - 1
        owner[characters[:, 0] == characters[:, 1]] = -1  # special tokens
        for sentence in np.unique(owner[owner >= 0]).tolist():
            sentence_tokens = np.flatnonzero(owner == sentence)
            first, end = int(sentence_tokens[0]), int(sentence_tokens[-1]) + 1
            tokens_before = first if number else len(encoded.ids)
            tokens_after = window.num_tokens - end if number < last else len(encoded.ids)
            candidate = (end - first, min(tokens_before, tokens_after), begin + first)
            if sentence not in best or candidate[:2] > best[sentence][:2]:
                best[sentence] = candidate
        begin += window.num_tokens
    locations = [best.get(sentence, (0, 0, 0)) for sentence in range(len(spans))]
    return [(first, first + count) for count, _, first in locations]


def _collect_sentences(tokens: TokenBatch) -> tuple[Ints, Ints, Ints]:
    """All sentences of the batch that were read: first token, the token after the last, and whether the oracle selects
    it."""
    first, end, in_oracle, begin = [], [], [], 0
    for values, length in zip(tokens.row_targets, tokens.row_lengths.tolist(), strict=True):
        row = summaries.decode_sentences(values)
        first.append(begin + row.first[row.is_read])
        end.append(begin + row.end[row.is_read])
        in_oracle.append(row.in_oracle[row.is_read].astype(np.int64))
        begin += length
    return np.concatenate(first), np.concatenate(end), np.concatenate(in_oracle)


def _pool_sentences(logits: "torch.Tensor", first: Ints, end: Ints) -> "torch.Tensor":
    """[sentences, 2], the mean of each sentence's tokens, in fp32 or better."""
    import torch

    fp32_logits = upcast_logits(logits)
    counts = end - first
    sentence = torch.from_numpy(np.repeat(np.arange(len(first)), counts)).to(fp32_logits.device)
    token = np.arange(int(counts.sum())) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    total = fp32_logits.new_zeros((len(first), fp32_logits.shape[1])).index_add(
        0, sentence, fp32_logits[torch.from_numpy(token)]
    )
    return total / torch.from_numpy(counts).to(fp32_logits)[:, None]


def _mean_outputs(output: Floats, first: Ints, end: Ints) -> Wide:
    """[sentences, 2]: the mean output of each sentence's tokens; zeros if a sentence was not read."""
    spans = zip(first.tolist(), end.tolist(), strict=True)
    means = [output[start:end].mean(axis=0, dtype=np.float64) if end > start else np.zeros(2) for start, end in spans]
    return np.array(means, dtype=np.float64).reshape(-1, 2)


def _compute_margins(output: Floats, first: Ints, end: Ints) -> Wide:
    """For each sentence the logit of its selection; -inf if it was not read."""
    means = _mean_outputs(output, first, end)
    return np.where(end > first, means[:, 1] - means[:, 0], -np.inf)


def _rank_sentences(margins: Wide) -> list[int]:
    """Sentences that were read, the best first."""
    order: list[int] = np.argsort(-margins, kind="stable")[: int(np.isfinite(margins).sum())].tolist()
    return order


def _format_numbers(is_picked: Any) -> list[str]:
    return [str(position + 1) for position in np.flatnonzero(is_picked)]


TASK = ExtractiveSummary()
