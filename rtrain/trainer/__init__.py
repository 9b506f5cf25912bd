"""The training loop: steps, losses, optimizers, evaluation. No Ray."""
