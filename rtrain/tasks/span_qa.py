"""The span of a text that answers a question, or none. Texts are read in overlapping windows (`data.max_windows`).

The model gives each token two outputs: the answer begins here, it ends here. In a window without the answer both are
learned at its first token, as for questions without one (Devlin et al. 2019). The answer is the best span of all
windows, given where it beats the first token's score by more than a threshold, which is chosen on the validation rows.
"""

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import regex

from rtrain.core.errors import UserError, quoted
from rtrain.core.ragged import Encoded, Floats, Head, Outputs, Ragged, Tokens, Window
from rtrain.metrics import spans
from rtrain.metrics.calibration import softmax
from rtrain.tasks import base
from rtrain.tasks.base import Column, Described, Input
from rtrain.tasks.defaults import TokenTask, widened
from rtrain.tasks.encode import encode
from rtrain.tasks.labels import parsed

if TYPE_CHECKING:
    import tokenizers
    import torch

QUESTION_SHARE = 4
"""A question takes at most a fourth of a window; its end is cut off where it is longer."""
MOST_ANSWER_TOKENS = 30
MOST_STARTS = 20
"""How many of a window's best starts are tried, each with every end behind it."""
LONGEST_CHARACTER = 64
"""Code points behind an answer's end that are looked at for the end of its last character."""
_CHARACTER = regex.compile(r"\X")
EXAMPLE = '[{"text": "on monday", "start": 12}]'
"""Answers as they are written in a column."""
EXAMPLES = (
    (
        "When does the museum open on Sundays?",
        "The museum lies beside the old harbour. From Tuesday to Saturday it opens at nine, on Sundays at eleven; "
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
HIDDEN = -1e4
"""In place of the logit of padding: its chance is 0, and 0 x HIDDEN is still 0."""


class SpanQA(TokenTask):
    name = "span_qa"
    output = "spans"
    auto_model = "AutoModelForQuestionAnswering"
    fields = ("question", "context")
    needs_pair = True
    rule_of_marks = 2

    def flaw(self, text: str, pair: str | None, label: str) -> str | None:
        if pair is None:
            return "no context; name its column with --set data.text_pair=COLUMN"
        if not pair.strip():
            return "the context is empty; write a text or remove the question"
        try:
            answers = _answers(label)
        except (ValueError, TypeError, KeyError, OverflowError):
            return f'the answers are not a list of {{"text", "start"}} objects; write {EXAMPLE}, or [] for none'
        for answer, start in answers:
            # A negative start would count from the end.
            if not answer or start < 0 or pair[start : start + len(answer)] != answer:
                place = quoted(start)
                return f"answer {quoted(answer)} is not at character {place} of the context; correct its start"
        return None

    def head(self, counts: Mapping[str, int], tokenizer: "tokenizers.Tokenizer | None" = None) -> Head:
        return Head(("start", "end"), {"no_answer": any(not _answers(label) for label in counts)})

    def encode(
        self,
        tokenizer: "tokenizers.Tokenizer",
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        max_windows: int = 1,
    ) -> list[Encoded]:
        assert pairs is not None  # needs_pair
        assert tokenizer.truncation is not None  # encode.load_tokenizer
        most = tokenizer.truncation["max_length"] // QUESTION_SHARE
        questions = []
        for text, row in zip(texts, tokenizer.encode_batch(list(texts), add_special_tokens=False), strict=True):
            questions.append(text if len(row.ids) <= most else text[: row.offsets[most - 1][1]])
        found = encode(tokenizer, questions, pairs, max_windows, by_type_ids=False)
        if any(window.second >= window.tokens for row in found for window in row.windows):
            raise UserError(
                "model.name: its tokenizer does not mark the second text; question answering needs one",
                code="unsupported_model",
            )
        return found

    def marks(self, text: str, pair: str | None, label: str, encoded: Encoded) -> list[int]:
        """First and last token of the first answer in each window; 0 and 0, its first token, where it is not in it."""
        answers = _answers(label)
        whole = _tokens_of(encoded, *answers[0]) if answers else set()
        found: list[int] = []
        for window, span in _windows(encoded):
            found += _place(window, span, whole)
        return found

    def stand_in(self, text: str, head: Head) -> str:
        return "[]"

    def counts(self, tokens: Tokens, head: Head) -> dict[str, int]:
        """A start and an end for each window."""
        return {"loss": len(tokens.targets)}

    def loss(self, logits: "torch.Tensor", tokens: Tokens, head: Head) -> dict[str, "torch.Tensor"]:
        import torch

        found = _by_window(logits, tokens)
        wanted = torch.from_numpy(tokens.targets.reshape(-1, 2).astype(np.int64)).to(logits.device)
        # [windows, tokens, 2] beside [windows, 2]
        return {"loss": torch.nn.functional.cross_entropy(found, wanted, reduction="sum")}

    def imitation(
        self, logits: "torch.Tensor", tokens: Tokens, head: Head, temperature: float
    ) -> dict[str, "torch.Tensor"]:
        """T^2 x KL over the tokens of each window, of its start and of its end."""
        import torch
        import torch.nn.functional as F

        student = _by_window(logits, tokens)
        teacher = _by_window(torch.from_numpy(tokens.teacher.copy()).to(student), tokens)
        found, known = (F.log_softmax(side / temperature, dim=1) for side in (student, teacher))
        return {"loss": temperature**2 * F.kl_div(found, known, reduction="sum", log_target=True)}

    def outcomes(self, outputs: Outputs, tokens: Tokens, head: Head) -> Ragged:
        """For each row: F1 and exact match of the best span's tokens with the answer's (both 0 where there is none to
        find), its margin over no answer, whether there is one, the loss, and the span's first and last token."""
        found = []
        for row, output in enumerate(outputs):
            one = tokens.pick([row])
            windows = [Window(int(length), int(second)) for length, second in zip(one.lengths, one.second, strict=True)]
            best, wanted = _best(output, windows), one.targets.reshape(-1, 2).astype(np.int64)
            starts = np.cumsum(one.lengths) - one.lengths
            gold = next(
                (one.ids[begin + a : begin + b + 1] for begin, (a, b) in zip(starts, wanted, strict=True) if b > 0),
                None,
            )
            exact, f1 = 0.0, 0.0
            if gold is not None and not np.isnan(best.margin):
                exact, f1 = _overlap(one.ids[best.first : best.last + 1], gold)
            logs = [np.log(softmax(part.T)) for part in np.split(output, starts[1:])]
            loss = -np.mean(
                [log[side, place[side]] for log, place in zip(logs, wanted, strict=True) for side in (0, 1)]
            )
            found.append((f1, exact, best.margin, float(gold is not None), loss, best.first, best.last))
        return Ragged.of(found, np.float64)

    def calibrate(self, outcomes: Ragged, targets: Ragged, head: Head) -> dict[str, Any]:
        """The margin above which an answer is given: that of the best mean F1, half-way between two rows' margins."""
        rows = outcomes.matrix(7)
        rows = rows[~np.isnan(rows[:, 2])]
        if not head.facts["no_answer"] or not len(rows):
            return {}
        order = np.argsort(-rows[:, 2], kind="stable")
        margins, gains = rows[order, 2], rows[order, 0] - (rows[order, 3] == 0)
        # After n answers the mean F1 has gained their F1, and lost the unanswerable among them.
        total = np.concatenate([[0.0], np.cumsum(gains)])
        falls = np.concatenate([[True], np.diff(margins) < 0, [True]])
        answered = int(np.argmax(np.where(falls, total, -np.inf)))
        edges = np.concatenate([[margins[0] + 1], margins, [margins[-1] - 1]])
        return {"threshold": float(edges[answered] + edges[answered + 1]) / 2}

    def describe(self, outcomes: Ragged, targets: Ragged, head: Head) -> Described:
        """Spans as places and slices of the row's tokens."""
        rows, least = outcomes.matrix(7), threshold(head)
        wanted = []
        for windows in targets:
            places = windows.reshape(-1, 2).astype(np.int64).tolist()
            held = (base.Place(number, *place) for number, place in enumerate(places) if place[1] > 0)
            wanted.append(next(held, ""))
        return Described(
            target=wanted,
            prediction=["" if row[2] <= least else slice(int(row[5]), int(row[6]) + 1) for row in rows],
            score=1 / (1 + np.exp(-np.clip(rows[:, 2], -700, 700))),
            loss=rows[:, 4],
        )

    def decode(
        self,
        outputs: Outputs,
        asked: Sequence[Input],
        encoded: Sequence[Encoded],
        head: Head,
        parameters: Mapping[str, Any],
    ) -> list[Any]:
        """`{"answer", "score", "start", "end"}` for each input; an empty answer at 0 where there is none."""
        answers = []
        for given, output, row in zip(asked, outputs, encoded, strict=True):
            assert not isinstance(given, str)  # needs_pair
            best = _best(output, row.windows)
            start, end = row.spans[best.first][0], row.spans[best.last][1]
            while start < end and given["context"][start].isspace():
                start += 1  # DeBERTa's tokens, and others', begin at the blank before their word
            start, end = _whole_characters(given["context"], start, end)
            if best.margin <= threshold(head):
                answers.append({"answer": "", "score": 1.0 - best.score, "start": 0, "end": 0})
            else:
                answers.append({"answer": given["context"][start:end], "score": best.score, "start": start, "end": end})
        return answers

    def examples(self, head: Head) -> list[Input]:
        return [dict(zip(self.fields, example, strict=True)) for example in EXAMPLES]

    def alone(self, answer: Any) -> Any:
        return answer

    def columns(self, head: Head) -> list[Column]:
        """As in the HTTP answer: an answer that is not in the context is empty, with its place at 0."""
        kinds = {"answer": str, "start": int, "end": int, "score": float}
        return [Column(name, kind, operator.itemgetter(name)) for name, kind in kinds.items()]

    def judge(self, answers: Sequence[Any], labels: Sequence[str]) -> dict[str, float]:
        """SQuAD's own scores, of the answers' texts: exact match and F1, 0 to 100."""
        gold = [[text for text, _ in _answers(label)] for label in labels]
        return {
            f"squad_{name}": value
            for name, value in spans.additive([a["answer"] for a in answers], gold).scores().items()
        }


class _Span(NamedTuple):
    first: int
    """Place of its first token in the row. `last` is the place of its last one, included."""
    last: int
    margin: float
    """Its score minus the score of no answer; a score is the sum of a start's and an end's logit. NaN where a logit of
    the row is: such an answer is wrong, whatever is right."""
    score: float
    """Chance of its start times that of its end, in its window."""


def threshold(head: Head) -> float:
    return float(head.facts.get("threshold", 0.0 if head.facts.get("no_answer") else -np.inf))


def _best(output: Floats, windows: Sequence[Window]) -> _Span:
    """The best span of all windows. The score of no answer is the lowest of the scores of the windows' first tokens,
    from the window that is surest that it holds an answer: a single window may hold it."""
    if np.isnan(output).any():
        return _Span(0, 0, np.nan, 0.0)
    best, nothing, begin = (-np.inf, 0, 0, 0.0), np.inf, 0
    for window in windows:
        logits = output[begin : begin + window.tokens].astype(np.float64)
        nothing = min(nothing, float(logits[0].sum()))
        context = np.arange(window.second, max(window.second + 1, window.tokens - 1))  # its last token is a separator
        starts = context[np.argsort(-logits[context, 0], kind="stable")[:MOST_STARTS]]
        for start in starts:
            ends = logits[start : min(start + MOST_ANSWER_TOKENS, context[-1] + 1), 1]
            end = int(start) + int(ends.argmax())
            value = float(logits[start, 0] + logits[end, 1])
            if value > best[0]:
                chances = softmax(logits.T)
                best = (value, begin + int(start), begin + end, float(chances[0, start] * chances[1, end]))
        begin += window.tokens
    return _Span(best[1], best[2], best[0] - nothing, best[3])


def _overlap(found: Any, gold: Any) -> tuple[float, float]:
    """(exact match, F1) of two runs of tokens, 0 to 1."""
    shared = (Counter(found.tolist()) & Counter(gold.tolist())).total()
    return float(found.tolist() == gold.tolist()), 2 * shared / (len(found) + len(gold))


def _windows(encoded: Encoded) -> Iterator[tuple[Window, list[tuple[int, int]]]]:
    begin = 0
    for window in encoded.windows:
        yield window, encoded.spans[begin : begin + window.tokens]
        begin += window.tokens


def _tokens_of(encoded: Encoded, answer: str, start: int) -> set[tuple[int, int]]:
    """The characters of each of the answer's tokens; none where its end was left out with the text's.

    Characters that the tokenizer drops are in no token: BERT's, which strips accents, drops vowel signs of Hindi and
    Thai. So an answer may begin or end with some, and its tokens do not reach to its ends.
    """
    end = start + len(answer)
    every = [one for window, span in _windows(encoded) for one in span[window.second :] if one[1] > one[0]]
    if encoded.truncated and end > max((one[1] for one in every), default=0):
        return set()
    return {one for one in every if one[0] < end and one[1] > start}


def _place(window: Window, span: list[tuple[int, int]], whole: set[tuple[int, int]]) -> tuple[int, int]:
    """First and last token of the answer in a window that holds all of its tokens, else (0, 0)."""
    inside = [token for token in range(window.second, window.tokens) if span[token] in whole]
    if not inside or {span[token] for token in inside} != whole:
        return 0, 0
    return inside[0], inside[-1]


def _whole_characters(text: str, start: int, end: int) -> tuple[int, int]:
    """The span [start, end) of a text, widened to whole characters as people see them. A tokenizer may cut a syllable
    of Hangul that is written by its letters, and drop marks."""
    if start >= end:
        return start, end
    blank = max(0, text.rfind(" ", 0, start))  # a character begins at a blank
    borders = [blank, *(match.end() for match in _CHARACTER.finditer(text, blank, end + LONGEST_CHARACTER))]
    first = max(border for border in borders if border <= start)
    return first, next((border for border in borders if border >= end), len(text))


def _by_window(logits: "torch.Tensor", tokens: Tokens) -> "torch.Tensor":
    """[windows, longest window, 2], in fp32 or better; HIDDEN behind each window's end."""
    import torch

    wide = widened(logits)
    lengths = torch.from_numpy(tokens.lengths.astype(np.int64)).to(logits.device)
    mask = torch.arange(int(lengths.max()), device=logits.device)[None, :] < lengths[:, None]
    return wide.new_full((*mask.shape, 2), HIDDEN).masked_scatter(mask[:, :, None].expand(-1, -1, 2), wide)


def _answers(label: str) -> list[tuple[str, int]]:
    """(text, first character) of each. Raises ValueError, TypeError, KeyError or OverflowError where they are none."""
    found = parsed(label, EXAMPLE)
    if isinstance(found, dict):  # as `datasets` has them: lists of texts and of starts
        columns = found["text"], found["answer_start"]
        found = [{"text": text, "start": start} for text, start in zip(*columns, strict=True)]
    if not isinstance(found, list):
        raise TypeError("not a list")
    return [(str(answer["text"]), int(answer.get("answer_start", answer.get("start")))) for answer in found]


TASK = SpanQA()
