"""Nodes that join while a run goes on: asked once, and named where they explain a failure. Ray is stood in for; the
slow test of `preflight` has real nodes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rtrain.cluster import preflight, supply
from rtrain.cluster.preflight import Answers
from rtrain.errors import UserError
from rtrain.runs import nodes


class Cluster:
    """Nodes with their labels, and what each of them answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.nodes: dict[str, Mapping[str, str]] = {"head": {}}
        self.answers: dict[str, Answers] = {}
        self.asked: list[list[str]] = []
        self.closed = 0
        monkeypatch.setattr(preflight, "nodes_up", lambda: {node: node for node in self.nodes})
        monkeypatch.setattr(
            supply, "up_by_id", lambda: {node: supply.Host({}, labels) for node, labels in self.nodes.items()}
        )
        monkeypatch.setattr(preflight, "Question", self.question)
        monkeypatch.setattr(nodes, "LOOK_EVERY_S", 60.0)  # the test looks itself

    def question(self, folder: Path, names: Mapping[str, str], needed: Mapping[str, Any]) -> Any:
        self.asked.append(sorted(names))
        cluster = self

        class Question:
            def is_answered(self, seconds: float) -> bool:
                return all(name in cluster.answers for name in names)

            def answers(self) -> Answers:
                return cluster.answers[min(names)]

            def close(self) -> None:
                cluster.closed += 1

        return Question()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


ANYWHERE = supply.Needs()
FINE = Answers(None, {})
APART = Answers("--out: /runs is another folder", {"/models/x": ["late"]})


def watching(said: Callable[[dict[str, Any]], None], needs: supply.Needs = ANYWHERE) -> nodes.Joined:
    return nodes.Joined(Path("/runs"), {}, {"head"}, needs, said)


def test_each_node_is_asked_once_and_one_that_lacks_something_explains_a_failure(cluster: Cluster) -> None:
    said: list[dict[str, Any]] = []
    with watching(said.append) as joined:
        joined._look(0)
        assert cluster.asked == []
        cluster.nodes |= {"early": {}}
        cluster.answers = {"early": FINE}
        for _ in range(3):
            joined._look(0)
        joined.refuse(OSError("a worker failed"))  # no node explains it
        cluster.nodes |= {"late": {}}
        cluster.answers |= {"late": APART}
        with pytest.raises(UserError, match="--out: /runs is another folder; /models/x cannot be read") as told:
            joined.refuse(OSError("a worker failed"))
        assert isinstance(told.value.__cause__, OSError)
    assert cluster.asked == [["early"], ["late"]]
    assert cluster.closed == 2
    assert [event["text"].partition(":")[0] for event in said] == ["a node that has joined cannot take part"]
    del cluster.nodes["late"]  # what it lacked has nothing to do with what fails now
    joined.refuse(OSError("a worker failed"))


def test_a_node_that_has_not_answered_yet_has_some_seconds_and_no_more(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "PATIENCE_S", 0.05)
    cluster.nodes |= {"silent": {}}
    with watching(print) as joined:
        joined.refuse(OSError("a worker failed"))
    assert (cluster.asked, cluster.closed) == ([["silent"]], 1)
    with pytest.raises(OSError, match="a task failed"), joined.explaining():
        raise OSError("a task failed")


def test_nodes_for_other_purposes_are_not_asked(cluster: Cluster) -> None:
    cluster.nodes |= {"serves": {"for": "answers"}, "trains": {"for": "training"}}
    with watching(print, supply.Needs("cpu", None, {"for": "training"}, {"for": "data"})) as joined:
        joined._look(0)
    assert cluster.asked == [["trains"]]


def test_a_look_that_fails_is_said_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[dict[str, Any]] = []
    looks: list[int] = []

    def fails() -> dict[str, str]:
        looks.append(1)
        raise ConnectionError("no head")

    monkeypatch.setattr(nodes, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(preflight, "nodes_up", fails)
    with watching(said.append):
        while len(looks) < 3:
            pass
    assert len(said) == 1
