"""Losses of labels, target by target: cross-entropy, focal and asymmetric (`train.loss`).

Each loss is a class with two methods: `choose_one` for one label out of several, `decide_each` for a yes or no to each
label. Both return one value for each target, so that weights and sums stay outside (`rtrain.trainer.imbalance`).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rtrain.config import TrainConfig
from rtrain.tasks.base import LabelLoss, TargetValues

if TYPE_CHECKING:
    import torch

MIN_FACTOR = 1e-12
"""Smallest base of a power: below 1 the power's gradient at 0 is infinite."""


def get_label_loss(train: TrainConfig) -> LabelLoss:
    """The loss that `train.loss` names, with its settings."""
    match train.loss:
        case "focal":
            return FocalLoss(train.focal_gamma, train.focal_alpha, train.label_smoothing)
        case "asymmetric":
            return AsymmetricLoss(
                train.asymmetric_gamma_positive, train.asymmetric_gamma_negative, train.asymmetric_margin
            )
        case _:
            return FocalLoss(gamma=0.0, smoothing=train.label_smoothing)


@dataclass(frozen=True)
class FocalLoss:
    """(1 - p)^gamma x cross-entropy, for the probability p of the right answer (Lin et al. 2017, arXiv:1708.02002).
    gamma = 0 is cross-entropy."""

    gamma: float
    alpha: float | None = None
    """Factor of a yes; a no has 1 - alpha. Not used for one label out of several, where class weights do the same."""
    smoothing: float = 0.0
    """Share of `train.label_smoothing`, as in `rtrain.trainer.losses.RunLoss`."""

    def choose_one(self, logits: "torch.Tensor", classes: TargetValues) -> "torch.Tensor":
        import torch

        log_probabilities = torch.log_softmax(logits, dim=-1)
        indices = torch.from_numpy(classes.astype(np.int64)).to(logits.device)
        losses = self._weigh_by_confidence(log_probabilities.gather(1, indices[:, None])[:, 0])
        if not self.smoothing:
            return losses
        uniform = -log_probabilities.mean(dim=-1) - float(np.log(logits.shape[1]))
        return (1 - self.smoothing) * losses + self.smoothing * uniform

    def decide_each(self, logits: "torch.Tensor", has_label: TargetValues) -> "torch.Tensor":
        import torch

        is_yes = torch.from_numpy(has_label > 0).to(logits.device)
        losses = self._weigh_by_confidence(torch.nn.functional.logsigmoid(torch.where(is_yes, logits, -logits)))
        return losses if self.alpha is None else torch.where(is_yes, self.alpha, 1 - self.alpha).to(losses) * losses

    def _weigh_by_confidence(self, log_probability: "torch.Tensor") -> "torch.Tensor":
        if not self.gamma:
            return -log_probability
        return (-log_probability.expm1()).clamp(min=MIN_FACTOR) ** self.gamma * -log_probability


@dataclass(frozen=True)
class AsymmetricLoss:
    """Focal loss with one gamma for a yes and another for a no, whose probability is lowered by `margin` first (Ridnik
    et al. 2021, arXiv:2009.14119): an easy no has no loss at all. For a yes or no to each label only."""

    gamma_positive: float
    gamma_negative: float
    margin: float

    def choose_one(self, logits: "torch.Tensor", classes: TargetValues) -> "torch.Tensor":
        raise NotImplementedError("the asymmetric loss needs a yes or no to each label")

    def decide_each(self, logits: "torch.Tensor", has_label: TargetValues) -> "torch.Tensor":
        import torch

        is_yes = torch.from_numpy(has_label > 0).to(logits.device)
        probability = torch.sigmoid(logits)
        lowered = (probability - self.margin).clamp(min=0.0)
        yes_losses = _power(1 - probability, self.gamma_positive) * -torch.nn.functional.logsigmoid(logits)
        # With a margin the logarithm is finite; without one only this form is.
        log_no = torch.log(1 - lowered) if self.margin else torch.nn.functional.logsigmoid(-logits)
        return torch.where(is_yes, yes_losses, _power(lowered, self.gamma_negative) * -log_no)


def _power(base: "torch.Tensor", exponent: float) -> "torch.Tensor":
    return base.clamp(min=MIN_FACTOR) ** exponent if exponent else base.new_ones(())
