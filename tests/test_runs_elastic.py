"""A run whose nodes come, are drained and vanish, on a real cluster of several nodes on this machine."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import elastic
from tests.root import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


def train_on_nodes(folder: Path, *way: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.elastic", str(folder), *way]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_run_follows_its_nodes_and_loses_no_row(tmp_path: Path) -> None:
    found = train_on_nodes(tmp_path)
    steps = found["steps"]
    assert [step["workers"] for step in steps] == [1, 4, 1, 4, 1]
    assert [step["change"] for step in steps[1:]] == ["joins", "drained", "joins again", "vanishes"]
    assert found["causes"] == ["resize", "preemption", "resize", "lost"]
    # Told in time, a run ends with a checkpoint; a node that vanishes costs what was trained since the last.
    assert [step["lost"] for step in steps[1:4]] == [0, 0, 0]
    assert 0 <= steps[4]["lost"] <= elastic.SAVE_EVERY
    assert (found["ledger"]["passed"], found["ledger"]["updates"]) == (True, elastic.UPDATES)
    assert found["ledger"]["checked"] == elastic.UPDATES


def test_a_run_with_too_few_nodes_says_so_and_waits_for_them(tmp_path: Path) -> None:
    found = train_on_nodes(tmp_path, "short")
    assert [step["change"] for step in found["steps"]] == [None, "waits", "vanishes"]
    assert [found["steps"][place]["workers"] for place in (0, 2)] == [4, 4]
    assert 0 <= found["steps"][2]["lost"] <= elastic.SAVE_EVERY
    assert found["causes"] == ["lost"]
    assert (found["ledger"]["passed"], found["ledger"]["updates"]) == (True, elastic.UPDATES)


def test_one_worker_goes_on_with_what_four_had_shares_of(tmp_path: Path) -> None:
    found = train_on_nodes(tmp_path, "shards")
    assert [(step["change"], step["workers"]) for step in found["steps"]] == [(None, 4), ("vanishes", 1)]
    assert 0 <= found["steps"][1]["lost"] <= elastic.SAVE_EVERY
    assert found["causes"] == ["crash"]
    assert (found["ledger"]["passed"], found["ledger"]["updates"]) == (True, elastic.UPDATES)
