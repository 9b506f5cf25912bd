"""A float artefact of random weights with a token store of its rows, quantized without Ray and without a gate."""

import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rtrain.compress import calibrate
from rtrain.compress.quantize import SERVING_FILES
from rtrain.config.recipe import QuantizeConfig
from rtrain.data.store.store import Store
from rtrain.inference import artifact, predictor
from tests.support import reports
from tests.support.tiny import CORPUS, MAX_TOKENS, make_encoder, make_store, make_task_artifact

LABELS = "abc"


@dataclass(frozen=True)
class Made:
    folder: Path
    store: Store


def make(folder: Path, rows: int = 150, longest: int = 40, max_tokens: int = MAX_TOKENS) -> Made:
    """An artefact for texts of `max_tokens`, and rows of 3 to `longest` words of the corpus, in any order, so that few
    have another answer by little."""
    samples, words = random.Random(0), " ".join(CORPUS).split()
    texts = [" ".join(samples.choices(words, k=samples.randint(3, longest))) for _ in range(rows)]
    labelled = [(text, LABELS[number % len(LABELS)]) for number, text in enumerate(texts)]
    recipe = reports.settings(folder, labelled).recipe
    store = make_store(recipe, make_encoder(folder / "encoder"), folder)
    created = make_task_artifact(folder / "artifact", recipe.task, store.manifest.head, max_tokens=max_tokens)
    return Made(created, store)


def quantize(made: Made, draft: Path, parent: Path | None = None, **settings: Any) -> dict[str, Any]:
    """The report of the int8 graph that is written into `draft`, of `made` or of another artefact for its rows."""
    draft.mkdir(parents=True)
    folder = parent or made.folder
    job = calibrate.QuantizationJob(
        folder, artifact.read_artifact(folder), made.store, QuantizeConfig(**settings), draft, threads=1
    )
    return calibrate.quantize_graph(job, lambda doing, word: None)


def complete(made: Made, folder: Path, **settings: Any) -> Path:
    """The int8 artefact of `made`, golden answers and manifest included; nothing has scored or gated it."""
    quantize(made, folder, **settings)
    for name in SERVING_FILES:
        if (made.folder / name).is_file():
            shutil.copyfile(made.folder / name, folder / name)
    before = artifact.read_artifact(made.folder)
    after = replace(before, engine=QuantizeConfig(**settings).engine, golden=(), lineage={"parent": before.version})
    artifact.write_artifact(folder, after, predictor.compute_golden_logits)
    return folder
