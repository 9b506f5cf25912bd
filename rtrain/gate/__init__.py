"""The release gate: a candidate beside its base, on the same rows and this machine; promoted, held or refused."""
