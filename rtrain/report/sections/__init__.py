"""The report's sections: each a function from what is known of a run to its part of the page, or to None."""
