"""The verdict, table and page of a search, and its export to Optuna."""
