"""Readers of file formats: CSV, JSON lines, Parquet, SQuAD, CoNLL."""
