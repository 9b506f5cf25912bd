"""Search of learning rate and aggregation frequency with Ray Tune; each trial is an ordinary run."""
