"""Extractive question answering: the span of a text that answers a question, or no answer. Texts are read in
overlapping windows (`data.max_windows`).

The model gives each token a start logit and an end logit. In a window without the answer, both targets are the first
token, as for unanswerable questions (Devlin et al. 2019). The answer is the best span of all windows if its score
exceeds the first token's score by more than a threshold, which is chosen on the validation rows.
"""

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import regex

from rtrain.core.errors import UserError, quote_value
from rtrain.core.ragged import EncodedRow, Floats, Head, Outputs, RaggedArray, TokenBatch, TokenWindow
from rtrain.metrics import spans
from rtrain.metrics.classes import sigmoid
from rtrain.metrics.classification import softmax
from rtrain.metrics.spans import SpanResults, no_answer_threshold
from rtrain.tasks import base
from rtrain.tasks.base import AnswerColumn, Input, Inputs, Losses, Parameters, RowReport
from rtrain.tasks.defaults import TokenTask, upcast_logits
from rtrain.tasks.encode import encode, parse_json_label

if TYPE_CHECKING:
    import tokenizers
    import torch

QUESTION_SHARE = 4
"""A question takes at most a fourth of a window; a longer question is truncated."""
MAX_ANSWER_TOKENS = 30
MAX_STARTS = 20
"""Number of a window's best starts that are tried, each with every end after it."""
MAX_CHARACTER_CODE_POINTS = 64
"""Code points after an answer's end that are searched for the end of its last character."""
_CHARACTER = regex.compile(r"\X")
EXAMPLE_LABEL = '[{"text": "on monday", "start": 12}]'
"""The format of answers in a column."""
EXAMPLES = (
    (
        "When does the museum open on Sundays?",
        "The museum lies near the old harbor. From Tuesday to Saturday it opens at nine, on Sundays at eleven; "
        "on Mondays it is closed. Children under twelve pay nothing.",
    ),
    (
        "Who designed the bridge?",
        "The bridge was opened in 1894 after eight years of work. It was designed by Maria Lund, who had built two "
        "lighthouses before, and it carried trains until 1961.",
    ),
    (
        "How high is the tower?",
        "The tower was begun in 1310 and finished a century later. Its bells were cast in the town itself.",
    ),
)
"""Questions and contexts; the last one has no answer in its context."""
PADDING_LOGIT = -1e4
"""The logit of padding: its probability is 0, and 0 x PADDING_LOGIT is still 0."""


class SpanQA(TokenTask):
    name = "span_qa"
    output = "spans"
    auto_model = "AutoModelForQuestionAnswering"
    fields = ("question", "context")
    needs_pair = True
    target_rule_version = 2

    def validate_row(self, text: str, pair: str | None, label: str) -> str | None:
        if pair is None:
            return "no context; name its column with --set data.text_pair=COLUMN"
        if not pair.strip():
            return "the context is empty; write a text or remove the question"
        try:
            answers = _parse_answers(label)
        except (ValueError, TypeError, KeyError, OverflowError):
            return f'the answers are not a list of {{"text", "start"}} objects; write {EXAMPLE_LABEL}, or [] for none'
        for answer, start in answers:
            # A negative start would count from the end.
            if not answer or start < 0 or pair[start : start + len(answer)] != answer:
                position = quote_value(start)
                return f"answer {quote_value(answer)} is not at character {position} of the context; correct its start"
        return None

    def build_head(self, counts: Mapping[str, int], tokenizer: "tokenizers.Tokenizer | None" = None) -> Head:
        return Head(("start", "end"), {"no_answer": any(not _parse_answers(label) for label in counts)})

    def encode(
        self,
        tokenizer: "tokenizers.Tokenizer",
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        max_windows: int = 1,
    ) -> list[EncodedRow]:
        assert pairs is not None  # needs_pair
        assert tokenizer.truncation is not None  # encode.load_tokenizer
        max_question_tokens = tokenizer.truncation["max_length"] // QUESTION_SHARE
        questions = []
        for text, row in zip(texts, tokenizer.encode_batch(list(texts), add_special_tokens=False), strict=True):
            is_short = len(row.ids) <= max_question_tokens
            questions.append(text if is_short else text[: row.offsets[max_question_tokens - 1][1]])
        encoded = encode(tokenizer, questions, pairs, max_windows, by_type_ids=False)
        if any(window.pair_start >= window.num_tokens for row in encoded for window in row.windows):
            raise UserError(
                "model.name: its tokenizer does not mark the second text; question answering needs one",
                code="unsupported_model",
            )
        return encoded

    def target_positions(self, text: str, pair: str | None, label: str, encoded: EncodedRow) -> list[int]:
        """First and last token of the first answer in each window; 0 and 0 (the first token) if the window lacks it."""
        answers = _parse_answers(label)
        answer_tokens = _find_answer_tokens(encoded, *answers[0]) if answers else set()
        positions: list[int] = []
        for window, span in _iter_windows(encoded):
            positions += _locate_answer(window, span, answer_tokens)
        return positions

    def placeholder_label(self, text: str, head: Head) -> str:
        return "[]"

    def count_targets(self, tokens: TokenBatch, head: Head) -> dict[str, int]:
        """A start and an end for each window."""
        return {"loss": len(tokens.targets)}

    def loss(self, logits: "torch.Tensor", tokens: TokenBatch, head: Head) -> Losses:
        import torch

        window_logits = _pad_windows(logits, tokens)
        gold_positions = torch.from_numpy(tokens.targets.reshape(-1, 2).astype(np.int64)).to(logits.device)
        # [windows, tokens, 2] and [windows, 2]
        return {"loss": torch.nn.functional.cross_entropy(window_logits, gold_positions, reduction="sum")}

    def distillation_loss(self, logits: "torch.Tensor", tokens: TokenBatch, head: Head, temperature: float) -> Losses:
        """T^2 x KL over the tokens of each window, of its start and of its end."""
        import torch
        import torch.nn.functional as F

        student = _pad_windows(logits, tokens)
        teacher = _pad_windows(torch.from_numpy(tokens.teacher_logits.copy()).to(student), tokens)
        student_log, teacher_log = (F.log_softmax(logits / temperature, dim=1) for logits in (student, teacher))
        return {"loss": temperature**2 * F.kl_div(student_log, teacher_log, reduction="sum", log_target=True)}

    def row_results(self, outputs: Outputs, tokens: TokenBatch, head: Head) -> RaggedArray:
        """`SpanResults` of each row."""
        results = []
        for row, output in enumerate(outputs):
            row_tokens = tokens.take([row])
            lengths, pair_starts = row_tokens.window_lengths.tolist(), row_tokens.pair_start.tolist()
            best = _find_best_span(output, list(map(TokenWindow, lengths, pair_starts)))
            gold_positions = row_tokens.targets.reshape(-1, 2).astype(np.int64)
            starts = np.cumsum(row_tokens.window_lengths) - row_tokens.window_lengths
            placed = ((begin, *position) for begin, position in zip(starts, gold_positions, strict=True))
            gold = next((row_tokens.ids[begin + a : begin + b + 1] for begin, a, b in placed if b > 0), None)
            exact, f1 = 0.0, 0.0
            if gold is not None and not np.isnan(best.margin):
                exact, f1 = _score_overlap(row_tokens.ids[best.first : best.last + 1], gold)
            logs = [np.log(softmax(part.T)) for part in np.split(output, starts[1:])]
            pairs = zip(logs, gold_positions, strict=True)
            loss = -np.mean([log[side, position[side]] for log, position in pairs for side in (0, 1)])
            results.append(SpanResults(f1, exact, best.margin, float(gold is not None), loss, best.first, best.last))
        return RaggedArray.from_rows(results, np.float64)

    def calibrate(self, row_results: RaggedArray, targets: RaggedArray, head: Head) -> dict[str, Any]:
        """Choose the margin above which an answer is given: the margin of the best mean F1, half-way between two rows'
        margins."""
        rows = SpanResults.from_rows(row_results)
        rows = SpanResults(*(column[~np.isnan(rows.margin)] for column in rows))
        if not head.facts["no_answer"] or not len(rows.margin):
            return {}
        order = np.argsort(-rows.margin, kind="stable")
        margins, gains = rows.margin[order], (rows.f1 - (rows.has_answer == 0))[order]
        # n answers add their F1 to the total and subtract the unanswerable questions among them.
        total = np.concatenate([[0.0], np.cumsum(gains)])
        falls = np.concatenate([[True], np.diff(margins) < 0, [True]])
        num_answered = int(np.argmax(np.where(falls, total, -np.inf)))
        edges = np.concatenate([[margins[0] + 1], margins, [margins[-1] - 1]])
        return {"threshold": float(edges[num_answered] + edges[num_answered + 1]) / 2}

    def explain_rows(self, row_results: RaggedArray, targets: RaggedArray, head: Head) -> RowReport:
        """Spans as `TokenSpan`s and slices of the row's tokens."""
        rows, min_margin = SpanResults.from_rows(row_results), no_answer_threshold(head)
        gold_spans = []
        for windows in targets:
            positions = windows.reshape(-1, 2).astype(np.int64).tolist()
            spans = (base.TokenSpan(number, first, last) for number, (first, last) in enumerate(positions) if last > 0)
            gold_spans.append(next(spans, ""))
        spans_of_rows = zip(rows.margin, rows.first, rows.last, strict=True)
        return RowReport(
            target=gold_spans,
            prediction=[
                "" if margin <= min_margin else slice(int(first), int(last) + 1)
                for margin, first, last in spans_of_rows
            ],
            score=sigmoid(rows.margin),
            loss=rows.loss,
        )

    def decode(
        self, outputs: Outputs, inputs: Inputs, encoded: Sequence[EncodedRow], head: Head, parameters: Parameters
    ) -> list[Any]:
        """`{"answer", "score", "start", "end"}` for each input; an empty answer at 0 for no answer."""
        answers = []
        for input_item, output, row in zip(inputs, outputs, encoded, strict=True):
            assert not isinstance(input_item, str)  # needs_pair
            best = _find_best_span(output, row.windows)
            start, end = row.spans[best.first][0], row.spans[best.last][1]
            while start < end and input_item["context"][start].isspace():
                start += 1  # tokens of DeBERTa and other models begin at the blank before their word
            start, end = _widen_to_characters(input_item["context"], start, end)
            if best.margin <= no_answer_threshold(head):
                answers.append({"answer": "", "score": 1.0 - best.score, "start": 0, "end": 0})
            else:
                answer = input_item["context"][start:end]
                answers.append({"answer": answer, "score": best.score, "start": start, "end": end})
        return answers

    def example_inputs(self, head: Head) -> list[Input]:
        return [dict(zip(self.fields, example, strict=True)) for example in EXAMPLES]

    def unwrap_single(self, answer: Any) -> Any:
        return answer

    def answer_columns(self, head: Head) -> list[AnswerColumn]:
        """As in the HTTP answer: an answer that is not in the context is empty, with start and end 0."""
        kinds = {"answer": str, "start": int, "end": int, "score": float}
        return [AnswerColumn(name, kind, operator.itemgetter(name)) for name, kind in kinds.items()]

    def reference_scores(self, answers: Sequence[Any], labels: Sequence[str]) -> dict[str, float]:
        """SQuAD's scores of the answers' texts: exact match and F1, 0 to 100."""
        gold = [[text for text, _ in _parse_answers(label)] for label in labels]
        return {
            f"squad_{name}": value
            for name, value in spans.make_sum_metric([answer["answer"] for answer in answers], gold).scores().items()
        }


class _BestSpan(NamedTuple):
    first: int
    """Position of its first token in the row. `last` is the position of its last token, inclusive."""
    last: int
    margin: float
    """Its score minus the score of no answer; a score is the sum of a start's and an end's logit. NaN if a logit of the
    row is NaN: such an answer is always wrong."""
    score: float
    """Probability of its start times the probability of its end, in its window."""


def _find_best_span(output: Floats, windows: Sequence[TokenWindow]) -> _BestSpan:
    """The best span of all windows. The score of no answer is the lowest of the scores of the windows' first tokens,
    from the window that is most confident that it holds an answer: a single window may hold it."""
    if np.isnan(output).any():
        return _BestSpan(0, 0, np.nan, 0.0)
    best, no_answer_score, begin = (-np.inf, 0, 0, 0.0), np.inf, 0
    for window in windows:
        logits = output[begin : begin + window.num_tokens].astype(np.float64)
        no_answer_score = min(no_answer_score, float(logits[0].sum()))
        # The window's last token is a separator.
        context = np.arange(window.pair_start, max(window.pair_start + 1, window.num_tokens - 1))
        starts = context[np.argsort(-logits[context, 0], kind="stable")[:MAX_STARTS]]
        for start in starts:
            ends = logits[start : min(start + MAX_ANSWER_TOKENS, context[-1] + 1), 1]
            end = int(start) + int(ends.argmax())
            value = float(logits[start, 0] + logits[end, 1])
            if value > best[0]:
                probabilities = softmax(logits.T)
                best = (value, begin + int(start), begin + end, float(probabilities[0, start] * probabilities[1, end]))
        begin += window.num_tokens
    return _BestSpan(best[1], best[2], best[0] - no_answer_score, best[3])


def _score_overlap(predicted: Any, gold: Any) -> tuple[float, float]:
    """(exact match, F1) of two runs of tokens, 0 to 1."""
    shared = (Counter(predicted.tolist()) & Counter(gold.tolist())).total()
    return float(predicted.tolist() == gold.tolist()), 2 * shared / (len(predicted) + len(gold))


def _iter_windows(encoded: EncodedRow) -> Iterator[tuple[TokenWindow, list[tuple[int, int]]]]:
    begin = 0
    for window in encoded.windows:
        yield window, encoded.spans[begin : begin + window.num_tokens]
        begin += window.num_tokens


def _find_answer_tokens(encoded: EncodedRow, answer: str, start: int) -> set[tuple[int, int]]:
    """The characters of each of the answer's tokens; empty if the answer's end was truncated.

    Characters that the tokenizer drops are in no token: BERT's, which strips accents, drops vowel signs of Hindi and
    Thai. So an answer may begin or end with some, and its tokens do not reach to its ends.
    """
    end = start + len(answer)
    token_spans = [
        token_span
        for window, span in _iter_windows(encoded)
        for token_span in span[window.pair_start :]
        if token_span[1] > token_span[0]
    ]
    if encoded.is_truncated and end > max((token_span[1] for token_span in token_spans), default=0):
        return set()
    return {token_span for token_span in token_spans if token_span[0] < end and token_span[1] > start}


def _locate_answer(
    window: TokenWindow, span: list[tuple[int, int]], answer_tokens: set[tuple[int, int]]
) -> tuple[int, int]:
    """First and last token of the answer in a window that holds all of its tokens, else (0, 0)."""
    inside = [token for token in range(window.pair_start, window.num_tokens) if span[token] in answer_tokens]
    if not inside or {span[token] for token in inside} != answer_tokens:
        return 0, 0
    return inside[0], inside[-1]


def _widen_to_characters(text: str, start: int, end: int) -> tuple[int, int]:
    """The span [start, end) of a text, widened to whole grapheme clusters. A tokenizer may split a Hangul syllable of
    jamo, or drop combining marks."""
    if start >= end:
        return start, end
    blank = max(0, text.rfind(" ", 0, start))  # a character begins at a blank
    borders = [blank, *(match.end() for match in _CHARACTER.finditer(text, blank, end + MAX_CHARACTER_CODE_POINTS))]
    first = max(border for border in borders if border <= start)
    return first, next((border for border in borders if border >= end), len(text))


def _pad_windows(logits: "torch.Tensor", tokens: TokenBatch) -> "torch.Tensor":
    """[windows, longest window, 2], in fp32 or better; `PADDING_LOGIT` after each window's end."""
    import torch

    fp32_logits = upcast_logits(logits)
    lengths = torch.from_numpy(tokens.window_lengths.astype(np.int64)).to(logits.device)
    mask = torch.arange(int(lengths.max()), device=logits.device)[None, :] < lengths[:, None]
    return fp32_logits.new_full((*mask.shape, 2), PADDING_LOGIT).masked_scatter(
        mask[:, :, None].expand(-1, -1, 2), fp32_logits
    )


def _parse_answers(label: str) -> list[tuple[str, int]]:
    """(text, first character) of each answer. Raises ValueError, TypeError, KeyError or OverflowError if they are
    malformed."""
    answers = parse_json_label(label, EXAMPLE_LABEL)
    if isinstance(answers, dict):  # the format of `datasets`: lists of texts and of starts
        columns = answers["text"], answers["answer_start"]
        answers = [{"text": text, "start": start} for text, start in zip(*columns, strict=True)]
    if not isinstance(answers, list):
        raise TypeError("not a list")
    return [(str(answer["text"]), int(answer.get("answer_start", answer.get("start")))) for answer in answers]


TASK = SpanQA()
