"""Where the time of training steps goes, measured."""
