"""Where the time of a recipe's updates goes, on each worker, by the real path of training."""
