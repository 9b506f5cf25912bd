"""The artifact of a run, and its scores on running text.

Rows of a tagging task have words that an annotator has split; an endpoint gets running text. The words of held-out rows
show the characters at which the data set splits (`text_segmentation.find_word_cuts`), and requests are split at the
same characters. The same rows, joined to running text, measure the endpoint's answers.
"""

import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rtrain.config import Recipe
from rtrain.config.recipe import NEUTRAL_ROW_SETTINGS, drop_neutral
from rtrain.core import engines, plugins
from rtrain.core.ragged import Head, RaggedArray
from rtrain.core.run_folder import Run
from rtrain.core.text_segmentation import find_word_cuts
from rtrain.data.store.store import Store
from rtrain.inference import artifact, drift_baseline, predictor, score
from rtrain.metrics import scores
from rtrain.metrics.entities import to_tag_names
from rtrain.models import long_texts, model_files, network_parts, pooling
from rtrain.runs import trim_vocabulary
from rtrain.tasks import base
from rtrain.tasks.encode import load_tokenizer, resolve_window_spec
from rtrain.trainer import trainer

if TYPE_CHECKING:
    import torch
    import transformers

MAX_RUNNING_TEXT_ROWS = 1000
"""Maximum rows of a split that are scored as running text."""
HELD_OUT_SPLITS = ("test", "valid")


def export_artifact(
    network: "transformers.PreTrainedModel",
    source: Path,
    context: trainer.TrainingContext,
    outcome: trainer.TrainingResult,
    validation_results: RaggedArray | None = None,
    *,
    weights: "Mapping[str, torch.Tensor]",
) -> Path:
    """Write the run's artifact from full `weights`, atomically through a hidden draft.

    `validation_results`: results of the validation rows; the artifact keeps their histograms.
    """
    draft = context.run.folder / f".artifact.{uuid.uuid4().hex[:8]}"
    attention_window = long_texts.attention_window(network.config)
    max_tokens = resolve_window_spec(context.task, context.recipe.data).max_tokens
    write_model(network, source, draft, context.recipe, context.head, weights=network_parts.drop_auxiliary(weights))
    baseline, abstain_facts, digests = {}, {}, plugins.owner_digests("task", context.recipe.task)
    if validation_results is not None:
        unknown_id = drift_baseline.find_unknown_id(load_tokenizer(source, max_tokens))
        baseline = drift_baseline.build_split_baseline(
            context.task, context.head, context.store, validation_results, unknown_id
        )
        abstain_facts = drift_baseline.choose_abstain_threshold(
            context.task, context.head, validation_results, context.store.targets("valid")
        )
    new_artifact = artifact.Artifact(
        name=context.recipe.name,
        task=context.recipe.task,
        labels=context.store.manifest.labels,
        max_tokens=max_tokens,
        engine=engines.FLOAT_ENGINE,
        facts={
            **context.head.facts,
            **({pooling.FACT: "mean"} if context.recipe.model.pooling == "mean" else {}),
            **({long_texts.FACT: attention_window} if attention_window is not None else {}),
            **abstain_facts,
            **find_word_boundaries(context.task, context.store),
            **({artifact.PLUGINS_FACT: digests} if digests else {}),
        },
        data=drop_neutral(
            context.recipe.data.model_dump(mode="json", include=set(artifact.ROW_FORMAT_SETTINGS)),
            NEUTRAL_ROW_SETTINGS,
        ),
        metrics=outcome.scores,
        drift_baseline=baseline,
        lineage={
            "run": context.run.name,
            "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "recipe": context.recipe.recipe_digest(),
            "model": context.recipe.model.name,
            "data_digest": context.store.manifest.digest,
            "order_digest": outcome.ledger,
            "best_step": outcome.best_step,
            **({"averaged_steps": list(outcome.averaged_steps)} if outcome.averaged_steps else {}),
            **({"teacher": teacher} if (teacher := context.recipe.distill.teacher) else {}),
            **({"co_teachers": list(co_teachers)} if (co_teachers := context.recipe.distill.co_teachers) else {}),
            **trim_vocabulary.vocabulary_lineage(context.run),
        },
    )
    artifact.write_artifact(
        draft, new_artifact, predictor.compute_golden_logits, predictor.make_golden_inputs(context.task, context.head)
    )
    return artifact.publish_artifact(draft, context.run.artifact)


def write_model(
    network: "transformers.PreTrainedModel",
    source: Path,
    folder: Path,
    recipe: Recipe,
    head: Head,
    *,
    weights: "Mapping[str, torch.Tensor] | None" = None,
) -> None:
    """Write the files that other programs load: weights, config.json, tokenizer, sentence-transformers layout.

    A model that other programs would compute differently is written so that they refuse it. `weights`: see
    `model_files.save_weights`.
    """
    task, attention_window = base.get_task(recipe.task), long_texts.attention_window(network.config)
    is_guarded = recipe.model.pooling == "mean" or attention_window is not None or not task.has_standard_head
    scale = (head.facts["mean"], head.facts["std"]) if task.problem_type == "regression" else None
    model_files.save_weights(network, folder, guard_head=is_guarded, weights=weights, scale=scale)
    reading = resolve_window_spec(task, recipe.data)
    model_files.write_tokenizer_files(source, folder, reading.max_tokens, reading.stride, task.parses_special_tokens)
    # With a window, other encoders would attend to all tokens.
    if attention_window is None and (pooling_mode := find_sentence_pooling(recipe, source)):
        pooling.write_sentence_files(folder, pooling_mode, network.config.hidden_size, reading.max_tokens, source)


def find_sentence_pooling(recipe: Recipe, source: Path) -> str | None:
    """Return how other programs should pool the encoder: as the run trained it or, for token-level tasks, as the model
    of `source` was pooled. None if it is no sentence encoder, or if its vectors need more than pooling."""
    if recipe.model.pooling == "mean":
        return "mean"
    if pooling.find_unsupported(source):
        return None
    base_pooling = pooling.read_pooling(source)
    return base_pooling if base.get_task(recipe.task).is_token_level or base_pooling == "cls" else None


# ------------------------------------------------------------------------------------------------------- running text


def find_word_boundaries(task: base.Task, store: Store) -> dict[str, str]:
    """Return an artifact's facts about characters at which words are split; empty for other tasks."""
    if task.output != "tags":
        return {}
    rows = (row for split in HELD_OUT_SPLITS for row in _read_rows(store, split, store.num_rows(split)))
    return find_word_cuts(word for words, _ in rows for word in words)


def measure_running_text(run: Run, task: base.Task, store: Store) -> None:
    """Add the scores of held-out rows as running text to the log and to the split's file of scores."""
    for split in HELD_OUT_SPLITS if task.output == "tags" else ():
        rows = list(_read_rows(store, split, min(MAX_RUNNING_TEXT_ROWS, store.num_rows(split))))
        if not rows:
            continue
        words, tags = map(list, zip(*rows, strict=True))
        text_scores = score.score_running_text(predictor.Predictor.load(run.artifact), words, tags)
        run.append_event("running_text", split=split, rows=len(rows), scores=text_scores)
        if (document := scores.read_scores(run.scores(split))) is not None:
            running_text = {"rows": len(rows), "scores": text_scores}
            scores.write_scores(run.scores(split), {**document, "running_text": running_text})
        return


def _read_rows(store: Store, split: str, max_rows: int) -> Iterator[tuple[list[str], list[str]]]:
    """Yield (words, tags) of the rows of a split whose words are all in the store."""
    positions = np.arange(max_rows, dtype=np.int64)
    texts = store.kept_texts(split, positions)
    for row_texts, targets in zip(texts, store.targets(split, positions), strict=True):
        words = [] if row_texts is None else row_texts[0].split(" ")
        tags = to_tag_names(targets[targets >= -1], store.manifest.head)
        if words and len(words) == len(tags):
            yield words, tags
