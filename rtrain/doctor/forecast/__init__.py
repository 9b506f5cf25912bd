"""Before anything is spent: the memory of a worker, the seconds of an update, the hours and the money of a run."""
