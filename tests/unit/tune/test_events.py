"""Events of a search for its user. Without Ray."""

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rtrain.api import training
from rtrain.api.process import end_ray_with_calls
from rtrain.cli import train as verb
from rtrain.cluster import connection
from rtrain.report import PhaseTimer, progress, summary
from tests.support.searches import make_search, settings
from tune import search
from tune.history import Journal
from tune.report import page


def test_every_file_that_the_end_of_a_search_names_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    instance, context = make_search(tmp_path, [0.5, 0.7, 0.6]), SimpleNamespace(obj=PhaseTimer())
    page.write_search_page(instance)
    instance.best_config.touch()
    ended: Any = search.SearchResult(instance, Journal(instance.trials).history)
    monkeypatch.setattr(search, "run_search", lambda *arguments, **named_settings: ended)
    monkeypatch.setattr(search.SearchResult, "gate_verdict", None)
    monkeypatch.setattr(connection, "session", lambda *arguments: nullcontext())
    monkeypatch.setattr(progress, "format_summary", lambda item, winner: "")
    monkeypatch.setattr(summary, "summarize", lambda winner: {})
    with end_ray_with_calls():
        result = training.run_search(settings(tmp_path, 3), instance.folder, "resume")
    verb.print_search(cast(Any, context), result, as_json=False, next_command="")
    named_settings = re.findall(rf"{tmp_path}[^\s;,]*", capsys.readouterr().out)
    assert {Path(name).name for name in named_settings} == {"best.yaml", "search.html"}
    assert all(Path(name).is_file() for name in named_settings)
