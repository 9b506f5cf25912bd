"""The gate at the end of a search: the winner beside the recipe's own settings, on rows that have steered no rung."""

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

NAMES = ("_name_or_path", "transformers_version")
"""Keys of config.json that say nothing of how a model is computed."""


def run(
    search: Run,
    winner: int,
    config: Config,
    say: Callable[[dict[str, Any]], None],
    teacher: Path | None = None,
) -> dict[str, Any] | None:
    """Gate the winner against trial 0, or a student against the artefact of its teacher, and write the verdict into its
    artefact; returns the gate's document.

    None where there is nothing to compare: trial 0 has won itself, or did not come to its end, or the token store is
    gone. The rows are those that `tune.held_back` has held back; where none were, the test rows. `config` is the
    search's. A winner that has its verdict already is not asked again.
    """
    base, won = search.trial(0), search.trial(winner)
    if won.store is None or (teacher is None and (winner == 0 or not base.finished)):
        return None
    made = artifact.read(won.artifact)
    if made.gate is not None and made.gate.get("version") == made.version:
        return dict(made.gate)
    store, other = open_store(won.store), teacher or base.artifact
    held = holdout_scores.held(store, config.deploy.tune.held_back)
    own = score.trained_from(other, artifact.read(other, verify=False), beside=store)
    both = gate.Sides(
        won.artifact,
        other,
        store,
        trained=own,
        threads=config.deploy.serve.threads,
        among=(holdout_scores.SPLIT, held) if len(held) else None,
        timed=not is_computed_alike(won.artifact, other),
        further=() if own is None else (own,),
    )
    # A search has taken longer than a plain model does; its rows are often a part of the validation rows.
    found = gate.run(both, config.recipe.gate, fits=True, on_event=say)
    gate.record(won.artifact, found)
    return found


def is_computed_alike(one: Path, other: Path) -> bool:
    """Whether two artefacts differ in their weights alone, so that any difference in latency is the machine's."""
    return _computed(one) == _computed(other)


def _computed(folder: Path) -> tuple[Any, ...]:
    made = artifact.read(folder, verify=False)
    document = json_files.read(folder / "config.json")
    network = {name: value for name, value in document.items() if name not in NAMES}
    facts = {
        name: fact for name, fact in made.facts.items() if name != drift_baseline.ABSTAIN
    }  # follows from the weights
    return made.engine, made.max_tokens, facts, network, (folder / "tokenizer.json").read_bytes()
