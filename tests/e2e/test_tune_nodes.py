"""A search with several trials at once, on real nodes; one is lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.root import ROOT


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_trials_run_at_once_on_two_nodes_and_go_on_when_one_vanishes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.two_nodes", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["slots"], result["at_once"], result["used"]) == (2, 2, [0, 1])
    assert result["errors"] == [None] * 5
    assert set(result["status"]) == {"frozen", "finished"}
    assert {0, result["winner"]} <= set(result["finished"])
