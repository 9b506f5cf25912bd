"""The gate at the end of a search: the winner against trial 0, on the holdout rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rtrain.config import Config
from rtrain.core import json_files
from rtrain.core.run_folder import Run
from rtrain.data.store.store import open_store
from rtrain.evaluation import gate
from rtrain.inference import artifact, drift_baseline, score
from tune import holdout_scores

IGNORED_CONFIG_KEYS = ("_name_or_path", "transformers_version")
"""Keys of config.json that do not affect the computation."""


def gate_winner(
    search: Run,
    winner: int,
    config: Config,
    on_event: Callable[[dict[str, Any]], None],
    teacher: Path | None = None,
) -> dict[str, Any] | None:
    """Gate the winner against trial 0, or a student against its teacher's artifact; record and return the verdict.

    An existing verdict on this version is returned. The rows are the holdout rows, or the test rows without holdout
    rows. Returns None if trial 0 is the winner or not finished, or the token store is removed. `config` is the
    search's.

    """
    baseline, winner_run = search.trial(0), search.trial(winner)
    if winner_run.token_store is None or (teacher is None and (winner == 0 or not baseline.is_finished)):
        return None
    winner_artifact = artifact.read_artifact(winner_run.artifact)
    if winner_artifact.gate is not None and winner_artifact.gate.get("version") == winner_artifact.version:
        return dict(winner_artifact.gate)
    store, baseline_artifact = open_store(winner_run.token_store), teacher or baseline.artifact
    holdout = holdout_scores.holdout_rows(store, config.deploy.tune.holdout_fraction)
    training_store = score.find_training_store(
        baseline_artifact, artifact.read_artifact(baseline_artifact, verify=False), sibling_store=store
    )
    gate_request = gate.GateRequest(
        winner_run.artifact,
        baseline_artifact,
        store,
        training_store=training_store,
        threads=config.deploy.serve.threads,
        subset=(holdout_scores.SPLIT, holdout) if len(holdout) else None,
        measures_latency=not is_computed_alike(winner_run.artifact, baseline_artifact),
        extra_stores=() if training_store is None else (training_store,),
    )
    # A plain model is cheap relative to a search; the holdout rows are part of the validation rows.
    gate_document = gate.run_gate(gate_request, config.recipe.gate, trains_rivals=True, on_event=on_event)
    gate.record_verdict(winner_run.artifact, gate_document)
    return gate_document


def is_computed_alike(first: Path, second: Path) -> bool:
    """Return whether two artifacts differ in their weights alone, so that their latency is the same."""
    return _computation_key(first) == _computation_key(second)


def _computation_key(folder: Path) -> tuple[Any, ...]:
    loaded = artifact.read_artifact(folder, verify=False)
    document = json_files.load_json_object(folder / "config.json")
    network = {name: value for name, value in document.items() if name not in IGNORED_CONFIG_KEYS}
    facts = {
        name: fact for name, fact in loaded.facts.items() if name != drift_baseline.ABSTAIN_FACT
    }  # follows from the weights
    return loaded.engine, loaded.max_tokens, facts, network, (folder / "tokenizer.json").read_bytes()
