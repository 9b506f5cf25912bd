"""Shared by verbs that search: the progress line, the table of trials, also after Ctrl-C, and the verdicts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rtrain.cli.options import resume_hint_on_interrupt
from rtrain.cli.output import print_result
from rtrain.core import events
from rtrain.core.errors import TemporaryFailureError
from rtrain.core.run_folder import Run

if TYPE_CHECKING:
    from rtrain.config import Config
    from rtrain.runs.run_folders import Reuse


def run_search(
    context: typer.Context,
    config: "Config",
    folder: Path,
    reuse: "Reuse",
    as_json: bool,
    command_words: tuple[object, ...],
    make_hint: Callable[[Run], str],
    teacher: Path | None = None,
) -> None:
    """Run a checked search and print its result.

    Args:
        command_words: Its arguments on the command line.
        make_hint: Makes the next command for a winner that the gate does not refuse.
        teacher: The artifact whose students are searched.
    """
    from rtrain.cluster.connection import session
    from rtrain.evaluation import gate_table
    from rtrain.report.live.progress import ProgressLine, format_next_command, format_summary
    from rtrain.report.summary import summarize
    from tune import search, trainable
    from tune.history import Journal
    from tune.report import table, verdict

    settings, journal, headline = config.deploy.tune, Journal(Run(folder).trials), trainable.headline_metric(config)
    with (
        resume_hint_on_interrupt(folder, *command_words),
        _print_trials_on_interrupt(folder, headline, settings),
        ProgressLine(context.obj) as line,
        session(config, folder.parent, line, settings.max_concurrent_trials or 1),
        line.follow_search(table.SearchFollower(headline, settings, journal.history)),
    ):
        line(events.make_phase_event("reading the rows", "rows"))
        search_result = search.run_search(config, folder, reuse, on_event=line, teacher=teacher)
    summary, baseline_name = summarize(search_result.winner), "trial 0" if teacher is None else "the teacher"
    gate_lines = [] if search_result.gate_verdict is None else gate_table.format_brief(search_result.gate_verdict)
    text = [
        f"{(verdict_text := verdict.describe_search(search_result.search))}\n",
        *(
            ["\n".join([f"gate, these weights against those of {baseline_name}: {gate_lines[0]}", *gate_lines[1:], ""])]
            if gate_lines
            else []
        ),
        table.format_table(search_result.history, headline, settings),
        f"settings of the winner: {search_result.search.best_config}; all trials: {search_result.search.search_page}",
        format_summary(summary, search_result.winner),
    ]
    document = {**search_result.to_document(), "winner": summary, "verdict_text": verdict_text}
    is_refused = search_result.gate_verdict is not None and search_result.gate_verdict["verdict"] == "refuse"
    next_command = (
        format_next_command("inspect", search_result.winner.artifact) if is_refused else make_hint(search_result.winner)
    )
    print_result(document, as_json, "\n".join(text), context.obj.format_phases(), next_command)


@contextmanager
def _print_trials_on_interrupt(folder: Path, headline: str, settings: Any) -> Iterator[None]:
    """Print the trials so far when Ctrl-C or a stop request ends a search."""
    try:
        yield
    except (KeyboardInterrupt, TemporaryFailureError):
        from rtrain.report.live.progress import print_message
        from tune.history import Journal
        from tune.report import table

        if (history := Journal(Run(folder).trials).history).trials:
            print_message(table.format_table(history, headline, settings))
        raise
