"""The watch over the cluster's nodes: what it reads is whole, and a look that fails is not its last."""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rtrain.cluster import supply
from rtrain.runs import notice, placement


def within(what: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_look_that_fails_is_said_once_and_the_next_ones_see_a_preemption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[dict[str, Any]] = []
    looks = [0]

    def workers_by_node(run: Path) -> Counter[str]:
        looks[0] += 1
        raise ValueError("half an id")  # as a crashed write leaves it

    monkeypatch.setattr(notice, "LOOK_EVERY_S", 0.005)
    monkeypatch.setattr(placement, "workers_by_node", workers_by_node)
    with notice.Watch(tmp_path, 2, "cpu", lambda nodes: 2, said.append):
        within(lambda: looks[0] > 5)
        monkeypatch.setattr(placement, "workers_by_node", lambda run: Counter({"a node": 2}))
        monkeypatch.setattr(supply, "leaving", lambda: {"a node"})
        within(lambda: notice.given(tmp_path))
    assert notice.take(tmp_path) == "preemption"
    [event] = said
    assert event["kind"] == "stage"
    assert event["text"].startswith("a look at the cluster's nodes failed (")
    assert event["text"].endswith("); looking on")


def test_the_file_of_the_workers_placement_is_whole_or_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(name: str) -> Any:
        group = SimpleNamespace(id=SimpleNamespace(hex=lambda: name))
        state = SimpleNamespace(placement_group_handle=SimpleNamespace(placement_group=group))
        return SimpleNamespace(get_worker_group_state=lambda: state)

    remember, path, write = placement.Remember(tmp_path), tmp_path / placement.NAME, Path.write_text
    remember.after_worker_group_start(started("5a" * 18))

    def torn(path: Path, text: str) -> int:
        write(path, text[: len(text) // 2])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", torn)
    with pytest.raises(OSError, match="no space left"):
        remember.after_worker_group_start(started("6b" * 18))
    assert path.read_text() == "5a" * 18
    monkeypatch.undo()
    remember.after_worker_group_start(started("6b" * 18))
    assert path.read_text() == "6b" * 18
    assert [found.name for found in tmp_path.iterdir()] == [placement.NAME]
