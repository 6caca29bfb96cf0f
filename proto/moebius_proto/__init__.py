"""The worker protocol. `worker` is generated from proto/moebius by `make proto`; `channel` opens channels."""
