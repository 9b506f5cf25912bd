"""Every fault once, ten minutes of faults by three seeds, and Ray's own calls failing: nothing lost, nothing left."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rtrain.verification.drill import FAULTS
from tests.support import soak
from tests.support.root import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(2700)]


def certificates(folder: Path, *options: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.support.soak", str(folder), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2600)
    actual = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr[-4000:]
    assert actual
    for certificate in actual:
        assert certificate["passed"], done.stderr[-4000:]
        assert (certificate["is_same_weights"], certificate["is_same_order"]) == (True, True)
        assert (certificate["rows_lost"], certificate["rows_repeated"], certificate["left_behind"]) == (0, 0, [])
        assert all(0 <= fault["recomputed_steps"] <= fault["max_recomputed_steps"] for fault in certificate["faults"])
    return actual


def test_every_fault_once(tmp_path: Path) -> None:
    [certificate] = certificates(tmp_path)
    assert [fault["name"] for fault in certificate["faults"]] == [fault.name for fault in (*FAULTS, *soak.MORE)]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ten_minutes_of_faults(tmp_path: Path, seed: int) -> None:
    actual = certificates(tmp_path, "--seed", str(seed), "--minutes", "10")
    assert all(len(certificate["faults"]) == soak.ROUND for certificate in actual)


def test_calls_between_ray_s_processes_fail(tmp_path: Path) -> None:
    """One in a hundred: of five, Ray's own worker groups no longer come up, which ends in an error after four tries."""
    [certificate] = certificates(tmp_path, "--rpc", "1")
    assert certificate["faults"] == []
