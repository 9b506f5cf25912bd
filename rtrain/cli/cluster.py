"""Verbs about the cluster that runs are made on: its file, and the jobs on it. `rtrain cluster VERB`."""

import json
import math
import os
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from rtrain.cli.options import JsonOption, PluginOption, SetOption, expand_options, option_error, print_result
from rtrain.core import plugins
from rtrain.core.errors import CommandInterruptedError, ConfigError, Problem, UserError
from rtrain.core.run_folder import quote_path

if TYPE_CHECKING:
    from rtrain.cluster.jobs.client import JobInfo

EXIT_PROBLEMS_FOUND = 1
EXIT_DETACHED = 130
VERBS_WITH_JOB = ("submit", "kubernetes", "rehearse")
"""Verbs behind which another one follows, after --."""
JobApiOption = Annotated[
    str | None, typer.Option("--address", help="Job API; default RAY_API_SERVER_ADDRESS, else http://127.0.0.1:8265.")
]
RunArgument = Annotated[str, typer.Argument(help="A run's folder on the nodes, or its name.")]
StorageOption = Annotated[
    str | None, typer.Option("--storage", help="The run's cluster.storage, e.g. s3://bucket/runs.")
]
FileArgument = Annotated[Path, typer.Argument(help="The cluster's file.")]


def lint(
    context: typer.Context,
    file: FileArgument = Path("cluster.yaml"),
    must_be_filled: Annotated[bool, typer.Option("--strict", help="A remaining FILL-IN is an error.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Report problems in a cluster file, or in manifests for KubeRay, each with its line and a fix. No cloud is
    contacted. The exit code is 1 if there is an error."""
    from rtrain.cluster.checks import LintContext, check_file as linting

    text = linting.read_file(file)
    lint_context = LintContext(file.absolute().parent, verbs=_list_verbs(context))
    findings, unfilled_lines = linting.check_text(text, lint_context), linting.fill_in_lines(text)
    if must_be_filled:
        findings = sorted([*findings, *linting.find_fill_ins(text)], key=lambda finding: finding.line)
    num_errors = sum(finding.level == "error" for finding in findings)
    lines = [finding.format(quote_path(file)) for finding in findings]
    lines.append(f"{quote_path(file)}: {num_errors} errors, {len(findings) - num_errors} warnings")
    if unfilled_lines and not must_be_filled:
        lines.append(f"left to fill in: line {', '.join(map(str, unfilled_lines))}")
    print_result(
        {"file": str(file), "findings": [vars(finding) for finding in findings], "fill_in": unfilled_lines},
        as_json,
        *lines,
    )
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(EXIT_PROBLEMS_FOUND)


def init(
    cloud: Annotated[str, typer.Option("--cloud", help="aws, gcp, azure, onprem, or sky for SkyPilot.")],
    gpu: Annotated[str | None, typer.Option("--gpu", help="Workers with this GPU, e.g. L4, A100, H100.")] = None,
    instance: Annotated[
        str | None, typer.Option("--instance", help="Workers of this type, e.g. c7i.8xlarge, in place of --gpu.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write; - prints it (default: cluster.yaml).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a commented file of a cluster: autoscaled, on spot nodes, closed to the internet."""
    from rtrain.cluster import render
    from rtrain.cluster.checks import check_file as linting

    text = render.render_cluster_file(cloud, gpu, instance, out.name if out and str(out) != "-" else None)
    file = out or Path(render.CLOUD_TEMPLATES[cloud].file)
    if str(file) == "-":
        print(text, end="")
        return
    if file.exists():
        raise option_error(
            "--out", str(file), "is there already", "name another file, or - to see it", "already_exists"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    unfilled_lines = linting.fill_in_lines(text)
    lines = [f"{quote_path(file)}: {len(text.splitlines())} lines; fill in line {', '.join(map(str, unfilled_lines))}"]
    if cloud != "sky":
        lines.append(f"next: rtrain cluster lint --strict {quote_path(file)}")
        if not (file.absolute().parent / "pyproject.toml").is_file():
            lines.append(f"{quote_path(file)} copies rtrain's checkout to the nodes: move it into one")
    print_result({"file": str(file), "fill_in": unfilled_lines}, as_json, *lines)


def _list_verbs(context: typer.Context) -> frozenset[str]:
    return frozenset(getattr(context.find_root().command, "commands", ()))


@dataclass(frozen=True)
class KubernetesOptions:
    verb: Annotated[
        list[str] | None, typer.Argument(help="Command of the job: train intent --data ... --out /shared/...")
    ] = None
    image: Annotated[str | None, typer.Option("--image", help="Image of the pods, by its digest.")] = None
    name: Annotated[str, typer.Option("--name", help="Name of the cluster.")] = "rtrain"
    workers: Annotated[int, typer.Option("--workers", help="Most pods of workers.", min=1)] = 4
    cpus: Annotated[int, typer.Option("--cpus", help="Processors of a worker's pod.", min=1)] = 8
    memory: Annotated[str, typer.Option("--memory", help="Memory of a worker's pod.")] = "16Gi"
    gpus: Annotated[int, typer.Option("--gpus", help="GPUs of a worker's pod.", min=0)] = 0
    storage_class: Annotated[str | None, typer.Option("--storage-class", help="Storage class with ReadWriteMany.")] = (
        None
    )
    bucket: Annotated[str | None, typer.Option("--bucket", help="gs://NAME in place of a claim, on GKE.")] = None
    data_workers: Annotated[
        int, typer.Option("--data-workers", help="Most pods of a second group, for data tasks.", min=0)
    ] = 0
    artifact: Annotated[str | None, typer.Option("--artifact", help="Artifact of the service.")] = None
    kind: Annotated[list[str] | None, typer.Option("--kind", help="Only manifests of this kind. Repeatable.")] = None
    dockerfile: Annotated[bool, typer.Option("--dockerfile", help="Print the image's Dockerfile instead.")] = False


@expand_options
def kubernetes(context: typer.Context, options: KubernetesOptions) -> None:
    """Print manifests for KubeRay: a cluster, a job that resumes when it is retried, a service, and their shared
    volume. After --: the job's command."""
    from rtrain.cluster import kubernetes_manifests
    from rtrain.cluster.checks import LintContext, check_file as linting, kubernetes_rules

    if options.dockerfile:
        print(kubernetes_manifests.render_dockerfile(options.gpus > 0), end="")
        return
    _refuse_missing_files(options.verb or (), ())
    values: dict[str, Any] = {
        **{field.name: getattr(options, field.name, None) for field in fields(kubernetes_manifests.ManifestOptions)},
        "bucket": None if options.bucket is None else kubernetes_manifests.parse_bucket_name(options.bucket),
        "verb": tuple(options.verb or ()) or None,
    }
    settings = kubernetes_manifests.ManifestOptions(
        **{name: value for name, value in values.items() if value is not None}
    )
    kubernetes_manifests.check_options(settings)
    kinds = [part.manifest["kind"] for part in kubernetes_manifests.build_manifests(settings)]
    if unknown_kinds := [kind for kind in options.kind or () if kind not in kinds]:
        raise option_error(
            "--kind", unknown_kinds[0], "is not among the manifests", f"write one of {', '.join(kinds)}", "unknown_name"
        )
    text = kubernetes_manifests.render_manifests(settings)
    # Problems of generated manifests come from the options.
    errors = [
        finding
        for finding in linting.check_text(text, LintContext(Path.cwd(), verbs=_list_verbs(context)))
        if finding.level == "error"
    ]
    # Not the Ray of this machine: they may be applied from any other, by people who submit from a third.
    option_errors = [error for error in errors if error.rule != kubernetes_rules.VERSION_RULE]
    if problems := {
        Problem(option_error.rule, None, option_error.message, option_error.fix, code="refused_by_rule")
        for option_error in option_errors
    }:
        raise ConfigError(sorted(problems, key=str))
    for line in sorted({f"rtrain: {error.message}; {error.fix}" for error in errors}):
        print(line, file=sys.stderr)
    print(kubernetes_manifests.render_manifests(settings, options.kind or ()), end="")


@dataclass(frozen=True)
class RehearseOptions:
    words: Annotated[
        list[str] | None, typer.Argument(help="Behind --: train and its options, with data of this machine.")
    ] = None
    file: Annotated[Path, typer.Option("--file", help="The cluster's file.")] = Path("cluster.yaml")
    out: Annotated[str | None, typer.Option("--out", help="New folder for its runs and logs.")] = None
    folder: Annotated[Path, typer.Option("--folder", help="Root of the checkout to take along.")] = Path(".")
    max_upload_mb: Annotated[float, typer.Option("--max-mb", help="Most megabytes to take along.")] = 5.0
    extra_checks: Annotated[
        list[str] | None, typer.Option("--extra", help="resize: also a run that shrinks and grows, in float64.")
    ] = None
    as_json: JsonOption = False


@expand_options
def rehearse(options: RehearseOptions) -> None:
    """Rehearse a cluster file on this machine: its nodes, its autoscaler and a real job, with a spot notice and the
    loss of a node. The exit code is 0 if the run has the same weights and rows as an undisturbed run, and no process
    remains."""
    from rtrain.cluster.checks import check_file as linting
    from rtrain.cluster.jobs import client
    from rtrain.rehearsal import rehearse as rehearsing
    from rtrain.report.progress import print_message
    from rtrain.runs import run_folders

    text = linting.read_file(options.file)
    out_folder = run_folders.default_run_folder("rehearsal", options.out)
    if out_folder.is_dir() and any(out_folder.iterdir()):
        raise option_error("--out", quote_path(out_folder), "is not empty", "name a new folder", "already_exists")
    extra_checks = options.extra_checks or ()
    plan, resolved_words = rehearsing.check_request(options.words or (), text, extra_checks)
    files = client.collect_upload(options.folder.absolute(), _to_bytes(options.max_upload_mb))
    certificate = rehearsing.Rehearsal(plan, resolved_words, out_folder, print_message, extra_checks).run(files)
    document = certificate.to_document()
    (out_folder / "certificate.json").write_text(json.dumps(document, indent=2), encoding="utf-8")
    print_result(
        document, options.as_json, certificate.format(), f"kept: {quote_path(out_folder / 'certificate.json')}"
    )
    if not certificate.has_passed:
        raise typer.Exit(EXIT_PROBLEMS_FOUND)


def _to_bytes(megabytes: float) -> int:
    if not 0 <= megabytes < math.inf:
        raise option_error("--max-mb", megabytes, "is no size", "write megabytes, as 20", "out_of_range")
    return int(megabytes * 1e6)


def submit(
    context: typer.Context,
    words: Annotated[list[str], typer.Argument(help="Behind --: the verb and its options.")],
    watch: Annotated[bool, typer.Option("--watch", help="Show its lines until it ends; Ctrl-C detaches.")] = False,
    folder: Annotated[Path, typer.Option("--folder", help="Root of the checkout to take along.")] = Path("."),
    max_upload_mb: Annotated[float, typer.Option("--max-mb", help="Most megabytes to take along.")] = 5.0,
    address: JobApiOption = None,
) -> None:
    """Run a verb on a cluster, as a job with the tracked files of this checkout. Submitted again, it resumes the run,
    or shows the running job."""
    from rtrain.cluster.jobs import client, job_names
    from rtrain.report.progress import print_message

    commands = getattr(context.find_root().command, "commands", {})
    if not words or words[0] not in commands or words[0] == "cluster":
        reason, fix = "is no verb that a job can run", "write e.g. -- train intent --data ..."
        raise option_error("verb", words[0] if words else None, reason, fix, "unknown_name")
    run = job_names.resolve_run_folder(words)
    files = client.collect_upload(folder.absolute(), _to_bytes(max_upload_mb))
    _refuse_missing_files(words, [path for path, _ in files.files], ", or let git track it")
    jobs = client.JobClient(address)
    job, name = jobs.submit(words, files, print_message), run or job_names.job_id(words, run).removeprefix("rtrain-")
    if not watch:
        print(job)
        print_message(f"next: rtrain cluster logs --follow {name}   or: rtrain cluster stop {name}")
        return
    _watch_job(jobs, job, str(name))


def _refuse_missing_files(words: Sequence[str], files: Collection[str], extra_fix: str = "") -> None:
    """Raise `ConfigError` for relative paths of rows and models that are not among the `files` of a job, the only files
    in its folder. `extra_fix`: another fix."""
    from rtrain.cluster.jobs import job_names
    from rtrain.data.sources import is_hub_name

    paths_by_option = {name: job_names.option_value(words, name) for name in ("--data", "--valid", "--test", "--model")}
    settings = dict(text.partition("=")[::2] for text in job_names.assignments(words))
    paths_by_option |= {name: settings.get(name) for name in ("data.path", "data.valid", "data.test", "model.name")}
    plugin_files = [("--plugin", address) for address in job_names.plugin_addresses(words) if plugins.is_path(address)]
    problems = []
    for name, value in [*paths_by_option.items(), *plugin_files]:
        if not value or "://" in value or value.startswith(("/", "~")):
            continue
        pattern = os.path.normpath(value)
        if any(fnmatch(path, pattern) or PurePosixPath(path).is_relative_to(pattern) for path in files):
            continue
        may_be_on_hub = name in ("--model", "model.name") or (name != "--plugin" and is_hub_name(value, None))
        if Path(value).exists() or not may_be_on_hub:
            reason = "is a relative path, and not among the files of the job"
            fix = f"write a URL or an absolute path that all nodes can read{extra_fix}"
            problems.append(Problem(name, value, reason, fix, code="not_uploaded"))
    if problems:
        raise ConfigError(problems)


@dataclass(frozen=True)
class ClusterServeOptions:
    artifact: Annotated[str, typer.Argument(help="Folder on the nodes, of an artifact or its run; or a URL.")]
    replicas: Annotated[int | None, typer.Option("--replicas", help="Replicas (default 1).", min=1)] = None
    max_replicas: Annotated[
        int | None, typer.Option("--max-replicas", help="Most replicas, for autoscaling.", min=1)
    ] = None
    assignments: SetOption = None
    folder: Annotated[Path, typer.Option("--folder", help="Root of the checkout to take along.")] = Path(".")
    max_upload_mb: Annotated[float, typer.Option("--max-mb", help="Most megabytes to take along.")] = 5.0
    address: JobApiOption = None
    plugin: PluginOption = None


@expand_options
def serve(options: ClusterServeOptions) -> None:
    """Serve an artifact on a cluster, as a job; returns once it answers. The autoscaler starts nodes for its replicas.
    `rtrain cluster stop` ends it within a minute."""
    from rtrain.cluster.jobs import client, job_names
    from rtrain.report.progress import print_message

    artifact = options.artifact
    if "://" not in artifact and not artifact.startswith("/"):
        reason, fix = "must be an absolute path on the nodes, or an address", "write e.g. /shared/runs/intent"
        raise option_error("artifact", artifact, reason, fix, "not_absolute")
    replica_settings = {"serve.replicas": options.replicas, "serve.max_replicas": options.max_replicas}
    settings = [
        *(f"{name}={value}" for name, value in replica_settings.items() if value is not None),
        *(options.assignments or ()),
    ]
    words = ["serve", artifact, *(word for setting in settings for word in ("--set", setting))]
    words += [word for address in options.plugin or () for word in ("--plugin", address)]
    files = client.collect_upload(options.folder.absolute(), _to_bytes(options.max_upload_mb))
    _refuse_missing_files(words, [path for path, _ in files.files], ", or let git track it")
    jobs, name = client.JobClient(options.address), job_names.serving_job_name(artifact)
    job = jobs.submit(words, files, print_message)
    try:
        line = jobs.wait_for_line(job, "serving ")
    except KeyboardInterrupt:
        raise CommandInterruptedError(
            f"{job} continues without this terminal; rtrain cluster stop {name} ends it", EXIT_DETACHED
        ) from None
    print(job)
    endpoint_text = line.rpartition(" (")[0]
    port = urlsplit(endpoint_text.rpartition(" at ")[2]).port
    print_message(
        f"{endpoint_text} of the head; next: ray attach -p {port} cluster.yaml   or: rtrain cluster stop {name}"
    )


def _watch_job(jobs: Any, job: str, name: str) -> None:
    from rtrain.cluster.jobs import job_names

    def print_text(text: str) -> None:
        print(text, end="", flush=True)

    try:
        final_job = jobs.watch(job, print_text)
    except KeyboardInterrupt:
        hint = f"rtrain cluster logs --follow {name}   or: rtrain cluster stop {name}"
        raise CommandInterruptedError(f"{job} continues without this terminal; {hint}", EXIT_DETACHED) from None
    if code := job_names.exit_code(final_job.status, final_job.driver_exit_code, final_job.error):
        raise CommandInterruptedError(f"{job} has ended as {final_job.status}", code)


def status(address: JobApiOption = None, as_json: JsonOption = False) -> None:
    """List the jobs and the nodes of a cluster."""
    from rtrain.cluster.jobs import client

    jobs = client.JobClient(address)
    sorted_jobs, nodes = sorted(jobs.list_jobs().values(), key=lambda job: job.started_at or 0), jobs.cluster_status()
    lines = [f"{job.status:10} {_format_duration(job):>9}  {job.id}" for job in sorted_jobs] or ["no job yet"]
    document = {"jobs": [job._asdict() for job in sorted_jobs], "nodes": nodes}
    print_result(document, as_json, *lines, nodes)


def _format_duration(job: "JobInfo") -> str:
    seconds = (job.ended_at or time.time()) - job.started_at if job.started_at else 0
    return f"{seconds:,.0f} s"


def logs(
    run: RunArgument,
    follow: Annotated[bool, typer.Option("--follow", help="Follow new lines until the job ends.")] = False,
    storage: StorageOption = None,
    address: JobApiOption = None,
) -> None:
    """Print all lines of a run's jobs: from its folder or its storage, also when the cluster is gone; else from the
    cluster."""
    from rtrain.cluster.jobs import client, entry

    if not follow and (saved_log := entry.read_run_log(run, storage)) is not None:
        print(saved_log, end="")
        return
    jobs = client.JobClient(address)
    run_jobs = jobs.list_run_jobs(run)
    if not run_jobs:
        raise UserError(
            f"the cluster has no job of the run {run}; rtrain cluster status lists its jobs", code="not_found"
        )
    for job in run_jobs[:-1] if follow else run_jobs:
        print(jobs.get_logs(job.id), end="")
    if follow:
        _watch_job(jobs, run_jobs[-1].id, run)


def stop(run: RunArgument, address: JobApiOption = None) -> None:
    """End the job of a run. The run stays, and resumes when it is submitted again."""
    from rtrain.cluster.jobs import client, job_names

    jobs = client.JobClient(address)
    running_jobs = [job for job in jobs.list_run_jobs(run) if job.status not in job_names.FINAL_STATUSES]
    if not running_jobs:
        raise UserError(f"no job of the run {run} is running", code="not_running")
    for job in running_jobs:
        jobs.stop(job.id)
        print(f"{job.id}: stop requested")


def fetch(
    run: RunArgument,
    destination: Annotated[Path | None, typer.Option("--to", help="New folder for it (default: runs/NAME).")] = None,
    storage: StorageOption = None,
    file: Annotated[Path, typer.Option("--file", help="The cluster's file; without --storage.")] = Path("cluster.yaml"),
) -> None:
    """Copy a run to this machine: from its storage (settings, log, checkpoints and artifact), else the whole folder
    from the cluster's head by SSH (`ray rsync-down`)."""
    from rtrain.checkpoint.remote_copy import RemoteCopy
    from rtrain.cluster import cluster_file
    from rtrain.cluster.jobs import entry
    from rtrain.report.progress import print_message

    name = Path(run).name
    if name in ("", ".."):
        raise option_error("run", run, "names no run", "write its folder, or its name with --storage", "not_a_run")
    target = (destination or Path("runs") / name).expanduser().absolute()
    if storage is not None:
        size = RemoteCopy(storage, name).fetch_run(target)
        if (lines := entry.read_run_log(name, storage)) is not None:
            (target / "job.log").write_text(lines, encoding="utf-8")
        print_message(f"{quote_path(target)}: {size / 1e6:.1f} MB")
    else:
        cluster_file.rsync_down(file, run, target)
    print(quote_path(target))


def down(
    file: FileArgument = Path("cluster.yaml"),
    assume_yes: Annotated[bool, typer.Option("--yes", help="Also while jobs are going on, and ask nothing.")] = False,
    address: JobApiOption = None,
) -> None:
    """End every node of a cluster (`ray down`). While jobs are going on, it is refused without --yes."""
    from rtrain.cluster import cluster_file
    from rtrain.cluster.jobs import client, job_names

    head_ip = cluster_file.find_head_ip(file)
    try:
        jobs = client.JobClient(address)
        running_ids = [job.id for job in jobs.list_jobs().values() if job.status not in job_names.FINAL_STATUSES]
        if head_ip and (api_head_ip := jobs.head_ip()) and api_head_ip != head_ip:
            mismatch = f"its head is {api_head_ip}, and that of {quote_path(file)} is {head_ip}"
            raise UserError(
                f"{jobs.address} is the job API of another cluster: {mismatch} (forwarded by ray dashboard "
                f"{quote_path(file)})",
                code="other_cluster",
            )
    except UserError as error:
        running_ids = []
        print(f"{error}; so nobody knows whether a job is going on", file=sys.stderr)
    if running_ids and not assume_yes:
        raise UserError(
            f"still going on: {', '.join(running_ids)}; end them (rtrain cluster stop), or write --yes",
            code="still_running",
        )
    if code := cluster_file.tear_down(file, assume_yes):
        raise typer.Exit(code)
