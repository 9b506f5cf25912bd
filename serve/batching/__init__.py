"""Which inputs an engine call takes, by cost, deadline and client."""
