"""From a configuration to a finished run, on the Ray that the process is connected to."""

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.cluster.session import DATA_CPUS
from rtrain.config import Config
from rtrain.data import records, tokens
from rtrain.data.order import Order
from rtrain.data.store import Store
from rtrain.errors import ConfigError, Problem, UserError
from rtrain.plan import preflight
from rtrain.report import attributions, events, html, summary, trackers, versions
from rtrain.training import checkpoint, group, losses, model, notice, placement, precision, replica, runs, worker
from rtrain.training.recovery import Kind, Recovery, halvings, out_of_memory

OnEvent = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Prepared:
    """A run that may start: its folder, its frozen configuration, its rows."""

    run: Path
    config: Config
    store: Store
    model: Path

    @property
    def updates(self) -> int:
        recipe = self.config.recipe
        rows = self.store.rows("train")
        return Order(self.store.manifest.digest, rows, recipe.rows_per_update, recipe.train.epochs, 0).updates


def check(config: Config, source: records.Source | None = None) -> tuple[records.Source, Path]:
    """Everything that can be refused before Ray starts, all at once: files, columns, model, precision.

    The files of a `source` that was found before are not looked at again.
    """
    problems: list[Any] = [
        *tokens.problems(config.recipe),
        *losses.problems(config.recipe),
        *model.problems(config.recipe),
    ]
    folder = None
    try:
        source = source or records.inspect(config.recipe.data)
    except ConfigError as error:
        problems += error.problems
    try:
        folder = model.resolve(config.recipe.model.name)
        problems += model.check_architecture(folder, config.recipe.data.window_tokens)
    except ConfigError as error:
        problems += error.problems
    problems += trackers.missing(config)
    if config.deploy.cluster.address is None:
        problems += precision.refused_here(config.recipe.train.precision)
    if problems or source is None or folder is None:
        raise ConfigError(problems)
    return source, folder


def prepare(
    config: Config,
    folder: Path,
    reuse: runs.Reuse = "refuse",
    tokens_root: Path | None = None,
    source: records.Source | None = None,
) -> Prepared:
    """Check, make or reuse the token store, and open the run folder. The folder is written only when nothing is wrong.

    The store lies under `tokens_root`, by default the folder that holds the run, so that runs side by side share it.
    `source` is what `check` found, where that was asked already: there may be thousands of files.
    """
    source, weights = check(config, source)
    source = source.beside(tokens_root or folder.parent)
    if reuse == "resume":
        _bring_back(config, folder)
    run, config = runs.choose(folder, config, reuse)
    origin = tokens.origin(config.recipe, source, weights)
    created = next((event for event in events.read(run) if event["kind"] == "created"), None)
    if created and created["data_digest"] != tokens.digest(config.recipe, source, weights):
        raise _other_rows(run, created, origin)
    preflight.disk(run, needed=_disk_needed(weights, config.recipe.train.keep))
    if not created and (copy := replica.of(config.deploy.cluster, run)) and copy.exists():
        raise UserError(
            f"cluster.storage: {copy.url} holds a run already; write --resume to continue it, or another --out"
        )
    preflight.shared(tokens_root or run.parent)
    store, made = tokens.ensure(config.recipe, source, weights, tokens_root or run.parent)
    if problems := [*preflight.rows(config.recipe, store.rows("train")), *capacity(config)]:
        raise ConfigError(problems)
    frozen = runs.freeze(run, config)
    if not created:
        events.append(
            run,
            "created",
            run=run.name,
            recipe=frozen.recipe.name,
            task=frozen.recipe.task,
            data_digest=store.manifest.digest,
            store=str(store.folder),
            # The run's own names: its store may have been made from equal files elsewhere, and may be removed.
            origin=origin,
            identity=frozen.recipe.identity(),
            versions=versions.installed(),
        )
    events.append(
        run,
        "tokenised" if made else "tokens_reused",
        rows=store.manifest.rows,
        quarantined=store.manifest.quarantined,
        copies=store.manifest.copies,
        left_out=store.manifest.left_out,
        store=str(store.folder),
    )
    return Prepared(run, frozen, store, weights)


def _bring_back(config: Config, folder: Path) -> None:
    """A resumed run whose folder is lost, with the machine that held it, comes back from its replica."""
    copy = replica.of(config.deploy.cluster, folder)
    if copy and not (folder / runs.CONFIG).is_file() and copy.exists():
        copy.restore(folder)


def _other_rows(run: Path, created: dict[str, Any], origin: dict[str, dict[str, str]]) -> UserError:
    """A run goes on with the rows that it was started on or not at all: its order and its scores are theirs."""
    changes = tokens.changes(created.get("origin", origin), origin)
    if not changes:
        return UserError(
            f"--resume: {run} was started with a version of rtrain that makes other rows of the same files; "
            "continue it with that version, or start another run with --new"
        )
    listed = "\n  ".join([*changes[:10], *([f"and {len(changes) - 10} more"] if len(changes) > 10 else [])])
    return UserError(
        f"--resume: {run} was started on other rows:\n  {listed}\nRestore these files, or start another run with --new."
    )


def _disk_needed(weights: Path, keep: int) -> int:
    return preflight.checkpoint_copies(keep) * sum(path.stat().st_size for path in weights.glob("*.safetensors"))


def fit(
    prepared: Prepared,
    *,
    until: int | None = None,
    evaluate_at: Sequence[int] = (),
    callbacks: Sequence[Any] = (),
    on_event: OnEvent | None = None,
) -> dict[str, Any]:
    """Train from the newest checkpoint to update `until` (default: the last) and return the run's summary.

    `callbacks` are Ray Train's own. A run that is finished already is left as it is.
    """
    run = prepared.run
    if (run / "artifact" / "artifact.json").is_file():
        _copy_out(prepared)
        return summary.write(run)
    _announce(run, on_event)
    say = on_event or (lambda event: None)
    with runs.hold(run), events.Follow([(run, {})], on_event), trackers.following(prepared.config, run, say):
        try:
            _attempts(prepared, until, evaluate_at, callbacks, say)
        except (KeyboardInterrupt, SystemExit):
            events.append(run, "interrupted")
            summary.write(run)
            raise
        finally:
            placement.release(run)
            for path in run.glob(worker.STALLED.format("*")):
                if not path.stat().st_size:
                    path.unlink()
    last = _last_trained(run)
    events.append(run, "finished" if last["finished"] else "paused", update=last["updates"])
    if last["finished"]:  # a run that is paused, interrupted or stopped goes on: `rtrain report` shows it meanwhile
        _report(run, say)
        _copy_out(prepared)
    return summary.write(run)


def _report(run: Path, say: OnEvent) -> None:
    """Write the page about the run. What goes wrong in it is said and kept in a file, and costs no one the run."""
    for name, make in (("attributions", attributions.ensure), (html.NAME, html.write)):
        try:
            make(run)
        except Exception as error:
            text = f"no {name}: {_first_line([error])} (traceback in {_traceback(run, Path(name).stem, error)})"
            say({"kind": "stage", "text": text})


def _copy_out(prepared: Prepared) -> None:
    if copy := replica.of(prepared.config.deploy.cluster, prepared.run):
        copy.push_artifact(prepared.run)


def _attempts(
    prepared: Prepared, until: int | None, evaluate_at: Sequence[int], callbacks: Sequence[Any], say: OnEvent
) -> None:
    """Start the workers again and again until they have come to the end, or until that makes no sense.

    Each start is a worker group of its own, with its own controller: what Ray's retries inside of one controller do not
    cover, the death of that controller, ends here too, and so does every fault in the same way. It resumes from the
    newest checkpoint, which the workers select.
    """
    run, train, cluster = prepared.run, prepared.config.recipe.train, prepared.config.deploy.cluster
    wanted = notice.wanted(train.workers, train.min_workers, DATA_CPUS)
    recovery = Recovery(cluster.max_crashes)
    settings: dict[str, Any] = {
        "config": configuration.to_document(prepared.config),
        "run": str(run),
        "store": str(prepared.store.folder),
        "model": str(prepared.model),
        "until": until,
        "evaluate_at": list(evaluate_at),
        "owner": copy.claim() if (copy := replica.of(cluster, run)) else "",
    }
    while True:
        notice.take(run)  # one that was left by a driver that died is of no concern to the workers of this one
        workers = _workers(wanted, say)
        settings["halvings"] = halvings(events.read(run))
        start = group.trainer(
            worker.run,
            settings,
            workers,
            run / "ray",
            stall_s=cluster.stall_s,
            elastic=train.min_workers is not None,
            callbacks=[*callbacks, placement.Remember(run)],
        )
        try:
            with notice.Watch(run, workers, wanted, say):
                start.fit()
        except Exception as error:
            placement.release(run)
            if _is_unplaced(error):  # nothing was lost, and the cluster has had time to see which nodes are gone
                say({"kind": "waiting", "workers": workers, "cpus": notice.cpus()})
            else:
                _recover(run, error, recovery)
            continue
        reason, last = notice.take(run), _last_trained(run)
        if reason is None or last["finished"] or last["updates"] == until:
            return
        events.append(run, "yielded", reason=reason, update=last["updates"])


def _last_trained(run: Path) -> dict[str, Any]:
    return [event for event in events.read(run) if event["kind"] == "trained"][-1]


def _is_unplaced(error: Exception) -> bool:
    return any(type(cause).__name__ == "WorkerGroupStartupTimeoutError" for cause in _causes(error))


def _workers(wanted: Callable[[float], int], say: OnEvent) -> int:
    """Workers for the next start; waits, and says so, while there are fewer CPUs than the least number needs."""
    said = 0.0
    while not (workers := wanted(cpus := notice.cpus())):
        if time.monotonic() - said > notice.SAY_EVERY_S:
            said = time.monotonic()
            say({"kind": "waiting", "workers": None, "cpus": cpus})
        time.sleep(notice.LOOK_EVERY_S)
    return workers


def _recover(run: Path, error: Exception, recovery: Recovery) -> None:
    """Return where the run should be started again; raise what the user should read where it should not."""
    if summary.status(events.read(run)) == "stopped":  # a search ends the workers of a trial that it stops
        summary.write(run)
        raise explain(run, error) from error
    causes = _causes(error)
    user_error = next((found for cause in causes if (found := _user_error(cause))), None)
    preempted = notice.take(run) == "preemption" or any(getattr(cause, "preempted", False) for cause in causes)
    short = out_of_memory(map(str, causes))
    kind: Kind = "refused" if user_error else "preemption" if preempted else "memory" if short else "crash"
    update = _newest(run)
    if recovery.retry(kind, update):
        events.append(run, "crashed", cause=kind, resumes_from=update, error=_first_line(causes), stalled=_stalled(run))
        return
    events.append(run, "failed", error=str(error)[:2000])
    summary.write(run)
    _report(run, lambda event: None)
    raise explain(run, error) from error


def _newest(run: Path) -> int:
    """Update of the newest complete checkpoint; whether it verifies is for the workers to find out."""
    return max(checkpoint.updates(run / "checkpoints"), default=0)


def _stalled(run: Path) -> list[str]:
    """Tracebacks that hung workers left; those of workers that ended otherwise are empty."""
    return [str(path) for path in sorted(run.glob(worker.STALLED.format("*"))) if path.stat().st_size]


def capacity(config: Config) -> list[Problem]:
    import ray

    # Nodes that an autoscaler may still start count too; it starts them when the workers ask. None: no autoscaler.
    most = ray._private.state.state.get_max_resources_from_cluster_config() or {}
    cpus = max(ray.cluster_resources().get("CPU", 0.0), most.get("CPU", 0.0))
    return preflight.capacity(config.recipe, cpus, DATA_CPUS)


def _announce(run: Path, on_event: OnEvent | None) -> None:
    """Tell the caller what the run trains on; that was logged before the run was followed."""
    if on_event:
        on_event(next(event for event in reversed(events.read(run)) if event["kind"] in ("tokenised", "tokens_reused")))


def explain(run: Path, error: Exception) -> UserError:
    """A worker's own UserError as it is; anything else with its traceback in a file of the run."""
    causes = _causes(error)
    for cause in causes:
        if found := _user_error(cause):
            return found
    return UserError(f"training failed: {_first_line(causes)}\nThe traceback is in {_traceback(run, 'error', error)}")


def _traceback(run: Path, name: str, error: Exception) -> Path:
    path = run / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    path.write_text("".join(traceback.format_exception(error)), encoding="utf-8", errors="backslashreplace")
    return path


def _causes(error: Exception) -> list[Exception]:
    controller = getattr(error, "controller_failure", None)
    return [error, *([controller] if controller else []), *getattr(error, "worker_failures", {}).values()]


def _first_line(causes: list[Exception]) -> str:
    """The last line of a traceback says what happened; where a process died, the first sentence does."""
    lines = [line for line in str(causes[-1]).splitlines() if line.strip()]
    died = next((line for line in lines if line.startswith("Worker exit type")), None)
    text = died or (lines[-1] if lines else type(getattr(causes[-1], "_base_exc", causes[-1])).__name__)
    return text if len(text) <= 200 else text[:200] + " ..."


def _user_error(cause: Exception) -> UserError | None:
    inner = getattr(cause, "_base_exc", cause)
    return inner if isinstance(inner, UserError) else None
