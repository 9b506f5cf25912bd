"""Training a head alone: `model.freeze=encoder` leaves the encoder's weights as they are, bit for bit.

The head is what is not under the model's `base_model`, and what of the encoder its folder has no weights for (a pooler,
mostly): weights that were drawn and are never trained would be noise. The output embedding of a masked language model
is the encoder's word embedding, and stays as that is: of such a head the transformation, its normalisation and the bias
are trained, not the vocabulary's vectors.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from rtrain.errors import UserError

if TYPE_CHECKING:
    import torch
    import transformers


def freeze_encoder(network: "transformers.PreTrainedModel", drawn: Collection[str]) -> None:
    """Freeze all of the encoder but the parameters named `drawn`, those whose weights were not read but drawn.

    Before the exchange and the optimizer are made: both take what asks for a gradient then. No graph is built where
    nothing does, and so the frozen part costs one forward pass; it runs without dropout, which would only be noise to
    the head. Raises `UserError` where nothing is left to train.
    """
    encoder: Any = network.base_model
    if encoder is network:
        kind = type(network).__name__
        raise UserError(
            f"model.freeze=encoder: {kind} does not tell its encoder from its head; write model.freeze=none"
        )
    prefix = f"{network.base_model_prefix}."
    for name, parameter in encoder.named_parameters():
        parameter.requires_grad_(prefix + name in drawn)
    whole: Any = network
    if not any(parameter.requires_grad for parameter in whole.parameters()):
        kind = type(network).__name__
        raise UserError(f"model.freeze=encoder: {kind} has no weights beside its encoder's; write model.freeze=none")
    for part in _frozen(encoder):
        part.register_forward_pre_hook(_without_dropout)


def _frozen(module: "torch.nn.Module") -> "list[torch.nn.Module]":
    """The largest parts of `module` in which nothing is trained."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return [module]
    return [part for child in module.children() for part in _frozen(child)]


def _without_dropout(module: "torch.nn.Module", inputs: Any) -> None:
    """Before each pass, since `train()` of the whole network reaches every part. A hook, and not a method of one
    module's own: copies of a network keep it."""
    if module.training:
        module.eval()
