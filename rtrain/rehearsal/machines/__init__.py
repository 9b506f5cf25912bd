"""The simulated nodes of a rehearsal, as processes, and the cloud that starts them."""
