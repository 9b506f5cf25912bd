"""What a search tells its user while it runs. Without Ray."""

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rtrain.cli import search as verb
from rtrain.cluster import session
from rtrain.report import summary
from rtrain.report.live import progress
from rtrain.report.live.waited import Waited
from tests.searches import ROWS_PER_UPDATE, UPDATES, make_search, settings
from tests.test_tune_budget import started
from tune import search
from tune.known.halving import Ladder
from tune.known.journal import Journal
from tune.results import page


def test_who_was_left_behind_is_told_once_all_have_come_to_a_rung(tmp_path: Path) -> None:
    """Five trials: three go on to the second rung, two from there. A resume does not tell it again."""
    found, said = make_search(tmp_path, [0.5, 0.7, 0.6, 0.4, 0.8], ended=False), list[dict[str, Any]]()
    chosen, ladder = settings(tmp_path, 5), Ladder.of(0.25, ROWS_PER_UPDATE * UPDATES)
    one = started(found, chosen, said.append)
    one._ladder = ladder
    one._tell_frozen()
    assert said == []  # further trials may be asked for, and one of these may go on
    Journal(found.trials).append("stopped", why="the budget pays for 5 trials")
    one = started(found, chosen, said.append)
    one._ladder = ladder
    one._tell_frozen()
    one._tell_frozen()
    assert [(event["what"], event["rung"], event["trials"]) for event in said] == [
        ("frozen", 0, [0, 3]),
        ("frozen", 1, [2]),
    ]


def test_a_search_that_is_interrupted_has_its_study_for_optuna(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = make_search(tmp_path, [0.5, 0.7], ended=False)
    one = started(found, settings(tmp_path, 5))

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(one, "_decide", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.run()
    assert (found.folder / "optuna.journal").is_file()


def test_every_file_that_the_end_of_a_search_names_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, context = make_search(tmp_path, [0.5, 0.7, 0.6]), SimpleNamespace(obj=Waited())
    page.write(made)
    made.best.touch()
    ended: Any = search.Found(made, Journal(made.trials).history)
    monkeypatch.setattr(search, "run", lambda *given, **named: ended)
    monkeypatch.setattr(search.Found, "gate", None)
    monkeypatch.setattr(session, "session", lambda *given: nullcontext())
    monkeypatch.setattr(progress, "summary_text", lambda made, winner: "")
    monkeypatch.setattr(summary, "summarise", lambda winner: {})
    given: Any = (context, settings(tmp_path, 3), made.folder, "resume", False, ("train", "intent"), lambda winner: "")
    verb.searched(*given)
    named = re.findall(rf"{tmp_path}[^\s;,]*", capsys.readouterr().out)
    assert {Path(name).name for name in named} == {"best.yaml", "search.html"}
    assert all(Path(name).is_file() for name in named)
