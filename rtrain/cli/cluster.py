"""Verbs about the cluster that runs are made on: its file, and the jobs on it. `rtrain cluster VERB`."""

import json
import math
import os
import sys
import time
from collections.abc import Collection, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from rtrain.cli.options import Json, Set
from rtrain.cli.output import show
from rtrain.core.errors import ConfigError, Ended, Problem, UserError
from rtrain.core.run_folder import shown

FOUND = 1
DETACHED = 130
TAKE_VERBS = ("submit", "kubernetes", "rehearse")
"""Verbs behind which another one follows, after --."""
Api = Annotated[
    str | None, typer.Option("--address", help="Job API; default RAY_API_SERVER_ADDRESS, else http://127.0.0.1:8265.")
]
RunArgument = Annotated[str, typer.Argument(help="A run's folder on the nodes, or its name.")]
Storage = Annotated[str | None, typer.Option("--storage", help="The run's cluster.storage, e.g. s3://bucket/runs.")]
FileArgument = Annotated[Path, typer.Argument(help="The cluster's file.")]


def lint(
    context: typer.Context,
    file: FileArgument = Path("cluster.yaml"),
    filled: Annotated[bool, typer.Option("--filled", help="A FILL-IN that is left is an error.")] = False,
    as_json: Json = False,
) -> None:
    """Say what is wrong in a cluster's file, or in manifests for KubeRay, each with its line and what to write instead.
    Nothing is asked of a cloud. The exit code is 1 where there is an error."""
    from rtrain.cluster.checks import check_file as linting
    from rtrain.cluster.checks.findings import Around

    text = linting.read_file(file)
    around = Around(file.absolute().parent, verbs=_verbs(context))
    found, left = linting.check(text, around), linting.to_fill_in(text)
    if filled:
        found = sorted([*found, *linting.find_fill_ins(text)], key=lambda one: one.line)
    errors = sum(one.level == "error" for one in found)
    lines = [one.text(shown(file)) for one in found]
    lines.append(f"{shown(file)}: {errors} errors, {len(found) - errors} warnings")
    if left and not filled:
        lines.append(f"left to fill in: line {', '.join(map(str, left))}")
    show({"file": str(file), "findings": [vars(one) for one in found], "fill_in": left}, as_json, *lines)
    if any(one.level == "error" for one in found):
        raise typer.Exit(FOUND)


def init(
    cloud: Annotated[str, typer.Option("--cloud", help="aws, gcp, azure, onprem, or sky for SkyPilot.")],
    gpu: Annotated[str | None, typer.Option("--gpu", help="Workers with this GPU, e.g. L4, A100, H100.")] = None,
    instance: Annotated[
        str | None, typer.Option("--instance", help="Workers of this type, e.g. c7i.8xlarge, in place of --gpu.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write; - prints it (default: cluster.yaml).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a commented file of a cluster: autoscaled, on spot nodes, closed to the internet."""
    from rtrain.cluster.checks import check_file as linting
    from rtrain.cluster.templates import render

    text = render.render(cloud, gpu, instance, out.name if out and str(out) != "-" else None)
    file = out or Path(render.PLACES[cloud].file)
    if str(file) == "-":
        print(text, end="")
        return
    if file.exists():
        raise ConfigError(
            [
                Problem(
                    "--out", str(file), "is there already", "name another file, or - to see it", code="already_exists"
                )
            ]
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    left = linting.to_fill_in(text)
    lines = [f"{shown(file)}: {len(text.splitlines())} lines; fill in line {', '.join(map(str, left))}"]
    if cloud != "sky":
        lines.append(f"next: rtrain cluster lint --filled {shown(file)}")
        if not (file.absolute().parent / "pyproject.toml").is_file():
            lines.append(f"{shown(file)} copies rtrain's checkout to the nodes: move it into one")
    show({"file": str(file), "fill_in": left}, as_json, *lines)


def _verbs(context: typer.Context) -> frozenset[str]:
    return frozenset(getattr(context.find_root().command, "commands", ()))


def kubernetes(
    context: typer.Context,
    verb: Annotated[
        list[str] | None, typer.Argument(help="Of the job: train intent --data ... --out /shared/...")
    ] = None,
    image: Annotated[str | None, typer.Option("--image", help="Image of the pods, by its digest.")] = None,
    name: Annotated[str, typer.Option("--name", help="Of the cluster.")] = "rtrain",
    workers: Annotated[int, typer.Option("--workers", help="Most pods of workers.", min=1)] = 4,
    cpus: Annotated[int, typer.Option("--cpus", help="Processors of a worker's pod.", min=1)] = 8,
    memory: Annotated[str, typer.Option("--memory", help="Memory of a worker's pod.")] = "16Gi",
    gpus: Annotated[int, typer.Option("--gpus", help="GPUs of a worker's pod.", min=0)] = 0,
    storage_class: Annotated[str | None, typer.Option("--storage-class", help="One that knows ReadWriteMany.")] = None,
    bucket: Annotated[str | None, typer.Option("--bucket", help="gs://NAME in place of a claim, on GKE.")] = None,
    data_workers: Annotated[
        int, typer.Option("--data-workers", help="Most pods of a second group, for data tasks.", min=0)
    ] = 0,
    artifact: Annotated[str | None, typer.Option("--artifact", help="What the service serves.")] = None,
    kind: Annotated[list[str] | None, typer.Option("--kind", help="Only manifests of this kind. Repeatable.")] = None,
    dockerfile: Annotated[bool, typer.Option("--dockerfile", help="Print the image's Dockerfile instead.")] = False,
) -> None:
    """Print manifests for KubeRay: a cluster, a job that goes on where it is tried again, a service, and what they
    share. Behind -- the job's verb."""
    from rtrain.cluster.checks import check_file as linting
    from rtrain.cluster.checks.findings import Around
    from rtrain.cluster.kubernetes import manifests, rules

    if dockerfile:
        print(manifests.dockerfile(gpus > 0), end="")
        return
    _refuse_left_behind(verb or (), ())
    given = {"image": image, "storage_class": storage_class, "artifact": artifact, "verb": tuple(verb or ()) or None}
    given["bucket"] = None if bucket is None else manifests.bucket_of(bucket)
    chosen = {key: value for key, value in given.items() if value is not None}
    sizes = {"workers": workers, "cpus": cpus, "memory": memory, "gpus": gpus, "data_workers": data_workers}
    settings = manifests.Settings(name=name, **sizes, **chosen)  # type: ignore[arg-type]
    manifests.check(settings)
    kinds = [part.manifest["kind"] for part in manifests.parts(settings)]
    if wrong := [one for one in kind or () if one not in kinds]:
        raise ConfigError(
            [
                Problem(
                    "--kind",
                    wrong[0],
                    "is not among the manifests",
                    f"write one of {', '.join(kinds)}",
                    code="unknown_name",
                )
            ]
        )
    text = manifests.text(settings)
    # They are printed to be applied: what the check finds in them comes from the options.
    broken = [one for one in linting.check(text, Around(Path.cwd(), verbs=_verbs(context))) if one.level == "error"]
    # Not the Ray of this machine: they may be applied from any other, by people who submit from a third.
    of_options = [one for one in broken if one.rule != rules.VERSION]
    if problems := {Problem(one.rule, None, one.what, one.mend, code="refused_by_rule") for one in of_options}:
        raise ConfigError(sorted(problems, key=str))
    for line in sorted({f"rtrain: {one.what}; {one.mend}" for one in broken}):
        print(line, file=sys.stderr)
    print(manifests.text(settings, kind or ()), end="")


def rehearse(
    words: Annotated[
        list[str] | None, typer.Argument(help="Behind --: train and its options, with data of this machine.")
    ] = None,
    file: Annotated[Path, typer.Option("--file", help="The cluster's file.")] = Path("cluster.yaml"),
    out: Annotated[str | None, typer.Option("--out", help="New folder for its runs and logs.")] = None,
    folder: Annotated[Path, typer.Option("--folder", help="Root of the checkout to take along.")] = Path("."),
    most_mb: Annotated[float, typer.Option("--most-mb", help="Most megabytes to take along.")] = 5.0,
    also: Annotated[
        list[str] | None, typer.Option("--also", help="resize: also a run that shrinks and grows, in float64.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Try a cluster's file on this machine: its nodes, its autoscaler and a real job, with a spot notice and the loss
    of a node in the middle. The exit code is 0 if the run came to the same weights by the same rows, and nothing was
    left behind."""
    from rtrain.cluster.checks import check_file as linting
    from rtrain.cluster.jobs import upload
    from rtrain.rehearsal import rehearse as rehearsing
    from rtrain.report.live.progress import say
    from rtrain.runs import run_folders

    text = linting.read_file(file)
    place = run_folders.folder_for("rehearsal", out)
    if place.is_dir() and any(place.iterdir()):
        raise ConfigError([Problem("--out", shown(place), "is not empty", "name a new folder", code="already_exists")])
    plan, whole = rehearsing.check(words or (), text, also or ())
    files = upload.of(folder.absolute(), _bytes(most_mb))
    certificate = rehearsing.Rehearsal(plan, whole, place, say, also or ()).run(files)
    document = certificate.to_document()
    (place / "certificate.json").write_text(json.dumps(document, indent=2), encoding="utf-8")
    show(document, as_json, certificate.text(), f"kept: {shown(place / 'certificate.json')}")
    if not certificate.passed:
        raise typer.Exit(FOUND)


def _bytes(megabytes: float) -> int:
    if not 0 <= megabytes < math.inf:
        raise ConfigError(
            [Problem("--most-mb", megabytes, "is no size", "write megabytes, as 20", code="out_of_range")]
        )
    return int(megabytes * 1e6)


def submit(
    context: typer.Context,
    words: Annotated[list[str], typer.Argument(help="Behind --: the verb and its options.")],
    watch: Annotated[bool, typer.Option("--watch", help="Show its lines until it ends; Ctrl-C detaches.")] = False,
    folder: Annotated[Path, typer.Option("--folder", help="Root of the checkout to take along.")] = Path("."),
    most_mb: Annotated[float, typer.Option("--most-mb", help="Most megabytes to take along.")] = 5.0,
    address: Api = None,
) -> None:
    """Run a verb on a cluster, as a job that takes the tracked files of this checkout along. Asked for again, it goes
    on where the run is, or shows the job that is there."""
    from rtrain.cluster.jobs import client, job_names, upload
    from rtrain.report.live.progress import say

    known = getattr(context.find_root().command, "commands", {})
    if not words or words[0] not in known or words[0] == "cluster":
        reason, fix = "is no verb that a job can run", "write e.g. -- train intent --data ..."
        raise ConfigError([Problem("verb", words[0] if words else None, reason, fix, code="unknown_name")])
    run = job_names.run_of(words)
    files = upload.of(folder.absolute(), _bytes(most_mb))
    _refuse_left_behind(words, [path for path, _ in files.files], ", or let git track it")
    jobs = client.Jobs(address)
    job, name = jobs.submit(words, files, say), run or job_names.identity(words, run).removeprefix("rtrain-")
    if not watch:
        print(job)
        say(f"next: rtrain cluster logs --follow {name}   or: rtrain cluster stop {name}")
        return
    _watched(jobs, job, str(name))


def _refuse_left_behind(words: Sequence[str], files: Collection[str], also: str = "") -> None:
    """Raise `ConfigError` for relative paths of rows and models that are not among the `files` of a job: it runs in a
    folder that holds these alone. `also`: another way out."""
    from rtrain.cluster.jobs import job_names
    from rtrain.data.sources.find import is_hub_name

    given = {name: job_names.option(words, name) for name in ("--data", "--valid", "--test", "--model")}
    settings = dict(text.partition("=")[::2] for text in job_names.assignments(words))
    given |= {name: settings.get(name) for name in ("data.path", "data.valid", "data.test", "model.name")}
    problems = []
    for name, value in given.items():
        if not value or "://" in value or value.startswith(("/", "~")):
            continue
        pattern = os.path.normpath(value)
        if any(fnmatch(path, pattern) or PurePosixPath(path).is_relative_to(pattern) for path in files):
            continue
        if Path(value).exists() or not (name in ("--model", "model.name") or is_hub_name(value, None)):
            reason = "is a relative path, and not among the files that the job takes along"
            fix = f"write an address or an absolute path that all nodes read{also}"
            problems.append(Problem(name, value, reason, fix, code="not_uploaded"))
    if problems:
        raise ConfigError(problems)


def serve(
    artifact: Annotated[str, typer.Argument(help="Folder on the nodes, of an artefact or its run; or an address.")],
    replicas: Annotated[int | None, typer.Option("--replicas", help="Copies of the model (default 1).", min=1)] = None,
    max_replicas: Annotated[
        int | None, typer.Option("--max-replicas", help="Most copies, as the load asks for them.", min=1)
    ] = None,
    assignments: Set = None,
    folder: Annotated[Path, typer.Option("--folder", help="Root of the checkout to take along.")] = Path("."),
    most_mb: Annotated[float, typer.Option("--most-mb", help="Most megabytes to take along.")] = 5.0,
    address: Api = None,
) -> None:
    """Serve an artefact on a cluster, as a job of its own; returns once it answers. Its replicas are on nodes that the
    autoscaler starts for them. `rtrain cluster stop` ends it, and gives it a minute for that."""
    from rtrain.cluster.jobs import client, job_names, upload
    from rtrain.report.live.progress import say

    if "://" not in artifact and not artifact.startswith("/"):
        reason, fix = "must be an absolute path on the nodes, or an address", "write e.g. /shared/runs/intent"
        raise ConfigError([Problem("artifact", artifact, reason, fix, code="not_absolute")])
    given = {"serve.replicas": replicas, "serve.max_replicas": max_replicas}
    settings = [*(f"{name}={value}" for name, value in given.items() if value is not None), *(assignments or ())]
    words = ["serve", artifact, *(word for setting in settings for word in ("--set", setting))]
    files = upload.of(folder.absolute(), _bytes(most_mb))
    jobs, name = client.Jobs(address), job_names.served_name(artifact)
    job = jobs.submit(words, files, say)
    try:
        line = jobs.await_line(job, "serving ")
    except KeyboardInterrupt:
        raise Ended(f"{job} goes on without this terminal; rtrain cluster stop {name} ends it", DETACHED) from None
    print(job)
    serving = line.rpartition(" (")[0]
    port = urlsplit(serving.rpartition(" at ")[2]).port
    say(f"{serving} of the head; next: ray attach -p {port} cluster.yaml   or: rtrain cluster stop {name}")


def _watched(jobs: Any, job: str, name: str) -> None:
    from rtrain.cluster.jobs import job_names

    def show(text: str) -> None:
        print(text, end="", flush=True)

    try:
        ended = jobs.watch(job, show)
    except KeyboardInterrupt:
        way = f"rtrain cluster logs --follow {name}   or: rtrain cluster stop {name}"
        raise Ended(f"{job} goes on without this terminal; {way}", DETACHED) from None
    if code := job_names.exit_code(ended.status, ended.driver_exit_code, ended.error):
        raise Ended(f"{job} has ended as {ended.status}", code)


def status(address: Api = None, as_json: Json = False) -> None:
    """Say which jobs there are on a cluster, and what nodes it has."""
    from rtrain.cluster.jobs import client

    jobs = client.Jobs(address)
    listed, nodes = sorted(jobs.all().values(), key=lambda job: job.started or 0), jobs.nodes()
    lines = [f"{job.status:10} {_since(job):>9}  {job.id}" for job in listed] or ["no job yet"]
    document = {"jobs": [job._asdict() for job in listed], "nodes": nodes}
    show(document, as_json, *lines, nodes)


def _since(job: Any) -> str:
    seconds = (job.ended or time.time()) - job.started if job.started else 0
    return f"{seconds:,.0f} s"


def logs(
    run: RunArgument,
    follow: Annotated[bool, typer.Option("--follow", help="Show lines as they come, until the job ends.")] = False,
    storage: Storage = None,
    address: Api = None,
) -> None:
    """Print all lines of a run's jobs: from its folder or its storage, also when the cluster is gone; else from the
    cluster."""
    from rtrain.cluster.jobs import chunked_log_upload, client

    if not follow and (kept := chunked_log_upload.find_log(run, storage)) is not None:
        print(kept, end="")
        return
    jobs = client.Jobs(address)
    mine = jobs.of_run(run)
    if not mine:
        raise UserError(
            f"the cluster knows no job of the run {run}; rtrain cluster status lists what it knows", code="not_found"
        )
    for job in mine[:-1] if follow else mine:
        print(jobs.logs(job.id), end="")
    if follow:
        _watched(jobs, mine[-1].id, run)


def stop(run: RunArgument, address: Api = None) -> None:
    """End the job of a run. The run stays, and goes on when it is submitted again."""
    from rtrain.cluster.jobs import client, job_names

    jobs = client.Jobs(address)
    going = [job for job in jobs.of_run(run) if job.status not in job_names.ENDED]
    if not going:
        raise UserError(f"no job of the run {run} is going on", code="not_running")
    for job in going:
        jobs.stop(job.id)
        print(f"{job.id}: told to end")


def fetch(
    run: RunArgument,
    to: Annotated[Path | None, typer.Option("--to", help="New folder for it (default: runs/NAME).")] = None,
    storage: Storage = None,
    file: Annotated[Path, typer.Option("--file", help="The cluster's file; without --storage.")] = Path("cluster.yaml"),
) -> None:
    """Copy a run to this machine: from its storage, which holds its settings, log, checkpoints and artefact, else whole
    from the cluster's head by SSH (`ray rsync-down`)."""
    from rtrain.checkpoint.remote_copy import Replica
    from rtrain.cluster.jobs import chunked_log_upload, launcher
    from rtrain.report.live.progress import say

    name = Path(run).name
    if name in ("", ".."):
        raise ConfigError(
            [Problem("run", run, "names no run", "write its folder, or its name with --storage", code="not_a_run")]
        )
    target = (to or Path("runs") / name).expanduser().absolute()
    if storage is not None:
        size = Replica(storage, name).fetch(target)
        if (lines := chunked_log_upload.find_log(name, storage)) is not None:
            (target / "job.log").write_text(lines, encoding="utf-8")
        say(f"{shown(target)}: {size / 1e6:.1f} MB")
    else:
        launcher.bring(file, run, target)
    print(shown(target))


def down(
    file: FileArgument = Path("cluster.yaml"),
    yes: Annotated[bool, typer.Option("--yes", help="Also while jobs are going on, and ask nothing.")] = False,
    address: Api = None,
) -> None:
    """End every node of a cluster (`ray down`). While jobs are going on, it is refused without --yes."""
    from rtrain.cluster.jobs import client, job_names, launcher

    head_ip = launcher.head_ip(file)
    try:
        jobs = client.Jobs(address)
        going = [job.id for job in jobs.all().values() if job.status not in job_names.ENDED]
        if head_ip and (api_head_ip := jobs.head_ip()) and api_head_ip != head_ip:
            heads = f"its head is {api_head_ip}, and that of {shown(file)} is {head_ip}"
            raise UserError(
                f"{jobs.address} is the job API of another cluster: {heads} (forwarded by ray dashboard {shown(file)})",
                code="other_cluster",
            )
    except UserError as error:
        going = []
        print(f"{error}; so nobody knows whether a job is going on", file=sys.stderr)
    if going and not yes:
        raise UserError(
            f"still going on: {', '.join(going)}; end them (rtrain cluster stop), or write --yes", code="still_running"
        )
    if code := launcher.down(file, yes):
        raise typer.Exit(code)
