"""A profile by the real path, on Ray: two workers."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from rtrain.cli import app as cli
from rtrain.profiling import cases, profile
from rtrain.trainer.step_timing import PARTS
from tests import trained
from tests.profiles import document, row

LENGTH = cases.Length(updates=3, warm_up=1)


@pytest.mark.ray
def test_a_recipe_is_profiled_as_it_trains(ray_session: Path) -> None:
    config = trained.settings(ray_session / "profiled", **{"train.workers": 2})
    folder, events = ray_session / "profiled" / "out", list[dict[str, Any]]()
    found = profile.run(
        config,
        cases.rows(config, [], LENGTH),
        LENGTH,
        folder,
        lambda row, place: contextlib.nullcontext(),
        events.append,
    )
    (one,) = found["rows"]
    assert (one["workers"], one["rows_per_update"]) == (2, 24)
    for worker in one["of_workers"]:
        assert [each["update"] for each in worker["each"]] == [1, 2, 3]
        for each in worker["each"]:
            assert sum(each["parts"].values()) == pytest.approx(each["seconds"])
        parts = worker["parts"]
        assert tuple(parts) == PARTS
        assert min(parts[part] for part in ("forward", "backward", "exchange", "optimizer", "get_batch")) > 0
    assert one["checkpoint"]["seconds"] > 0
    by_kind = {event["kind"]: event for event in events}
    assert "evaluated" not in by_kind
    assert {event["of"] for event in events if event["kind"] == "progress"} == {LENGTH.until}
    (machine,) = by_kind["machines"]["machines"]
    assert (machine["workers"], machine["gpus"], machine["spot"]) == (2, 0, False)
    assert by_kind["machines"]["head"]["host"] == machine["host"]
    assert [tuple(mean)[: len(PARTS)] for mean in by_kind["trained"]["stages"]] == [PARTS] * 2
    assert sorted(path.name for path in folder.iterdir()) == ["profile.html", "profile.json", "trace.json"]
    assert json.loads((folder / profile.JSON).read_text()) == json.loads(json.dumps(found))
    spans = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert sum(span.get("cat") == "update" for span in spans) == 2 * LENGTH.until


def test_the_verb_sets_two_profiles_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, slower in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.json").write_text(json.dumps(document(row(slower=slower), name=name)))
    cli.main(["profile", "--beside", "a.json", "--beside", "b.json", "--json"])
    found = json.loads(capfd.readouterr().out)
    assert found["rows"] == [{"rows": ["workers=1", "workers=1"], "ratio": pytest.approx(2.0)}]
    assert found["notes"] == []
    assert Path(found["page"]).read_text().startswith("<!")
    (tmp_path / "b.json").write_text(json.dumps(document(row(), row(workers=2), name="b")))
    cli.main(["profile", "--beside", "a.json", "--beside", "b.json"])
    assert "workers=2" in capfd.readouterr().out
