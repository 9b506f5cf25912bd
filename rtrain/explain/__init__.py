"""Which words an answer rests on: integrated gradients of a float artefact."""
