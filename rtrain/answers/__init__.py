"""Answers for the rows of files: every row keeps its place and its columns, and gets the artefact's answer beside."""
