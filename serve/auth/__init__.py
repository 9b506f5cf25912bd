"""Who may call the endpoint, and the limits of a request."""
