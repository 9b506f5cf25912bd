"""The verb `rtrain profile`: the time of each part of a step."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rtrain.cli.options import (
    AddressOption,
    DataOption,
    JsonOption,
    ModelOption,
    SetOption,
    TestOption,
    ValidOption,
    WorkersOption,
    build_config,
)
from rtrain.cli.output import print_result
from rtrain.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rtrain.config import Config


def profile(
    context: typer.Context,
    recipe: Annotated[str | None, typer.Argument(help="A recipe's name or a YAML file.")] = None,
    data: DataOption = None,
    valid: ValidOption = None,
    test: TestOption = None,
    model: ModelOption = None,
    workers: WorkersOption = None,
    out: Annotated[str | None, typer.Option("--out", help="Folder of the profile, or page of two.")] = None,
    assignments: SetOption = None,
    address: AddressOption = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Measured steps.")] = 20,
    warm_up: Annotated[int, typer.Option("--warm-up", min=1, help="Warm-up steps before them.")] = 3,
    sweep: Annotated[
        list[str] | None,
        typer.Option("--sweep", help="A row for each value: workers=1,2, loader=1,2,4, precision=..., any setting=..."),
    ] = None,
    choose_k: Annotated[
        bool, typer.Option("--choose-k", help="Train a calibration run; print the fastest aggregation frequency.")
    ] = False,
    compared_profiles: Annotated[
        list[Path] | None,
        typer.Option("--compare", help="Compare two profiles (JSON, written twice) on one page, without training."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the time of each part of a recipe's steps on each worker; print a table, and write a page and a trace."""
    from rtrain.cluster.connection import session
    from rtrain.profiling import cases, profile as profiling, tables
    from rtrain.report.live.progress import ProgressLine
    from rtrain.runs import run_folders

    if compared_profiles:
        _compare_profiles(recipe, compared_profiles, out, as_json)
        return
    if recipe is None:
        reason = "needs a recipe, or two profiles by --compare"
        fix = "write rtrain profile RECIPE --data FILE, or --compare A.json --compare B.json"
        raise ConfigError([Problem("profile", None, reason, fix, code="missing")])
    option_values = {"data": data, "valid": valid, "test": test, "model": model, "workers": workers, "address": address}
    config = run_folders.resolve_paths(build_config(recipe, assignments, **option_values))
    if choose_k:
        if sweep:
            reason, fix = "trains one calibration run, without sweeps", "leave out --sweep"
            raise ConfigError([Problem("--choose-k", None, reason, fix, code="conflicting_settings")])
        _choose_k(context, config, run_folders.default_run_folder(f"{config.recipe.name}-choose-k", out), as_json)
        return
    folder = run_folders.default_run_folder(f"{config.recipe.name}-profile", out)
    length = cases.ProfileLength(steps, warm_up)
    sweep_rows = cases.expand_sweeps(config, sweep or (), length)
    with ProgressLine(context.obj) as line:
        document = profiling.run_profile(
            config, sweep_rows, length, folder, lambda row, place: session(row, place.parent, line), on_event=line
        )
    files: dict[str, Any] = {
        name: str(folder / name) for name in (profiling.JSON_FILE, profiling.PAGE_FILE, profiling.TRACE_FILE)
    }
    file_lines = f"page: {files[profiling.PAGE_FILE]}\ntrace, for ui.perfetto.dev: {files[profiling.TRACE_FILE]}"
    print_result(
        {**document, "files": files},
        as_json,
        f"{tables.format_profile(document)}\n",
        file_lines,
        context.obj.format_phases(),
    )


def _choose_k(context: typer.Context, config: "Config", folder: Path, as_json: bool) -> None:
    from rtrain.cluster.connection import session
    from rtrain.profiling import profile as profiling
    from rtrain.report.live.progress import ProgressLine
    from tune import choose_frequency

    profiling.check_profile([config], folder)
    with ProgressLine(context.obj) as line, session(config, folder.parent, line):
        document = choose_frequency.choose_frequency(config, folder, line)
    file = str(folder / choose_frequency.DECISION_FILE)
    lines = [*choose_frequency.format_decision(document), f"decision: {file}", context.obj.format_phases()]
    print_result({**document, "file": file}, as_json, *lines)


def _compare_profiles(recipe: str | None, paths: list[Path], out: str | None, as_json: bool) -> None:
    if len(paths) != 2 or recipe is not None:
        fix = "write rtrain profile --compare A.json --compare B.json"
        reason = "compares two profiles, and trains nothing"
        raise ConfigError([Problem("--compare", None, reason, fix, code="conflicting_settings")])
    from rtrain.profiling import page, profile as profiling, tables

    documents = [profiling.read_profile(path.expanduser().absolute()) for path in paths]
    names = [document["name"] for document in documents]
    if names[0] == names[1]:
        names = [str(path) for path in paths]
    page_path = Path(out or "profiles.html").expanduser().absolute()
    page_path.write_text(page.render_comparison(documents, names), encoding="utf-8")
    notes = tables.unpaired_notes(documents, names)
    comparison = {
        "profiles": [str(path) for path in paths],
        "rows": _compute_ratios(documents),
        "notes": notes,
        "page": str(page_path),
    }
    print_result(
        comparison,
        as_json,
        "\n".join([tables.comparison_table(documents, names).formatted, "", *notes, f"page: {page_path}"]),
    )


def _compute_ratios(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the ratio of step times of the second profile to the first, row by row."""
    pairs = zip(*(document["rows"] for document in documents), strict=False)
    return [
        {"rows": [first["name"], second["name"]], "ratio": second["step_s"] / first["step_s"]}
        for first, second in pairs
    ]
