"""Summaries made of a document's own sentences, the best ones under a budget of words, in the document's order.

The model answers each token: left out, or taken. A sentence's logits are the mean of its tokens'. It learns the
sentences that a greedy search by ROUGE-1 and ROUGE-2 takes for the reference (Nallapati, Zhai and Zhou 2017), found
once, when the rows are read. Documents are read in windows (`data.max_windows`), and each sentence is scored once, in
the window that holds most of it, of equals where it has the most text on both sides.

A summary's words are counted by blanks, and its length is by default the mean length of the training references. Its
first sentence may be longer: no summary is empty.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rtrain.core.errors import UserError
from rtrain.core.ragged import Encoded, Floats, Head, Outputs, Ragged, Tokens
from rtrain.core.text_segmentation import sentence_spans
from rtrain.metrics import rouge as scores, summary_rows
from rtrain.metrics.summary_oracle import oracle
from rtrain.metrics.sums import Floats as Wide, Ints
from rtrain.tasks import base
from rtrain.tasks.base import Column, Described, Input
from rtrain.tasks.classification import divergence
from rtrain.tasks.defaults import TokenTask, widened

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
    varies: base.Variation = "text"

    def flaw(self, text: str, pair: str | None, label: str) -> str | None:
        if not any(character.isalnum() for character in text):
            return "the document has no sentence, not one letter or digit; write a text or remove the row"
        if not scores.rouge_words(label):
            return "the reference summary has no word that ROUGE counts (a to z, 0 to 9); write one or remove the row"
        return None

    def head(self, counts: Mapping[str, int], tokenizer: "tokenizers.Tokenizer | None" = None) -> Head:
        """The budget: the mean length of the training rows' references, in words."""
        if not counts:
            raise UserError(
                "data.path: no row is left to train on; add rows with a document and its summary each", code="no_rows"
            )
        words = sum(len(label.split()) * count for label, count in counts.items())
        return Head(("left out", "taken"), {"max_words": max(1, round(words / sum(counts.values())))})

    def marks(self, text: str, pair: str | None, label: str, encoded: Encoded) -> list[int]:
        """The numbers that `rtrain.metrics.summary_rows` describes."""
        spans = sentence_spans(text)
        sentences = [text[start:end] for start, end in spans]
        taken = oracle(sentences, label, scores.Budget(sentences=max(1, len(sentences))))
        return summary_rows.write(sentences, places(encoded, spans), taken, label)

    def stand_in(self, text: str, head: Head) -> str:
        return "unknown"

    def counts(self, tokens: Tokens, head: Head) -> dict[str, int]:
        """Sentences that were read."""
        return {"loss": sum(int(summary_rows.sentences_of(row).read.sum()) for row in tokens.labelled)}

    def loss(self, logits: "torch.Tensor", tokens: Tokens, head: Head) -> dict[str, "torch.Tensor"]:
        import torch

        first, end, taken = _sentences(tokens)
        wanted = torch.from_numpy(taken).to(logits.device)
        return {"loss": torch.nn.functional.cross_entropy(_pooled(logits, first, end), wanted, reduction="sum")}

    def imitation(
        self, logits: "torch.Tensor", tokens: Tokens, head: Head, temperature: float
    ) -> dict[str, "torch.Tensor"]:
        """T^2 x KL of each sentence, as in classification."""
        first, end, _ = _sentences(tokens)
        known = _means(tokens.teacher, first, end).astype(np.float32)
        return {"loss": divergence(_pooled(logits, first, end), known, temperature)}

    def outcomes(self, outputs: Outputs, tokens: Tokens, head: Head) -> Ragged:
        """For each row its figures (`summary_rows.FIGURES`) under the head's budget; then for each of its sentences the
        chance that it is taken, or -1 where it was not read, and whether it is in the summary."""
        rows = []
        budget = scores.Budget(words=int(head.facts["max_words"]))
        for output, values in zip(outputs, tokens.labelled, strict=True):
            sentences, (rouge, bleu) = summary_rows.sentences_of(values), summary_rows.words_of(values)
            margins = _margins(output, sentences.first, sentences.end)
            words = sentences.words.tolist()
            picked = scores.pick(_order(margins), words, budget)
            lead = scores.pick(range(len(words)), words, budget)
            figures: list[float] = []
            for chosen in (picked, lead):
                figures += scores.rouge(rouge.of(chosen), rouge.reference)
                figures += scores.bleu_counts(bleu.of(chosen), bleu.reference)
            figures += scores.rouge(rouge.of(np.flatnonzero(sentences.taken)), rouge.reference)
            wrong = np.where(sentences.taken, -margins, margins)[sentences.read]
            figures.append(float(np.logaddexp(0, wrong).mean()) if len(wrong) else 0.0)
            assert len(figures) == summary_rows.FIGURES
            chances = np.where(sentences.read, _chance(margins), -1.0)
            given = np.isin(np.arange(len(words)), picked)
            rows.append([*figures, *np.stack([chances, given], axis=1).ravel()])
        return Ragged.of(rows, np.float64)

    def describe(self, outcomes: Ragged, targets: Ragged, head: Head) -> Described:
        """The oracle's sentences and those of the summary, by their numbers from 1."""
        found = [summary_rows.answered(row) for row in outcomes]
        picked = [given for _, given in found]
        return Described(
            target=[_numbers(summary_rows.sentences_of(row).taken) for row in targets],
            prediction=[_numbers(given) for given in picked],
            score=np.array([chances[given].mean() if given.any() else np.nan for chances, given in found]),
            loss=np.array([row[summary_rows.FIGURES - 1] for row in outcomes]),
        )

    def decode(
        self,
        outputs: Outputs,
        asked: Sequence[Input],
        encoded: Sequence[Encoded],
        head: Head,
        parameters: Mapping[str, Any],
    ) -> list[Any]:
        """`{"summary_text", "sentences": [{"text", "score", "start", "end"}, ...]}` for each text: at most
        `parameters["max_words"]` words, by default the head's; start and end are characters."""
        most = parameters.get("max_words")
        budget = scores.Budget(words=int(head.facts["max_words"] if most is None else most))
        answers = []
        for given, output, row in zip(asked, outputs, encoded, strict=True):
            text = given if isinstance(given, str) else given["text"]
            spans = sentence_spans(text)
            margins = _margins(output, *np.array(places(row, spans), dtype=np.int64).reshape(-1, 2).T)
            words = scores.lengths([text[start:end] for start, end in spans])
            picked = scores.pick(_order(margins), words, budget)
            found = [(*spans[place], float(_chance(margins[place]))) for place in picked]
            sentences = [
                {"text": text[start:end], "score": chance, "start": start, "end": end} for start, end, chance in found
            ]
            summary = " ".join(text[start:end] for start, end, _ in found)
            answers.append({"summary_text": summary, "sentences": sentences})
        return answers

    def examples(self, head: Head) -> list[Input]:
        return list(EXAMPLES)

    def columns(self, head: Head) -> list[Column]:
        sentence = {"text": str, "score": float, "start": int, "end": int}
        return [
            Column("summary", str, operator.itemgetter("summary_text")),
            Column("sentences", [sentence], operator.itemgetter("sentences")),
        ]


def places(encoded: Encoded, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each sentence its first token and the token behind its last, in one window; (0, 0) where it was not read.

    Of the windows the one that has most of its tokens, of equals that in which it is farthest from an edge; the text's
    own beginning and end are no edges.
    """
    starts = np.array([start for start, _ in spans], dtype=np.int64)
    best: dict[int, tuple[int, int, int]] = {}  # sentence -> (tokens, distance from the edge, first token)
    begin, last = 0, len(encoded.windows) - 1
    for number, window in enumerate(encoded.windows):
        characters = np.array(encoded.spans[begin : begin + window.tokens], dtype=np.int64).reshape(-1, 2)
        # By its last character: a token may begin at the blank before its word, none ends behind it.
        owner = np.searchsorted(starts, characters[:, 1] - 1, side="right") - 1
        owner[characters[:, 0] == characters[:, 1]] = -1  # special tokens
        for sentence in np.unique(owner[owner >= 0]).tolist():
            own = np.flatnonzero(owner == sentence)
            first, end = int(own[0]), int(own[-1]) + 1
            before = first if number else len(encoded.ids)
            after = window.tokens - end if number < last else len(encoded.ids)
            found = (end - first, min(before, after), begin + first)
            if sentence not in best or found[:2] > best[sentence][:2]:
                best[sentence] = found
        begin += window.tokens
    kept = [best.get(sentence, (0, 0, 0)) for sentence in range(len(spans))]
    return [(first, first + count) for count, _, first in kept]


def _sentences(tokens: Tokens) -> tuple[Ints, Ints, Ints]:
    """All sentences of the batch that were read: first token, the one behind the last, and whether it is taken."""
    first, end, taken, begin = [], [], [], 0
    for values, length in zip(tokens.labelled, tokens.lengths_of_rows.tolist(), strict=True):
        row = summary_rows.sentences_of(values)
        first.append(begin + row.first[row.read])
        end.append(begin + row.end[row.read])
        taken.append(row.taken[row.read].astype(np.int64))
        begin += length
    return np.concatenate(first), np.concatenate(end), np.concatenate(taken)


def _pooled(logits: "torch.Tensor", first: Ints, end: Ints) -> "torch.Tensor":
    """[sentences, 2], the mean of each sentence's tokens, in fp32 or better."""
    import torch

    wide = widened(logits)
    counts = end - first
    sentence = torch.from_numpy(np.repeat(np.arange(len(first)), counts)).to(wide.device)
    token = np.arange(int(counts.sum())) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    total = wide.new_zeros((len(first), wide.shape[1])).index_add(0, sentence, wide[torch.from_numpy(token)])
    return total / torch.from_numpy(counts).to(wide)[:, None]


def _means(output: Floats, first: Ints, end: Ints) -> Wide:
    """[sentences, 2]: the mean output of each sentence's tokens; zeros where a sentence was not read."""
    spans = zip(first.tolist(), end.tolist(), strict=True)
    means = [output[a:b].mean(axis=0, dtype=np.float64) if b > a else np.zeros(2) for a, b in spans]
    return np.array(means, dtype=np.float64).reshape(-1, 2)


def _margins(output: Floats, first: Ints, end: Ints) -> Wide:
    """For each sentence the logit that it is taken; -inf where it was not read."""
    means = _means(output, first, end)
    return np.where(end > first, means[:, 1] - means[:, 0], -np.inf)


def _order(margins: Wide) -> list[int]:
    """Sentences that were read, the best first."""
    order: list[int] = np.argsort(-margins, kind="stable")[: int(np.isfinite(margins).sum())].tolist()
    return order


def _chance(margins: Any) -> Any:
    return 1 / (1 + np.exp(-np.clip(margins, -700, 700)))


def _numbers(given: Any) -> list[str]:
    return [str(place + 1) for place in np.flatnonzero(given)]


TASK = ExtractiveSummary()
