"""Paraphrases and back-translations of training texts, by any encoder-decoder model of transformers.

Decoding is greedy, or by beams if several variants are asked for; no random number is drawn. Padding changes logits by
rounding errors. If two tokens are about equally probable, a text can get another variant in another batch. So a stage
of Ray Data before tokenization stores the variants, in chunks that hold the same texts for any number of processes:

<store>/rewritten/<file>-<chunk>.arrow     content (u64), texts (list of strings)
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from rtrain import ray_internals
from rtrain.config import AugmentConfig
from rtrain.core.errors import UserError
from rtrain.data.store.store import map_table, write_table


@dataclass(frozen=True)
class Seq2SeqRewriter:
    """A loaded encoder-decoder model and its generation settings."""

    model: Any
    tokenizer: Any
    prefix: str = ""
    """Written before each text, for models that expect a task prefix (`paraphrase: `)."""
    num_variants: int = 1
    """Variants per text. One is decoded greedily, several with as many beams."""
    max_tokens: int = 512
    """Texts of more tokens, or of more than the model has positions, are not rewritten: a rewritten half of a text is
    not a variant of the text."""
    batch_size: int = 16
    """Texts decoded together."""
    generate_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of `generate`, such as the `forced_bos_token_id` that names a target language."""

    def generate(self, texts: Sequence[str]) -> list[list[str]]:
        """The complete outputs for each text, best first; none for a text that is empty or too long."""
        import torch

        outputs: list[list[str]] = [[] for _ in texts]
        if not texts:
            return []
        lengths = [len(ids) for ids in self.tokenizer([self.prefix + text for text in texts]).input_ids]
        positions = getattr(self.model.config, "max_position_embeddings", None) or math.inf  # T5 counts none
        max_input_tokens = min(self.max_tokens, positions)
        fit = [row for row, length in enumerate(lengths) if texts[row].strip() and length <= max_input_tokens]
        # Texts of like lengths are batched, which saves padding. The sort is stable: the texts alone decide the
        # batches.
        fit.sort(key=lambda row: lengths[row])
        for start in range(0, len(fit), self.batch_size):
            rows = fit[start : start + self.batch_size]
            inputs = self.tokenizer([self.prefix + texts[row] for row in rows], return_tensors="pt", padding=True)
            # One position is the token that decoding starts from.
            max_new_tokens = int(min(2 * max(lengths[row] for row in rows) + 16, positions - 1))
            with torch.inference_mode():
                ids = self.model.generate(
                    input_ids=inputs.input_ids,
                    attention_mask=inputs.attention_mask,
                    do_sample=False,
                    num_beams=self.num_variants,
                    num_return_sequences=self.num_variants,
                    max_new_tokens=max_new_tokens,
                    **self.generate_kwargs,
                )
            for index, output in enumerate(ids.tolist()):
                # An output that ends at `max_new_tokens` was cut off there: BART and its kin are given an end token.
                if self._eos_token_ids & set(output[1:max_new_tokens]):
                    text = self.tokenizer.decode(output, skip_special_tokens=True).strip()
                    outputs[rows[index // self.num_variants]].append(text)
        return outputs

    @property
    def _eos_token_ids(self) -> set[int]:
        end = self.model.generation_config.eos_token_id
        return set(end) if isinstance(end, list) else {end}


def check_model(name: str) -> None:
    """Raise `UserError` if `load_rewriter` could not load the model of a folder. Its weights are not read."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
        AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise _load_error(name, str(error).strip() or type(error).__name__) from None
    if not config.is_encoder_decoder:
        raise _load_error(name, f"a {config.model_type} model has no decoder")
    if Path(name).is_dir() and not any(Path(name).glob("*.safetensors")):
        raise _load_error(name, "the folder has no *.safetensors")


def _load_error(name: str, reason: str) -> UserError:
    return UserError(
        f"{name} cannot be loaded as a model that rewrites texts: {reason.splitlines()[0]}. Name an encoder-decoder "
        "model of transformers with safetensors weights (a hub name or a folder), such as a T5 model, or a Marian one, "
        "whose tokenizer needs pip install sentencepiece.",
        code="unsupported_model",
    )


def load_rewriter(name: str, **settings: Any) -> Seq2SeqRewriter:
    """The model of a folder, on the CPU, from safetensors; `settings` are fields of `Seq2SeqRewriter`.

    Raises `UserError` if it cannot be loaded.
    """
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
        model = AutoModelForSeq2SeqLM.from_pretrained(
            name, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError) as error:
        raise _load_error(name, str(error).strip() or type(error).__name__) from None
    return Seq2SeqRewriter(model.eval(), tokenizer, **settings)


def paraphrase_texts(model: Seq2SeqRewriter, texts: Sequence[str]) -> list[list[str]]:
    """For each text, the variants that the model makes of it, without the text itself and without repetition."""
    return [_filter_variants(text, candidates) for text, candidates in zip(texts, model.generate(texts), strict=True)]


def back_translate(to_pivot: Seq2SeqRewriter, from_pivot: Seq2SeqRewriter, texts: Sequence[str]) -> list[list[str]]:
    """For each text, its translations into another language and back, without the text itself and without repetition.

    Source: Sennrich, Haddow and Birch 2016, "Improving Neural Machine Translation Models with Monolingual Data".
    """
    pivots = to_pivot.generate(texts)
    translations = iter(from_pivot.generate([pivot for row in pivots for pivot in row]))
    variants = [[text for _ in row for text in next(translations)] for row in pivots]
    return [_filter_variants(text, candidates) for text, candidates in zip(texts, variants, strict=True)]


def _filter_variants(text: str, variants: Sequence[str]) -> list[str]:
    """The variants that are not empty, and differ from the text and each other by more than case and white space."""
    seen = {"", _normalize(text)}
    distinct_variants = []
    for variant in variants:
        if (form := _normalize(variant)) not in seen:
            seen.add(form)
            distinct_variants.append(variant)
    return distinct_variants


def _normalize(text: str) -> str:
    return " ".join(text.casefold().split())


# ------------------------------------------------------------------------------------------------ the stage of Ray Data

FOLDER = "rewritten"
CHUNK_SIZE = 64
"""Texts that a model is given in one call."""

TextIterator = Callable[[dict[str, Any]], Iterable[tuple[int, str]]]
"""Maps a task of `read_tasks.plan_tasks` to the (content hash, text) of each training row of its file."""


class RewriteActor:
    """A Ray actor that loads the models once. A call with a chunk writes the chunk's file, and returns counts."""

    def __init__(self, settings: AugmentConfig, folder: Path):
        self._folder = folder
        pivot = settings.back_translation_model
        self._to_pivot = None if pivot is None else load_rewriter(pivot)
        options = {"prefix": settings.prefix, "num_variants": settings.variants}
        self._rewriter = load_rewriter(settings.paraphrase or "", **options)

    def __call__(self, chunk: dict[str, Any]) -> dict[str, Any]:
        texts = [str(text) for text in chunk["texts"]]
        variants = (
            paraphrase_texts(self._rewriter, texts)
            if self._to_pivot is None
            else back_translate(self._to_pivot, self._rewriter, texts)
        )
        write_chunk(self._folder, chunk, variants)
        return {"rows": len(texts), "texts": sum(map(len, variants))}


def iter_chunks(task: dict[str, Any], texts: TextIterator) -> Iterator[dict[str, Any]]:
    """The texts of a file, `CHUNK_SIZE` at a time."""
    rows = iter(texts(task))
    for number in itertools.count():
        part = list(itertools.islice(rows, CHUNK_SIZE))
        if not part:
            return
        content, chunk_texts = zip(*part, strict=True)
        # The hashes go as text, since Ray would turn integers beyond 2^63 into an array of floats.
        keys = [str(key) for key in content]
        yield {"file": task["number"], "chunk": number, "content": keys, "texts": list(chunk_texts)}


def rewrite_texts(tasks: list[dict[str, Any]], texts: TextIterator, settings: AugmentConfig, folder: Path) -> None:
    """Write the chunks of all files under `folder`, with as many processes as there are free CPUs."""
    import ray.data

    ray_internals.disable_data_actors()
    (folder / FOLDER).mkdir()
    dataset = ray.data.from_items(tasks, override_num_blocks=len(tasks)).flat_map(partial(iter_chunks, texts=texts))
    pool = ray.data.ActorPoolStrategy(min_size=1, max_size=64)
    arguments = {"settings": settings, "folder": folder}
    rewriter: Any = RewriteActor  # Ray's annotation leaves out classes
    dataset.map(rewriter, fn_constructor_kwargs=arguments, compute=pool).materialize()


def write_chunk(folder: Path, chunk: dict[str, Any], texts: list[list[str]]) -> None:
    """Write the file of a chunk; `texts` are the new texts for each of its rows."""
    content = pa.array([int(key) for key in chunk["content"]], pa.uint64())
    table = pa.table({"content": content, "texts": pa.array(texts, pa.list_(pa.string()))})
    write_table(folder / FOLDER / f"{chunk['file']:06d}-{chunk['chunk']:06d}.arrow", table)


def read_rewritten(folder: Path, task_number: int) -> dict[int, list[str]]:
    """The rewritten texts of a file's rows, by the hash of the row's content; or an empty mapping."""
    variants_by_hash: dict[int, list[str]] = {}
    for path in sorted((folder / FOLDER).glob(f"{task_number:06d}-*.arrow")):
        table = map_table(path)
        variants_by_hash.update(zip(table["content"].to_pylist(), table["texts"].to_pylist(), strict=True))
    return variants_by_hash
