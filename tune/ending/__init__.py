"""The end of a search: which rows decide, what is trained again, and when it is clear."""
