"""Float artifact -> int8 artifact for the engine `quantize.engine`: exported, checked, quantized, gated.

Activation scales are static and come from training rows. Scales that are computed per batch make an answer depend on
the other rows of its batch (I8): dynamic int8 changed logits by a tenth of their range.

The docstring of `rtrain.core.engines` lists the steps for another engine.
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
from rtrain.compress import calibrate
from rtrain.config import Recipe
from rtrain.config.recipe import QuantizeConfig
from rtrain.core import engines, events
from rtrain.core.errors import ConfigError, Problem, UserError
from rtrain.core.ragged import Floats, Head, Ints, RaggedArray
from rtrain.core.run_folder import Run, resolve_artifact
from rtrain.data.store.store import Store
from rtrain.evaluation import gate, gate_table
from rtrain.inference import artifact, drift_baseline, predictor as inference_predictor, score
from rtrain.metrics import operating_points
from rtrain.metrics.classes import OPERATING_POINTS
from rtrain.models import precision
from rtrain.tasks import base

SERVING_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")
"""Files of the float artifact that the int8 artifact needs for serving in rtrain and in other programs. tokenizer.json
holds the vocabulary of vocab.txt too."""
MIN_SCORE_RATIO = 0.995
"""Least share of the float score that int8 should keep. Below it the report recommends the fall-back to float."""
REFERENCE_ROWS = 4000
"""Most validation rows in the histograms of the drift baseline."""
MAX_OUTPUT_BYTES, PROBE_ROWS = 1 << 29, 16
"""Most bytes of one model's outputs in memory, and rows whose outputs estimate the bytes of one row."""
UNBATCHED_ROWS = 4000
"""Most test rows that are also predicted one at a time, to count answers that depend on their batch."""


def run_quantization(
    recipe: Recipe,
    store_folder: Path,
    parent_run: Path,
    out: Path,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    threads: int = 1,
) -> dict[str, Any]:
    """Quantize the artifact of a run and gate it against its parent.

    A refused artifact is written too; `rtrain serve` rejects it.

    Args:
        threads: engine threads of the served artifact.

    Returns:
        The report: scores of both artifacts, changed answers, sizes and the gate document.
    """
    parent_folder = resolve_artifact(parent_run)
    check_output_folder(out)
    parent = artifact.read_artifact(parent_folder)
    if not engines.get_engine(parent.engine).has_gradients:
        raise UserError(
            f"{parent_folder} is quantized already; name the run of its float parent", code="already_quantized"
        )
    if recipe.compress.vocabulary == "trim" and not _is_trimmed(parent_run, parent):
        reason, fix = "a finished model is not trimmed", "trim before rtrain train or rtrain distill"
        raise ConfigError([Problem("compress.vocabulary", "trim", reason, fix, code="conflicting_settings")])
    check_engine_support(recipe.quantize, predicts_tokens=base.get_task(parent.task).output == "tokens")
    gate.check_floors(recipe.gate, parent)
    store = Store(store_folder)
    started_at = time.perf_counter()
    target = out.resolve()  # publishing renames a folder, so a link is resolved first
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    draft.mkdir(parents=True)
    try:
        job = calibrate.QuantizationJob(parent_folder, parent, store, recipe.quantize, draft, threads)
        graph_report = calibrate.quantize_graph(job, lambda text, word: on_event(events.make_phase_event(text, word)))
        for name in SERVING_FILES:
            if (parent_folder / name).is_file():
                shutil.copyfile(parent_folder / name, draft / name)
        lineage = {**parent.lineage, "parent": parent.version, **_lineage_fields(recipe.quantize, graph_report)}
        metadata = replace(parent, engine=recipe.quantize.engine, lineage=lineage, golden=(), metrics={})
        metadata = _choose_operating_points(draft, metadata, store)
        on_event(events.make_phase_event(f"scoring both models on {store.num_rows('test'):,} test rows", "scores"))
        report, both_answers = measure_quantization(parent_folder, draft, parent, metadata, store)
        report |= {
            "engine": metadata.engine,
            "kind": recipe.quantize.kind,
            "host": asdict(precision.detect_int8()),
            **graph_report,
        }
        metadata = replace(metadata, metrics={"test": report["test"]})
        _write_artifact(draft, metadata)
        if recipe.quantize.compressed:
            compress_graph(draft)
        report["size_mb"] = round(artifact.model_size_mb(draft, metadata.engine), 2)
        report["artifact_mb"] = round(sum(path.stat().st_size for path in draft.iterdir()) / 1e6, 2)
        report["gate"] = gate.run_gate(
            gate.GateRequest(draft, parent_folder, store, store, threads, both_answers), recipe.gate, on_event=on_event
        )
        artifact.write_gate_verdict(draft, report["gate"], _measure_drift_baseline(draft, store))
        artifact.publish_artifact(draft, out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    seconds = round(time.perf_counter() - started_at, 2)
    return {**report, "seconds": seconds, "run": str(parent_run), "artifact": str(out)}


def _choose_operating_points(draft: Path, metadata: artifact.Artifact, store: Store) -> artifact.Artifact:
    """Choose the thresholds of the operating points again: the scores of int8 differ from those of its parent."""
    points, rows = metadata.facts.get(OPERATING_POINTS), np.arange(store.num_rows("valid"))
    if not points or not len(rows):
        return metadata
    predictor = inference_predictor.Predictor(draft, metadata)
    valid = score.predict_split(predictor, store, "valid", rows, keep_outputs=False).row_results, store.targets("valid")
    facts = operating_points.choose_operating_points(predictor.task.output, *valid, predictor.head, points)
    return replace(metadata, facts={**metadata.facts, **facts})


def check_output_folder(out: Path) -> None:
    """Raise `UserError` if `out` holds anything but an int8 artifact: the folder is replaced as a whole."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        if not engines.get_engine(artifact.read_artifact(out, verify=False).engine).has_gradients:
            return
    except (UserError, ValueError):  # no artifact, or an unreadable one
        pass
    raise UserError(
        f"--out {out}: the folder holds other files than an int8 artifact, and they would be lost; name a new folder",
        code="not_empty",
    )


def check_engine_support(settings: QuantizeConfig, predicts_tokens: bool = False) -> None:
    """Check the settings before anything is computed. `predicts_tokens`: the model predicts tokens of its vocabulary.

    Raises:
        UserError: the engine is not installed.
        ConfigError: the engine does not support a setting.
    """
    entry = engines.get_engine(settings.engine)
    engines.require_libraries(settings.engine, entry.libraries)
    if settings.embedding_dtype != "int4" or (entry.supports_int4_embedding and not predicts_tokens):
        return
    if entry.supports_int4_embedding:
        reason = "the output layer shares the int8 word table, so a 4-bit copy would add bytes"
        fix = "write quantize.embedding_dtype=int8"
    else:
        names = engines.list_quantized_engines()
        capable_engines = " or ".join(name for name in names if engines.get_engine(name).supports_int4_embedding)
        reason, fix = (
            f"{settings.engine} has no 4-bit embedding table",
            f"write int8, or quantize.engine={capable_engines}",
        )
    raise ConfigError([Problem("quantize.embedding_dtype", "int4", reason, fix, code="unsupported")])


def _lineage_fields(settings: QuantizeConfig, graph_report: dict[str, Any]) -> dict[str, Any]:
    """Fields of the lineage: the settings of the quantization."""
    table = {"embedding_dtype": "int4"} if settings.embedding_dtype == "int4" else {}
    if settings.kind == "weights":
        return {"kind": settings.kind, **table}
    limit, reverted = settings.max_changed_predictions, graph_report.get("fallback", {}).get("reverted")
    return {
        "calibration_rows": settings.calibration_rows,
        **table,
        **({} if limit is None else {"max_changed_predictions": limit}),
        **({"overflow_fix": True} if settings.overflow_fix else {}),
        **({"reverted": reverted} if reverted else {}),
    }


def _write_artifact(draft: Path, metadata: artifact.Artifact) -> None:
    """Write artifact.json, with new golden answers."""
    inputs = inference_predictor.make_golden_inputs(base.get_task(metadata.task), Head(metadata.labels, metadata.facts))
    artifact.write_artifact(draft, metadata, inference_predictor.compute_golden_logits, inputs)


def format_report(report: dict[str, Any]) -> str:
    """Format the report of `run_quantization`: scores and sizes before and after, changed answers, the verdict."""
    parent_scores, quantized_scores = report["parent"], report["test"]
    rows = [
        (name, f"{parent_scores[name]:.4f}", f"{quantized_scores[name]:.4f}")
        for name in quantized_scores
        if name in parent_scores and name != "rows"
    ]
    rows.append(("size", f"{report['parent_size_mb']:.1f} MB", f"{report['size_mb']:.1f} MB"))
    verdict, *rivals = gate_table.format_brief(report["gate"])
    width = max(len(name) for name, *_ in rows)
    table = [f"{name:<{width}}  {old:>10}  {new:>10}" for name, old, new in [("", "float", "int8"), *rows]]
    rows_note = f" (of the first {report['changed_share_rows']:,} rows)" if "changed_share_rows" in report else ""
    changed_share, logit_difference = report["batch_changed_share"], report["batch_max_logit_difference"]
    return "\n".join(
        [
            f"{quantized_scores['rows']:,} test rows, {report['seconds']:.0f} s",
            *table,
            f"answers that differ from the float model's: {report['changed_share']:.2%}{rows_note}",
            f"answers that differ between alone and in a batch: {changed_share:.2%} (logits by "
            f"{logit_difference:.3f} at most)",
            *_format_score_warning(report),
            *(operating_points.format_operating_point(point, "test") for point in report.get(OPERATING_POINTS, ())),
            *_format_graph(report),
            f"gate: {verdict}",
            *rivals,
            f"artifact: {report['artifact']}",
        ]
    )


def _format_score_warning(report: dict[str, Any]) -> list[str]:
    """Recommend the fall-back if int8 loses too much of the headline score, whose sign may be negative."""
    name = next(name for name in report["test"] if name != "rows")
    parent_score, quantized_score = report["parent"][name], report["test"][name]
    score_ratio = 1 - (parent_score - quantized_score) / abs(parent_score) if parent_score else 1.0
    if score_ratio >= MIN_SCORE_RATIO:
        return []
    text = f"int8 keeps {score_ratio:.4f} of the float {name}, less than {MIN_SCORE_RATIO}"
    if report["kind"] == "static" and "fallback" not in report:
        text += (
            f"; some operations in float may keep more: rtrain quantize {report['run']} --set "
            "quantize.max_changed_predictions=0.005"
        )
    return [text]


def _format_graph(report: dict[str, Any]) -> list[str]:
    lines = []
    if (export := report.get("export")) is not None:
        lines.append(
            f"exported graph: logits as PyTorch's to {export['max_difference']:.1e}, on {export['rows']} training "
            f"rows of {export['buckets']} lengths"
        )
    if (result := report.get("fallback")) is not None:
        is_short = not result["is_within_limit"]
        shortfall = f", more than the limit of {result['max_changed_share']:.2%}" if is_short else ""
        lines.append(
            f"fall-back: {len(result['reverted'])} of {result['operations']} operations in float; of "
            f"{result['rows']:,} training rows' answers {result['changed_share_before']:.2%} differed, now "
            f"{result['changed_share']:.2%}{shortfall} ({result['seconds']:.0f} s)"
        )
        lines += [f"  in float: {name}" for name in result["reverted"]]
        if result["reverted"]:
            latency_text = ", ".join(
                f"{entry['ms']:.2f} ms in place of {entry['int8_ms']:.2f} ({entry['bucket']})"
                for entry in result["latency"]
            )
            lines.append(f"  it costs {result['megabytes_added']:.1f} MB; {latency_text}")
    if (host := report.get("host")) is not None:
        lines.append(precision.Int8Support(**host).summary)
    return lines


def compress_graph(draft: Path) -> None:
    """Compress the graph of a finished artifact. Its version changes."""
    metadata = artifact.read_artifact(draft)
    for path in engines.get_engine(metadata.engine).find_files(draft):
        # No timestamp, so that the same graph has the same bytes.
        (draft / f"{path.name}{engines.COMPRESSED_SUFFIX}").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        path.unlink()
    _write_artifact(draft, replace(metadata, golden=(), lineage={**metadata.lineage, "compressed": True}))


def measure_quantization(
    parent_folder: Path, draft: Path, parent: artifact.Artifact, metadata: artifact.Artifact, store: Store
) -> tuple[dict[str, Any], tuple[score.PredictedRows, score.PredictedRows]]:
    """Score both artifacts on the test rows and count changed answers.

    If the outputs of all test rows do not fit into memory, the shares cover the first `changed_share_rows` rows, and
    the returned answers have no outputs.

    Returns:
        (scores, and shares of changed answers: int8 against float, alone against batched; answers of parent and int8)
    """
    predictor, all_rows = inference_predictor.Predictor(draft, metadata), np.arange(store.num_rows("test"))
    memory_rows = all_rows[: _count_rows_in_memory(predictor, store)]
    unbatched_rows = memory_rows[:UNBATCHED_ROWS]

    def answer_rows(engine_predictor: inference_predictor.Predictor) -> tuple[score.PredictedRows, score.PredictedRows]:
        """Predict all rows, and the rows whose outputs stay in memory."""
        if len(memory_rows) == len(all_rows):
            return (answered := score.predict_split(engine_predictor, store, "test", all_rows)), answered
        answered = score.predict_split(engine_predictor, store, "test", all_rows, keep_outputs=False)
        return answered, score.predict_split(engine_predictor, store, "test", memory_rows)

    float_answers, float_subset = answer_rows(inference_predictor.Predictor(parent_folder, parent))
    batched, int8_subset = answer_rows(predictor)
    unbatched = score.predict_split(predictor, store, "test", unbatched_rows, batch_size=1)
    batched_subset = score.PredictedRows(
        int8_subset.outputs[: len(unbatched_rows)], int8_subset.row_results.take(unbatched_rows)
    )

    def changed_share(left: score.PredictedRows, right: score.PredictedRows, rows: Ints) -> float:
        targets = store.targets("test", rows)
        answers = (
            calibrate.collect_graph_answers(predictor.task, predictor.head, predicted, targets).answers
            for predicted in (left, right)
        )
        return calibrate.changed_share(*answers)

    report = {
        "test": score.compute_scores(predictor, batched, store),
        "parent": score.compute_scores(predictor, float_answers, store),
        **_measure_points(predictor, batched.row_results, store),
        "changed_share": changed_share(int8_subset, float_subset, memory_rows),
        **({} if len(memory_rows) == len(all_rows) else {"changed_share_rows": len(memory_rows)}),
        "batch_changed_share": changed_share(unbatched, batched_subset, unbatched_rows),
        "batch_max_logit_difference": max_logit_difference(unbatched.outputs, batched_subset.outputs),
        "parent_size_mb": round(artifact.model_size_mb(parent_folder, parent.engine), 2),
    }
    return report, (float_answers, batched)


def _measure_points(
    predictor: inference_predictor.Predictor, row_results: RaggedArray, store: Store
) -> dict[str, list[dict[str, Any]]]:
    """Measure the operating points on the test rows; empty without points."""
    answers = predictor.task.output, row_results, store.targets("test"), predictor.head
    points = operating_points.measure_operating_points(*answers)
    return {OPERATING_POINTS: points} if points else {}


def _count_rows_in_memory(predictor: inference_predictor.Predictor, store: Store) -> int:
    """Test rows whose outputs fit into memory. A row of masked text has megabytes: one logit per mask and vocabulary
    token."""
    rows = store.num_rows("test")
    probe_outputs = score.predict_split(predictor, store, "test", np.arange(min(rows, PROBE_ROWS))).outputs
    bytes_per_row = sum(output.nbytes for output in probe_outputs) / max(1, len(probe_outputs))
    return min(rows, max(len(probe_outputs), int(MAX_OUTPUT_BYTES / max(1.0, bytes_per_row))))


def max_logit_difference(left: Sequence[Floats], right: Sequence[Floats]) -> float:
    """Largest logit difference of the same rows; 0 for rows without a masked token."""
    return max(
        (float(np.abs(one - other).max(initial=0.0)) for one, other in zip(left, right, strict=True)), default=0.0
    )


def _measure_drift_baseline(draft: Path, store: Store) -> dict[str, Any]:
    """Measure the drift baseline of the int8 artifact; its answers differ slightly from its parent's."""
    predictor = inference_predictor.Predictor(draft, artifact.read_artifact(draft))
    rows = np.arange(min(store.num_rows("valid"), REFERENCE_ROWS))
    outcomes = score.predict_split(predictor, store, "valid", rows).row_results
    return drift_baseline.build_split_baseline(
        predictor.task, predictor.head, store, outcomes, drift_baseline.find_unknown_id(predictor.tokenizer)
    )


def _is_trimmed(run: Path, parent: artifact.Artifact) -> bool:
    """Whether the vocabulary was trimmed before training. A student of a trimmed teacher shows it in its settings
    alone."""
    parent_run = Run(run)
    by_settings = (
        parent_run.exists and configuration.load_config(str(parent_run.config)).recipe.compress.vocabulary == "trim"
    )
    return by_settings or "vocabulary" in parent.lineage


def find_token_store(run: Path) -> Path:
    """Find the token store of a run."""
    created = Run(run).first_event("created")
    if created is None:
        raise UserError(f"{run} holds no run; name the folder of a finished run", code="not_a_run")
    return Path(created["store"])
