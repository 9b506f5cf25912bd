"""Verbs for stored runs: runs, clean, export, import, push."""

import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rtrain.cli.options import (
    ArtifactArgument,
    JsonOption,
    expand_options,
    option_error,
    print_result,
    resolve_artifact_argument,
    resolve_run_argument,
)
from rtrain.core.errors import UserError
from rtrain.core.run_folder import ARTIFACT_FILE, Run, quote_path, relative_to_cwd, resolve_artifact


class KeepPolicy(StrEnum):
    """Content that `rtrain clean` keeps."""

    ARTIFACT = "artifact"
    NONE = "none"


class WheelPurpose(StrEnum):
    """Use of the wheels of `rtrain export`."""

    PREDICT = "predict"
    SERVE = "serve"
    ALL = "all"


def runs(
    root: Annotated[Path, typer.Argument(help="Folder of runs, or a run.")] = Path("runs"),
    include_trials: Annotated[bool, typer.Option("--all", help="A line for each trial of a search too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the runs, searches and students of a folder: state, score, size, origin, removable bytes."""
    from rtrain.runs.store import scan, table

    run_inventory = scan.scan_folder(root.absolute())
    if as_json:
        print_result(table.inventory_document(run_inventory), True, "")
    else:
        print(table.format_inventory(run_inventory, include_trials))


def clean(
    path: Annotated[Path, typer.Argument(help="A run, or a folder of runs.")],
    keep: Annotated[
        KeepPolicy, typer.Option("--keep", help="artifact: all that is finished; none: nothing.")
    ] = KeepPolicy.ARTIFACT,
    stores: Annotated[
        bool, typer.Option("--stores", help="In a folder: also token stores that only ended runs use.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List removals without removing anything.")] = False,
    assume_yes: Annotated[
        bool, typer.Option("--yes", help="Remove whole runs (--keep none) without a question.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove the files that a finished run does not need, after listing them and their use."""
    from rtrain.runs.store import clean, clean as store_clean, scan, table

    folder = path.absolute()
    is_single_run = scan.holds_run(folder)
    if is_single_run and stores:
        fix = f"name the folder that holds the runs: {quote_path(folder.parent)}"
        raise option_error("--stores", None, "token stores are shared by runs", fix, "conflicting_settings")
    run_inventory = scan.scan_surroundings(folder) if is_single_run else scan.scan_folder(folder)
    run_info = run_inventory.find(folder) if is_single_run else None
    if is_single_run and run_info is None:
        raise UserError(
            f"{folder} is a link, or lies in another run: nothing is removed there; name the run itself",
            code="not_a_run",
        )
    if not is_single_run and not (run_inventory.runs or run_inventory.shared or run_inventory.drafts):
        raise UserError(
            f"{folder} holds no run, and none lies below it; name a run, or the folder that holds them",
            code="not_a_run",
        )
    planned_removals = (
        clean.plan_run_removal(run_info, keep.value, run_inventory)
        if run_info
        else clean.plan_root_removal(run_inventory, keep.value, stores)
    )
    removals = clean.verify_removals(planned_removals)
    if not as_json:
        print(table.format_removals(removals, dry_run))
    parts = [part for removed in removals for part in removed.items]
    if is_single_run and not parts and (reasons := removals[0].kept_reasons):
        raise UserError(f"{folder} is unchanged: {'; '.join(reasons)}", code="not_removed")
    failures = []
    if parts and not dry_run:
        _confirm_removal(keep, assume_yes, len([removed for removed in removals if removed.removes_run]))
        try:
            store_clean.remove_all(removals)
        except UserError as error:  # the others are removed, and are reported
            failures.append(str(error))
    if unreadable_names := [removed.name for removed in removals if removed.is_unreadable]:
        failures.append(f"files of {', '.join(unreadable_names)} cannot be read; their dependencies stay, as listed")
    if as_json:
        print_result(table.removals_document(removals, dry_run), True, "")
    if failures and not as_json:
        raise UserError("\n".join(failures), code="not_removed")
    if as_json:
        print("".join(f"rtrain: {line}\n" for line in failures), end="", file=sys.stderr)
        raise typer.Exit(bool(failures))
    if dry_run and any(part.size for part in parts):
        options = f"{' --keep ' + keep.value if keep is not KeepPolicy.ARTIFACT else ''}{' --stores' if stores else ''}"
        print(f"next: rtrain clean {quote_path(folder)}{options}{' --yes' if keep is KeepPolicy.NONE else ''}")
    else:
        print(f"next: rtrain runs {quote_path(folder.parent if is_single_run else folder)}")


def _confirm_removal(keep: KeepPolicy, assume_yes: bool, count: int) -> None:
    """Ask at a terminal before whole runs are removed, unless `--yes` is set."""
    if keep is not KeepPolicy.NONE or assume_yes or not count:
        return
    fix = "write --yes, or --keep artifact to keep finished artifacts"
    if not sys.stdin.isatty():
        raise option_error(
            "--keep", "none", "removes whole runs, and there is no terminal for a question", fix, "no_terminal"
        )
    if not typer.confirm(f"Remove {count} whole run{'' if count == 1 else 's'}?", err=True):
        raise UserError("nothing was removed", code="declined")


@dataclass(frozen=True)
class ExportOptions:
    run: Annotated[Path, typer.Argument(help="Run folder, or a search's.")]
    out: Annotated[Path, typer.Option("--out", help="The file to write, e.g. intent.tar.")]
    int8: Annotated[bool, typer.Option("--int8", help="Only the int8 artifact: smaller, and independent of torch.")] = (
        False
    )
    with_wheels: Annotated[
        bool, typer.Option("--with-wheels", help="Include the packages for predictions, by pip download.")
    ] = False
    wheels_for: Annotated[
        WheelPurpose, typer.Option("--wheels-for", help="Use of these packages; all: training too.")
    ] = WheelPurpose.SERVE
    no_texts: Annotated[
        bool, typer.Option("--no-texts", help="Leave out predictions and the report: they hold texts.")
    ] = False
    ungated: Annotated[bool, typer.Option("--ungated", help="Export refused artifacts, too.")] = False
    as_json: JsonOption = False


@expand_options
def export(options: ExportOptions) -> None:
    """Bundle a run's artifacts, scores, report and log into one file, for a machine without network."""
    import tempfile

    from rtrain.api.training import require_finished_run
    from rtrain.inference import artifact
    from rtrain.runs.store import bundle, run_info

    resolve_run_argument(options.run)  # prints the winner of a search
    source_run, file, name = (
        Run(require_finished_run(options.run)),
        options.out.expanduser().absolute(),
        options.run.absolute().name,
    )
    bundle.check_export(source_run, file, options.int8)  # before anything is fetched
    verdicts = bundle.load_verdicts(source_run, options.int8)
    if not options.ungated:
        bundle.require_accepted(verdicts)
    with tempfile.TemporaryDirectory() as folder:
        wheel_files, install = [], ""
        if options.with_wheels:
            print(f"fetching the packages of rtrain {options.wheels_for}", file=sys.stderr)
            candidate_folders = (
                [source_run.int8_artifact] if options.int8 else [source_run.artifact, source_run.int8_artifact]
            )
            artifact_folders = [place for place in candidate_folders if (place / ARTIFACT_FILE).is_file()]
            engines = [artifact.read_artifact(place, verify=False).engine for place in artifact_folders]
            if warning := bundle.torch_build_warning(bundle.required_packages(options.wheels_for.value, engines)):
                print(warning, file=sys.stderr)
            wheel_files = bundle.fetch_wheels(options.wheels_for.value, engines, Path(folder))
            install = bundle.format_instructions(name, file.name, options.wheels_for.value)
        exported_bundle = bundle.export_bundle(
            source_run, name, file, options.int8, wheel_files, install, with_texts=not options.no_texts
        )
    size_text = f"{exported_bundle.num_files} files, {run_info.format_bytes(exported_bundle.num_bytes)}"
    lines = [f"{quote_path(file)}: the run {name}, {size_text}"]
    if exported_bundle.files_with_texts:
        lines.append(
            f"WARNING: texts of rows are in {', '.join(exported_bundle.files_with_texts)}; --no-texts leaves these "
            "files out"
        )
    else:
        lines.append("it holds no texts of rows")
    lines.append("not in it: checkpoints, and the token store")
    lines += [f"skipped, unknown to rtrain: {', '.join(exported_bundle.left_out)}"] if exported_bundle.left_out else []
    lines += [f"gate: {verdict}" for verdict in verdicts]
    lines += [install] if install else []
    lines.append(f"next, on the other machine: rtrain import {quote_path(file)}")
    document = {
        "file": str(file),
        "run": name,
        "bytes": exported_bundle.num_bytes,
        "files": exported_bundle.num_files,
        "skipped_files": list(exported_bundle.left_out),
    }
    document["with_texts"] = list(exported_bundle.files_with_texts)
    document["gate"] = {verdict.name: verdict.verdict for verdict in verdicts}
    print_result({**document, "wheels": [path.name for path in wheel_files]}, options.as_json, "\n".join(lines))


def import_(
    file: Annotated[Path, typer.Argument(help="A file that rtrain export has written.")],
    out: Annotated[Path | None, typer.Option("--out", help="Run folder (default: runs/<name of the run>).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Unpack a bundle of rtrain export; every file is verified before the run appears."""
    from rtrain.report.progress import format_next_command, next_artifact_command
    from rtrain.runs.store import bundle, run_info

    imported_run = bundle.import_bundle(
        file.absolute(), out.expanduser().absolute() if out else None, Path("runs").absolute()
    )
    folder = imported_run.run.folder
    lines = [
        f"{quote_path(folder)}: {imported_run.files} files, {run_info.format_bytes(imported_run.size)}, all verified"
    ]
    install = bundle.install_command(quote_path(imported_run.wheels)) if imported_run.wheels else None
    lines += [f"to install its packages without network: {install}"] if install else []
    next_command = next_artifact_command(resolve_artifact(folder), relative_to_cwd(folder)).removeprefix("next: ")
    lines.append(f"{format_next_command('predict', relative_to_cwd(folder), 'a text')}   or: {next_command}")
    document = {"run": str(folder), "files": imported_run.files, "bytes": imported_run.size, "install": install}
    print_result(document, as_json, "\n".join(lines))


@dataclass(frozen=True)
class PushOptions:
    artifact: ArtifactArgument
    destination: Annotated[str, typer.Argument(help="hf://OWNER/NAME (the hub), or models:/NAME (MLflow).")]
    license: Annotated[str | None, typer.Option("--license", help="License on the model card, e.g. apache-2.0.")] = None
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public; it is private without.")] = (
        False
    )
    mlflow_uri: Annotated[str | None, typer.Option("--mlflow-uri", help="Default: MLFLOW_TRACKING_URI.")] = None
    ungated: Annotated[bool, typer.Option("--ungated", help="Push refused or unjudged artifacts, too.")] = False
    as_json: JsonOption = False


@expand_options
def push(options: PushOptions) -> None:
    """Push an artifact to the Hugging Face Hub, with a model card, or to MLflow's model registry."""
    from rtrain.config import ServeConfig
    from rtrain.inference import artifact
    from rtrain.report import push
    from serve.auth import preflight

    registry, name = push.parse_destination(options.destination)
    folder = resolve_artifact_argument(options.artifact)
    facts, settings = artifact.read_artifact(folder), ServeConfig(ungated=options.ungated)
    preflight.require_servable(facts, folder, settings, lambda line: print(line, file=sys.stderr))
    document = {"artifact": str(folder), "version": facts.version, "registry": registry, "name": name}
    if registry == "hub":
        url = push.push_to_hub(folder, name, license=options.license, is_private=not options.public)
        text, document["url"] = f"pushed: {url}\nnext: rtrain serve hf://{name}", url
    else:
        document["url"], number = push.push_to_mlflow(folder, name, options.mlflow_uri)
        text, document["registered_version"] = f"registered: version {number} of {name} at {document['url']}", number
        serve = f"mlflow models serve --model-uri models:/{name}/{number} --env-manager local"
        text += f"\nnext: MLFLOW_TRACKING_URI={document['url']} {serve}"
    print_result(document, options.as_json, text)
