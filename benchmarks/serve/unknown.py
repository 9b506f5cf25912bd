"""A part of the benchmark: how soon an endpoint tells that its input is not what its model was made for."""

import random
import statistics
from typing import Any

from benchmarks.serve.parts import Work
from rtrain.batch import Encoded, Floats
from rtrain.predict import Predictor
from serve.watching.telemetry import Watch

STREAMS = 20
FOREIGN = 0.1
"""Share of rows of the other set."""
MOST_ROWS = 5000
"""Rows of a stream: of one with foreign rows until its alarm, of a clean one all of them."""


def drift(work: Work) -> dict[str, Any]:
    """Streams of the texts, drawn with repetition, with a tenth of foreign ones and without: rows until the first
    alarm, and alarms of clean rows. What a replica asks of each answer is asked here too, without HTTP between."""
    if not work.foreign:
        raise SystemExit("--only drift needs texts of another kind: --foreign FILE, a csv file with a column `text`")
    predictor = Predictor.load(work.student, threads=1)
    if not predictor.artifact.reference:
        raise SystemExit(f"{work.student} has no reference: it was made before artefacts had one")
    own, foreign = (_answers(predictor, texts) for texts in (work.texts, work.foreign))
    until, clean = [], 0
    for seed in range(STREAMS):
        draw = random.Random(seed)
        until.append(first_alarm(predictor, [_drawn(draw, own, foreign) for _ in range(MOST_ROWS)]))
        watch = Watch(predictor)
        for output, encoded in (draw.choice(own) for _ in range(MOST_ROWS)):
            watch.observe([output], [encoded])
        status = watch.status()
        assert status is not None
        clean += status["alarms"]
    rows = [number for number in until if number is not None]
    return {
        "drift_flagged_within_500": sum(number <= 500 for number in rows) / STREAMS,
        "median_rows": statistics.median(rows) if rows else None,
        "rows_to_alarm": until,
        "clean_rows": STREAMS * MOST_ROWS,
        "clean_alarms": clean,
    }


Answer = tuple[Floats, Encoded]


def _answers(predictor: Predictor, texts: Any) -> list[Answer]:
    encoded = predictor.encode([text for text in texts if text.strip()])
    return list(zip(predictor.outputs(encoded), encoded, strict=True))


def _drawn(draw: random.Random, own: list[Answer], foreign: list[Answer]) -> Answer:
    return draw.choice(foreign if draw.random() < FOREIGN else own)


def first_alarm(predictor: Predictor, rows: list[Answer]) -> int | None:
    """After how many rows there is one."""
    watch = Watch(predictor)
    for number, (output, encoded) in enumerate(rows, 1):
        watch.observe([output], [encoded])
        status = watch.status()
        assert status is not None
        if status["alarms"]:
            return number
    return None
