"""Files to checked rows, rows to tokens, tokens to the micro-batches of each step."""
