"""The worker's gRPC side: serves gateways, and starts, watches and restarts the engine process."""
