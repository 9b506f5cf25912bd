"""Paraphrases and back-translations of training texts, by any encoder-decoder model of transformers.

Decoding is greedy, or by beams if several variants are asked for; no random number is drawn. Padding changes logits by
rounding errors. Where two tokens are about equally probable, a text can therefore come out differently in another
batch. So callers must keep what was made, and not make it again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rtrain.core.errors import UserError


@dataclass(frozen=True)
class Rewriter:
    """A loaded model and how to ask it."""

    model: Any
    tokenizer: Any
    prefix: str = ""
    """Written before each text, for models that are told their job (`paraphrase: `)."""
    count: int = 1
    """Variants per text. One is decoded greedily, several with as many beams."""
    max_tokens: int = 512
    """Texts of more tokens, or of more than the model has positions, are not rewritten: half of a text, rewritten, is
    no variant of the text."""
    batch: int = 16
    """Texts decoded together."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of `generate`, such as the `forced_bos_token_id` that names a target language."""

    def generate(self, texts: Sequence[str]) -> list[list[str]]:
        """The complete outputs for each text, best first; none for a text that is empty or too long."""
        import torch

        found: list[list[str]] = [[] for _ in texts]
        lengths = (
            [len(ids) for ids in self.tokenizer([self.prefix + text for text in texts]).input_ids] if texts else []
        )
        positions = getattr(self.model.config, "max_position_embeddings", None) or math.inf  # T5 counts none
        most = min(self.max_tokens, positions)
        fit = [row for row, length in enumerate(lengths) if texts[row].strip() and length <= most]
        # Texts of like lengths are batched, which saves padding. The sort is stable: the texts alone decide the
        # batches.
        fit.sort(key=lambda row: lengths[row])
        for start in range(0, len(fit), self.batch):
            rows = fit[start : start + self.batch]
            inputs = self.tokenizer([self.prefix + texts[row] for row in rows], return_tensors="pt", padding=True)
            # One position is the token that decoding starts from.
            longest = int(min(2 * max(lengths[row] for row in rows) + 16, positions - 1))
            with torch.inference_mode():
                ids = self.model.generate(
                    input_ids=inputs.input_ids,
                    attention_mask=inputs.attention_mask,
                    do_sample=False,
                    num_beams=self.count,
                    num_return_sequences=self.count,
                    max_new_tokens=longest,
                    **self.options,
                )
            for index, output in enumerate(ids.tolist()):
                # An output that ends at `max_new_tokens` was cut off there: BART and its kin are given an end token.
                if self._ends & set(output[1:longest]):
                    text = self.tokenizer.decode(output, skip_special_tokens=True).strip()
                    found[rows[index // self.count]].append(text)
        return found

    @property
    def _ends(self) -> set[int]:
        end = self.model.generation_config.eos_token_id
        return set(end) if isinstance(end, list) else {end}


def check(name: str) -> None:
    """Raise `UserError` if `load` could not load the model of a folder. Its weights are not read."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
        AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise _refused(name, str(error).strip() or type(error).__name__) from None
    if not config.is_encoder_decoder:
        raise _refused(name, f"a {config.model_type} model has no decoder")
    if Path(name).is_dir() and not any(Path(name).glob("*.safetensors")):
        raise _refused(name, "the folder has no *.safetensors")


def _refused(name: str, reason: str) -> UserError:
    return UserError(
        f"{name} cannot be loaded as a model that rewrites texts: {reason.splitlines()[0]}. Name an encoder-decoder "
        "model of transformers with safetensors weights (a hub name or a folder), such as a T5 model, or a Marian one, "
        "whose tokenizer needs pip install sentencepiece.",
        code="unsupported_model",
    )


def load(name: str, **settings: Any) -> Rewriter:
    """The model of a folder, on the CPU, from safetensors; `settings` are fields of `Rewriter`.

    Raises `UserError` if it cannot be loaded.
    """
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
        model = AutoModelForSeq2SeqLM.from_pretrained(
            name, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError) as error:
        raise _refused(name, str(error).strip() or type(error).__name__) from None
    return Rewriter(model.eval(), tokenizer, **settings)


def paraphrases(model: Rewriter, texts: Sequence[str]) -> list[list[str]]:
    """For each text, the variants that the model makes of it, without the text itself and without repetition."""
    return [_new(text, found) for text, found in zip(texts, model.generate(texts), strict=True)]


def back_translations(there: Rewriter, back: Rewriter, texts: Sequence[str]) -> list[list[str]]:
    """For each text, its translations into another language and back, without the text itself and without repetition.

    Source: Sennrich, Haddow and Birch 2016, "Improving Neural Machine Translation Models with Monolingual Data".
    """
    pivots = there.generate(texts)
    returned = iter(back.generate([pivot for row in pivots for pivot in row]))
    variants = [[text for _ in row for text in next(returned)] for row in pivots]
    return [_new(text, found) for text, found in zip(texts, variants, strict=True)]


def _new(text: str, found: Sequence[str]) -> list[str]:
    """The variants that are not empty, and differ from the text and each other by more than case and white space."""
    seen = {"", _form(text)}
    kept = []
    for variant in found:
        if (form := _form(variant)) not in seen:
            seen.add(form)
            kept.append(variant)
    return kept


def _form(text: str) -> str:
    return " ".join(text.casefold().split())
