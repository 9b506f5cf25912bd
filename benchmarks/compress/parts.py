"""The parts of `benchmarks.compress`. Each resumes where it was stopped: models that are made are not made again."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.compress import latency, making, rivals
from benchmarks.compress.making import BANKING, Set, Work
from benchmarks.compress.rivals import Answer, Inputs
from benchmarks.results import Keep
from rtrain.compress import quantize
from rtrain.core.ragged import Encoded, Floats, Tokens, Window, pack, padded
from rtrain.core.run_folder import Run
from rtrain.data.store.store import Store
from rtrain.inference import artifact, score
from rtrain.inference.artifact import Artifact
from rtrain.inference.predictor import Predictor

TOKENS = 32
BATCHES = (1, 8)
ROUNDS, CALLS = 15, 20
CALIBRATION_ROWS = 256


# -------------------------------------------------------------------------------------------------------------- scores


def scores(work: Work, sets: Sequence[Set], keep: Keep) -> dict[str, Any]:
    """For each set, the student's score over its teacher's, and the int8 student's over its float parent's."""
    done: dict[str, Any] = {}
    for one in sets:
        teacher, student = (making.score(make(work, one), one) for make in (making.teacher, making.student))
        small = making.int8(work, one)
        done[one.job] = {
            "score": one.score,
            "teacher": teacher,
            "student": student,
            "int8": making.score_of(small, one),
            "student_score_ratio": student / teacher,
            "int8_score_ratio": making.score_of(small, one) / student,
            "mb": making.megabytes(small),
        }
        keep({"sets": done})
    return {"sets": done}


def served(work: Work, sets: Sequence[Set], keep: Keep) -> dict[str, Any]:
    """For each set, bytes and score of the student whose vocabulary was trimmed before it was trained, in int8 and as
    small as it can be, beside those of the int8 one that has the whole vocabulary."""
    done: dict[str, Any] = {}
    for one in sets:
        small, whole = making.int8(work, one, trimmed=True, smallest=True), making.int8(work, one)
        plain = making.int8(work, one, trimmed=True)
        done[one.job] = {
            "score": one.score,
            "trimmed": making.score_of(small, one),
            "untrimmed": making.score_of(whole, one),
            "int8": {"score": making.score_of(plain, one), "mb": making.megabytes(plain)},
            "settings": making.SMALLEST,
            "served_mb": making.megabytes(small),
            "untrimmed_mb": making.megabytes(whole),
            "trimmed_score_ratio": making.score_of(small, one) / making.score_of(whole, one),
        }
        keep({"sets": done})
    return {"sets": done}


# ------------------------------------------------------------------------------------------------------------- latency


class Borrowed(Predictor):
    """An artefact's tokens and head, answered by another engine."""

    def __init__(self, folder: Path, made: Artifact, answer: Answer):
        super().__init__(folder, made, threads=1)
        self._engine = _Engine(answer)


class _Engine:
    def __init__(self, answer: Answer):
        self._answer = answer

    def logits(self, inputs: Mapping[str, Any]) -> Floats:
        return self._answer(inputs)


def beside(work: Work, sets: Sequence[Set], keep: Keep) -> dict[str, Any]:
    """banking77's int8 student beside its teacher in Transformers, and beside the same float student in other engines:
    latency of rows of 32 tokens on one thread, scores on the same test rows, and megabytes."""
    student = making.student(work, BANKING)
    small = making.int8(work, BANKING)
    store = Store(quantize.store_of(student.folder))
    made = artifact.read(student.artifact)
    own = Predictor.load(small, threads=1)
    others, sizes, absent = _others(work, student, store)
    teacher = Predictor.load(making.teacher(work, BANKING).artifact, threads=1)
    others["hf_teacher"] = rivals.torch_float(teacher.network[0])
    found: dict[str, Any] = {}
    for rows in BATCHES:
        tokens = _of_equal_length(store, own, rows)
        asked = padded(tokens, own.pad_id)
        sides = {"ours": _asks_ours(own, tokens), **{name: _asks(answer, asked) for name, answer in others.items()}}
        found[str(rows)] = latency.figures(latency.rounds(sides, ROUNDS, CALLS), "ours", "hf_teacher")
        keep({"batches": found})
    parent = making.score(student, BANKING)
    told: dict[str, dict[str, Any]] = {"ours": {"score": making.score_of(small, BANKING)}}
    told["ours"]["mb"] = artifact.size_mb(small, own.artifact.engine)
    for name, answer in others.items():
        if name != "hf_teacher":
            told[name] = {"score": _score(Borrowed(student.artifact, made, answer), store), "mb": sizes.get(name)}
    for each in told.values():
        each["score_ratio"] = each["score"] / parent
    return {
        **{f"latency_vs_hf_b{rows}": 1 / found[str(rows)]["ratio"] for rows in BATCHES},
        "batches": found,
        "engines": {**told, "hf_teacher": {"score": making.score(making.teacher(work, BANKING), BANKING)}},
        "absent": absent,
        "tokens": TOKENS,
        "rounds": ROUNDS,
        "calls": CALLS,
    }


def _others(work: Work, student: Run, store: Store) -> tuple[dict[str, Answer], dict[str, float], str]:
    """(the float student in each engine, megabytes of those that have a file, why some are absent)"""
    network = Predictor.load(student.artifact, threads=1).network[0]
    samples = _samples(store, Predictor(student.artifact, artifact.read(student.artifact), 1).pad_id)
    found = {
        "torch": rivals.torch_float(network),
        "torch_dynamic_int8": rivals.torch_dynamic(network),
        "openvino": rivals.openvino_float(network, samples[0]),
        "openvino_int8": rivals.openvino_int8(network, samples[0], samples),
    }
    folder = making.students(work, BANKING) / "onnx"
    folder.mkdir(exist_ok=True)
    try:
        plain = rivals.onnx_graph(network, samples[0], folder / "student.onnx")
    except rivals.Absent as error:
        return found, {}, f"ONNX Runtime: {error}"
    paths = {
        "onnxruntime": plain,
        "onnxruntime_dynamic_int8": rivals.onnx_dynamic(plain),
        "onnxruntime_static_int8": rivals.onnx_static(plain, samples),
    }
    found |= {name: rivals.onnx(path) for name, path in paths.items()}
    return found, {name: path.stat().st_size / 1e6 for name, path in paths.items()}, ""


def _samples(store: Store, pad_id: int) -> list[Inputs]:
    """Single training rows, evenly spread: what `rtrain quantize` measures scales on."""
    places = np.unique(np.linspace(0, store.rows("train") - 1, CALIBRATION_ROWS).astype(np.int64))
    return [padded(store.read("train", np.array([place])), pad_id) for place in places]


def _of_equal_length(store: Store, predictor: Predictor, rows: int) -> Tokens:
    """Rows of `TOKENS` tokens each, made of the first test rows'."""
    read = store.read("test", np.arange(min(store.rows("test"), 40 * rows)))
    first, last = int(read.ids[0]), int(read.ids[int(read.lengths[0]) - 1])
    words = [int(number) for number in read.ids if number not in (first, last)]
    inner = TOKENS - 2
    made = [[first, *words[inner * row : inner * (row + 1)], last] for row in range(rows)]
    return pack([Encoded(ids, [Window(TOKENS, TOKENS)], False, [(0, 0)] * TOKENS) for ids in made])


def _asks_ours(predictor: Predictor, tokens: Tokens) -> Callable[[], object]:
    return lambda: predictor.run_tokens(tokens)


def _asks(answer: Answer, inputs: Inputs) -> Callable[[], object]:
    return lambda: answer(inputs)


def _score(predictor: Predictor, store: Store) -> float:
    answered = score.on_split(predictor, store, "test", np.arange(store.rows("test")))
    return float(score.scores(predictor, answered, store)[BANKING.score])
