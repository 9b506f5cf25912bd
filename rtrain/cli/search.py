"""What verbs that search have in common: the live line, the table, also after Ctrl-C, and the verdicts at the end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rtrain.cli.options import resumable
from rtrain.cli.output import show
from rtrain.core import events
from rtrain.core.errors import TryAgain
from rtrain.core.run_folder import Run

if TYPE_CHECKING:
    from rtrain.config import Config
    from rtrain.runs.run_folders import Reuse


def searched(
    context: typer.Context,
    config: "Config",
    folder: Path,
    reuse: "Reuse",
    as_json: bool,
    verb: tuple[object, ...],
    way_on: Callable[[Run], str],
    teacher: Path | None = None,
) -> None:
    """Run a search that is checked, and show its end. `verb`: its words on the command line; `way_on`: what to do with
    a winner that the gate does not refuse; `teacher`: the artefact whose students are searched."""
    from rtrain.cluster.connection import session
    from rtrain.evaluation import gate_table as gate
    from rtrain.report.live.progress import Line, summary_text, then
    from rtrain.report.summary import summarise
    from tune import search, trainable
    from tune.history import Journal
    from tune.report import table, verdict

    settings, known, headline = config.deploy.tune, Journal(Run(folder).trials), trainable.headline_of(config)
    with (
        resumable(folder, *verb),
        _so_far(folder, headline, settings),
        Line(context.obj) as line,
        session(config, folder.parent, line, settings.concurrent or 1),
        line.following(table.Follower(headline, settings, known.history)),
    ):
        line(events.doing("reading the rows", "rows"))
        found = search.run(config, folder, reuse, on_event=line, teacher=teacher)
    summary, beside = summarise(found.winner), "trial 0" if teacher is None else "the teacher"
    brief = [] if found.gate is None else gate.brief(found.gate)
    text = [
        f"{(told := verdict.of(found.search))}\n",
        *(
            ["\n".join([f"gate, of these weights beside those of {beside}: {brief[0]}", *brief[1:], ""])]
            if brief
            else []
        ),
        table.text(found.history, headline, settings),
        f"settings of the winner: {found.search.best}; all trials: {found.search.search_page}",
        summary_text(summary, found.winner),
    ]
    document = {**found.to_document(), "winner": summary, "told": told}
    refused = found.gate is not None and found.gate["verdict"] == "refuse"
    after = then("inspect", found.winner.artifact) if refused else way_on(found.winner)
    show(document, as_json, "\n".join(text), context.obj.text(), after)


@contextmanager
def _so_far(folder: Path, headline: str, settings: Any) -> Iterator[None]:
    """Where Ctrl-C ends a search, or a signal that asks it to end, show the trials until then."""
    try:
        yield
    except (KeyboardInterrupt, TryAgain):
        from rtrain.report.live.progress import say
        from tune.history import Journal
        from tune.report import table

        if (history := Journal(Run(folder).trials).history).trials:
            say(table.text(history, headline, settings))
        raise
