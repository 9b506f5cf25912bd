"""The endpoint: HTTP and gRPC, one model or several, on Ray Serve or standalone."""
