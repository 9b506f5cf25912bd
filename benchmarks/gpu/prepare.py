"""Make the folder to carry to a GPU machine that has neither Ray nor data: token stores, the model in half precision,
and a few texts. On that machine, make the model in fp32 again.

    OUT/model/       config.json, tokenizer.json, model.safetensors (fp16)
    OUT/banking77/.tokens/<digest>/      all of its rows; the test rows are the validation rows too
    OUT/squadshifts/.tokens/<digest>/    some thousand questions
    OUT/texts.json   texts of banking77's test rows, for the section `serving_peers`
"""

import csv
import gzip
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rtrain.config import Recipe
    from rtrain.data.store.store import Store

MOST_BYTES = 64 << 20
QUESTIONS = 4000
TEXTS = 256
WINDOW, STRIDE = 256, 96


def prepare(data: Path, out: Path, name: str, questions: int = QUESTIONS) -> dict[str, int]:
    """Make the folder `out` from a folder that holds `banking77` and `squadshifts`; returns bytes by part.

    All rows of banking77 are taken, about a megabyte, since fewer do not reach an accuracy of 0.93.
    """
    from rtrain import config
    from rtrain.models import builder as models_builder

    if out.exists():
        raise SystemExit(f"{out} exists; name a new folder, or remove it")
    source, out = models_builder.resolve_folder(name), out.absolute()
    out.mkdir(parents=True)
    half(source, out / "model")
    positions = json.loads((source / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    bank = {kind: str((data / "banking77" / f"{kind}.csv").absolute()) for kind in ("train", "test")}
    recipe_config = config.load_config(
        "intent", {**intent(), "data.path": bank["train"], "data.test": bank["test"], "data.valid": bank["test"]}
    )
    _store(recipe_config.recipe, source, out / "banking77")
    num_questions = _questions(data / "squadshifts", out / "questions.json", questions)
    window = min(WINDOW, positions)
    squad = {"data.path": str(num_questions), "data.window": window, "data.stride": min(STRIDE, window // 3)}
    _store(config.load_config("squad", squad).recipe, source, out / "squadshifts")
    num_questions.unlink()
    with Path(bank["test"]).open(encoding="utf-8", newline="") as file:
        texts = [row["text"] for row in csv.DictReader(file)][:TEXTS]
    (out / "texts.json").write_text(json.dumps(texts, ensure_ascii=False), encoding="utf-8")
    sizes = {
        part.name: sum(path.stat().st_size for path in [part, *part.rglob("*")] if path.is_file())
        for part in sorted(out.iterdir())
    }
    if sum(sizes.values()) > MOST_BYTES:
        raise SystemExit(f"{out} has {sum(sizes.values()) / 2**20:.0f} MB, more than {MOST_BYTES >> 20}: {sizes}")
    return sizes


def intent() -> dict[str, Any]:
    """The settings of runs on banking77 that shape its token store."""
    return {"data.text": "text", "data.label": "category", "data.max_tokens": 64}


def _store(recipe: "Recipe", source: Path, root: Path) -> "Store":
    """The token store that a run would make, made by the same functions one after another, without Ray."""
    from rtrain.data import row_reader
    from rtrain.data.splits import Splits
    from rtrain.data.store import builder as store_builder, commit, shards, store

    rows = row_reader.inspect_source(recipe.data)
    writer = store.StoreWriter(root / ".tokens" / store_builder.compute_digest(recipe, rows, source))
    job = shards.TokenizeJob(recipe, source, writer.folder, Splits.from_config(recipe.data, rows))
    written = [
        row
        for piece in shards.plan_tasks(rows)
        for part in shards.split_task(piece, recipe)
        for row in shards.write_shards(part, job)
    ]
    return commit.commit_store(job, rows, writer, written)


def _questions(folder: Path, target: Path, count: int) -> Path:
    """Write the first questions of the folder's files as one SQuAD file."""
    articles: list[Any] = []
    for path in sorted(folder.glob("*.json*")):
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            articles += json.load(file)["data"]
    rows, left = [], count
    for article in articles:
        if left <= 0:
            break
        rows.append(article)
        left -= sum(len(paragraph["qas"]) for paragraph in article["paragraphs"])
    target.write_text(json.dumps({"version": "1.1", "data": rows}), encoding="utf-8")
    return target


def half(source: Path, target: Path) -> None:
    """Write a model folder with its weights in fp16, which halves the bytes to carry."""
    _converted(source, target, "float32", "float16")


def widened(source: Path, target: Path) -> None:
    """Write a model folder with its weights in fp32, in which models are trained."""
    _converted(source, target, "float16", "float32")


def _converted(source: Path, target: Path, before: str, after: str) -> None:
    from safetensors.numpy import load_file, save_file

    target.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    (weights,) = source.glob("model.safetensors")
    tensors = {
        name: value.astype(after) if value.dtype == before else value for name, value in load_file(weights).items()
    }
    save_file(tensors, target / weights.name, {"format": "pt"})
