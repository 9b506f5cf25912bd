"""report.html: one page that needs nothing else, made from a run folder alone."""

from functools import partial
from pathlib import Path

from rtrain.errors import UserError
from rtrain.report import attributions, baseline, collect
from rtrain.report.drawing.page import render, write as write_page
from rtrain.report.live.progress import say
from rtrain.report.sections import answers, certificate, curves, data, hardest, outcome, settings, slices, timing
from rtrain.run import Run


def make(run: Run) -> Path:
    """`write`, after the baselines and the attributions of the hardest rows are measured, where they can be had.

    Raises as `write` does.
    """
    collect.read(run)  # refuses a folder without a run before anything is measured
    for name, ensure in (("baselines", baseline.ensure), ("attributions", partial(attributions.ensure, say=say))):
        try:
            if name == "baselines" and run.finished and baseline.read(run) is None:
                say("measuring baselines for the report")
            ensure(run)
        except UserError as error:
            say(f"no {name}: {error}")
        except OSError as error:
            say(f"no {name}: they cannot be kept ({error.strerror})")
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
        hardest.section(run),
        timing.section(run),
        certificate.section(run),
        settings.section(run),
    ]
    shown = [section for section in sections if section]
    about = f"A run of the recipe {run.config.recipe.name} by rtrain"
    return render(run.summary["run"], about, outcome.tiles(run), shown)
