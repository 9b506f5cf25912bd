"""Whether requests still look like the validation rows: seeded simulations of the pure function."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from rtrain.config import ServeConfig
from rtrain.core.ragged import Head
from rtrain.inference import drift_baseline
from rtrain.inference.drift_baseline import BIN_EDGES, DriftFeatures
from rtrain.inference.predictor import Predictor
from serve.app import build_app
from serve.observability.metrics import MIN_ROWS, WINDOW_ROWS, DriftDetector, stability_index
from tests.support.serving import TEXT, call
from tests.support.tiny import CORPUS, make_task_artifact


class Kind(NamedTuple):
    """How rows are drawn: a sentence of questions, most of them answered surely; and what may come in their place."""

    words: float
    """Median length in tokens."""
    sure: tuple[float, float]
    """The two parameters of a Beta distribution of top scores."""
    unknown: float
    """Chance that a row has unknown pieces."""

    def draw(self, chance: np.random.Generator, rows: int) -> DriftFeatures:
        tokens = np.ceil(self.words * np.exp(chance.normal(0, 0.4, rows)))
        unknown = np.where(chance.random(rows) < self.unknown, chance.uniform(0.02, 0.3, rows), 0.0)
        return DriftFeatures(tokens, unknown, chance.beta(*self.sure, rows), [["a"]] * rows)


CLEAN = Kind(14, (8, 0.6), 0.02)
"""A top score below 0.7 has 8 % of the rows, one below 0.5 has 2 %."""
FOREIGN = {
    "unsure": Kind(14, (4, 4), 0.02),
    "another language": Kind(28, (3, 3), 0.5),
    "of unknown pieces, and sure": Kind(14, (8, 0.6), 0.95),
    "long, and sure": Kind(150, (8, 0.6), 0.02),
    "short, and sure": Kind(2.5, (8, 0.6), 0.02),
}


def join(first: DriftFeatures, second: DriftFeatures, choose: npt.NDArray[np.bool_]) -> DriftFeatures:
    """Rows of the second where `choose`, else of the first."""
    first_features, second_features = first.numeric_features(), second.numeric_features()
    tokens, unknown, score = (
        np.where(choose, second_features[name], first_features[name]) for name in ("tokens", "unknown", "score")
    )
    return DriftFeatures(tokens, unknown, score, labels=[["b"] if is_b else ["a"] for is_b in choose])


def document(features: DriftFeatures) -> dict[str, Any]:
    """As `rtrain.inference.drift_baseline.build_split_baseline` makes it."""
    baseline: dict[str, Any] = {"rows": len(features.tokens), "labels": {"a": len(features.tokens)}}
    for name, values in features.numeric_features().items():
        counts = np.bincount(drift_baseline.assign_bins(values, BIN_EDGES[name]), minlength=len(BIN_EDGES[name]) + 1)
        baseline[name] = {"edges": list(BIN_EDGES[name]), "counts": counts.tolist()}
    return baseline


def watching(chance: np.random.Generator, rows: int = 1000) -> DriftDetector:
    return DriftDetector(document(CLEAN.draw(chance, rows)))


@pytest.mark.parametrize("rows", [300, 1000])
def test_rows_like_the_validation_rows_raise_no_alarm(rows: int) -> None:
    for seed in range(10):
        chance = np.random.default_rng([seed, rows])
        drift = watching(chance, rows)
        for _ in range(20):
            drift.observe(CLEAN.draw(chance, MIN_ROWS))
            assert not drift.has_alarm(drift.distances()), seed


@pytest.mark.parametrize("name", FOREIGN)
def test_a_window_half_of_foreign_rows_alarms_until_they_have_left_it(name: str) -> None:
    chance = np.random.default_rng(1)
    drift = watching(chance)
    assert drift.distances() == {}
    drift.observe(CLEAN.draw(chance, WINDOW_ROWS))
    assert set(drift.distances()) == {"tokens", "unknown", "score", "labels"}
    assert max(drift.distances().values()) < 0.1
    drift.observe(FOREIGN[name].draw(chance, WINDOW_ROWS // 2))
    assert drift.has_alarm(drift.distances())
    drift.observe(CLEAN.draw(chance, WINDOW_ROWS))
    assert not drift.has_alarm(drift.distances())
    assert drift.rows == 2 * WINDOW_ROWS + WINDOW_ROWS // 2


@pytest.mark.parametrize(("validation", "requests"), [(MIN_ROWS - 1, WINDOW_ROWS), (WINDOW_ROWS, MIN_ROWS - 1)])
def test_too_few_rows_raise_no_alarm(validation: int, requests: int) -> None:
    chance = np.random.default_rng(2)
    drift = watching(chance, validation)
    drift.observe(FOREIGN["another language"].draw(chance, requests))
    assert drift.distances()["score"] > 0.25
    assert not drift.has_alarm(drift.distances())


def test_other_labels_raise_no_alarm() -> None:
    chance = np.random.default_rng(3)
    drift = watching(chance)
    drift.observe(CLEAN.draw(chance, WINDOW_ROWS)._replace(labels=[["b"]] * WINDOW_ROWS))
    assert drift.distances()["labels"] > 0.25
    assert not drift.has_alarm(drift.distances())


def test_the_index_of_equal_shares_is_nothing() -> None:
    assert stability_index(np.array([10, 20, 70]), np.array([100, 200, 700])) == pytest.approx(0)
    # (0.5 - 0.25) ln 2 + (0.5 - 0.75) ln(2 / 3)
    assert stability_index(np.array([250, 750]), np.array([500, 500])) == pytest.approx(0.25 * math.log(3))


def test_a_model_without_scores_or_unknown_pieces_is_watched_by_what_there_is() -> None:
    tokens = np.arange(1.0, 501.0)
    drift = DriftDetector(document(DriftFeatures(tokens, None, None, None)))
    drift.observe(DriftFeatures(np.full(300, 5000.0), None, None, None))
    assert set(drift.distances()) == {"tokens"}
    assert drift.has_alarm(drift.distances())


LABELS = ("a", "b", "c")


def served(folder: Path, task: str = "classification", head: Head | None = None, **fields: Any) -> Predictor:
    predictor = Predictor.load(make_task_artifact(folder, task, head or Head(LABELS)), threads=1)
    predictor.artifact = replace(predictor.artifact, **fields)
    return predictor


@pytest.fixture(scope="module")
def predictor_with_baseline(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """An artifact whose reference is its own answers."""
    predictor = served(tmp_path_factory.mktemp("watched"))
    predictor.artifact = replace(predictor.artifact, drift_baseline=reference_of(predictor))
    return predictor


def reference_of(predictor: Predictor) -> dict[str, Any]:
    """The answers to 300 texts of the corpus."""
    encoded = predictor.encode([CORPUS[number % len(CORPUS)] for number in range(300)])
    features = drift_baseline.compute_request_features(
        predictor.task,
        predictor.head,
        predictor.outputs(encoded),
        encoded,
        drift_baseline.find_unknown_id(predictor.tokenizer),
    )
    assert features.labels is not None
    label_counts = Counter(label for row in features.labels for label in row)
    document: dict[str, Any] = {"rows": 300, "labels": dict(label_counts)}
    for name, values in features.numeric_features().items():
        edges = drift_baseline.BIN_EDGES[name]
        counts = np.bincount(drift_baseline.assign_bins(values, edges), minlength=len(edges) + 1).tolist()
        document[name] = {"edges": list(edges), "counts": counts}
    return document


def metrics(text: str, name: str) -> dict[str, float]:
    """Samples of a metric by their labels, the names of replica and model left out."""
    values = {}
    for line in text.splitlines():
        if line.startswith((f"{name}{{", f"{name} ")):
            labels, value = line.removeprefix(name).rsplit(" ", 1)
            label_names = [
                label for label in labels.strip("{}").split(",") if not label.startswith(("model=", "replica="))
            ]
            values[",".join(label_names)] = float(value)
    return values


def ask(app: Any, text: str, count: int) -> None:
    for _ in range(count // 50):
        assert call(app, "POST", "/predict", json={"inputs": [text] * 50}).status_code == 200


def test_drift_is_on_metrics_and_alarms_at_unknown_input(predictor_with_baseline: Predictor) -> None:
    app = build_app(predictor_with_baseline, ServeConfig())
    for _ in range(20):
        assert call(app, "POST", "/predict", json={"inputs": list(CORPUS)}).status_code == 200
    text = call(app, "GET", "/metrics").text
    assert max(metrics(text, "rtrain_drift_distance").values()) < 0.1
    assert set(metrics(text, "rtrain_drift_distance")) == {
        f'feature="{name}"' for name in ("tokens", "unknown", "score", "labels")
    }
    assert metrics(text, "rtrain_drift_alarm") == {"": 0.0}
    ask(app, "ζζζ ξξξ ψψψ", 200)
    text = call(app, "GET", "/metrics").text
    assert metrics(text, "rtrain_drift_alarm") == {"": 1.0}
    assert metrics(text, "rtrain_drift_distance")['feature="unknown"'] > 0.25


def test_an_artifact_without_a_reference_is_served_and_not_watched(tmp_path: Path) -> None:
    predictor = served(tmp_path)
    app = build_app(predictor, ServeConfig())
    ask(app, TEXT, 50)
    assert "rtrain_drift" not in call(app, "GET", "/metrics").text


# ---------------------------------------------------------------------------------------------------------- abstention


def predict_with(predictor: Predictor, **parameters: object) -> Any:
    return call(
        build_app(predictor, ServeConfig()), "POST", "/predict", json={"inputs": TEXT, "parameters": parameters}
    )


def test_a_classifier_abstains_below_its_threshold(tmp_path: Path) -> None:
    predictor = served(tmp_path)
    plain = predict_with(predictor).json()[0]
    best = plain[0]["score"]
    for threshold, abstains in ((best - 1e-6, False), (best + 1e-6, True)):
        predictor.head = Head(LABELS, {"abstain": threshold})
        none = [{"label": "none", "score": pytest.approx(1 - best), "abstained": True}] if abstains else []
        assert predict_with(predictor, abstain=True).json() == [none + plain]
        assert predict_with(predictor, abstain=True, top_k=1).json() == [(none + plain)[:1]]
        assert predict_with(predictor).json() == [plain]


def test_an_abstention_is_told_from_a_label_of_its_name(tmp_path: Path) -> None:
    predictor = served(tmp_path, head=Head(("NA", "nan", "none"), {"abstain": 1.0}))
    [answer] = predict_with(predictor, abstain=True).json()
    assert [entry["label"] for entry in answer].count("none") == 2
    assert [entry.get("abstained") for entry in answer] == [True, None, None, None]
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": [TEXT]}
    document = {"inputs": [tensor], "outputs": [{"name": "label"}], "parameters": {"abstain": True}}
    reply = call(
        build_app(predictor, ServeConfig()), "POST", f"/v2/models/{predictor.artifact.name}/infer", json=document
    )
    assert reply.status_code == 422
    assert "parameters.abstain" in reply.text


def test_a_classifier_abstains_over_v2_too_and_its_rows_are_of_one_length(tmp_path: Path) -> None:
    predictor = served(tmp_path)
    texts = [TEXT, *CORPUS[:8]]
    rows = predictor(texts)
    threshold = sorted(row[0]["score"] for row in rows)[4]
    predictor.head = Head(LABELS, {"abstain": threshold})
    tensor = {"name": "text", "datatype": "BYTES", "shape": [9], "data": texts}
    outputs = [{"name": "label"}, {"name": "labels"}]
    document = {"inputs": [tensor], "outputs": outputs, "parameters": {"abstain": True}}
    reply = call(build_app(predictor, ServeConfig()), "POST", "/v2/models/tiny/infer", json=document).json()
    label, labels = reply["outputs"]
    expected = [[entry["label"] for entry in row] for row in rows]
    expected = [
        ["none", *names][:3] if row[0]["score"] < threshold else names
        for names, row in zip(expected, rows, strict=True)
    ]
    assert labels["shape"] == [9, 3]
    assert labels["data"] == [name for names in expected for name in names]
    assert label["data"] == [names[0] for names in expected]
    assert 0 < label["data"].count("none") < 9


def test_rows_outside_of_all_classes_are_none_too(tmp_path: Path) -> None:
    predictor = served(tmp_path, head=Head(LABELS, {"out_of_scope_label": "other", "threshold": 0.9999}))
    plain = predict_with(predictor).json()[0]
    assert plain[0]["label"] == "other"
    assert predict_with(predictor, abstain=True).json()[0] == [
        {**plain[0], "label": "none", "abstained": True},
        *plain[1:],
    ]


def test_of_several_labels_none_is_the_one_where_none_applies(tmp_path: Path) -> None:
    predictor = served(tmp_path, "multi_label", Head(LABELS, {"thresholds": dict.fromkeys(LABELS, 0.5)}))
    best = predict_with(predictor).json()[0][0]["score"]
    for threshold, label in ((best + 1e-6, "none"), (best - 1e-6, predict_with(predictor).json()[0][0]["label"])):
        predictor.head = Head(LABELS, {"thresholds": dict.fromkeys(LABELS, threshold)})
        assert predict_with(predictor, abstain=True).json()[0][0]["label"] == label


def test_of_several_labels_the_given_ones_come_first(tmp_path: Path) -> None:
    """The label with the highest score lies below its own threshold, and the next one above."""
    predictor = served(tmp_path, "multi_label", Head(LABELS))
    first, second, third = predict_with(predictor).json()[0]
    thresholds = {first["label"]: first["score"] + 1e-6, second["label"]: second["score"] - 1e-6, third["label"]: 1.0}
    predictor.head = Head(LABELS, {"thresholds": thresholds})
    assert predict_with(predictor, abstain=True).json()[0] == [second, first, third]
    assert predict_with(predictor, abstain=True, top_k=1).json()[0] == [second]


def test_a_label_of_an_operating_point_comes_first_over_http_and_is_never_abstained_from(tmp_path: Path) -> None:
    predictor = served(tmp_path, head=Head(LABELS, {"abstain": 1.0}))
    first, second, third = predict_with(predictor).json()[0]
    assert predict_with(predictor, abstain=True).json()[0][0]["label"] == "none"
    for threshold, expected in ((third["score"] - 1e-6, [third, first, second]), (1.0, [first, second, third])):
        points = [{"label": third["label"], "recall": 0.8, "threshold": threshold, "is_reached": True}]
        predictor.head = Head(LABELS, {"abstain": 1.0, "operating_points": points})
        assert predict_with(predictor).json()[0] == expected
        assert predict_with(predictor, top_k=1).json()[0] == expected[:1]
        label = predict_with(predictor, abstain=True).json()[0][0]["label"]
        assert label == (third["label"] if expected[0] == third else "none")
