"""What rtrain did when `tests/record.json` was written, it does today."""

from pathlib import Path

import pytest

from rtrain.runs.worker_pool import ReusableWorkerGroup
from tests import record

RECORDED = record.read()


def assert_as_recorded(current: dict[str, object]) -> None:
    exact = RECORDED["machine"] == record.machine()
    recorded = {name: RECORDED[name] for name in current}
    assert [*record.differences(recorded, record.plain(current), exact=exact)] == []


def test_order_runs_of_one_worker_and_replies_are_as_recorded(tmp_path: Path) -> None:
    assert_as_recorded(record.without_ray(tmp_path))


@pytest.mark.ray
@pytest.mark.slow
def test_runs_of_two_workers_and_what_is_made_of_them_are_as_recorded(
    ray_session: Path, kept_workers: ReusableWorkerGroup
) -> None:
    assert_as_recorded(record.runs(ray_session / "record", kept_workers))


def test_a_difference_is_named_by_its_place() -> None:
    recorded = {"a": {"x": 1.0, "y": record.ANY, "weights_sha256": "0"}, "b": [1, 2]}
    current = {"a": {"x": 1.00001, "y": 7, "weights_sha256": "1", "z": 0}, "b": [1, 3]}
    assert [each.partition(":")[0] for each in record.differences(recorded, current)] == [
        ".a.weights_sha256",
        ".a.z",
        ".b.1",
    ]
    assert [each.partition(":")[0] for each in record.differences(recorded, current, exact=False)] == [".a.z", ".b.1"]
