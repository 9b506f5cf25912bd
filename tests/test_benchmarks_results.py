"""What a benchmark's parts have come to is on the disk after each, whatever becomes of the next."""

import json
from pathlib import Path

import pytest

from benchmarks.results import Found, Keep, Results


def read(path: Path) -> dict[str, Found]:
    found: dict[str, Found] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_a_part_stands_with_its_machine_and_options_and_is_replaced_alone(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    results = Results(out, rows=10)
    assert results.measure("speed", lambda keep: {"ratio": 2.0}) == read(out)["speed"]
    results.measure("size", lambda keep: {"mb": 5})
    assert results.folder == tmp_path / "figures-work"
    assert results.folder.is_dir()
    again = Results(out, rows=20)
    again.measure("speed", lambda keep: {"ratio": 3.0})
    parts = read(out)
    assert json.loads(str(again)) == parts
    assert (parts["speed"]["ratio"], parts["size"]["mb"]) == (3.0, 5)
    assert (parts["speed"]["about"]["rows"], parts["size"]["about"]["rows"]) == (20, 10)
    assert {"processor", "cores", "load_before", "measured"} < parts["size"]["about"].keys()


def test_what_a_part_knew_is_kept_where_it_breaks_off(tmp_path: Path) -> None:
    results = Results(tmp_path / "figures.json")
    results.measure("size", lambda keep: {"mb": 5})

    def broken(keep: Keep) -> Found:
        keep({"rounds": [1, 2]})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        results.measure("speed", broken)
    parts = read(tmp_path / "figures.json")
    assert parts["size"]["mb"] == 5
    assert (parts["speed"]["rounds"], parts["speed"]["unfinished"]) == ([1, 2], True)
