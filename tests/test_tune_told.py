"""What a search tells its user while it runs. Without Ray."""

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rtrain.cli import search as verb
from rtrain.cluster import connection
from rtrain.report import summary
from rtrain.report.live import progress
from rtrain.report.live.phase_timer import Waited
from tests.searches import make_search, settings
from tune import search
from tune.history import Journal
from tune.report import page


def test_every_file_that_the_end_of_a_search_names_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, context = make_search(tmp_path, [0.5, 0.7, 0.6]), SimpleNamespace(obj=Waited())
    page.write(made)
    made.best.touch()
    ended: Any = search.Found(made, Journal(made.trials).history)
    monkeypatch.setattr(search, "run", lambda *given, **named: ended)
    monkeypatch.setattr(search.Found, "gate", None)
    monkeypatch.setattr(connection, "session", lambda *given: nullcontext())
    monkeypatch.setattr(progress, "summary_text", lambda made, winner: "")
    monkeypatch.setattr(summary, "summarise", lambda winner: {})
    given: Any = (context, settings(tmp_path, 3), made.folder, "resume", False, ("train", "intent"), lambda winner: "")
    verb.searched(*given)
    named = re.findall(rf"{tmp_path}[^\s;,]*", capsys.readouterr().out)
    assert {Path(name).name for name in named} == {"best.yaml", "search.html"}
    assert all(Path(name).is_file() for name in named)
