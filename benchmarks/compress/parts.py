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
from rtrain.core.ragged import EncodedRow, Floats, TokenBatch, TokenWindow, collate, pad_batch
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
    for dataset in sets:
        teacher, student = (making.score(make(work, dataset), dataset) for make in (making.teacher, making.student))
        small = making.int8(work, dataset)
        done[dataset.job] = {
            "score": dataset.score,
            "teacher": teacher,
            "student": student,
            "int8": making.score_of(small, dataset),
            "student_score_ratio": student / teacher,
            "int8_score_ratio": making.score_of(small, dataset) / student,
            "mb": making.megabytes(small),
        }
        keep({"sets": done})
    return {"sets": done}


def served(work: Work, sets: Sequence[Set], keep: Keep) -> dict[str, Any]:
    """For each set, bytes and score of the student with a vocabulary trimmed before training, in int8 and at the
    smallest size, beside the int8 student with the whole vocabulary."""
    done: dict[str, Any] = {}
    for dataset in sets:
        small, untrimmed = making.int8(work, dataset, trimmed=True, smallest=True), making.int8(work, dataset)
        plain = making.int8(work, dataset, trimmed=True)
        done[dataset.job] = {
            "score": dataset.score,
            "trimmed": making.score_of(small, dataset),
            "untrimmed": making.score_of(untrimmed, dataset),
            "int8": {"score": making.score_of(plain, dataset), "mb": making.megabytes(plain)},
            "settings": making.SMALLEST,
            "served_mb": making.megabytes(small),
            "untrimmed_mb": making.megabytes(untrimmed),
            "trimmed_score_ratio": making.score_of(small, dataset) / making.score_of(untrimmed, dataset),
        }
        keep({"sets": done})
    return {"sets": done}


# ------------------------------------------------------------------------------------------------------------- latency


class Borrowed(Predictor):
    """An artifact's tokens and head, answered by another engine."""

    def __init__(self, folder: Path, model_artifact: Artifact, answer: Answer):
        super().__init__(folder, model_artifact, threads=1)
        self._engine = _Engine(answer)


class _Engine:
    def __init__(self, answer: Answer):
        self._answer = answer

    def logits(self, inputs: Mapping[str, Any]) -> Floats:
        return self._answer(inputs)


def compare_engines(work: Work, sets: Sequence[Set], keep: Keep) -> dict[str, Any]:
    """banking77's int8 student beside its teacher in Transformers, and beside the same float student in other engines:
    latency of rows of 32 tokens on one thread, scores on the same test rows, and megabytes."""
    student = making.student(work, BANKING)
    small = making.int8(work, BANKING)
    store = Store(quantize.find_token_store(student.folder))
    model_artifact = artifact.read_artifact(student.artifact)
    predictor = Predictor.load(small, threads=1)
    rival_answers, sizes, absent = _load_rivals(work, student, store)
    teacher = Predictor.load(making.teacher(work, BANKING).artifact, threads=1)
    rival_answers["hf_teacher"] = rivals.torch_float(teacher.network[0])
    results: dict[str, Any] = {}
    for rows in BATCHES:
        tokens = _of_equal_length(store, predictor, rows)
        inputs = pad_batch(tokens, predictor.pad_id)
        sides = {
            "ours": _asks_ours(predictor, tokens),
            **{name: _asks(answer, inputs) for name, answer in rival_answers.items()},
        }
        results[str(rows)] = latency.figures(latency.rounds(sides, ROUNDS, CALLS), "ours", "hf_teacher")
        keep({"batches": results})
    parent = making.score(student, BANKING)
    engines: dict[str, dict[str, Any]] = {"ours": {"score": making.score_of(small, BANKING)}}
    engines["ours"]["mb"] = artifact.model_size_mb(small, predictor.artifact.engine)
    for name, answer in rival_answers.items():
        if name != "hf_teacher":
            engines[name] = {
                "score": _score(Borrowed(student.artifact, model_artifact, answer), store),
                "mb": sizes.get(name),
            }
    for engine in engines.values():
        engine["score_ratio"] = engine["score"] / parent
    return {
        **{f"latency_vs_hf_b{rows}": 1 / results[str(rows)]["ratio"] for rows in BATCHES},
        "batches": results,
        "engines": {**engines, "hf_teacher": {"score": making.score(making.teacher(work, BANKING), BANKING)}},
        "absent": absent,
        "tokens": TOKENS,
        "rounds": ROUNDS,
        "calls": CALLS,
    }


def _load_rivals(work: Work, student: Run, store: Store) -> tuple[dict[str, Answer], dict[str, float], str]:
    """Answers of the float student in each engine, file sizes in MB, and reasons for missing engines."""
    network = Predictor.load(student.artifact, threads=1).network[0]
    samples = _samples(store, Predictor(student.artifact, artifact.read_artifact(student.artifact), 1).pad_id)
    answers = {
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
        return answers, {}, f"ONNX Runtime: {error}"
    paths = {
        "onnxruntime": plain,
        "onnxruntime_dynamic_int8": rivals.onnx_dynamic(plain),
        "onnxruntime_static_int8": rivals.onnx_static(plain, samples),
    }
    answers |= {name: rivals.onnx(path) for name, path in paths.items()}
    return answers, {name: path.stat().st_size / 1e6 for name, path in paths.items()}, ""


def _samples(store: Store, pad_id: int) -> list[Inputs]:
    """Single training rows, evenly spread: what `rtrain quantize` measures scales on."""
    places = np.unique(np.linspace(0, store.num_rows("train") - 1, CALIBRATION_ROWS).astype(np.int64))
    return [pad_batch(store.read_tokens("train", np.array([place])), pad_id) for place in places]


def _of_equal_length(store: Store, predictor: Predictor, rows: int) -> TokenBatch:
    """Rows of `TOKENS` tokens each, made of the first test rows'."""
    read = store.read_tokens("test", np.arange(min(store.num_rows("test"), 40 * rows)))
    first, last = int(read.ids[0]), int(read.ids[int(read.window_lengths[0]) - 1])
    words = [int(number) for number in read.ids if number not in (first, last)]
    inner = TOKENS - 2
    model_artifact = [[first, *words[inner * row : inner * (row + 1)], last] for row in range(rows)]
    return collate([EncodedRow(ids, [TokenWindow(TOKENS, TOKENS)], False, [(0, 0)] * TOKENS) for ids in model_artifact])


def _asks_ours(predictor: Predictor, tokens: TokenBatch) -> Callable[[], object]:
    return lambda: predictor.run_tokens(tokens)


def _asks(answer: Answer, inputs: Inputs) -> Callable[[], object]:
    return lambda: answer(inputs)


def _score(predictor: Predictor, store: Store) -> float:
    answered = score.predict_split(predictor, store, "test", np.arange(store.num_rows("test")))
    return float(score.compute_scores(predictor, answered, store)[BANKING.score])
