"""A new model version: shadow test, canary, switch and rollback; and the number of replicas."""
