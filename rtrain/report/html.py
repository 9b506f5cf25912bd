"""report.html: a self-contained page of a run folder."""

from pathlib import Path

from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.report import baselines, collect
from rtrain.report.page import Section, Table, render_html, write_page as write_page
from rtrain.report.progress import print_message
from rtrain.report.sections import answers, data, outcome, run_details


def make_report(run: Run) -> Path:
    """Measure the baselines, if possible, then `write_report`. Raises as `write_report` does."""
    collect.read_run_data(run)  # raises for a folder without a run before anything is measured
    try:
        if run.is_finished and baselines.read_baselines(run) is None:
            print_message("measuring baselines for the report")
        baselines.ensure_baselines(run)
    except UserError as error:
        print_message(f"no baselines: {error}")
    except OSError as error:
        print_message(f"no baselines: they cannot be written ({error.strerror})")
    return write_report(run)


def write_report(run: Run) -> Path:
    """Write report.html. Raises `UserError` for a folder without a run or without write permission."""
    return write_page(run.report, render_report(collect.read_run_data(run)))


def render_report(run: collect.RunData) -> str:
    """Render the page: the outcome first, then the details, settings and digests last."""
    sections = [
        outcome.build_section(run),
        data.build_section(run),
        run_details.build_training_section(run),
        answers.build_answers_section(run),
        answers.build_slices_section(run),
        run_details.build_timing_section(run),
        build_drill_section(run),
        run_details.build_settings_section(run),
    ]
    present_sections = [section for section in sections if section]
    description = f"A run of the recipe {run.config.recipe.name} by rtrain"
    return render_html(run.summary["run"], description, outcome.build_tiles(run), present_sections)


def build_drill_section(run: collect.RunData) -> Section | None:
    """Build the certificate of a drill, which compares an interrupted run with an undisturbed one."""
    drills = run.events_of_kind("drill_report")
    if not drills:
        return None
    report = drills[-1]["report"]
    rows = [
        (
            fault["name"],
            fault["at_step"],
            fault["resumed_from"],
            fault["recomputed_steps"],
            f"{fault['seconds_to_next_step']:.1f}",
            "passed" if fault["passed"] else "FAILED",
        )
        for fault in report["faults"]
    ]
    intro = (
        f"{'Passed' if report['passed'] else 'FAILED'}: {len(rows)} faults in {report['steps']} steps of "
        f"{report['workers']} workers. Compared with an undisturbed run: "
        f"{'the same weights, bit for bit' if report['is_same_weights'] else 'OTHER WEIGHTS'}, "
        f"{'the same rows in the same order' if report['is_same_order'] else 'OTHER ROWS'}; {report['rows_lost']} rows "
        f"lost, {report['rows_repeated']} repeated."
    )
    head = ("fault", "at", "from", "repeated", "seconds", "")
    note = (
        "At: step of the fault; from: step of the checkpoint that the run resumed from; repeated: steps that were "
        "computed again; seconds: from the fault to the first new step. "
        f"A checkpoint every {report['save_every']} steps: at most the steps since the newest "
        f"valid checkpoint are computed again. The drill took {report['seconds']:.0f} s."
    )
    table = Table("Faults and recovery", head, rows, note, wide=True)
    return Section("drill", "Drill certificate", intro, [table])
