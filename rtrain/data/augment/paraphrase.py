"""Paraphrases and back-translations of training texts, by any encoder-decoder model of transformers.

Decoding is greedy, or by beams where several variants are asked for: no random number is drawn. Padding moves logits by
rounding, so a text can come out differently in another batch where two tokens are equally probable: keep what was made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rtrain.errors import UserError


@dataclass(frozen=True)
class Rewriter:
    """A loaded model and how to ask it."""

    model: Any
    tokenizer: Any
    prefix: str = ""
    """Written before each text, for models that are told their job (`paraphrase: `)."""
    count: int = 1
    """Variants per text: 1 decodes greedily, more by as many beams."""
    max_tokens: int = 512
    """Longer texts are not rewritten: a rewritten half of a text is no variant of it."""
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
        fit = [row for row, length in enumerate(lengths) if texts[row].strip() and length <= self.max_tokens]
        # Like lengths together: less padding. The sort is stable, so batches follow from the texts alone.
        fit.sort(key=lambda row: lengths[row])
        for start in range(0, len(fit), self.batch):
            rows = fit[start : start + self.batch]
            inputs = self.tokenizer([self.prefix + texts[row] for row in rows], return_tensors="pt", padding=True)
            longest = 2 * max(lengths[row] for row in rows) + 16
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
                # Without its end an output was cut off.
                if self._ends & set(output[1:]):
                    text = self.tokenizer.decode(output, skip_special_tokens=True).strip()
                    found[rows[index // self.count]].append(text)
        return found

    @property
    def _ends(self) -> set[int]:
        end = self.model.generation_config.eos_token_id
        return set(end) if isinstance(end, list) else {end}


def check(name: str) -> None:
    """Refuse, without its weights being read, what `load` could not load."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise _refused(name, str(error).strip() or type(error).__name__) from None
    if not config.is_encoder_decoder:
        raise _refused(name, f"a {config.model_type} model has no decoder")


def _refused(name: str, reason: str) -> UserError:
    return UserError(
        f"{name} cannot be loaded as a model that rewrites texts: {reason.splitlines()[0]}. Name an encoder-decoder "
        "model of transformers with safetensors weights (a hub name or a folder), such as a T5 or Marian model."
    )


def load(name: str, **settings: Any) -> Rewriter:
    """The model of that hub name or folder, on the CPU, from safetensors; `settings` are `Rewriter`'s."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model = AutoModelForSeq2SeqLM.from_pretrained(name, use_safetensors=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise _refused(name, str(error).strip() or type(error).__name__) from None
    return Rewriter(model.eval(), tokenizer, **settings)


def paraphrases(model: Rewriter, texts: Sequence[str]) -> list[list[str]]:
    """For each text, the model's variants that are not the text itself, each once."""
    return [_new(text, found) for text, found in zip(texts, model.generate(texts), strict=True)]


def back_translations(there: Rewriter, back: Rewriter, texts: Sequence[str]) -> list[list[str]]:
    """For each text, what it becomes in another language and back (Sennrich, Haddow and Birch 2016), each once."""
    pivots = there.generate(texts)
    returned = iter(back.generate([pivot for row in pivots for pivot in row]))
    variants = [[text for _ in row for text in next(returned)] for row in pivots]
    return [_new(text, found) for text, found in zip(texts, variants, strict=True)]


def _new(text: str, found: Sequence[str]) -> list[str]:
    """Without empty ones and those that differ from the text or each other by case and white space alone."""
    seen = {"", _form(text)}
    kept = []
    for variant in found:
        if (form := _form(variant)) not in seen:
            seen.add(form)
            kept.append(variant)
    return kept


def _form(text: str) -> str:
    return " ".join(text.casefold().split())
