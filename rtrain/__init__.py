"""rtrain: from a file of text to an HTTP answer, trained and served on Ray."""

__version__ = "0.1.0"
