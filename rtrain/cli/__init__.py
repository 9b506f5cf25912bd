"""The command line; `app` lists its verbs."""
