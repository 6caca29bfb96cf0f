"""The gateway's side of the worker protocol: connections, choice of worker, recovery."""
