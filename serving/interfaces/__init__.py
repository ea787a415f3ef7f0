"""The gRPC and REST interfaces, with limits on their connections and requests."""
