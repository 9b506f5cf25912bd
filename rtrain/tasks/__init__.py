"""What a model is trained to answer; one module per task."""
