"""Operating points of an int8 model: chosen again by its own scores on the validation rows, and answered by them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain import config
from rtrain.compress import quantize
from rtrain.core.errors import ConfigError
from rtrain.core.ragged import Head
from rtrain.inference import artifact, predictor, score
from rtrain.metrics import operating_points
from rtrain.metrics.classes import OPERATING_POINTS
from tests.support.quantizing import Made, make
from tests.support.tiny import CORPUS


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A float artifact of random weights with a point of the label b."""
    made = make(tmp_path_factory.mktemp("points"), rows=90)
    before = artifact.read_artifact(made.folder)
    loaded = predictor.Predictor.load(made.folder)
    facts = operating_points.choose_operating_points(
        "classes", *valid_results(loaded, made), loaded.head, [{"label": "b", "recall": 0.7}]
    )
    after = replace(before, facts={**before.facts, **facts}, golden=())
    inputs = predictor.make_golden_inputs(loaded.task, Head(before.labels, after.facts))
    artifact.write_artifact(made.folder, after, predictor.compute_golden_logits, inputs)
    return made


def valid_results(loaded: predictor.Predictor, made: Made) -> tuple[Any, Any]:
    rows = np.arange(made.store.num_rows("valid"))
    return score.predict_split(loaded, made.store, "valid", rows).row_results, made.store.targets("valid")


def recipe(**overrides: Any) -> config.Recipe:
    settings = {"quantize.engine": "onnxruntime", "quantize.calibration_rows": 16, "gate.latency_seconds": 0.1}
    return config.load_config("intent", {**settings, **overrides}).recipe


def test_the_threshold_follows_the_scores_of_the_int8_model(parent: Made, tmp_path: Path) -> None:
    report = quantize.run_quantization(recipe(), parent.store.folder, parent.folder, tmp_path / "int8")
    loaded = predictor.Predictor.load(tmp_path / "int8")
    [point] = loaded.head.facts[OPERATING_POINTS]
    [float_point] = artifact.read_artifact(parent.folder).facts[OPERATING_POINTS]
    expected = operating_points.choose_operating_points(
        "classes", *valid_results(loaded, parent), loaded.head, [{"label": "b", "recall": 0.7}]
    )
    assert point == expected[OPERATING_POINTS][0]
    assert point["threshold"] != float_point["threshold"]
    [measured] = report[OPERATING_POINTS]
    assert (measured["label"], measured["threshold"]) == ("b", point["threshold"])
    targets = parent.store.targets("test").values
    assert measured["rows"] == (targets == loaded.head.labels.index("b")).sum()
    for answer in loaded(list(CORPUS)):
        by_label = {entry["label"]: entry["score"] for entry in answer}
        assert (answer[0]["label"] == "b") == (by_label["b"] >= point["threshold"])


def test_a_floor_of_an_unknown_label_is_refused_before_the_model_is_quantized(parent: Made, tmp_path: Path) -> None:
    limits = {"gate.min_recall": {"b": 0.5, "nobody": 0.5}}
    with pytest.raises(ConfigError) as caught:
        quantize.run_quantization(recipe(**limits), parent.store.folder, parent.folder, tmp_path / "int8")
    assert [(problem.field, problem.value, problem.code) for problem in caught.value.problems] == [
        ("gate.min_recall", "nobody", "unknown_label")
    ]
    assert not list(tmp_path.iterdir())
