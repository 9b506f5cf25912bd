"""`verify`, `drill` and the ledger: tests of exact training."""
