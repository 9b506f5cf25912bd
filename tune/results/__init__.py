"""What is shown of a search: its verdict, table, page, and study for Optuna's dashboard."""
