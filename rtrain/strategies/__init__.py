"""How a model lies on several workers: one class for each strategy, all of them an `exchange.Exchange`."""
