"""The holdout rows of a search: the scores of finished trials on them, and the gate of the winner.

The score of the best of several trials is biased on the rows that selected it (Cawley & Talbot 2010). So the rungs use
one part of the validation rows, the steering rows, and the finals use the other, the holdout rows. The part of a row is
a hash of its content, the same on every machine, in every attempt and with any number of workers.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rtrain import config as configuration
from rtrain.config import Config
from rtrain.core import json_files
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.data.row_reader import DataSource
from rtrain.data.splits import Splits
from rtrain.data.store import commit
from rtrain.data.store.store import Store, open_store
from rtrain.evaluation import gate, pairing, row_scores
from rtrain.inference import artifact, drift_baseline, score
from rtrain.metrics.bootstrap import Bools, Ints
from rtrain.tasks import base
from tune import finals
from tune.difference_ci import HoldoutScores
from tune.history import History

HASH_KEY = np.uint64(0x5EA2C40F4E1DBAC7)
"""Makes this hash independent of other uses of row ids."""
SPLIT = "valid"
IGNORED_CONFIG_KEYS = ("_name_or_path", "transformers_version")
"""Keys of config.json that do not affect the computation."""
MIN_HOLDOUT_ROWS = 200
"""Minimum holdout rows: with fewer, each seed of the finals has its own validation rows (`count_folds`)."""


def holdout_mask(row_ids: npt.NDArray[np.uint64], holdout_share: float) -> Bools:
    """Return which validation rows are holdout rows, (rows,); about that share of them.

    `row_ids` are the ids of all validation rows, in any order. Rows with equal texts and labels are in one part; rows
    with equal texts and different labels may not be. Each part has at least one of two or more rows, unless the share
    is 0; a single row is never a holdout row.
    """
    if holdout_share == 0 or len(row_ids) < 2:
        return np.zeros(len(row_ids), dtype=np.bool_)
    first_ids = commit.find_first_occurrences(row_ids)
    hashes = _hash_ids(first_ids)
    is_holdout = hashes < np.uint64(min(int(holdout_share * 2**64), 2**64 - 1))
    if is_holdout.all() == is_holdout.any():
        # All of a few rows are in one part: move the row with the nearest hash, and its equals, to the other.
        nearest = hashes == (hashes.max() if is_holdout.all() else hashes.min())
        if nearest.all():
            nearest = row_ids == row_ids.max()
        is_holdout = is_holdout ^ nearest
    return is_holdout


def holdout_rows(store: Store, holdout_share: float) -> Ints:
    """Return the positions of the holdout rows among the validation rows of a store."""
    return np.flatnonzero(holdout_mask(store.column(SPLIT, "row_id"), holdout_share))


def steering_rows(store: Store, holdout_share: float) -> Ints:
    """Return the positions of the steering rows among the validation rows of a store."""
    return np.flatnonzero(~holdout_mask(store.column(SPLIT, "row_id"), holdout_share))


def _hash_ids(ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return 64-bit hashes: the finalizer of SplitMix64 (Steele, Lea & Flood 2014)."""
    hashes = ids ^ HASH_KEY
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


def count_folds(config: Config, source: DataSource, store: Store) -> int:
    """Return the number of folds of the validation rows: each seed of the finals uses another one.

    1 if there are enough holdout rows, or `tune.holdout_fraction` is 0. 0 if the validation rows are few and given by a
    file or a column: then all seeds use the same rows.
    """
    holdout_share = config.deploy.tune.holdout_fraction
    if not holdout_share or len(holdout_rows(store, holdout_share)) >= MIN_HOLDOUT_ROWS:
        return 1
    fold_count = Splits.from_config(config.recipe.data, source).num_validation_folds
    return fold_count if fold_count != 1 else 0


def load_holdout_scores(run: Run, holdout_share: float) -> HoldoutScores:
    """Load the scores of a finished run, by its best weights, on the holdout rows.

    All validation rows are used if `holdout_share` is 0, or if the run has another fold than the search
    (`data.validation_fold`), which no rung has used. Raises `UserError` for a run without valid predictions.
    """
    recipe = configuration.load_config(str(run.config)).recipe
    answers, output = pairing.read_answer_file(run, SPLIT), base.get_task(recipe.task).output
    if answers is None:
        raise UserError(f"{run} has no predictions for its validation rows", code="no_answers")
    uses_all_rows = not holdout_share or recipe.data.validation_fold > 0
    is_scored = np.ones(len(answers.ids), dtype=np.bool_) if uses_all_rows else holdout_mask(answers.ids, holdout_share)
    rows = np.flatnonzero(is_scored if is_scored.any() else ~is_scored)
    if output == "number" and not np.isfinite(answers.rows.prediction[rows].astype(np.float64)).all():
        raise UserError(f"{run} has non-finite predictions: its training has diverged", code="diverged")
    sheet = row_scores.RowAnswers(
        target=answers.rows.target[rows],
        prediction=answers.rows.prediction[rows],
        loss=answers.rows.loss[rows],
        facts=artifact.read_artifact(run.artifact, verify=False).facts if run.is_finished else {},
        # Only the scores of a summary need more than the file of predictions.
        store=open_store(run.token_store) if output == "summary" and run.token_store is not None else None,
        split=SPLIT,
        positions=answers.positions[rows],
    )
    scored = row_scores.score_rows(output, sheet)
    return HoldoutScores(scored.headline, answers.ids[rows], scored.scores)


def collect_holdout_scores(
    search: Run, history: History, holdout_share: float, folds: int
) -> dict[finals.FinalRun, HoldoutScores]:
    """Return the scores by final run. A run without valid predictions is left out, and counts as failed."""
    scores_by_run = {}
    original_trials = [(trial.number, trial) for trial in history.original_trials]
    for original, trial in (*original_trials, *finals.repeated_trials(history, folds)):
        if trial.final_result is not None:
            with suppress(UserError):
                scores = load_holdout_scores(search.trial(trial.number), holdout_share)
                scores_by_run[finals.FinalRun(original, trial.seed)] = scores
    return scores_by_run


def gate_winner(
    search: Run, winner: int, config: Config, on_event: Callable[[dict[str, Any]], None], teacher: Path | None = None
) -> dict[str, Any] | None:
    """Gate the winner against trial 0, or a student against its teacher's artifact; record and return the verdict.

    An existing verdict on this version is returned. The rows are the holdout rows, or the test rows without holdout
    rows. Returns None if trial 0 is the winner or not finished, or the token store is removed. `config` is the
    search's.
    """
    default_run, winner_run = search.trial(0), search.trial(winner)
    if winner_run.token_store is None or (teacher is None and (winner == 0 or not default_run.is_finished)):
        return None
    candidate, baseline = winner_run.artifact, teacher or default_run.artifact
    metadata = artifact.read_artifact(candidate)
    if metadata.gate is not None and metadata.gate.get("version") == metadata.version:
        return dict(metadata.gate)
    store = open_store(winner_run.token_store)
    holdout = holdout_rows(store, config.deploy.tune.holdout_fraction)
    baseline_metadata = artifact.read_artifact(baseline, verify=False)
    training_store = score.find_training_store(baseline, baseline_metadata, sibling_store=store)
    request = gate.GateRequest(
        candidate,
        baseline,
        store,
        training_store=training_store,
        threads=config.deploy.serve.threads,
        subset=(SPLIT, holdout) if len(holdout) else None,
        measures_latency=not is_computed_alike(candidate, baseline),
        extra_stores=() if training_store is None else (training_store,),
    )
    # A plain model is cheap relative to a search; the holdout rows are part of the validation rows.
    document = gate.run_gate(request, config.recipe.gate, trains_rivals=True, on_event=on_event)
    gate.record_verdict(candidate, document)
    return document


def is_computed_alike(first: Path, second: Path) -> bool:
    """Return whether two artifacts differ in their weights alone, so that their latency is the same."""

    def key(folder: Path) -> tuple[Any, ...]:
        metadata = artifact.read_artifact(folder, verify=False)
        document = json_files.load_json_object(folder / "config.json")
        network = {name: value for name, value in document.items() if name not in IGNORED_CONFIG_KEYS}
        # The threshold of abstentions follows from the weights.
        facts = {name: fact for name, fact in metadata.facts.items() if name != drift_baseline.ABSTAIN_FACT}
        return metadata.engine, metadata.max_tokens, facts, network, (folder / "tokenizer.json").read_bytes()

    return key(first) == key(second)
