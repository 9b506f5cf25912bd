"""How gradients, and what else the ranks of a run must agree on, go from worker to worker."""
