"""Summaries: beside the first sentences and the oracle's, how long they are, where their sentences stand, and some."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rtrain.data.stores.store import Store
from rtrain.metrics import summary_rows, text
from rtrain.report.collect import Collected
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Card, Cards, Figure, Marked, Note, Piece, Table
from rtrain.report.drawing.charts import Bar
from rtrain.report.drawing.svg import score_name, short, three

SYSTEMS = (("", "summary"), ("lead_", "first sentences"), ("oracle_", "oracle"))
COMPARED = (*SYSTEMS[:2], ("over_lead_", "difference"), SYSTEMS[2])
BESIDE = ("lead_", "oracle_", "over_lead_")
"""Beginnings of the names of scores that are shown beside the model's own."""
SCORES = (*text.ROUGES, "rouge", "bleu")
EXAMINED = 300
"""Documents among which the examples are looked for: ROUGE of each takes a few milliseconds."""
EACH = 2
"""Examples of each kind."""
AROUND = 1
"""Unmarked sentences that are shown on either side of a marked one."""
LONGEST = 600
"""Characters of a sentence that are shown."""
CSS = {(True, True): "both", (True, False): "picked", (False, True): "oracle"}
"""Mark of a sentence by (whether the summary has it, whether the oracle takes it)."""
LEGEND = (
    Piece("solid line", "picked"),
    Piece(": in the summary only; "),
    Piece("dashed line", "oracle"),
    Piece(": taken by the oracle only; "),
    Piece("double line", "both"),
    Piece(": both."),
)


@dataclass(frozen=True)
class Shown:
    """What is known of one document."""

    sentences: summary_rows.Sentences
    given: npt.NDArray[np.bool_]
    """Sentences in the summary."""
    rouge: float
    """Mean of the three, of the summary, then of the first sentences and of the oracle's."""
    lead: float
    oracle: float


def blocks(run: Collected, tables: Mapping[str, Any]) -> list[Block]:
    assert run.scores is not None  # answers.section
    ends: Mapping[str, Sequence[float]] = run.scores.get("intervals", {}).get("scores", {})
    found: list[Block] = [_chart(run.scores["scores"], ends)]
    if "lengths" in tables:
        found.append(_lengths(tables["lengths"]))
    found += [_positions(tables["positions"]), _beside(run.scores, ends, tables.get("beside_lead"))]
    return [*found, _examples(run)]


# ------------------------------------------------------------------------------------------------------------- figures


def _chart(scores: Mapping[str, float], ends: Mapping[str, Sequence[float]]) -> Figure:
    items = []
    for name in text.ROUGES:
        for prefix, who in SYSTEMS:
            low_high = ends.get(f"{prefix}{name}")
            interval = (low_high[0], low_high[1]) if low_high else None
            hint = f"{score_name(name)} of the {who}: {three(scores[prefix + name])}"
            items.append(
                Bar(
                    f"{score_name(name)}, {'lead' if prefix == 'lead_' else who}", scores[prefix + name], hint, interval
                )
            )
    reached, most = scores["rouge1"], scores["oracle_rouge1"]
    title = f"ROUGE-1 {reached:.3f}; the first sentences reach {scores['lead_rouge1']:.3f}, the oracle {most:.3f}"
    note = (
        "F1 of the words (1), pairs of words (2) and the longest common sequence (L) shared with the reference, mean "
        "over the documents. Lead: the first sentences, as many as the same budget of words holds. Oracle: those "
        "chosen by the reference itself, however long: what is learned, and about the most that whole sentences can "
        "reach."
    )
    return Figure(title, charts.bars(items, "ROUGE (F1)"), f"{note} Whiskers: 95 % intervals.")


def _beside(document: Mapping[str, Any], ends: Mapping[str, Sequence[float]], sides: Mapping[str, int] | None) -> Table:
    scores, rows = document["scores"], []
    for name in SCORES:
        digits = 2 if name == "bleu" else 4
        for prefix, who in COMPARED:
            if (own := f"{prefix}{name}") in scores:
                interval = " to ".join(_fixed(end, digits) for end in ends[own]) if own in ends else "-"
                sign = "+" if prefix == "over_lead_" else ""
                rows.append((score_name(name), who, _fixed(scores[own], digits, sign), interval))
    note = (
        "95 % bootstrap intervals over the documents. The difference is the summary's score less that of the first "
        "sentences, on the same documents: where its interval holds 0, these documents do not tell the two apart. "
        "ROUGE is 0 to 1 (without a number: the mean of the three), BLEU 0 to 100."
    )
    if sides is not None:
        note += (
            f" By ROUGE {sides['better']:,} of the summaries are better than the first sentences, {sides['worse']:,} "
            f"worse and {sides['same']:,} the same."
        )
    return Table(_verdict(document, ends), ("score", "of", "value", "95 % interval"), rows, note)


def _verdict(document: Mapping[str, Any], ends: Mapping[str, Sequence[float]]) -> str:
    own, lead = document["scores"]["rouge"], document["scores"]["lead_rouge"]
    title = f"ROUGE {own:.3f} against {lead:.3f} of the first sentences"
    if "over_lead_rouge" not in ends:
        return title
    low, high = ends["over_lead_rouge"]
    if low > 0 or high < 0:
        return f"{title}: {'better' if low > 0 else 'worse'}, beyond chance"
    return f"{title}: {document['rows']:,} documents do not tell them apart"


def _fixed(value: float, digits: int, sign: str = "") -> str:
    return format(round(value, digits) + 0.0, f"{sign}.{digits}f")  # no -0.00


def _lengths(found: Mapping[str, Any]) -> Table:
    names = {"picked": "summary", "oracle": "oracle's sentences", "document": "whole document"}
    rows = [(name, f"{found[key]['sentences']:.1f}", f"{found[key]['words']:.1f}") for key, name in names.items()]
    picked = found["picked"]
    title = (
        f"A summary has {picked['sentences']:.1f} sentences and {picked['words']:.0f} words; the budget is "
        f"{found['budget']:,} words"
    )
    note = (
        "Means over the documents; words are counted by blanks. Sentences are taken, the best first, until the next "
        f"does not fit; {found['over_budget']:,} summaries are longer than the budget, for a first sentence is taken "
        "whatever its length."
    )
    return Table(title, ("", "sentences", "words"), rows, note)


def _positions(found: Mapping[str, Any]) -> Figure:
    edges = [100 * place / found["tenths"] for place in range(found["tenths"] + 1)]
    shares = {}
    for name, key in (("summary", "picked"), ("oracle", "oracle")):
        counts = np.array(found[key], dtype=np.float64)
        shares[name] = (100 * counts / max(1.0, counts.sum())).tolist()
    title = (
        f"{shares['summary'][0]:.0f} % of the summaries' sentences are in the first tenth of their document, of the "
        f"oracle's {shares['oracle'][0]:.0f} %"
    )
    note = (
        "Filled: the sentences of the summaries; outline: those of the oracle, which are learned. Places are by "
        "sentences: the only sentence of a document stands at its beginning."
    )
    return Figure(title, charts.histogram(edges, shares, "place in the document (%)", "sentences (%)"), note)


# ------------------------------------------------------------------------------------------------------------ examples


def _examples(run: Collected) -> Block:
    answers = run.answers
    assert answers is not None  # answers.section
    if run.store is None or run.tokenizer is None:
        return Note("Examples are shown where the token store and the tokenizer are still there.")
    every = shown(run, range(min(EXAMINED, len(answers))))
    choices = (
        ("better than the first sentences", sorted(every, key=lambda row: every[row].lead - every[row].rouge)),
        ("worse than the first sentences", sorted(every, key=lambda row: every[row].rouge - every[row].lead)),
        ("farthest from the oracle", sorted(every, key=lambda row: every[row].rouge - every[row].oracle)),
    )
    rows: dict[int, str] = {}
    for name, order in choices:
        fitting = [row for row in order if row not in rows and _fits(name, every[row])]
        rows |= dict.fromkeys(fitting[:EACH], name)
    drawn = marked(run, {row: every[row] for row in rows})
    cards = [Card("", [("chosen as", name)], answers.place(row), [drawn[row]]) for row, name in rows.items()]
    note = "Sentences as the tokenizer spells them; the references themselves are not kept, open them by file and line."
    if len(answers) > EXAMINED:
        note += f" Chosen among the first {EXAMINED}."
    return Cards("Some documents, with the sentences that were picked", cards, note, legend=LEGEND)


def _fits(name: str, one: Shown) -> bool:
    gain = one.rouge - one.lead
    return gain > 1e-9 if name.startswith("better") else gain < -1e-9 if name.startswith("worse") else True


def shown(run: Collected, rows: Sequence[int]) -> dict[int, Shown]:
    """What is known of these rows, by their position; nothing where the store is gone."""
    answers = run.answers
    if answers is None or run.store is None or not len(rows):
        return {}
    targets, found = run.store.read(answers.split, np.array(rows, dtype=np.int64)).labelled, {}
    for row, values in zip(rows, targets, strict=True):
        sentences, (words, _) = summary_rows.sentences_of(values), summary_rows.words_of(values)
        given = np.zeros(len(sentences.words), dtype=np.bool_)
        given[[int(number) - 1 for number in answers.prediction[row]]] = True
        choices = (np.flatnonzero(given), _lead(run.store, sentences), np.flatnonzero(sentences.taken))
        own, lead, oracle = (float(np.mean(text.rouge(words.of(one), words.reference))) for one in choices)
        found[row] = Shown(sentences, given, own, lead, oracle)
    return found


def _lead(store: Store, sentences: summary_rows.Sentences) -> list[int]:
    budget = text.Budget(words=int(store.manifest.head.facts["max_words"]))
    return text.pick(range(len(sentences.words)), sentences.words.tolist(), budget)


def marked(run: Collected, every: Mapping[int, Shown]) -> dict[int, Marked]:
    """The documents' sentences, those of the summary and of the oracle marked."""
    answers = run.answers
    if answers is None or run.store is None or run.tokenizer is None or not every:
        return {}
    import tokenizers

    spelling, rows = tokenizers.Tokenizer.from_file(str(run.tokenizer)), list(every)
    tokens = run.store.read(answers.split, np.array(rows, dtype=np.int64))
    found = {}
    for place, row in enumerate(rows):
        ids, one = tokens.pick([place]).ids, every[row]
        texts = spelling.decode_batch(
            [ids[a:b].tolist() for a, b in zip(one.sentences.first, one.sentences.end, strict=True)]
        )
        note = f"{three(one.rouge)}; first sentences {three(one.lead)}, oracle {three(one.oracle)}"
        found[row] = Marked("ROUGE", note, [list(_pieces(texts, one))], _named(one))
    return found


def _pieces(texts: Sequence[str], one: Shown) -> Iterator[Piece]:
    """Marked sentences with their neighbours; between them how many are left out."""
    known = one.given | one.sentences.taken
    near = np.convolve(known, np.ones(2 * AROUND + 1), mode="same") > 0 if known.any() else np.arange(len(texts)) < 3
    left_out = 0
    for place, sentence in enumerate(texts):
        if not near[place]:
            left_out += 1
            continue
        yield from _gap(left_out)
        left_out = 0
        css = CSS.get((bool(one.given[place]), bool(one.sentences.taken[place])), "")
        words = short(sentence, LONGEST) or "(not read)"
        yield Piece(f"{place + 1}. ")
        yield Piece(words, css, f"sentence {place + 1}, {one.sentences.words[place]} words")
        yield Piece("\n")
    yield from _gap(left_out)


def _gap(count: int) -> Iterator[Piece]:
    if count:
        yield Piece(f"[{count:,} sentence{'' if count == 1 else 's'} left out]\n")


def _named(one: Shown) -> list[tuple[str, str]]:
    """The numbers of the marked sentences, for readers who cannot see the marks."""
    sides = (("summary", one.given), ("oracle", one.sentences.taken))
    return [(name, _numbers(chosen, one.sentences.words)) for name, chosen in sides]


def _numbers(chosen: npt.NDArray[np.bool_], words: npt.NDArray[np.int64]) -> str:
    if not chosen.any():
        return "no sentence"  # none shares a word with the reference
    numbers = ", ".join(str(place + 1) for place in np.flatnonzero(chosen)[:20])
    return f"sentence{'s' if chosen.sum() > 1 else ''} {numbers} of {len(chosen)} ({int(words[chosen].sum()):,} words)"
