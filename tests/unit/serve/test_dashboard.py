"""Grafana's dashboard: every query uses metrics that the endpoint exposes."""

import importlib.resources
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rtrain.config import ServeConfig
from rtrain.core.ragged import Head
from rtrain.inference.predictor import Predictor
from serve.app import build_app
from serve.ingress import haproxy
from tests.support.serving import TEXT, call
from tests.support.tiny import make_task_artifact

WORDS = {"sum", "by", "le", "rate", "max", "increase", "histogram_quantile", "h"}
WORDS |= {"status", "feature", "route", "version", "result", "model"}
"""Words of the query language, and labels."""


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    text = (importlib.resources.files("serve") / "dashboard.json").read_text(encoding="utf-8")
    dashboard: dict[str, Any] = json.loads(text)
    return dashboard


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of each sample on /metrics, of a model whose input is watched, after a question."""
    folder = make_task_artifact(tmp_path_factory.mktemp("artifact"), "classification", Head(("a", "b", "c")))
    predictor = Predictor.load(folder, threads=1)
    score = {"edges": [0.5], "counts": [50, 150]}
    predictor.artifact = replace(predictor.artifact, drift_baseline={"rows": 200, "score": score, "labels": {"a": 200}})
    app = build_app(predictor, ServeConfig())
    assert call(app, "POST", "/predict", json={"inputs": TEXT}).status_code == 200
    labels_by_metric: dict[str, set[str]] = {}
    exposition = call(app, "GET", "/metrics", headers={haproxy.PROXY_ERRORS_HEADER: "503=1 504=0"}).text
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            labels_by_metric.setdefault(sample.name, set()).update(sample.labels)
    return labels_by_metric


def queries(board: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def test_every_query_names_metrics_and_labels_that_exist(board: dict[str, Any], samples: dict[str, set[str]]) -> None:
    expressions = queries(board)
    assert len(expressions) >= 15
    for query in expressions:
        bare = re.sub(r'"[^"]*"|\$__rate_interval|\d+(\.\d+)?', "", query)
        names = set(re.findall(r"[a-z_]+", bare)) - WORDS
        assert names, query
        assert names <= set(samples), query
        labels = {label for part in re.findall(r"\{([^}]*)\}", query) for label in re.findall(r"(\w+)=", part)}
        labels |= {label for part in re.findall(r"by \(([^)]*)\)", query) for label in re.findall(r"\w+", part)}
        assert labels <= set().union(*(samples[name] for name in names)), query


def test_every_metric_of_ours_is_looked_at(board: dict[str, Any], samples: dict[str, set[str]]) -> None:
    families = {name for name in samples if name.startswith("rtrain_") and not name.endswith("_created")}
    expressions = " ".join(queries(board))
    bare = {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in families}
    assert len(bare) >= 12
    assert {name for name in bare if name not in expressions} == set()


def test_every_query_is_of_the_models_that_are_chosen(board: dict[str, Any], samples: dict[str, set[str]]) -> None:
    """The value All includes metrics without a model: requests to the address itself. HAProxy knows no models."""
    variable = board["templating"]["list"][1]
    assert variable["allValue"] == ".*"
    [metric, label] = re.findall(r"\w+", variable["query"].removeprefix("label_values"))
    assert label in samples[metric]
    for query in queries(board):
        assert re.findall(r"rtrain_(?!haproxy)\w+(?!\w|\{[^}]*model=~\"\$model\"\})", query) == [], query
