"""Generated code of the worker protocol. Sources: proto/moebius; made by `make proto`."""
