"""Float artefact -> int8 artefact, for the engine that `quantize.engine` names: exported, checked, quantized, gated.

Scales of activations are static, because scales that are computed per batch make an answer depend on its neighbours
(I8): dynamic int8 moved logits by a tenth of their range. They come from training rows.
"""

import gzip
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from rtrain import config as configuration
from rtrain.compress import calibrate, fallback
from rtrain.config import Recipe
from rtrain.config.recipe import Quantize
from rtrain.core import engines, events
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.core.ragged import Floats, Head, Ints
from rtrain.core.run_folder import Run, artifact_of
from rtrain.data.store.store import Store
from rtrain.evaluation import gate, gate_table
from rtrain.inference import artifact, drift_baseline, predictor as inference_predictor, score
from rtrain.models import int8_support
from rtrain.tasks import base

SERVED = ("tokenizer.json", "tokenizer_config.json", "config.json")
"""Files of the float artefact that its int8 one is served by, or read by other programs that answer with its graph. A
vocabulary as vocab.txt is in tokenizer.json too."""
KEPT = 0.995
"""Least share of the float score that int8 should keep. Below, the fall-back to float is named."""
REFERENCE_ROWS = 4000
"""Most validation rows whose answers are kept as histograms."""
OUTPUT_BYTES, PROBED = 1 << 29, 16
"""Most bytes of outputs of one model that are compared with another's, and rows by which those of a row are known."""
ALONE_ROWS = 4000
"""Most test rows that are asked one at a time too, to count the answers that depend on their batch."""


def run(
    recipe: Recipe,
    store_folder: Path,
    parent_run: Path,
    out: Path,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    threads: int = 1,
) -> dict[str, Any]:
    """Quantize the artefact of a run, and gate it against its parent; returns its scores beside its parent's, flips,
    sizes and the gate's document. A refused artefact is there too, and is not served. `threads`: those that serve it.
    """
    parent_folder = artifact_of(parent_run)
    refuse_out(out)
    parent = artifact.read(parent_folder)
    if not engines.get(parent.engine).gradients:
        raise UserError(
            f"{parent_folder} is quantized already; name the run of its float parent", code="already_quantized"
        )
    if recipe.compress.vocabulary == "trim" and not _is_trimmed(parent_run, parent):
        reason, fix = "a finished model is not trimmed", "trim before rtrain train or rtrain distill"
        raise ConfigError([Problem("compress.vocabulary", "trim", reason, fix, code="conflicting_settings")])
    refuse(recipe.quantize, words=base.get(parent.task).output == "tokens")
    store = Store(store_folder)
    started = time.perf_counter()
    whole = out.resolve()  # behind a link, the folder that it names: what is published there is renamed
    draft = whole.with_name(f".{whole.name}.{uuid.uuid4().hex[:8]}")
    draft.mkdir(parents=True)
    try:
        job = calibrate.Job(parent_folder, parent, store, recipe.quantize, draft, threads)
        found = calibrate.write(job, lambda text, word: on_event(events.doing(text, word)))
        for name in SERVED:
            if (parent_folder / name).is_file():
                shutil.copyfile(parent_folder / name, draft / name)
        lineage = {**parent.lineage, "parent": parent.version, **_told(recipe.quantize, found)}
        made = replace(parent, engine=recipe.quantize.engine, lineage=lineage, golden=(), metrics={})
        on_event(events.doing(f"scoring both models on {store.rows('test'):,} test rows", "scores"))
        report, answered = measure(parent_folder, draft, parent, made, store)
        report |= {
            "engine": made.engine,
            "kind": recipe.quantize.kind,
            "host": asdict(int8_support.of_processor()),
            **found,
        }
        made = replace(made, metrics={"test": report["test"]})
        artifact.write(
            draft,
            made,
            inference_predictor.golden_logits,
            inference_predictor.golden_inputs(base.get(made.task), Head(made.labels, made.facts)),
        )
        if recipe.quantize.compressed:
            pack_graph(draft)
        report["size_mb"] = round(artifact.size_mb(draft, made.engine), 2)
        report["artefact_mb"] = round(sum(path.stat().st_size for path in draft.iterdir()) / 1e6, 2)
        report["gate"] = gate.run(
            gate.Sides(draft, parent_folder, store, store, threads, answered), recipe.gate, on_event=on_event
        )
        artifact.judged(draft, report["gate"], _reference(draft, store))
        artifact.publish(draft, out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    seconds = round(time.perf_counter() - started, 2)
    return {**report, "seconds": seconds, "run": str(parent_run), "artifact": str(out)}


def refuse_out(out: Path) -> None:
    """Raise `UserError` where `out` holds anything but an int8 artefact: what is there is replaced as a whole."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        if not engines.get(artifact.read(out, verify=False).engine).gradients:
            return
    except (UserError, ValueError):  # no artefact, or none that can be read
        pass
    raise UserError(
        f"--out {out}: it holds something else than an int8 artefact, which would be lost; name a new folder",
        code="not_empty",
    )


def refuse(settings: Quantize, words: bool = False) -> None:
    """Raise before anything is computed: `UserError` where the engine is not installed, `ConfigError` where it is asked
    for what it cannot do. `words`: the model answers with pieces of its vocabulary."""
    engine = settings.engine
    entry = engines.get(engine)
    engines.needed(engine, entry.libraries)
    if settings.table == "int4" and not entry.narrows:
        able = " or ".join(name for name in engines.quantized() if engines.get(name).narrows)
        reason = f"{engine} has no table of 4 bits"
        raise ConfigError(
            [Problem("quantize.table", "int4", reason, f"write int8, or quantize.engine={able}", code="unsupported")]
        )
    if settings.table == "int4" and words:
        reason = "the model answers by its word table too, in int8: a second one of 4 bits would be added, not saved"
        raise ConfigError([Problem("quantize.table", "int4", reason, "write quantize.table=int8", code="unsupported")])


def _told(settings: Quantize, found: dict[str, Any]) -> dict[str, Any]:
    """What the lineage says of how the graph was made."""
    table = {"table": settings.table} if settings.table == "int4" else {}
    if settings.kind == "weights":
        return {"kind": settings.kind, **table}
    reverted = found.get("fallback", {}).get("reverted")
    flips = {} if settings.flips is None else {"flips": settings.flips}
    return {
        "calibration_rows": settings.calibration_rows,
        **table,
        **flips,
        **({"overflow_fix": True} if settings.overflow_fix else {}),
        **({"reverted": reverted} if reverted else {}),
    }


def report_text(report: dict[str, Any]) -> str:
    """What `run` returns, for a person: scores and size before and after, and which answers have changed."""
    before, after = report["parent"], report["test"]
    rows = [(name, f"{before[name]:.4f}", f"{after[name]:.4f}") for name in after if name in before and name != "rows"]
    rows.append(("size", f"{report['parent_size_mb']:.1f} MB", f"{report['size_mb']:.1f} MB"))
    verdict, *rivals = gate_table.brief(report["gate"])
    width = max(len(name) for name, *_ in rows)
    table = [f"{name:<{width}}  {old:>10}  {new:>10}" for name, old, new in [("", "float", "int8"), *rows]]
    of = f" (of the first {report['flips_rows']:,} rows)" if "flips_rows" in report else ""
    apart, moved = report["flips_alone_against_batch"], report["largest_logit_difference_alone_against_batch"]
    return "\n".join(
        [
            f"{after['rows']:,} test rows, {report['seconds']:.0f} s",
            *table,
            f"answers that differ from the float model's: {report['flips_against_parent']:.2%}{of}",
            f"answers that differ between alone and in a batch: {apart:.2%} (logits by {moved:.3f} at most)",
            *_kept_text(report),
            *_graph_text(report),
            f"gate: {verdict}",
            *rivals,
            f"artefact: {report['artifact']}",
        ]
    )


def _kept_text(report: dict[str, Any]) -> list[str]:
    """What to do where int8 loses more than it may of the headline's magnitude; some headlines are negative."""
    name = next(name for name in report["test"] if name != "rows")
    before, after = report["parent"][name], report["test"][name]
    left = 1 - (before - after) / abs(before) if before else 1.0
    if left >= KEPT:
        return []
    text = f"int8 keeps {left:.4f} of the float {name}, less than {KEPT}"
    if report["kind"] == "static" and "fallback" not in report:
        text += f"; some operations in float may keep more: rtrain quantize {report['run']} --set quantize.flips=0.005"
    return [text]


def _graph_text(report: dict[str, Any]) -> list[str]:
    """What the export and the fall-back have found, and what int8 costs on this processor."""
    lines = []
    if (export := report.get("export")) is not None:
        lines.append(
            f"exported graph: logits as PyTorch's to {export['largest']:.1e}, on {export['rows']} training rows of "
            f"{export['buckets']} lengths"
        )
    if (back := report.get("fallback")) is not None:
        count, of = len(back["reverted"]), back["operations"]
        short = "" if back["reached"] else f", more than the {back['most_flips']:.2%} that were asked for: not reached"
        lines.append(
            f"fall-back: {count} of {of} operations in float; of {back['rows']:,} training rows' answers "
            f"{back['flips_before']:.2%} differed, now {back['flips']:.2%}{short} ({back['seconds']:.0f} s)"
        )
        lines += [f"  in float: {name}" for name in back["reverted"]]
    if back and back["reverted"]:
        times = ", ".join(
            f"{one['ms']:.2f} ms in place of {one['int8_ms']:.2f} ({one['bucket']})" for one in back["latency"]
        )
        lines.append(f"  it costs {back['megabytes_added']:.1f} MB; {times}")
    if (found := report.get("host")) is not None:
        lines.append(int8_support.Int8(**found).text)
    return lines


def pack_graph(draft: Path) -> None:
    """Compress the graph of a finished artefact, whose version is another one then."""
    made = artifact.read(draft)
    for path in engines.get(made.engine).present(draft):
        # Without a date: the same graph has the same bytes.
        (draft / f"{path.name}{engines.PACKED}").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        path.unlink()
    head = Head(made.labels, made.facts)
    made = replace(made, golden=(), lineage={**made.lineage, "compressed": True})
    artifact.write(
        draft, made, inference_predictor.golden_logits, inference_predictor.golden_inputs(base.get(made.task), head)
    )


def measure(
    parent_folder: Path, draft: Path, parent: artifact.Artifact, made: artifact.Artifact, store: Store
) -> tuple[dict[str, Any], tuple[score.Answered, score.Answered]]:
    """(scores of both artefacts on the test rows and the shares of int8 answers that differ from the parent's, and that
    differ between being asked alone and in a batch; the answers of parent and int8)

    Where the outputs of all test rows do not fit into memory, the shares are of the first ones, `flips_rows`, and the
    answers come without outputs."""
    small, every = inference_predictor.Predictor(draft, made), np.arange(store.rows("test"))
    some = every[: _kept(small, store)]
    alone_rows = some[:ALONE_ROWS]

    def asked(predictor: inference_predictor.Predictor) -> tuple[score.Answered, score.Answered]:
        """Answers to all rows, and to those whose outputs are kept."""
        if len(some) == len(every):
            return (found := score.on_split(predictor, store, "test", every)), found
        found = score.on_split(predictor, store, "test", every, keep=False)
        return found, score.on_split(predictor, store, "test", some)

    float_answers, some_float = asked(inference_predictor.Predictor(parent_folder, parent))
    batched, some_small = asked(small)
    alone = score.on_split(small, store, "test", alone_rows, batch_rows=1)
    together = score.Answered(some_small.outputs[: len(alone_rows)], some_small.outcomes.take(alone_rows))

    def flips(found: score.Answered, other: score.Answered, rows: Ints) -> float:
        targets = store.targets("test", rows)
        one, two = (fallback.decided(small.task, small.head, side, targets).answers for side in (found, other))
        return fallback.flips(one, two)

    report = {
        "test": score.scores(small, batched, store),
        "parent": score.scores(small, float_answers, store),
        "flips_against_parent": flips(some_small, some_float, some),
        **({} if len(some) == len(every) else {"flips_rows": len(some)}),
        "flips_alone_against_batch": flips(alone, together, alone_rows),
        "largest_logit_difference_alone_against_batch": farthest(alone.outputs, together.outputs),
        "parent_size_mb": round(artifact.size_mb(parent_folder, parent.engine), 2),
    }
    return report, (float_answers, batched)


def _kept(predictor: inference_predictor.Predictor, store: Store) -> int:
    """The outputs of how many test rows are held in memory at a time: of masked text a row has one for each piece of
    the vocabulary and each mask, megabytes."""
    rows = store.rows("test")
    probed = score.on_split(predictor, store, "test", np.arange(min(rows, PROBED))).outputs
    each = sum(one.nbytes for one in probed) / max(1, len(probed))
    return min(rows, max(len(probed), int(OUTPUT_BYTES / max(1.0, each))))


def farthest(left: Sequence[Floats], right: Sequence[Floats]) -> float:
    """The largest difference of a logit of the same rows. A short row of masked text may have none, as no token is
    masked."""
    return max(
        (float(np.abs(one - other).max(initial=0.0)) for one, other in zip(left, right, strict=True)), default=0.0
    )


def _reference(draft: Path, store: Store) -> dict[str, Any]:
    """What the answers of the int8 artefact look like: they are not quite its parent's."""
    made = inference_predictor.Predictor(draft, artifact.read(draft))
    rows = np.arange(min(store.rows("valid"), REFERENCE_ROWS))
    outcomes = score.on_split(made, store, "valid", rows).outcomes
    return drift_baseline.measure(made.task, made.head, store, outcomes, drift_baseline.unknown_id(made.tokenizer))


def _is_trimmed(run: Path, parent: artifact.Artifact) -> bool:
    """Whether the model had its pieces chosen before it was trained. Where none had to go, as in a student whose
    teacher was trimmed, its settings alone say so."""
    made = Run(run)
    by_settings = made.exists and configuration.load(str(made.config)).recipe.compress.vocabulary == "trim"
    return by_settings or "vocabulary" in parent.lineage


def store_of(run: Path) -> Path:
    """The token store that a run was trained from."""
    created = Run(run).first("created")
    if created is None:
        raise UserError(f"{run} holds no run; name the folder of a finished one", code="not_a_run")
    return Path(created["store"])
