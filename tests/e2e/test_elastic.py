"""A run whose nodes come, are drained and vanish, on a real cluster of several nodes on this machine."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import elastic
from tests.support.root import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


def train_on_nodes(folder: Path, *layout_: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.support.elastic", str(folder), *layout_]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_a_run_follows_its_nodes_and_loses_no_row(tmp_path: Path) -> None:
    result = train_on_nodes(tmp_path)
    steps = result["steps"]
    assert [step["workers"] for step in steps] == [1, 4, 1, 4, 1]
    assert [step["change"] for step in steps[1:]] == ["joins", "drained", "joins again", "vanishes"]
    assert result["causes"] == ["resize", "preemption", "resize", "node_lost"]
    # With notice a run ends with a checkpoint; a lost node costs the training since the last one.
    assert [step["lost"] for step in steps[1:4]] == [0, 0, 0]
    assert 0 <= steps[4]["lost"] <= elastic.SAVE_EVERY
    assert (result["ledger"]["passed"], result["ledger"]["steps"]) == (True, elastic.UPDATES)
    assert result["ledger"]["checked"] == elastic.UPDATES


def test_a_run_with_too_few_nodes_says_so_and_waits_for_them(tmp_path: Path) -> None:
    result = train_on_nodes(tmp_path, "short")
    assert [step["change"] for step in result["steps"]] == [None, "waits", "vanishes"]
    assert [result["steps"][place]["workers"] for place in (0, 2)] == [4, 4]
    assert 0 <= result["steps"][2]["lost"] <= elastic.SAVE_EVERY
    assert result["causes"] == ["node_lost"]
    assert (result["ledger"]["passed"], result["ledger"]["steps"]) == (True, elastic.UPDATES)


def test_one_worker_goes_on_with_what_four_had_shares_of(tmp_path: Path) -> None:
    result = train_on_nodes(tmp_path, "shards")
    assert [(step["change"], step["workers"]) for step in result["steps"]] == [(None, 4), ("vanishes", 1)]
    assert 0 <= result["steps"][1]["lost"] <= elastic.SAVE_EVERY
    assert result["causes"] == ["node_lost"]
    assert (result["ledger"]["passed"], result["ledger"]["steps"]) == (True, elastic.UPDATES)
