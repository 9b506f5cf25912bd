"""`verify`, `drill` and the ledger: proofs that a run trains exactly what it should."""
