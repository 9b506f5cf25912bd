"""Files of rows, by format: their addresses, digests and parts, and the rows and values in them."""
