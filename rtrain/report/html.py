"""report.html: one page that needs nothing else, made from a run folder alone."""

from pathlib import Path

from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.report import baselines, collect
from rtrain.report.drawing.blocks import Section, Table
from rtrain.report.drawing.page import render, write as write_page
from rtrain.report.live.progress import say
from rtrain.report.sections import answers, curves, data, outcome, settings, slices, timing


def make(run: Run) -> Path:
    """`write`, after the baselines are measured, where they can be had. Raises as `write` does."""
    collect.read(run)  # refuses a folder without a run before anything is measured
    try:
        if run.finished and baselines.read(run) is None:
            say("measuring baselines for the report")
        baselines.ensure(run)
    except UserError as error:
        say(f"no baselines: {error}")
    except OSError as error:
        say(f"no baselines: they cannot be kept ({error.strerror})")
    return write(run)


def write(run: Run) -> Path:
    """Make the run's report.html. Raises `UserError` for a folder that holds no run, or that cannot be written to."""
    return write_page(run.report, page(collect.read(run)))


def page(run: collect.Collected) -> str:
    """The whole page: the outcome first, what it rests on behind it, settings and digests last."""
    sections = [
        outcome.section(run),
        data.section(run),
        curves.section(run),
        answers.section(run),
        slices.section(run),
        timing.section(run),
        drill_section(run),
        settings.section(run),
    ]
    shown = [section for section in sections if section]
    about = f"A run of the recipe {run.config.recipe.name} by rtrain"
    return render(run.summary["run"], about, outcome.tiles(run), shown)


def drill_section(run: collect.Collected) -> Section | None:
    """The certificate of a drill: a run that was killed again and again ended like one that was never touched."""
    drills = run.of("drilled")
    if not drills:
        return None
    found = drills[-1]["certificate"]
    rows = [
        (
            fault["name"],
            fault["at_update"],
            fault["resumed_from"],
            fault["recomputed_updates"],
            f"{fault['seconds_to_next_update']:.1f}",
            "passed" if fault["passed"] else "FAILED",
        )
        for fault in found["faults"]
    ]
    intro = (
        f"{'Passed' if found['passed'] else 'FAILED'}: {len(rows)} faults in {found['updates']} updates of "
        f"{found['workers']} "
        f"workers. Compared with an undisturbed run: "
        f"{'the same weights, bit for bit' if found['weights_identical'] else 'OTHER WEIGHTS'}, "
        f"{'the same rows in the same order' if found['order_identical'] else 'OTHER ROWS'}; "
        f"{found['rows_lost']} rows lost, {found['rows_repeated']} repeated."
    )
    head = ("fault", "at", "from", "again", "seconds", "")
    note = (
        "At: the update of the fault; from: that of the checkpoint that the run went on from; again: updates that were "
        "computed a second time; seconds: from the fault to the first new update. "
        f"A checkpoint every {found['save_every']} updates: no more updates than lie between the fault and the newest "
        f"whole checkpoint may be computed again. The drill took {found['seconds']:.0f} s."
    )
    table = Table("Each fault, and from where the run went on", head, rows, note, wide=True)
    return Section("drill", "Drill certificate", intro, [table])
