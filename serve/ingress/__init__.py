"""What accepts connections in front of the replicas: HAProxy, Ray's proxy, TLS."""
