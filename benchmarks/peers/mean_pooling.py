"""A classifier as one writes it so that HF Trainer pools by mean: an encoder, the mean of a text's tokens, a linear
head."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.modeling_outputs import SequenceClassifierOutput


class MeanPooled(torch.nn.Module):
    """It is called as a classifier of Transformers: padded inputs [rows, tokens] and labels [rows] -> loss and
    logits."""

    def __init__(self, folder: Path, labels: int, attention: str):
        super().__init__()
        encoder: Any = transformers.AutoModel.from_pretrained(
            folder,
            trust_remote_code=False,
            add_pooling_layer=False,  # its weights would get no gradient, which DDP refuses
            attn_implementation=attention,
            dtype=torch.float32,
            local_files_only=True,
        )
        self.encoder, self.config = encoder, encoder.config
        self.dropout = torch.nn.Dropout(self.config.hidden_dropout_prob)
        self.classifier = torch.nn.Linear(self.config.hidden_size, labels)
        # The head is drawn as Transformers draws the head of a classifier.
        torch.nn.init.normal_(self.classifier.weight, std=self.config.initializer_range)
        torch.nn.init.zeros_(self.classifier.bias)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> SequenceClassifierOutput:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        hidden = self.encoder(**inputs).last_hidden_state
        mask = attention_mask[..., None].to(hidden.dtype)
        logits = self.classifier(self.dropout((hidden * mask).sum(1) / mask.sum(1)))
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)
