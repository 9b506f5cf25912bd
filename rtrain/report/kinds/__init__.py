"""What the report draws of the answers of one kind: classes, entities, numbers, questions, summaries."""
