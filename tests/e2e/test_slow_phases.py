"""Work without passes that takes longer than a stall, on real workers: it is let be, and a hang in it is ended."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import slow_phases
from tests.support.root import ROOT

PASSES = ["pass 0", "pass 1", "pass 2"]
PHASES = ["artefact", "checkpoint", "download", "metric", "model", *PASSES, "predictions", "scores", "upload"]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_slow_phases_crash_no_worker_and_a_hang_in_one_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.slow_phases", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    slow, hung = result["slow"], result["hung"]
    assert slow["phases"] == PHASES
    assert (slow["crashed"], slow["started"]) == ([], [0, slow_phases.UNTIL])
    assert (slow["last"], slow["artefact"]) == ("finished", True)
    assert hung["taken"]
    # Ended by its own watch, which left its traceback; the next start makes the artefact.
    assert [(cause, traces > 0) for cause, _, traces in hung["crashed"]] == [("crash", True)]
    assert (hung["last"], hung["artefact"]) == ("finished", True)
