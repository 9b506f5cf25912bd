"""A profile by the real path, on Ray: two workers."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from rtrain.cli import app as cli
from rtrain.parallel.profiler import STEP_PARTS
from rtrain.profiling import profile
from tests.support import trained
from tests.support.profiles import document, row

LENGTH = profile.ProfileLength(steps=3, warm_up_steps=1)


@pytest.mark.ray
def test_a_recipe_is_profiled_as_it_trains(ray_session: Path) -> None:
    config = trained.settings(ray_session / "profiled", **{"train.workers": 2})
    folder, events = ray_session / "profiled" / "out", list[dict[str, Any]]()
    result = profile.run_profile(
        config,
        profile.expand_sweeps(config, [], LENGTH),
        LENGTH,
        folder,
        lambda row, place: contextlib.nullcontext(),
        events.append,
    )
    (item,) = result["rows"]
    assert (item["workers"], item["global_batch_size"]) == (2, 24)
    for worker in item["worker_summaries"]:
        assert [step["step"] for step in worker["steps"]] == [1, 2, 3]
        for step in worker["steps"]:
            assert sum(step["parts"].values()) == pytest.approx(step["seconds"])
        parts = worker["parts"]
        assert tuple(parts) == STEP_PARTS
        assert min(parts[part] for part in ("forward", "backward", "gradient_sync", "optimizer", "get_batch")) > 0
    assert item["checkpoint"]["seconds"] > 0
    by_kind = {event["kind"]: event for event in events}
    assert "evaluated" not in by_kind
    assert {event["total_steps"] for event in events if event["kind"] == "progress"} == {LENGTH.total_steps}
    (machine,) = by_kind["machines"]["machines"]
    assert (machine["workers"], machine["gpus"], machine["spot"]) == (2, 0, False)
    assert by_kind["machines"]["head"]["host"] == machine["host"]
    assert [tuple(mean)[: len(STEP_PARTS)] for mean in by_kind["trained"]["stages"]] == [STEP_PARTS] * 2
    assert sorted(path.name for path in folder.iterdir()) == ["profile.html", "profile.json", "trace.json"]
    assert json.loads((folder / profile.JSON_FILE).read_text()) == json.loads(json.dumps(result))
    spans = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert sum(span.get("cat") == "step" for span in spans) == 2 * LENGTH.total_steps


def test_the_verb_sets_two_profiles_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, slower in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.json").write_text(json.dumps(document(row(slower=slower), name=name)))
    cli.main(["profile", "--compare", "a.json", "--compare", "b.json", "--json"])
    result = json.loads(capfd.readouterr().out)
    assert result["rows"] == [{"rows": ["workers=1", "workers=1"], "ratio": pytest.approx(2.0)}]
    assert result["notes"] == []
    assert Path(result["page"]).read_text().startswith("<!")
    (tmp_path / "b.json").write_text(json.dumps(document(row(), row(workers=2), name="b")))
    cli.main(["profile", "--compare", "a.json", "--compare", "b.json"])
    assert "workers=2" in capfd.readouterr().out
