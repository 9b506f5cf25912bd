"""What is tried: the space of settings, and who proposes the next point."""
