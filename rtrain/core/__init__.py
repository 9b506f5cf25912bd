"""Files, errors, events and the environment: what every other package builds on."""
