"""The verbs as functions, under the names `rtrain.train` and so on. The command line calls the same functions."""
